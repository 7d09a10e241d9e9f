"""Denoising, BART's objective (Lewis et al. 2020, section 2.2), on WikiText-2: a small encoder-decoder.

Spans of 30 % of the tokens are replaced by one mask each, and the sentences are permuted: BART's own mixture.

Command:  python -m jaxformer train --config=configs/denoising.py --workdir=runs/denoising \
              --config.data.dir=DIR     (DIR holds train.txt.gz, valid.txt, test.txt)
          python -m jaxformer evaluate --workdir=runs/denoising --split=test
Hardware: 2 CPU cores
Time:     not measured here
Score:    not measured here
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
    config.task.name = "denoising"
    stack = dict(
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(dropout=0.1, deviation=0.02),
        attention=dict(heads=4),
        encoding=dict(kind="t5"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True
    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 3e-3
    config.train.steps = 200
    config.train.evaluate_every = 0
    config.train.checkpoint_every = 100
    config.evaluate.batch = 32
    return config
