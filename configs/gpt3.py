"""GPT-3 (Brown et al. 2020): GPT-2's block with dense and locally banded attention in turn; the sizes of table 2.1.

The paper does not give the width of the band; 256 is this recipe's.

Command:  python -m jaxformer train --config=configs/gpt3.py:small --workdir=runs/gpt3 \
              --config.data.dir=DIR --config.data.splits.train=train.txt --config.data.splits.validation=valid.txt
Variants: small, medium, large, xl, 2.7b, 6.7b, 13b, 175b
Hardware: accelerators; from xl on several, by config.mesh
Time:     not measured here
Score:    not measured here
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

# layers, width, heads, head width, batch in tokens, learning rate
SIZES = {
    "small": (12, 768, 12, 64, 0.5e6, 6e-4),
    "medium": (24, 1024, 16, 64, 0.5e6, 3e-4),
    "large": (24, 1536, 16, 96, 0.5e6, 2.5e-4),
    "xl": (24, 2048, 24, 128, 1e6, 2e-4),
    "2.7b": (32, 2560, 32, 80, 1e6, 1.6e-4),
    "6.7b": (32, 4096, 32, 128, 2e6, 1.2e-4),
    "13b": (40, 5140, 40, 128, 2e6, 1e-4),
    "175b": (96, 12288, 96, 128, 3.2e6, 0.6e-4),
}
CONTEXT = 2048

VARIANTS = ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b")


def get_config(variant: str = "small"):
    layers, width, heads, head_width, tokens, rate = SIZES[variant or "small"]
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt",), "validation": ("valid.txt",)}
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 50257
    config.data.tokenizer.multiple = 128
    config.data.packing = "concat"
    config.data.length = CONTEXT
    config.data.batch = round(tokens / CONTEXT / 8) * 8
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=layers,
        width=width,
        embed=dict(deviation=0.02),
        encoding=dict(kind="learned", max_length=CONTEXT),
        attention=dict(heads=heads, head_width=head_width, window=256, window_every=2),
        ffn=dict(activation="gelu_tanh"),
    )
    config.model.dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.schedule.peak = rate
    config.schedule.floor = 0.1
    config.schedule.warmup = round(375e6 / tokens)
    config.train.steps = round(300e9 / tokens)
    config.train.accumulation = 8
    config.train.evaluate_every = config.train.checkpoint_every = 1000
    return config
