"""Masked language modelling with BERT's encoder (Devlin et al. 2019), on Python's own standard library by default.

Command:  python -m jaxformer train --config=configs/bert_mlm.py --workdir=runs/bert_mlm
Variants: tiny (2 layers, width 128), pairs (the same with the second loss of next sentences, 300 steps), base (12
          layers, width 768: the paper's)
Hardware: tiny, pairs: 2 CPU cores; base: accelerators
Time:     tiny: 6.3 minutes, one core of a shared machine; pairs, base: not measured here
Score:    tiny: masked tokens' validation loss 6.066 (from 8.35), accuracy 9.9 %, still falling: a short run; pairs,
          base: not measured here
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

SIZES = {"tiny": (2, 128, 2), "pairs": (2, 128, 2), "base": (12, 768, 12)}

VARIANTS = ("tiny", "pairs", "base")


def get_config(variant: str = "tiny"):
    layers, width, heads = SIZES[variant or "tiny"]
    config = defaults()
    config.data.source = "pylib"
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 4000 if variant != "base" else 30000
    config.data.length = 128 if variant != "base" else 512
    config.data.batch = 16 if variant != "base" else 256
    config.task.name = "masked_lm"
    config.model.encoder = section(
        StackConfig,
        layers=layers,
        width=width,
        dropout=0.1,
        embed=dict(kinds=2, norm=True, dropout=0.1, deviation=0.02),
        encoding=dict(kind="learned", max_length=512),
        attention=dict(heads=heads, dropout=0.1),
        ffn=dict(activation="gelu"),
        norm=dict(order="post", epsilon=1e-12),
    )
    config.model.head.transform = True
    config.model.head.bias = True
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 1e-3 if variant != "base" else 1e-4
    config.schedule.warmup = 100 if variant != "base" else 10000
    config.train.steps = {"base": 1000000, "pairs": 300}.get(variant, 1000)
    if variant == "pairs":
        config.task.relation = "next_sentence"
        config.model.head.relation = True
        config.model.head.width = width
        config.data.length = 64
    return config
