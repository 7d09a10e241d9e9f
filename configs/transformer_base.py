"""The transformer of Vaswani et al. 2017, base model of table 3, on WMT14 English to German.

Variants: base (the default), and big, which has a recipe of its own (transformer_big.py).

Command:  jaxformer data prepare wmt14_translate/de-en --dir=DIR      (once, needs the extra [prepare])
          python -m jaxformer train --config=configs/transformer_base.py --workdir=runs/base --config.data.dir=DIR
Hardware: 8 accelerators (the paper: 8 P100, 12 hours, 100,000 steps of 25,000 source and 25,000 target tokens)
Time:     not measured here
Score:    not measured here. The paper: 27.3 BLEU (tokenised) on newstest2014
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

# Table 3 of the paper: width, feed-forward width, heads, dropout.
SIZES = {"base": (512, 2048, 8, 0.1), "big": (1024, 4096, 16, 0.3)}

VARIANTS = ("base", "big")


def get_config(variant: str = "base"):
    width, ffn_width, heads, dropout = SIZES[variant or "base"]
    config = defaults()
    config.data.source = "tfds"
    config.data.name = "wmt14_translate/de-en"
    config.data.columns = {"source": "en", "target": "de"}
    config.data.tokenizer.vocab = 37000
    config.data.tokenizer.multiple = 128
    config.data.tokens = 32768
    config.data.batch = 2048
    config.data.length = 256
    config.data.buckets = (16, 32, 64, 128, 256)
    config.data.skip_long = True
    config.task.label_smoothing = 0.1
    config.task.language = "de"

    stack = dict(
        layers=6,
        width=width,
        dropout=dropout,
        embed=dict(scale=True, dropout=dropout),
        attention=dict(heads=heads, bias=False),
        ffn=dict(width=ffn_width, activation="relu"),
        norm=dict(order="post"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True
    config.model.dtype = "bfloat16"

    config.optimizer.name = "adam"
    config.optimizer.beta2 = 0.98
    config.optimizer.epsilon = 1e-9
    config.schedule.kind = "noam"
    config.schedule.peak = 1.0
    config.schedule.warmup = 4000
    config.train.steps = 100000
    config.train.log_every = 100
    config.train.evaluate_every = 2000
    config.train.checkpoint_every = 1500  # the paper: one every 10 minutes, and the last 5 averaged
    config.checkpoint.keep_last = 5
    config.checkpoint.average = 5
    config.decode.method = "beam"
    config.decode.beams = 4
    config.decode.length_penalty = 0.6
    config.decode.max_length = 306
    config.decode.max_ratio = 1.5
    return config
