"""Matrix products with kernels, and the precision of their forward and backward passes.

Operands are in the compute dtype. A product with a float32 result has a float32 cotangent. Autodiff would multiply that
cotangent in float32: slow, and to a precision that the other factor does not have. Here it is rounded first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Num

from jaxformer.nn import cpu
from jaxformer.types import Array


def dot(
    x: Float[Array, "..."], kernel: Num[Array, "..."], inputs: int = 1, bias: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Product of the last `inputs` axes of `x` with the first `inputs` axes of `kernel`, plus `bias`, in `x.dtype`.

    The bias has the shape of the kernel's remaining axes. An integer kernel has no gradient.
    """
    if cpu.is_supported(x):
        return cpu.dot(x, kernel, inputs, bias)
    axes = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (axes, ((), ())))
    return y if bias is None else y + bias.astype(y.dtype)


@jax.custom_vjp
def wide_dot(x: Float[Array, "*batch M"], kernel: Num[Array, "M N"]) -> Float32[Array, "*batch N"]:
    """`x @ kernel` with a float32 result, whose cotangent is rounded to the dtype of `x`."""
    axes, kernel = (((x.ndim - 1,), (0,)), ((), ())), kernel.astype(x.dtype)
    if cpu.is_supported(x):
        x, kernel = cpu.operands(x, kernel)
    return jax.lax.dot_general(x, kernel, axes, preferred_element_type=jnp.float32)


def _wide_forward(x: Float[Array, "*batch M"], kernel: Float[Array, "M N"]) -> tuple[Float32[Array, "*batch N"], tuple]:
    return wide_dot(x, kernel), (x, kernel)


def _wide_backward(
    saved: tuple, dy: Float32[Array, "*batch N"]
) -> tuple[Float[Array, "*batch M"], Float[Array, "M N"]]:
    x, kernel = saved
    dy, low = dy.astype(x.dtype), kernel.astype(x.dtype)
    if cpu.is_supported(x):
        dx = cpu.input_gradient(dy.reshape(-1, dy.shape[-1]), low).reshape(x.shape)
    else:
        dx = jnp.einsum("...n,mn->...m", dy, low)
    return dx, kernel_gradient(x, dy).astype(kernel.dtype)


wide_dot.defvjp(_wide_forward, _wide_backward)


def kernel_gradient(x: Float[Array, "*batch M"], dy: Float[Array, "*batch N"]) -> Float[Array, "M N"]:
    """Gradient `[M, N]` of `x @ kernel` with respect to `kernel`, for the cotangent `dy` of the product."""
    if cpu.is_supported(x):
        return cpu.kernel_gradient(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
    return jnp.einsum("...m,...n->mn", x, dy)
