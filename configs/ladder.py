"""From a bigram table to a small transformer in six steps, on the characters of tiny Shakespeare.

The steps of the lecture "Let's build GPT: from scratch, in code, spelled out" (Karpathy 2023). Published validation
losses of its steps, by a reader of the lecture (Garg 2025, Building GPT from Scratch): 2.49, 2.40, 2.28, 2.27,
2.09, 2.076.

Command:  python -m jaxformer train --config=configs/ladder.py:norm --workdir=runs/ladder-norm --config.data.dir=DIR
              (DIR holds input.txt)
Variants: bigram    the row of a V x V table is the logits of the next character
          head      embeddings of characters and positions, and one head of attention over the whole width
          heads     four heads of a quarter of the width
          ffn       and one linear map with ReLU
          residual  three layers of both with residuals, output projections and a hidden width of 4 x 32
          norm      and layer norm before each of them and at the end
Hardware: 2 CPU cores
Time:     25 to 62 seconds of processor time each; 45 to 287 seconds on a machine shared with much other work
Score:    validation loss 2.487, 2.412, 2.275, 2.235, 2.102, 2.078 in this order
"""

from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("bigram", "head", "heads", "ffn", "residual", "norm")
WIDTH, CONTEXT = 32, 8


def get_config(variant: str = "norm"):
    steps = VARIANTS[: VARIANTS.index(variant or "norm") + 1]
    has_residuals = "residual" in steps
    config = defaults()
    config.data.source = "text"
    config.data.document = "file"
    config.data.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}
    config.data.tokenizer.kind = "character"
    config.data.packing = "concat"
    config.data.length = CONTEXT
    config.data.batch = 32
    config.task.name = "language_modelling"

    # Initial values as PyTorch's: tables of variance 1, kernels of variance 1 / 3 over the fan-in.
    if "head" in steps:
        ffn_width = 4 * WIDTH if has_residuals else WIDTH
        ffn = dict(width=ffn_width, activation="relu", output=has_residuals, init_scale=1 / 3)
        config.model.decoder = section(
            StackConfig,
            layers=3 if has_residuals else 1,
            width=WIDTH,
            embed=dict(deviation=1.0),
            encoding=dict(kind="learned", max_length=CONTEXT),
            attention=dict(
                heads=4 if "heads" in steps else 1,
                bias=False,
                output=has_residuals,
                output_bias=has_residuals,
                init_scale=1 / 3,
            ),
            ffn=ffn if "ffn" in steps else None,
            norm=dict(kind="layer" if "norm" in steps else "none"),
            residual_attention=has_residuals,
            residual_ffn=has_residuals,
        )
        config.model.head.tied = False
        config.model.head.bias = True
        config.model.head.init_scale = 1 / 3
    else:
        vocab = 72  # 65 characters and 7 special tokens
        config.model.decoder = section(
            StackConfig,
            layers=0,
            width=vocab,
            embed=dict(deviation=1.0),
            encoding=dict(kind="none"),
            norm=dict(kind="none"),
        )
        config.model.head.projection = False

    config.optimizer.weight_decay = 0.01
    config.optimizer.decay_exclude = ()
    config.optimizer.clip = None
    config.schedule.kind = "constant"
    config.schedule.peak = 1e-3 if "head" in steps else 1e-2  # as in the lecture
    config.schedule.warmup = 0
    config.train.steps = 5000
    config.train.evaluate_every = 1000
    config.train.checkpoint_every = 5000
    config.evaluate.batch = 512
    config.decode.method = "sample"
    config.decode.max_length = 200
    return config
