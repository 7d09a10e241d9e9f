"""The position-wise feed-forward layer, plain or gated."""

from __future__ import annotations

import functools

from flax import linen as nn
from jaxtyping import Float

from jaxformer.config import FeedForwardConfig
from jaxformer.nn import remat
from jaxformer.nn.layers import Dense, Dropout, activate, project_jointly
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array


class FeedForward(nn.Module):
    """`act(x W_in + b) W_out + b` (Vaswani et al. 2017, equation 2), or `(act(x W_gate) * (x W_in)) W_out` if gated.

    Gated forms (Shazeer 2020): gelu gives GEGLU, silu SwiGLU, relu ReGLU; `layers.activate` clips and shifts the
    factors. F is `config.width`, by default 4 D. Without `config.output` there is no W_out, and F is D.
    """

    config: FeedForwardConfig
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        inner = config.width or 4 * self.width
        dense = functools.partial(Dense, bias=config.bias, init_scale=config.init_scale)
        widen = functools.partial(dense, (self.width, inner), ("embed", "ffn"))
        if config.gated:
            y, gate = project_jointly(x, widen(name="in"), widen(name="gate"))
            y = activate(config, y, gate)
        else:
            y = activate(config, widen(name="in")(x))
        y = remat.name_activation(constrain(y, "batch", "length", "act_ffn"), "hidden")
        y = Dropout(config.dropout)(y)
        return dense((inner, self.width), ("ffn", "embed"), name="out")(y) if config.output else y
