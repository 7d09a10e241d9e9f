"""Word vectors of WikiText-2: skip-gram and CBOW with negative sampling (Mikolov et al. 2013).

Command:  python -m jaxformer train --config=configs/word_vectors.py:skip_gram --workdir=runs/words \
              --config.data.dir=DIR     (DIR holds train.txt.gz, valid.txt, test.txt)
          echo river | python -m jaxformer decode --workdir=runs/words
Variants: skip_gram, cbow
Hardware: 2 CPU cores
Time:     81 (skip_gram) and 80 (cbow) seconds of processor time, 7 minutes each beside much other work
Score:    validation loss 2.559 (skip_gram, a pair) and 2.439 (cbow, a word), which begin at 6 ln 2 = 4.159; the true
          word scores above its five noise words in 31.9 and 39.4 %, where chance is 16.7 %
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("skip_gram", "cbow")


def get_config(variant: str = "skip_gram"):
    config = defaults()
    config.task.name = variant or "skip_gram"
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt.gz",), "validation": ("valid.txt",), "test": ("test.txt",)}
    config.data.tokenizer.kind = "word"
    config.data.tokenizer.vocab = 10000
    config.data.tokenizer.lowercase = True
    config.data.packing = "first_fit"
    config.data.length = 256
    config.data.batch = 8
    config.task.window = 5
    config.task.negatives = 5
    config.task.subsample = 1e-3

    config.model.encoder = section(
        StackConfig,
        layers=0,
        width=100,
        embed=dict(deviation=0.01),
        encoding=dict(kind="none"),
        norm=dict(kind="none"),
    )
    config.model.head.tied = False
    config.model.head.init_scale = 1e-4
    config.model.head.chunk = 256  # logits of the drawn words alone, never of the whole vocabulary

    config.optimizer.clip = None
    config.schedule.kind = "linear"
    config.schedule.peak = 3e-3
    config.schedule.warmup = 0
    config.train.steps = 1500
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 500
    config.evaluate.batch = 8
    return config
