"""Matrix products as XLA's CPU backend runs them fast: what `products.dot` is there, on a single device.

Measured with jax 0.10 and 0.12 (docs/measurements/training.md). A product of two bfloat16 arrays with a bfloat16 result
is slow, the same with a float32 result is not; a product that contracts the first axis of its left side, as the
gradient of a kernel x^T dy does, misses the fast path; and so does the sum of a bias's gradient in bfloat16. So here
products have float32 results, x^T is written out before it is multiplied, and biases are added and their gradients
summed in float32.

A bfloat16 product with a float32 result that is transposed is turned into one that neither version can run. Barriers
keep results from what is done with them, and a small program is tried first.

On several simulated devices products are plain ones, but for `joined`, for which there is a reason of its own. What is
done for this backend alone and is no product stands here, too: `once`.
"""

from __future__ import annotations

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Num

from jaxformer.parallel import mesh, rules
from jaxformer.types import Array

log = logging.getLogger("jaxformer")


def serves(x: Float[Array, "..."]) -> bool:
    """Whether products of `x` run here: on one CPU, in a precision that is known to work."""
    current = jax.sharding.get_abstract_mesh()
    alone = current.empty or current.size == 1
    return alone and mesh.platform() == "cpu" and x.dtype in (jnp.float32, jnp.bfloat16) and _works(x.dtype.name)


def once() -> dict[str, int] | None:
    """Compiler options for a program that runs once: LLVM is done sooner, and last bits may differ."""
    less = jax.config.read("jax_disable_most_optimizations")  # then it is less already
    return {"xla_backend_optimization_level": 1} if mesh.platform() == "cpu" and not less else None


def exchanges_apart(*axes: tuple[str | None, int]) -> bool:
    """Whether devices would exchange their parts of a gradient once for every product that x is a factor of.

    Where the mesh divides products by output features, no device has the whole gradient of x. The TPU's compiler adds
    the parts of all products up before they are exchanged, the CPU's does not.

    Args:
      axes: logical name and size of the first output axis of each product.
    """
    current = jax.sharding.get_abstract_mesh()
    if current.empty or mesh.platform() != "cpu":
        return False
    return all(rules.fit(rules.spec((name,)), (size,), current)[0] for name, size in axes)


def dot(
    x: Float[Array, "..."], kernel: Num[Array, "..."], inputs: int, bias: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """See `products.dot`, which this equals in value and gradient to rounding."""
    width, outer = math.prod(kernel.shape[:inputs]), x.shape[: x.ndim - inputs]
    flat = None if bias is None else bias.reshape(-1)
    return _dot(x.reshape(-1, width), kernel.reshape(width, -1), flat).reshape(*outer, *kernel.shape[inputs:])


@jax.custom_vjp
def _dot(x: Float[Array, "N M"], kernel: Num[Array, "M O"], bias: Float[Array, " O"] | None) -> Float[Array, "N O"]:
    return _forward(x, kernel, bias)[0]


def _forward(x: Float[Array, "N M"], kernel: Num[Array, "M O"], bias: Float[Array, " O"] | None):
    kernel_dtype, kernel = kernel.dtype, kernel.astype(x.dtype)
    y = _product(x, kernel, 1, 0)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return _rounded(y, x.dtype), (x, kernel, jnp.zeros((), kernel_dtype), bias)


def _backward(
    kept: tuple, dy: Float[Array, "N O"]
) -> tuple[Float[Array, "N M"], Float[Array, "M O"], Float[Array, " O"] | None]:
    x, kernel, like, bias = kept
    dbias = None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)
    return input_gradient(dy, kernel), kernel_gradient(x, dy).astype(like.dtype), dbias


_dot.defvjp(_forward, _backward)


def input_gradient(dy: Float[Array, "N O"], kernel: Float[Array, "M O"]) -> Float[Array, "N M"]:
    """Of a product x kernel with respect to x, in the dtype of `dy`."""
    return _rounded(_product(dy, kernel, 1, 1), dy.dtype)


def kernel_gradient(x: Float[Array, "N M"], dy: Float[Array, "N O"]) -> Float32[Array, "M O"]:
    """Of a product x kernel with respect to the kernel."""
    narrow, wide = (x, dy) if x.shape[1] <= dy.shape[1] else (dy, x)
    dkernel = jax.lax.optimization_barrier(_product(_transposed(narrow), wide, 1, 0))
    return dkernel if narrow is x else dkernel.T


def _rounded(y: Float32[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """`y` in `dtype`, really: the compiler may not take the float32 result in its place."""
    return y if dtype == jnp.float32 else jax.lax.optimization_barrier(y.astype(dtype))


def _product(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axis: int, of_b: int) -> Float32[Array, "_ _"]:
    return jax.lax.dot_general(a, b, (((axis,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(x: Float[Array, "N M"]) -> Float[Array, "M N"]:
    """x^T in memory. The extra axis hides from the compiler that it could be multiplied without being written out."""
    return jax.lax.optimization_barrier(jnp.moveaxis(x[:, None], -1, 0)).reshape(x.shape[::-1])


@jax.custom_vjp
def joined(
    x: Float[Array, "*batch D"], kernels: tuple[Float[Array, "D ..."], ...], ys: tuple[Float[Array, "*batch ..."], ...]
) -> tuple[Float[Array, "*batch ..."], ...]:
    """`ys`, the products of `x` with each of `kernels`, whose gradients with respect to `x` are one product.

    Only x gets a gradient here: `ys` are to be computed from an x that is held constant, with the same kernels. The
    second axis of a kernel, which the mesh divides, is a multiple of the shortest one.
    """
    return ys


def _joined_forward(
    x: Float[Array, "*batch D"], kernels: tuple[Float[Array, "D ..."], ...], ys: tuple[Float[Array, "*batch ..."], ...]
) -> tuple[tuple[Float[Array, "*batch ..."], ...], tuple]:
    return ys, (x, kernels)


def _joined_backward(kept: tuple, dys: tuple[Float[Array, "*batch ..."], ...]) -> tuple:
    x, kernels = kept
    groups = min(kernel.shape[1] for kernel in kernels)
    kernel = jnp.concatenate([_grouped(kernel.astype(x.dtype), 1, groups) for kernel in kernels], axis=1)
    dy = jnp.concatenate([_grouped(dy, x.ndim - 1, groups) for dy in dys], axis=-3)
    dx = jnp.einsum("...rgk,drgk->...d", dy, kernel)
    return dx, jax.tree.map(jnp.zeros_like, kernels), dys


joined.defvjp(_joined_forward, _joined_backward)


def _grouped(array: Float[Array, "..."], axis: int, groups: int) -> Float[Array, "*_ R G K"]:
    """`[..., G R, ...]`, of which `axis` is the one of G groups with R members each, as `[..., R, G, K]`."""
    *outer, size = array.shape[: axis + 1]
    array = array.reshape(*outer, groups, size // groups, math.prod(array.shape[axis + 1 :]))
    return jnp.swapaxes(array, -3, -2)


@functools.cache
def _works(dtype: str) -> bool:
    """Whether a small program of these products runs here and is right: some failures only show at run time."""
    try:
        error = _error(dtype)
    except Exception as failure:
        log.warning("matrix products on CPU: plain ones are used, since the fast ones failed: %s", failure)
        return False
    if error > 0.05:
        log.warning("matrix products on CPU: plain ones are used, since the fast ones were off by %.1e", error)
    return error <= 0.05


def _error(dtype: str) -> float:
    """The largest relative error of the gradients of two layers, one of which widens."""
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 8), (8, 16), (16, 8)))

    def pulled(x, a, b):
        x = x.astype(dtype)
        y, pull = jax.vjp(lambda a, b, c: _dot(_dot(x, a, c), b, None), a, b, jnp.zeros(16))
        return tuple(2.0 * each.T for each in pull(y))

    # Compiled apart, since this is called while another program is traced.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = jax.jit(pulled).lower(*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in (x, a, b))).compile()(x, a, b)
    y = x @ a @ b
    wanted = (x.T @ y @ b.T, (x @ a).T @ y, (y @ b.T).sum(axis=0))
    errors = (np.abs(np.asarray(f) - 2.0 * w.T).max() / np.abs(w).max() for f, w in zip(found, wanted, strict=True))
    return float(max(errors))
