"""Language modelling on the One Billion Word benchmark with a decoder of the base size.

Command:  jaxformer data prepare lm1b --dir=DIR      (once, needs the extra [prepare])
          python -m jaxformer train --config=configs/lm1b.py --workdir=runs/lm1b --config.data.dir=DIR
Hardware: 8 accelerators
Time:     not measured here
Score:    not measured here
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "tfds"
    config.data.name = "lm1b"
    config.data.splits = {"train": ("train",), "validation": ("test",)}
    config.data.columns = {"text": "text"}
    config.data.tokenizer.vocab = 30000
    config.data.tokenizer.multiple = 128
    config.data.packing = "first_fit"
    config.data.length = 128
    config.data.batch = 256
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=6,
        width=512,
        dropout=0.1,
        embed=dict(dropout=0.1),
        attention=dict(heads=8, dropout=0.1),
        ffn=dict(width=2048),
    )
    config.model.dtype = "bfloat16"
    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.1
    config.schedule.kind = "inverse_sqrt"
    config.schedule.peak = 1.6e-3
    config.schedule.warmup = 1000
    config.train.steps = 500000
    config.train.log_every = 100
    config.train.evaluate_every = 2000
    config.train.checkpoint_every = 2000
    return config
