"""Conversations about orders: the replies of a shop that reads its price list and keeps the total.

Command:  jaxformer train --config=configs/dialogue_orders.py --workdir=runs/orders
          jaxformer evaluate --workdir=runs/orders --split=test
          jaxformer chat --workdir=runs/orders --system="tea 3 soup 5 cake 2"
Variants: none
Hardware: 2 CPU cores, shared with other work
Time:     3.4 minutes of processor time (20 minutes beside a load of 25)
Score:    test: exact match 54.3 % of the last replies of 1,000 conversations; perplexity of replies 1.104, token
          accuracy 94.7 %. Of 457 wrong replies 447 look up the wrong price, 10 add up wrongly. The loss still falls:
          more steps would help (not tried)
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config(variant: str = ""):
    config = defaults()
    config.task.name = "dialogue"
    config.data.source = "orders"
    config.data.examples = 100_000
    config.data.tokenizer.kind = "word"
    config.data.tokenizer.vocab = 128
    config.data.length = 160
    config.data.packing = "first_fit"
    config.data.batch = 12

    config.model.decoder = section(
        StackConfig,
        layers=2,
        width=128,
        attention=dict(heads=4),
        ffn=dict(width=512),
        encoding=dict(kind="rope"),
    )

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "cosine"
    config.schedule.peak = 3e-3
    config.schedule.warmup = 100
    config.train.steps = 1000
    config.train.evaluate_every = 500
    config.train.checkpoint_every = 500
    config.evaluate.decode_examples = 200
    config.evaluate.samples = 3
    config.evaluate.headline = "exact_match"
    config.decode.max_length = 12
    config.decode.batch = 100
    return config
