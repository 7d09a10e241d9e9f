"""Multi30k English to German with Transformer-Tiny (Wu et al. 2021): 4 + 4 layers, width 128, 4 heads.

Command:  python -m jaxformer train --config=configs/multi30k_tiny.py --workdir=runs/multi30k_tiny \
              --config.data.dir=DIR     (DIR holds train.en.gz, train.de.gz, val.en, ...)
          python -m jaxformer evaluate --workdir=runs/multi30k_tiny --split=test
Hardware: 2 CPU cores
Time:     124 minutes on a shared machine, most of them on one core; 0.5 seconds a step on two quiet ones
Score:    test2016 40.64 BLEU cased 13a, 41.12 lower-cased tokenised (beam 5, mean of the last 10 checkpoints);
          38.97 cased with train.steps=4000 and train.checkpoint_every=100, in 51 minutes.
          All of them with data.packing=none: buckets, 8 % fewer pairs a step. Not measured with packed pairs yet
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "parallel"
    config.data.splits = {
        "train": ("train.en.gz", "train.de.gz"),
        "validation": ("val.en", "val.de"),
        "test": ("test_2016_flickr.en", "test_2016_flickr.de"),
        "test_2017": ("test_2017_flickr.en", "test_2017_flickr.de"),
        "test_2018": ("test_2018_flickr.en", "test_2018_flickr.de"),
        "test_mscoco": ("test_2017_mscoco.en", "test_2017_mscoco.de"),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 6000
    config.data.tokens = 4096
    config.data.batch = 512
    config.data.length = 64
    config.data.packing = "first_fit"
    config.data.buckets = (12, 14, 16, 18, 22, 26, 34)  # of decoding
    config.task.label_smoothing = 0.1
    config.task.language = "de"  # of the targets: adds the lower-cased tokenised BLEU of the literature

    stack = dict(
        layers=4,
        width=128,
        dropout=0.3,
        embed=dict(scale=True, dropout=0.3),
        attention=dict(heads=4),
        ffn=dict(width=256, activation="relu"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True

    config.optimizer.beta2 = 0.98
    config.optimizer.epsilon = 1e-9
    config.schedule.kind = "linear"
    config.schedule.peak = 5e-3
    config.schedule.warmup = 400
    config.schedule.floor = 0.02
    config.train.steps = 9000
    config.train.log_every = 50
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 150
    config.checkpoint.keep_last = 10
    config.checkpoint.keep_best = 1
    config.checkpoint.average = 10
    config.evaluate.samples = 3
    config.decode.method = "beam"
    config.decode.beams = 5
    config.decode.length_penalty = 1.0
    config.decode.max_length = 80
    config.decode.max_ratio = 2.0
    return config
