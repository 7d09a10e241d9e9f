"""WikiText-2: a transformer and an LSTM language model of the same parameter count, on the same BPE tokens.

Command:  python -m jaxformer train --config=configs/wikitext2.py:transformer --workdir=runs/wikitext2 \
              --config.data.dir=DIR     (DIR holds train.txt.gz, valid.txt, test.txt)
          python -m jaxformer evaluate --workdir=runs/wikitext2 --split=test
Variants: transformer, lstm
Hardware: 2 CPU cores
Time:     transformer about 50 minutes, lstm 46, each on one core of a shared machine
Score:    after 1,500 steps, somewhat more than one epoch: validation loss 4.411 (transformer) and 4.946 (lstm) a token;
          docs/results.md has perplexities and bits per byte of the test split
"""

from jaxformer.config import RecurrentConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("transformer", "lstm")


def get_config(variant: str = "transformer"):
    recurrent = {"transformer": False, "lstm": True}[variant or "transformer"]
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt.gz",), "validation": ("valid.txt",), "test": ("test.txt",)}
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 8000
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "language_modelling"

    if recurrent:
        config.model.recurrent_decoder = section(
            RecurrentConfig, cell="lstm", layers=2, width=268, dropout=0.2, embed=dict(dropout=0.2)
        )
    else:
        config.model.decoder = section(
            StackConfig,
            layers=4,
            width=192,
            dropout=0.2,
            embed=dict(dropout=0.2, deviation=0.02),
            attention=dict(heads=4),
            encoding=dict(kind="rope"),
        )

    config.optimizer.beta2 = 0.98
    config.optimizer.weight_decay = 0.05
    config.schedule.peak = 2e-3
    config.schedule.warmup = 200
    config.train.steps = 1500
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 500
    config.evaluate.batch = 32
    config.decode.method = "sample"
    return config
