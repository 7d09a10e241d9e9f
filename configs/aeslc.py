"""Summarisation of an email as its subject line, from scratch (AESLC, Zhang and Tetreault 2019).

Command:  python -m jaxformer train --config=configs/aeslc.py --workdir=runs/aeslc --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/aeslc --split=test
Hardware: 2 CPU cores
Time:     32 minutes beside other work (16 of processor time)
Score:    test ROUGE-1, 2 and L 15.9, 3.7 and 15.6 (beam 5); the first 16 words of the email have 14.9, 6.2 and 13.6
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "table"
    config.data.splits = {"train": ("train.jsonl.gz",), "validation": ("dev.jsonl.gz",), "test": ("test.jsonl.gz",)}
    config.data.columns = {"source": "email", "target": "subject"}
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 4000
    config.data.tokenizer.lowercase = True
    config.data.tokens = 6144
    config.data.batch = 256
    config.data.length = 96  # an email's beginning
    config.data.buckets = (32, 64, 96)
    config.task.name = "summarisation"
    config.task.label_smoothing = 0.1

    stack = dict(
        layers=2,
        width=128,
        dropout=0.3,
        embed=dict(scale=True, dropout=0.3),
        attention=dict(heads=4),
        ffn=dict(width=256, activation="relu"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True
    config.model.head.copy = True  # most words of a subject are in its email

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "linear"
    config.schedule.peak = 3e-3
    config.schedule.warmup = 150
    config.schedule.floor = 0.02
    config.train.steps = 1000
    config.train.evaluate_every = 250
    config.train.checkpoint_every = 100
    config.checkpoint.keep_last = 5
    config.checkpoint.average = 5
    config.evaluate.decode_examples = 200
    config.evaluate.samples = 5
    config.decode.method = "beam"
    config.decode.beams = 5
    config.decode.length_penalty = 2.0
    config.decode.max_length = 24
    config.decode.no_repeat_ngram = 2
    return config
