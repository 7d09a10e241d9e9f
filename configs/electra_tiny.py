"""Replaced-token detection with ELECTRA's two encoders (Clark et al. 2020), on Python's own library.

Command:  python -m jaxformer train --config=configs/electra_tiny.py --workdir=runs/electra_tiny
Hardware: 2 CPU cores
Time:     1.9 minutes of processor time, on one core of a crowded machine (14 minutes by the clock)
Score:    validation after 250 steps: generator_loss 6.648 (ln 4000 = 8.29), detection_loss 0.4178, no better than
          saying for every token how many are replaced (14.7 %): a run this short finds none of them yet
"""

from jaxformer.config import GeneratorConfig, StackConfig
from jaxformer.config.overrides import defaults, section

ENCODER = dict(
    layers=2,
    dropout=0.1,
    embed=dict(norm=True, dropout=0.1, deviation=0.02, width=128),
    encoding=dict(kind="learned", max_length=512),
    norm=dict(order="post", epsilon=1e-12),
)


def get_config():
    config = defaults()
    config.data.source = "pylib"
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 4000
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "replaced_tokens"
    config.model.encoder = section(StackConfig, **ENCODER, width=128, attention=dict(heads=2, dropout=0.1))
    config.model.generator = section(
        GeneratorConfig,
        encoder=dict(**ENCODER, width=64, attention=dict(heads=1, dropout=0.1)),
        head=dict(transform=True, bias=True),
    )
    config.model.head.kind = "slots"
    config.optimizer.weight_decay = 0.01
    config.schedule.kind = "linear"
    config.schedule.peak = 1e-3
    config.schedule.warmup = 50
    config.train.steps = 250
    return config
