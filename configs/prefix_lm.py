"""Prefix language modelling (Liu et al. 2018; Raffel et al. 2020, section 3.2.1) on WikiText-2: a small decoder.

Command:  python -m jaxformer train --config=configs/prefix_lm.py --workdir=runs/prefix_lm \
              --config.data.dir=DIR     (DIR holds train.txt.gz, valid.txt, test.txt)
          python -m jaxformer evaluate --workdir=runs/prefix_lm --split=test
Hardware: 2 CPU cores
Time:     2.1 minutes of processor time, 22 minutes beside much other work
Score:    after 300 steps, still falling: validation loss 5.271 a token after the prefix, accuracy 19.5 %
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt.gz",), "validation": ("valid.txt",), "test": ("test.txt",)}
    config.data.tokenizer.vocab = 4000
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "prefix_lm"
    config.model.decoder = section(
        StackConfig,
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(dropout=0.1, deviation=0.02),
        attention=dict(heads=4),
        encoding=dict(kind="rope"),
    )
    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 3e-3
    config.train.steps = 300
    config.train.evaluate_every = 0
    config.train.checkpoint_every = 100
    config.evaluate.batch = 32
    return config
