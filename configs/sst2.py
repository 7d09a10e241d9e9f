"""SST-2 sentiment from scratch: trained on the labelled phrases of the training sentences, tested on whole sentences.

Training with the phrases is what the published figures do (Kim 2014; Socher et al. 2013).

Command:  python -m jaxformer train --config=configs/sst2.py:transformer --workdir=runs/sst2 --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/sst2 --split=test
Variants: transformer, lstm
Hardware: 2 CPU cores
Time:     transformer: 6.8 minutes, lstm: 4.0 minutes, on a shared machine
Score:    test accuracy, transformer: 80.8 %, lstm: 82.6 %
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("transformer", "lstm")
OLD_VARIANTS = {"bilstm": "lstm"}


def get_config(variant: str = "transformer"):
    recurrent = {"transformer": False, "lstm": True}[variant or "transformer"]
    config = defaults()
    config.data.source = "table"
    config.data.splits = {
        "train": ("glue.train.tsv.gz",),
        "validation": ("sentences.dev.tsv",),
        "test": ("sentences.test.tsv",),
    }
    config.data.columns = {"text": "sentence", "label": "label"}
    config.data.tokenizer.kind = "word"
    config.data.tokenizer.vocab = 12000
    config.data.batch = 64
    config.data.length = 64
    config.data.buckets = (8, 16, 32, 64)
    config.task.name = "classification"

    if recurrent:
        config.model.recurrent_encoder = section(
            RecurrentConfig, cell="lstm", width=256, bidirectional=True, dropout=0.5, embed=dict(dropout=0.5)
        )
    else:
        config.model.encoder = section(
            StackConfig,
            layers=2,
            width=128,
            dropout=0.3,
            embed=dict(scale=True, dropout=0.5),
            encoding=dict(kind="rope"),
            attention=dict(heads=4),
            ffn=dict(width=256),
        )
    config.model.head.kind = "classes"
    config.model.head.pooling = "mean"
    config.model.head.dropout = 0.5
    config.task.label_smoothing = 0.1

    config.optimizer.weight_decay = 0.05
    config.optimizer.decay_exclude = ("bias", "scale")
    config.schedule.peak = 1e-3
    config.schedule.warmup = 100
    config.train.steps = 2000
    config.train.evaluate_every = 250
    config.train.checkpoint_every = 250
    config.checkpoint.metric = "accuracy"
    config.checkpoint.mode = "max"
    return config
