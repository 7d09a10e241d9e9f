"""The GPT-2 of the study notes, exactly: PyTorch's TransformerEncoder with a causal mask, 8,271,696 parameters.

Vocabulary 512 with padding row 0; embedding 128, a Linear with bias to width 144, the sinusoid added after it; 12
post-norm layers of 6 heads, ReLU, feed-forward 2048, dropout 0.1, epsilon 1e-5, no norm after the last; an untied
output layer with bias. Kernels start with the variance that PyTorch's Linear gives them: with a larger one, post-norm
layers this deep lose their input. The notes give the cosine channels an exponent of their own; here a pair shares one,
as in Vaswani et al. 2017. `gpt2_3m.py` has the same sizes with GPT-2's own layers.

Command:  python -m jaxformer train --config=configs/gpt2_notes.py --workdir=runs/gpt2_notes
Hardware: 2 CPU cores
Time:     17.5 minutes beside other work
Score:    starts at loss 6.37 (ln 512 = 6.24); validation loss 3.889 after 500 steps (2.628 bits per byte)
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
        embed=dict(width=128, projection_bias=True, pad=0, deviation=1.0),
        encoding=dict(kind="sinusoidal"),
        attention=dict(heads=6, dropout=0.1, init_scale=1 / 3),
        ffn=dict(width=2048, activation="relu", dropout=0.1, init_scale=1 / 3),
        norm=dict(order="post"),
        dropout=0.1,
    )
    config.model.head.tied = False
    config.model.head.bias = True
    config.model.head.init_scale = 1 / 3
    config.optimizer.beta2 = 0.95
    config.schedule.peak = 5e-4
    config.train.steps = 500
    return config
