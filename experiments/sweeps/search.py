"""A search for the rates of a recipe: 16 trials, of which those that are worse than the median end early.

jaxformer sweep --config=configs/quickstart.py --sweep=experiments/sweeps/search.py --workdir=runs/search
    --config.train.evaluate_every=20
"""

from jaxformer.sweep import integers, log_uniform, median, search, uniform

SWEEP = search(
    16,
    0,
    {
        "schedule.peak": log_uniform(1e-4, 1e-1),
        "schedule.warmup": integers(5, 120),
        "model.decoder.dropout": uniform(0.0, 0.3),
        "optimizer.weight_decay": log_uniform(1e-5, 1e-1),
    },
    startup=5,
    pruner=median(startup=4, warmup=40),
)
