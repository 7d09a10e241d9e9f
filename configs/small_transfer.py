"""Sentiment (SST-2) and entities (WNUT 2017) with the encoder of `small_pretraining.py`, pre-trained or from scratch.

Both ways have the same tokenizer, steps and settings. `PRETRAINED` is a workdir of `small_pretraining.py`; from
scratch is the same command without `--config.init.directory`.

Command:  python -m jaxformer train --config=configs/small_transfer.py:sst2 --workdir=runs/sst2_pretrained \
              --config.data.dir=DIR --config.data.tokenizer.path=PRETRAINED/tokenizer.json \
              --config.init.directory=PRETRAINED --seeds=3
          python -m jaxformer evaluate --workdir=runs/sst2_pretrained --split=test
Variants: sst2 (DIR has glue.train.tsv.gz: labelled phrases, as for sst2.py), wnut17 (DIR has train.conll)
Hardware: 2 CPU cores
Time:     a seed of sst2: 2.2 to 7 minutes, of wnut17: 3.9 to 5.9, on a shared machine
Score:    test, mean of 3 seeds. wnut17: entity F1 14.9 % after masked_lm, 5.1 % from scratch; sst2: accuracy 79.9 % and
          80.4 %
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("sst2", "wnut17")

ENCODER = dict(
    layers=3,
    width=128,
    dropout=0.1,
    embed=dict(dropout=0.1, deviation=0.02),
    encoding=dict(kind="rope"),
    attention=dict(heads=4),
    ffn=dict(activation="gelu"),
)


def get_config(variant: str = "sst2"):
    config = defaults()
    config.data.tokenizer.kind = "file"
    config.data.tokenizer.path = "PRETRAINED/tokenizer.json"  # given on the command line
    config.model.encoder = section(StackConfig, **ENCODER)
    config.init.head = False
    config.data.batch = 64 if variant != "wnut17" else 32
    config.data.length = 128
    config.data.buckets = (16, 32, 64, 128)
    if variant == "wnut17":
        config.data.source = "conll"
        config.data.splits = {"train": ("train.conll",), "validation": ("dev.conll",), "test": ("test.conll",)}
        config.task.name = "tagging"
        config.model.head.kind = "slots"
        config.evaluate.decode_examples = 1009  # all of dev.conll
        config.checkpoint.metric = "f1"
    else:
        config.data.source = "table"
        config.data.splits = {
            "train": ("glue.train.tsv.gz",),
            "validation": ("sentences.dev.tsv",),
            "test": ("sentences.test.tsv",),
        }
        config.data.columns = {"text": "sentence", "label": "label"}
        config.task.name = "classification"
        config.model.head.kind = "classes"
        config.model.head.pooling = "mean"
        config.checkpoint.metric = "accuracy"
    config.model.head.dropout = 0.3
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 5e-4
    config.schedule.warmup = 100
    config.train.steps = 800
    config.train.evaluate_every = config.train.checkpoint_every = 100
    config.checkpoint.mode = "max"
    return config
