"""FLOPs of a config as a picture: by block, and against the row length."""

from __future__ import annotations

import numpy as np
from flax import linen as nn

from jaxformer.analysis.draw.panels import Bars, Curves, Picture
from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.plan import flops as counts


def flops(config: Config, title: str) -> Picture:
    """FLOPs of a training step for each token, by block at `data.length`, and for other row lengths.

    Args:
      config: with resolved sizes, see `program.resolve`.
      title: name of the recipe or run.

    Raises:
      ConfigError: nothing is multiplied.
    """
    module = build.build(config.model)
    params, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    length = config.data.length
    values = counts.by_block(config, params, names, length)
    total = sum(values.values())
    if not total:
        raise ConfigError("draw flops: got a model without matrix products, expected some; draw something else")
    largest = sorted(values.items(), key=lambda item: -item[1])
    width = max(map(len, values))
    summary = [f"{name:<{width}}  {value:>14,.0f}  {value / total:6.1%}" for name, value in largest]
    summary.append(f"{'all':<{width}}  {total:>14,.0f}  100.0%   per token, forward and backward, length {length:,}")
    rows: list = [[Bars(f"rows of {length:,} slots", dict(largest), "FLOPs per token, forward and backward")]]
    if config.model.stacks:
        products = 6 * counts.matmul_parameters(config, params, names)
        lengths = np.unique(np.geomspace(min(64, length), max(16 * length, 8192), 40).astype(int))
        scores = np.array([counts.attention_flops(config, int(each)) for each in lengths])
        curves = {"with parameters": np.full(len(lengths), products), "attention scores": scores}
        curves = {name: curve for name, curve in curves.items() if curve.any()}
        marks = ((float(length), f"length {length:,}"),)
        label = "FLOPs per token"
        rows.append(
            [Curves("against the row length", lengths, curves, "slots", label, log_x=True, log_y=True, marks=marks)]
        )
    return Picture(f"FLOPs of {title}, as PaLM counts them", rows, summary)
