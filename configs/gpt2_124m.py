"""GPT-2 small (Radford et al. 2019): 12 layers, width 768, 12 heads, 1,024 tokens, on text files of yours.

Command:  python -m jaxformer train --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m \
              --config.data.dir=DIR --config.data.splits.train=train.txt --config.data.splits.validation=valid.txt
Hardware: one or more accelerators of 40 GB; half a million tokens a step by accumulation
Time:     not measured here
Score:    not measured here. nanoGPT reports validation loss 2.85 after 300 billion tokens of OpenWebText
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt",), "validation": ("valid.txt",)}
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 50257
    config.data.tokenizer.multiple = 128
    config.data.packing = "concat"
    config.data.length = 1024
    config.data.batch = 480
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=12,
        width=768,
        embed=dict(deviation=0.02),
        encoding=dict(kind="learned", max_length=1024),
        attention=dict(heads=12),
        ffn=dict(activation="gelu_tanh"),
    )
    config.model.dtype = "bfloat16"
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.schedule.peak = 6e-4
    config.schedule.warmup = 2000
    config.schedule.floor = 0.1
    config.train.steps = 600000
    config.train.accumulation = 40
    config.train.evaluate_every = 2000
    config.train.checkpoint_every = 2000
    return config
