"""Twenty random settings of what keeps a small seq2seq transformer from learning its data by heart.

jaxformer sweep --config=configs/multi30k_tiny.py --sweep=experiments/sweeps/regularisation.py --workdir=runs/reg
"""

from jaxformer.sweep import choice, log_uniform, random, uniform

SWEEP = random(
    20,
    0,
    {
        "model.encoder.dropout": uniform(0.0, 0.4),
        "model.decoder.dropout": uniform(0.0, 0.4),
        "task.label_smoothing": choice(0.0, 0.1, 0.2),
        "optimizer.weight_decay": log_uniform(1e-5, 1e-1),
    },
)
