"""Multi30k English to German with a bidirectional LSTM and additive attention (Bahdanau et al. 2015).

Command:  python -m jaxformer train --config=configs/multi30k_rnn.py --workdir=runs/multi30k_rnn --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/multi30k_rnn --split=test
Hardware: 2 CPU cores
Time:     46 minutes on a shared machine (24 minutes of processor time)
Score:    test2016 35.48 BLEU cased 13a, 35.80 lower-cased tokenised (beam 5, mean of the last 5 checkpoints)
"""

from jaxformer.config import RecurrentConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "parallel"
    config.data.splits = {
        "train": ("train.en.gz", "train.de.gz"),
        "validation": ("val.en", "val.de"),
        "test": ("test_2016_flickr.en", "test_2016_flickr.de"),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 6000
    config.data.tokens = 2048
    config.data.batch = 128
    config.data.length = 64
    config.data.buckets = (16, 24, 32, 64)
    config.task.label_smoothing = 0.1
    config.task.language = "de"  # of the targets: adds the lower-cased tokenised BLEU of the literature

    part = dict(cell="lstm", width=256, embed=dict(dropout=0.2), dropout=0.2)
    config.model.recurrent_encoder = section(RecurrentConfig, **part, bidirectional=True)
    config.model.recurrent_decoder = section(RecurrentConfig, **part, attention="additive")
    config.model.share_embeddings = True

    config.optimizer.name = "adam"
    config.schedule.kind = "linear"
    config.schedule.peak = 3e-3
    config.schedule.warmup = 200
    config.schedule.floor = 0.02
    config.train.steps = 2500
    config.train.log_every = 50
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 200
    config.checkpoint.keep_last = 5
    config.checkpoint.average = 5
    config.evaluate.samples = 3
    config.decode.method = "beam"
    config.decode.beams = 5
    config.decode.length_penalty = 1.0
    config.decode.max_length = 80
    config.decode.max_ratio = 2.0
    return config
