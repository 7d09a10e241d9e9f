"""Decoders of LLaMA's shape (Touvron et al. 2023; Llama 3.2 for 1b): rotary positions, RMS norm, SwiGLU, no biases.

Command:  python -m jaxformer train --config=configs/llama.py:7b --workdir=runs/llama \
              --config.data.dir=DIR --config.data.splits.train=train.txt --config.data.splits.validation=valid.txt
Variants: 1b, 7b
Hardware: TPU slices from 16 chips; jaxformer plan says what fits, docs/scaling.md what did
Time:     not measured here; predicted in docs/scaling.md
Score:    not measured here
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

# layers, width, heads, key heads, feed-forward width, vocabulary, tied head, rows, rotary base
SIZES = {
    "1b": (16, 2048, 32, 8, 8192, 128256, True, 512, 500000.0),
    "7b": (32, 4096, 32, 32, 11008, 32000, False, 1024, 10000.0),
}

VARIANTS = ("1b", "7b")


def get_config(variant: str = "7b"):
    layers, width, heads, kv_heads, ffn, vocab, tied, rows, base = SIZES[variant or "7b"]
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt",), "validation": ("valid.txt",)}
    config.data.tokenizer.vocab = vocab
    config.data.tokenizer.multiple = 128
    config.data.packing = "concat"
    config.data.length = 4096
    config.data.batch = rows
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=layers,
        width=width,
        embed=dict(deviation=0.02),
        encoding=dict(kind="rope", base=base),
        attention=dict(heads=heads, kv_heads=kv_heads, bias=False),
        ffn=dict(width=ffn, activation="silu", gated=True, bias=False),
        norm=dict(kind="rms"),
        remat="full",
    )
    config.model.head.chunk = 1024
    config.model.head.tied = tied
    config.model.dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.schedule.peak = 3e-4
    config.schedule.warmup = 2000
    config.schedule.floor = 0.1
    config.train.steps = 250000
    config.train.evaluate_every = config.train.checkpoint_every = 1000
    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
