"""Named entity recognition in tweets from scratch (Broad Twitter Corpus, Derczynski et al. 2016).

Entities are persons, organisations and locations. Trained on sections a, b and f, the best checkpoint by e and g,
tested on h.

Command:  python -m jaxformer train --config=configs/btc_ner.py:transformer --workdir=runs/btc_ner --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/btc_ner --split=test
Variants: transformer, lstm
Hardware: 2 CPU cores
Time:     transformer: 2.5 minutes, lstm: 2.8 minutes, on a shared machine
Score:    test entity F1, transformer: 58.1 %, lstm: 56.3 %
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("transformer", "lstm")
OLD_VARIANTS = {"bilstm": "lstm"}


def get_config(variant: str = "transformer"):
    recurrent = {"transformer": False, "lstm": True}[variant or "transformer"]
    config = defaults()
    config.data.source = "conll"
    config.data.splits = {
        "train": ("a.conll", "b.conll", "f.conll"),
        "validation": ("e.conll", "g.conll"),
        "test": ("h.conll",),
    }
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 4000
    config.data.batch = 32
    config.data.length = 96
    config.data.buckets = (16, 32, 64, 96)
    config.task.name = "tagging"

    if recurrent:
        config.model.recurrent_encoder = section(
            RecurrentConfig, cell="lstm", width=256, bidirectional=True, dropout=0.5, embed=dict(dropout=0.5)
        )
    else:
        config.model.encoder = section(
            StackConfig,
            layers=2,
            width=128,
            dropout=0.3,
            embed=dict(scale=True, dropout=0.3),
            encoding=dict(kind="rope"),
            attention=dict(heads=4),
            ffn=dict(width=256),
        )
    config.model.head.kind = "slots"
    config.model.head.dropout = 0.3

    config.optimizer.weight_decay = 0.05
    config.optimizer.decay_exclude = ("bias", "scale")
    config.schedule.peak = 1e-3
    config.schedule.warmup = 100
    config.train.steps = 2000
    config.train.evaluate_every = 200
    config.train.checkpoint_every = 200
    config.evaluate.decode_examples = 3000
    config.checkpoint.metric = "f1"
    config.checkpoint.mode = "max"
    return config
