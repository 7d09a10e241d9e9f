"""A mixture of experts of the shape of Mixtral 8x7B (Jiang et al. 2024): 8 experts a layer, 2 for each token.

Command:  python -m jaxformer train --config=configs/moe_8x7b.py --workdir=runs/moe \
              --config.data.dir=DIR --config.data.splits.train=train.txt --config.data.splits.validation=valid.txt
Hardware: TPU slices from 128 chips; jaxformer plan says what fits, docs/scaling.md what did
Time:     not measured here; predicted in docs/scaling.md
Score:    not measured here
"""

from jaxformer.config import MoEConfig, StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt",), "validation": ("valid.txt",)}
    config.data.tokenizer.vocab = 32000
    config.data.tokenizer.multiple = 128
    config.data.packing = "concat"
    config.data.length = 4096
    config.data.batch = 1024
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=32,
        width=4096,
        embed=dict(deviation=0.02),
        encoding=dict(kind="rope", base=1e6),
        attention=dict(heads=32, kv_heads=8, bias=False),
        ffn=dict(width=14336, activation="silu", gated=True, bias=False),
        norm=dict(kind="rms"),
        remat="full",
    )
    config.model.decoder.moe = section(MoEConfig, experts=8, top_k=2, capacity=1.25)
    config.model.head.chunk = 1024
    config.model.head.tied = False
    config.model.dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.schedule.peak = 3e-4
    config.schedule.warmup = 2000
    config.schedule.floor = 0.1
    config.train.steps = 250000
    config.train.evaluate_every = config.train.checkpoint_every = 1000
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.expert = 8
    return config
