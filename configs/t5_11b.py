"""An encoder-decoder of the shape of T5-11B (Raffel et al. 2020, section 3.7), on pairs of texts.

24 + 24 layers of width 1,024 with 128 heads of 128 and a feed-forward width of 65,536: nearly all parameters are in the
feed-forward layers.

Command:  python -m jaxformer train --config=configs/t5_11b.py --workdir=runs/t5_11b --config.data.dir=DIR
Hardware: TPU slices from 16 chips; jaxformer plan says what fits, docs/scaling.md what did
Time:     not measured here; predicted in docs/scaling.md
Score:    not measured here
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "tfds"
    config.data.name = "wmt14_translate/de-en"
    config.data.columns = {"source": "en", "target": "de"}
    config.data.tokenizer.kind = "unigram"
    config.data.tokenizer.vocab = 32000
    config.data.tokenizer.multiple = 128
    config.data.length = 512
    config.data.batch = 2048
    stack = dict(
        layers=24,
        width=1024,
        encoding=dict(kind="t5", buckets=32),
        attention=dict(heads=128, head_width=128, bias=False, scale=False),
        ffn=dict(width=65536, activation="relu", bias=False),
        norm=dict(kind="rms", epsilon=1e-6),
        remat="full",
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True
    config.model.head.scale = True
    config.model.dtype = "bfloat16"
    config.optimizer.name = "adafactor"  # the paper's: no moments as large as the parameters
    config.schedule.kind = "inverse_sqrt"
    config.schedule.peak = 0.01
    config.schedule.warmup = 10000
    config.train.steps = 1000000
    config.train.evaluate_every = config.train.checkpoint_every = 5000
    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
