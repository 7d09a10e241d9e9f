"""One convolution over neighbouring slots, added after the first layer (DeBERTa v2; He et al. 2021, appendix A.6)."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int, Shaped

from jaxformer.config import ConfigError, ConvConfig, NormConfig
from jaxformer.nn.layers import ACTIVATIONS, Dropout, Norm
from jaxformer.types import Array, PyTree


@flax.struct.dataclass
class Convolved:
    """What the convolution of a stack's input made, for the layer that adds it.

    Attributes:
      output: `[B, T, D]`, zero at padding.
      visible: bool `[B, T]`, False at padding.
      params: of the norm after the sum.
      norm: its config.
    """

    output: Array
    visible: Array
    params: PyTree
    norm: NormConfig = flax.struct.field(pytree_node=False)

    def add(self, x: Float[Array, "B T D"], layer: Int[Array, ""]) -> Float[Array, "B T D"]:
        """norm(x + output), zero at padding, where `layer` (from 0) is the first; else `x`."""
        y = Norm(self.norm, parent=None).apply({"params": self.params}, x + self.output)
        return jnp.where(layer == 0, jnp.where(self.visible[..., None], y, jnp.zeros((), y.dtype)), x)


class Convolution(nn.Module):
    """The convolution of n = `config.kernel` neighbouring slots, half of them on either side.

        y_t = act(b + sum_o x_(t + o) W_o),   o = -(n - 1) / 2 ... (n - 1) / 2

    A neighbour of another segment counts as zero, as padding does, so that packing changes nothing. With groups, each
    reads and writes its own share of the channels.

    Attributes:
      norm: of the sum of layer and convolution.
      dropout: rate, before the activation.

    Raises:
      ConfigError: the kernel has no middle, the groups do not divide the width, or the norm is over the batch.
    """

    config: ConvConfig
    norm: NormConfig
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], segment: Int[Array, "B T"]) -> Convolved:
        """`x` at slots of `segment`; padding is 0, or negative where its output counts (see `nn/masks.py`)."""
        size, groups, width = self.config.kernel, self.config.groups, x.shape[-1]
        if size % 2 == 0 or width % groups:
            raise ConfigError(
                f"conv: got kernel {size} and {groups} groups, expected an odd kernel and a divisor of the width "
                f"{width}; change them"
            )
        if self.norm.kind == "batch":
            raise ConfigError("norm.kind: got batch with a convolution, expected layer, rms or none; change it")
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2)
        init = nn.with_logical_partitioning(init, (None, "embed", None))
        kernel = self.param("kernel", init, (size, width // groups, width)).astype(x.dtype)
        bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros_init(), (None,)), (width,))
        visible = segment > 0
        near = visible[..., None] & (_around(segment, size) == segment[..., None])
        around = jnp.where(near[..., None], _around(x, size), jnp.zeros((), x.dtype))
        around = around.reshape(*near.shape, groups, -1)
        by_group = kernel.reshape(size, width // groups, groups, -1)
        y = jnp.einsum("btngd,ndge->btge", around, by_group).reshape(x.shape) + bias.astype(x.dtype)
        y = jnp.where(visible[..., None], y, jnp.zeros((), y.dtype))
        y = ACTIVATIONS[self.config.activation](Dropout(self.dropout)(y))
        norm = Norm(self.norm, name="norm")
        if self.is_initializing():  # its parameters live here; the layer that adds the output applies them
            norm(y)
        return Convolved(y, visible, nn.meta.unbox(norm.variables.get("params", {})), self.norm)


def _around(x: Shaped[Array, "B T *rest"], size: int) -> Shaped[Array, "B T n *rest"]:
    """Every slot with its neighbours, zeros beyond the ends."""
    reach, length = size // 2, x.shape[1]
    padded = jnp.pad(x, [(0, 0), (reach, reach)] + [(0, 0)] * (x.ndim - 2))
    return jnp.stack([padded[:, i : i + length] for i in range(size)], axis=2)
