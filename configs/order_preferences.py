"""Preference learning (DPO) on pairs of replies to orders: with thanks rather than without.

The run starts from a dialogue model that was trained on replies of which half end with "thank you". Its log-likelihoods
are the reference.

Command:  jaxformer train --config=configs/dialogue_orders.py --workdir=runs/orders --config.data.name=courtesy \
              --config.train.steps=200
          jaxformer train --config=configs/order_preferences.py --workdir=runs/preferences
          jaxformer evaluate --workdir=runs/preferences --split=test
          jaxformer chat --workdir=runs/preferences --system="tea 3 soup 5 cake 2"
Variants: none
Hardware: 2 CPU cores, shared with other work
Time:     60 seconds of processor time for the first command, 27 for the second
Score:    test, 1,000 pairs: the chosen reply is the likelier one in 45.2 % before and in 100 % after; loss 0.535
"""

from jaxformer.config.overrides import defaults


def get_config(variant: str = ""):
    config = defaults()
    config.init.directory = "runs/orders"  # the model, its tokenizer and its chat template, too
    config.task.name = "preference"
    config.task.beta = 0.1
    config.data.source = "order_pairs"
    config.data.examples = 640
    config.data.length = 192  # of both conversations of a pair together
    config.data.batch = 16

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "linear"
    config.schedule.peak = 1e-4
    config.schedule.warmup = 4
    config.train.steps = 40
    config.train.evaluate_every = 40
    config.train.checkpoint_every = 40
    config.evaluate.examples = 200
    config.checkpoint.metric = "accuracy"
    config.checkpoint.mode = "max"
    config.decode.max_length = 14
    return config
