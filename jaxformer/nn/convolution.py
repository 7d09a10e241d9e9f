"""A convolution over neighbouring slots, added after the first layer (DeBERTa v2; He et al. 2021, appendix A.6)."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int, Shaped

from jaxformer.config import ConvConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.layers import ACTIVATIONS, Dropout, Norm, parameter, zeros_parameter
from jaxformer.types import Array, PyTree


class Convolved(flax.struct.PyTreeNode):
    """Output of the convolution over a stack's input, to be added by the first layer.

    Attributes:
      output: `[B, T, D]`, zero at padding.
      visible: bool `[B, T]`, False at padding.
      params: parameters of the norm after the sum.
      norm: config of that norm.
    """

    output: Array
    visible: Array
    params: PyTree
    norm: NormConfig = flax.struct.field(pytree_node=False)

    def add(self, x: Float[Array, "B T D"], layer: Int[Array, ""]) -> Float[Array, "B T D"]:
        """norm(x + output), zero at padding, if `layer` is 0; else `x`."""
        y: Any = Norm(self.norm, parent=None).apply({"params": self.params}, x + self.output)
        return jnp.where(layer == 0, jnp.where(self.visible[..., None], y, jnp.zeros((), y.dtype)), x)


class Convolution(nn.Module):
    """Convolution over n = `config.kernel` neighbouring slots, centred on each slot.

        y_t = act(b + sum_o x_(t + o) W_o),   o = -(n - 1) / 2 ... (n - 1) / 2

    Neighbours in another segment are zero, like padding, so packing does not change the result. With groups, each
    group of channels reads only itself.

    Attributes:
      norm: config of the norm after the sum of layer and convolution.
      dropout: dropout rate, before the activation.

    Raises:
      ConfigError: the kernel size is even, the groups do not divide the width, or the norm is batch norm.
    """

    config: ConvConfig
    norm: NormConfig
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], segment: Int[Array, "B T"]) -> Convolved:
        """Convolution of `x` `[B, T, D]`. Padding has segment 0, or negative ones where its output is used."""
        size, groups, width = self.config.kernel, self.config.groups, x.shape[-1]
        if size % 2 == 0 or width % groups:
            raise ConfigError(
                f"conv: got kernel {size} and {groups} groups, expected an odd kernel and a divisor of the width "
                f"{width}; change them"
            )
        if self.norm.kind == "batch":
            raise ConfigError("norm.kind: got batch with a convolution, expected layer, rms or none; change it")
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2)
        kernel = parameter(self, "kernel", init, (None, "embed", None), (size, width // groups, width)).astype(x.dtype)
        bias = zeros_parameter(self, "bias", (None,), (width,))
        visible = segment > 0
        near = visible[..., None] & (_around(segment, size) == segment[..., None])
        around = jnp.where(near[..., None], _around(x, size), jnp.zeros((), x.dtype))
        around = around.reshape(*near.shape, groups, -1)
        by_group = kernel.reshape(size, width // groups, groups, -1)
        y = jnp.einsum("btngd,ndge->btge", around, by_group).reshape(x.shape) + bias.astype(x.dtype)
        y = jnp.where(visible[..., None], y, jnp.zeros((), y.dtype))
        y = ACTIVATIONS[self.config.activation](Dropout(self.dropout)(y))
        norm = Norm(self.norm, name="norm")
        if self.is_initializing():  # creates the norm's parameters, which `Convolved.add` applies
            norm(y)
        return Convolved(y, visible, nn.meta.unbox(norm.variables.get("params", {})), self.norm)


def _around(x: Shaped[Array, "B T *rest"], size: int) -> Shaped[Array, "B T n *rest"]:
    """Each slot with its n = `size` neighbours, itself included; zeros beyond the ends."""
    reach, length = size // 2, x.shape[1]
    padded = jnp.pad(x, [(0, 0), (reach, reach)] + [(0, 0)] * (x.ndim - 2))
    return jnp.stack([padded[:, i : i + length] for i in range(size)], axis=2)
