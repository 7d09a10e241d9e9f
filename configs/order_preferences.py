"""Preference learning (DPO) on pairs of replies to orders: the right sum against one with a wrong price.

The run starts from a dialogue model that was trained briefly, which writes replies of the right form and often takes a
wrong price. Its log-likelihoods are the reference.

Command:  jaxformer train --config=configs/dialogue_orders.py --workdir=runs/orders --config.train.steps=200
          jaxformer train --config=configs/order_preferences.py --workdir=runs/preferences
          jaxformer evaluate --workdir=runs/preferences --split=test
          jaxformer chat --workdir=runs/preferences --system="tea 3 soup 5 cake 2"
Variants: none
Hardware: 2 CPU cores, shared with other work
Time:     TODO
Score:    TODO
"""

from jaxformer.config.overrides import defaults


def get_config(variant: str = ""):
    config = defaults()
    config.init.directory = "runs/orders"  # the model, its tokenizer and its chat template, too
    config.task.name = "preference"
    config.task.beta = 0.1
    config.data.source = "order_pairs"
    config.data.examples = 2000
    config.data.length = 192  # of both conversations of a pair together
    config.data.batch = 16

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "linear"
    config.schedule.peak = 5e-4
    config.schedule.warmup = 10
    config.train.steps = 125
    config.train.evaluate_every = 125
    config.train.checkpoint_every = 125
    config.evaluate.examples = 500
    config.checkpoint.metric = "accuracy"
    config.checkpoint.mode = "max"
    config.decode.max_length = 12
    return config
