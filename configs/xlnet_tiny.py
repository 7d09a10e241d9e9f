"""Permutation language modelling with XLNet's two streams and memories (Yang et al. 2019), on Python's own library.

Command:  python -m jaxformer train --config=configs/xlnet_tiny.py --workdir=runs/xlnet_tiny
Hardware: 2 CPU cores
Time:     3.1 minutes of processor time, on one core of a crowded machine (15 minutes by the clock)
Score:    starts at loss 8.32 (ln 4000 = 8.29); validation loss of the predicted tokens 5.957 after 400 steps (accuracy
          10.3 %), each row read by itself, still falling: a short run
"""

from jaxformer.config import PermutationConfig, StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "pylib"
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 4000
    config.data.packing = "concat"
    config.data.shuffle = False  # row i of a batch goes on with the text of row i of the batch before
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "permutation_lm"
    config.task.recurrence = True
    config.model.encoder = section(
        StackConfig,
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(dropout=0.1, deviation=0.02),
        encoding=dict(kind="transformer_xl"),
        attention=dict(heads=2, bias=False, dropout=0.1),
        norm=dict(order="post", epsilon=1e-12),
    )
    config.model.permutation = section(PermutationConfig, memory=128)
    config.model.head.bias = True
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 1e-3
    config.schedule.warmup = 50
    config.train.steps = 400
    return config
