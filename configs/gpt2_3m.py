"""A GPT-2 of 3.2 million parameters: vocabulary 512, embedding 128 to width 144, 6 heads, 12 layers.

Pre-norm, GELU, learned positions and a tied output, as GPT-2 has them, at the sizes of the study notes' model;
`gpt2_notes.py` is that model itself.

Command:  python -m jaxformer train --config=configs/gpt2_3m.py --workdir=runs/gpt2_3m
Hardware: 2 CPU cores
Time:     5.8 minutes, one core of a shared machine
Score:    starts at loss 6.31 (ln 512 = 6.24); validation loss 4.447 after 500 steps (3.005 bits per byte)
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "pylib"
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 512
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 8
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=12,
        width=144,
        embed=dict(width=128, deviation=0.02, dropout=0.1),
        encoding=dict(kind="learned", max_length=512),
        attention=dict(heads=6, dropout=0.1),
        ffn=dict(activation="gelu_tanh"),
        dropout=0.1,
    )
    config.optimizer.weight_decay = 0.1
    config.optimizer.beta2 = 0.95
    config.schedule.peak = 1e-3
    config.train.steps = 500
    return config
