"""A small GPT-2 of the sizes in the study notes: vocabulary 512, embedding 128 to width 144, 6 heads, 12 layers.

It has those sizes and is not the notes' own model, which is PyTorch's TransformerEncoder. What differs:

    here                                                 the notes
    pre-norm and a final norm, GELU, feed-forward 576    post-norm, ReLU, feed-forward 2048
    learned positions, `max_length` 512                  sinusoids, added after the Linear to the width
    128 to 144 by a matrix                               the same with a bias
    tied output (through that matrix) without a bias     an output layer of its own with a bias
    no padding row                                       row 0 of the table is padding, always 0
    3,166,432 parameters                                 8,271,696

Alike: vocabulary, widths, heads, layers, causal mask, dropout 0.1, epsilon 1e-5.

Command:  python -m jaxformer train --config=configs/gpt2_notes.py --workdir=runs/gpt2_notes
Hardware: 2 CPU cores
Time:     5.8 minutes, one core of a shared machine
Score:    starts at loss 6.31 (ln 512 = 6.24); validation loss 4.447 after 500 steps (3.005 bits per byte)
"""

from jaxformer.config import StackConfig
from jaxformer.overrides import defaults, section


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
