"""tiny Shakespeare, character by character, with the two published budgets of nanoGPT.

Command:  python -m jaxformer train --config=configs/shakespeare_char.py:cpu --workdir=runs/shakespeare \
              --config.data.dir=DIR     (DIR holds input.txt)
Variants: cpu  4 layers, width 128, length 64, batch 12, 2000 steps (published validation loss: 1.88)
          gpu  6 layers, width 384, length 256, batch 64, 5000 steps (published: 1.4697)
Hardware: cpu: 2 CPU cores; gpu: one accelerator
Time:     cpu: 6.4 minutes on a shared machine; gpu: not measured here
Score:    cpu: validation loss 1.669 (published 1.88); gpu: not measured here (published 1.4697)
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("cpu", "gpu")


def get_config(variant: str = "cpu"):
    small = {"cpu": True, "gpu": False}[variant or "cpu"]
    config = defaults()
    config.data.source = "text"
    config.data.document = "file"
    config.data.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}
    config.data.tokenizer.kind = "character"
    config.data.packing = "concat"
    config.data.length = 64 if small else 256
    config.data.batch = 12 if small else 64
    config.task.name = "language_modelling"

    width, dropout = (128, 0.0) if small else (384, 0.2)
    config.model.decoder = section(
        StackConfig,
        layers=4 if small else 6,
        width=width,
        dropout=dropout,
        embed=dict(dropout=dropout, deviation=0.02),
        attention=dict(heads=4 if small else 6, dropout=dropout, bias=False),
        encoding=dict(kind="rope"),
        norm=dict(kind="rms"),
    )

    config.optimizer.beta2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.schedule.kind = "linear"
    config.schedule.peak = 4e-3 if small else 1e-3
    config.schedule.warmup = 100
    config.train.steps = 2000 if small else 5000
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 500
    config.evaluate.batch = 256 if small else 64
    config.decode.method = "sample"
    config.decode.max_length = 200
    config.decode.temperature = 0.8
    return config
