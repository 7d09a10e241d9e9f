"""The position-wise feed-forward layer and its gated forms."""

from __future__ import annotations

import functools

from flax import linen as nn
from jaxtyping import Float

from jaxformer.config import FeedForwardConfig
from jaxformer.nn import remat
from jaxformer.nn.layers import ACTIVATIONS, Dense, Dropout, fan_out
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array


class FeedForward(nn.Module):
    """`act(x W_in + b) W_out + b` (Vaswani et al. 2017, equation 2), or `(act(x W_gate) * (x W_in)) W_out` if gated.

    The gated forms are Shazeer 2020's: gelu gives GEGLU, silu SwiGLU, relu ReGLU.
    """

    config: FeedForwardConfig
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        inner = config.width or 4 * self.width
        activation = ACTIVATIONS[config.activation]
        widen = functools.partial(Dense, (self.width, inner), ("embed", "ffn"), bias=config.bias)
        if config.gated:
            y, gate = fan_out(x, widen(name="in"), widen(name="gate"))
            y = activation(gate) * y
        else:
            y = activation(widen(name="in")(x))
        y = remat.name(constrain(y, "batch", "length", "act_ffn"), "hidden")
        y = Dropout(config.dropout)(y)
        return Dense((inner, self.width), ("ffn", "embed"), bias=config.bias, name="out")(y)
