"""SST-2 sentence-level sentiment from scratch: 6,920 training sentences, no pre-training.

Command:  python -m jaxformer train --config=configs/sst2.py:transformer --workdir=runs/sst2 --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/sst2 --split=test
Variants: transformer, bilstm
Hardware: 2 CPU cores
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.overrides import defaults, section


def get_config(variant: str = "transformer"):
    recurrent = {"transformer": False, "bilstm": True}[variant or "transformer"]
    config = defaults()
    config.data.source = "table"
    config.data.splits = {
        "train": ("sentences.train.tsv",),
        "validation": ("sentences.dev.tsv",),
        "test": ("sentences.test.tsv",),
    }
    config.data.columns = {"text": "sentence", "label": "label"}
    config.data.tokenizer.kind = "word"
    config.data.tokenizer.vocab = 12000
    config.data.batch = 64
    config.data.length = 64
    config.data.buckets = (16, 32, 64)
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
    config.train.steps = 1000
    config.train.evaluate_every = 100
    config.train.checkpoint_every = 100
    config.checkpoint.metric = "accuracy"
    config.checkpoint.mode = "max"
    return config
