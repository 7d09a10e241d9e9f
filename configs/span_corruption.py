"""Span corruption, T5's objective (Raffel et al. 2020, section 3.1.4), on WikiText-2: a small encoder-decoder.

Command:  python -m jaxformer train --config=configs/span_corruption.py --workdir=runs/span_corruption \
              --config.data.dir=DIR     (DIR holds train.txt.gz, valid.txt, test.txt)
          python -m jaxformer evaluate --workdir=runs/span_corruption --split=test
Hardware: 2 CPU cores
Time:     2.5 minutes of processor time, 14 minutes beside much other work
Score:    after 300 steps, still falling: loss 4.856 a token of the test split's targets (sentinels included), accuracy
          30.4 %; validation 4.907 and 30.4 %
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt.gz",), "validation": ("valid.txt",), "test": ("test.txt",)}
    config.data.tokenizer.vocab = 4000
    config.data.tokenizer.sentinels = 100
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "span_corruption"
    stack = dict(
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(dropout=0.1, deviation=0.02),
        attention=dict(heads=4),
        encoding=dict(kind="t5"),
        norm=dict(kind="rms"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True
    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 3e-3
    config.train.steps = 300
    config.train.evaluate_every = 0
    config.train.checkpoint_every = 100
    config.evaluate.batch = 32
    return config
