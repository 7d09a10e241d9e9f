"""Tatoeba English to French: short sentences, a small transformer, minutes of one core.

The corpus has no official split; DIR holds one by a hash of the English sentence (train.tsv.gz, dev.tsv and test.tsv,
English and French with a tab between), so that all translations of a sentence lie in one split.

Command:  python -m jaxformer train --config=configs/tatoeba.py --workdir=runs/tatoeba --config.data.dir=DIR --seeds=3
          python -m jaxformer evaluate --workdir=runs/tatoeba/seed-0 --split=test      (and seed-1, seed-2)
Hardware: 2 CPU cores
Time:     6.6 minutes of processor time a seed, with evaluation
Score:    test 20.8 BLEU cased 13a (standard deviation of 3 seeds 0.2), chrF 39.6 (0.3); beam 4, mean of the last 5
          checkpoints; 800 steps, loss still falling
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "table"
    config.data.columns = {"source": "#1", "target": "#2"}
    config.data.splits = {"train": ("train.tsv.gz",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 6000
    config.data.tokens = 2048
    config.data.batch = 256
    config.data.length = 64
    config.data.buckets = (8, 10, 12, 16, 24)
    config.task.name = "translation"
    config.task.label_smoothing = 0.1

    stack = dict(
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(scale=True, dropout=0.1),
        attention=dict(heads=4),
        ffn=dict(width=256, activation="relu"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "linear"
    config.schedule.peak = 4e-3
    config.schedule.warmup = 100
    config.schedule.floor = 0.02
    config.train.steps = 800
    config.train.log_every = 50
    config.train.evaluate_every = 400
    config.train.checkpoint_every = 40
    config.checkpoint.keep_last = 5
    config.checkpoint.keep_best = 1
    config.checkpoint.average = 5
    config.evaluate.samples = 3
    config.decode.method = "beam"
    config.decode.beams = 4
    config.decode.length_penalty = 1.0
    config.decode.batch = 128
    config.decode.max_length = 64
    config.decode.max_ratio = 2.0
    return config
