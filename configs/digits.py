"""Handwritten digits as patches of 2 x 2 pixels: which digit it is, and captions of two ("a seven above a two").

The images are scikit-learn's, 8 x 8 pixels. `classify` is a small vision transformer (Dosovitskiy et al. 2021) with
mean pooling; `caption` has the same encoder and a decoder of words.

Command:  python -m jaxformer train --config=configs/digits.py:classify --workdir=runs/digits
          python -m jaxformer evaluate --workdir=runs/digits --split=test
Variants: classify, caption
Hardware: 2 CPU cores
Time:     beside ten times as many processes as cores: classify: 8 minutes, 41 seconds of processor time; caption:
          13 minutes, 2.3 of processor time
Score:    classify: test accuracy 95.0 %; caption: exact match 91.8 %, BLEU 95.7
"""

from jaxformer.config import SeriesConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("classify", "caption")


def get_config(variant: str = "classify"):
    captions = {"classify": False, "caption": True}[variant or "classify"]
    config = defaults()
    config.data.source = "digits"
    config.data.name = "2/pairs" if captions else "2"
    config.data.length = 32 if captions else 16
    config.data.batch = 64
    config.model.series = section(SeriesConfig, channels=4)
    stack = dict(
        layers=2,
        width=64,
        dropout=0.1,
        attention=dict(heads=4),
        ffn=dict(width=128),
    )
    config.model.encoder = section(StackConfig, encoding=dict(kind="learned", max_length=config.data.length), **stack)
    config.schedule.peak = 2e-3
    config.schedule.warmup = 50
    config.optimizer.weight_decay = 0.05
    if captions:
        config.task.name = "captioning"
        config.data.tokenizer.kind = "word"
        config.model.decoder = section(StackConfig, encoding=dict(kind="rope"), **stack)
        config.decode.max_length = 8
        config.decode.batch = 250
        config.train.steps = 1000
        config.train.evaluate_every = config.train.checkpoint_every = 250
    else:
        config.task.name = "series_classification"
        config.model.head.kind = "classes"
        config.model.head.pooling = "mean"
        config.model.head.classes = 10
        config.train.steps = 600
        config.train.evaluate_every = config.train.checkpoint_every = 100
        config.checkpoint.metric = "accuracy"
        config.checkpoint.mode = "max"
    return config
