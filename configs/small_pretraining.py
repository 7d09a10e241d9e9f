"""Pre-training of small encoders on WikiText-2 and War and Peace: BERT's objective and T5's, with one tokenizer.

`small_transfer.py` trains them further. `DIR` holds the folders wikitext2 and war_and_peace.

Command:  python -m jaxformer train --config=configs/small_pretraining.py:masked_lm --workdir=runs/masked_lm \
              --config.data.dir=DIR
Variants: masked_lm (Devlin et al. 2019), span_corruption (Raffel et al. 2020; the same encoder, and a decoder)
Hardware: 2 CPU cores
Time:     masked_lm: 27 minutes on two cores of a shared machine; span_corruption: not run to its end
Score:    masked_lm: validation loss of masked tokens 4.076 (from 9.01), accuracy 36.2 %; span_corruption: not measured
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("masked_lm", "span_corruption")

ENCODER = dict(
    layers=3,
    width=128,
    dropout=0.1,
    embed=dict(dropout=0.1, deviation=0.02),
    encoding=dict(kind="rope"),
    attention=dict(heads=4),
    ffn=dict(activation="gelu"),
)


def get_config(variant: str = "masked_lm"):
    config = defaults()
    config.data.source = "text"
    config.data.splits = {
        "train": ("wikitext2/train.txt.gz", "war_and_peace/warandpeace.txt.gz"),
        "validation": ("wikitext2/valid.txt",),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 8000
    config.data.tokenizer.lowercase = True  # SST-2 is in small letters
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 32
    config.task.name = variant or "masked_lm"
    config.model.encoder = section(StackConfig, **ENCODER)
    if variant == "span_corruption":
        config.model.decoder = section(StackConfig, **ENCODER)
        config.model.share_embeddings = True
        config.data.tokenizer.sentinels = 100
    else:
        config.model.head.transform = True
        config.model.head.bias = True
    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 2e-3
    config.schedule.warmup = 200
    config.train.steps = 2500
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 250
    config.evaluate.batch = 32
    return config
