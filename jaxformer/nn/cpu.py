"""Matrix products for XLA's CPU backend: the implementation of `products.dot` on a single CPU.

Measured with jax 0.10 and 0.12 (docs/measurements/training.md), three things are slow there: a product of bfloat16
arrays with a bfloat16 result, a product that contracts the first axis of its left side (as the kernel's gradient x^T dy
does), and the sum of a bias's gradient in bfloat16. So products have float32 results, x^T is materialised before it is
multiplied, and biases are added and their gradients summed in float32.

Transposing the float32 result of a bfloat16 product makes XLA rewrite it into one that neither version can run.
Optimisation barriers prevent this, and a small test program runs first (`_works`).

A processor without instructions for products of bfloat16 (`BFLOAT16_FLAGS`) gets float32 copies of their operands: the
same numbers, and XLA's own way for a float32 result took 1.2 to 1.5 times the processor time there (AVX2).

Several simulated devices use plain products, except for `share_input_gradient`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Num

from jaxformer.parallel import mesh, rules
from jaxformer.types import Array

log = logging.getLogger("jaxformer")

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo of a processor that multiplies bfloat16 numbers itself: x86-64, and `bf16` on Arm."""


def is_supported(x: Float[Array, "..."]) -> bool:
    """True if products of `x` use this module: on a single CPU, in a dtype that works there."""
    current = jax.sharding.get_abstract_mesh()
    single = current.empty or current.size == 1
    return single and mesh.platform() == "cpu" and x.dtype in (jnp.float32, jnp.bfloat16) and _works(x.dtype.name)


@functools.cache
def multiplies_bfloat16() -> bool:
    """True if this processor has instructions for products of bfloat16, or if its flags cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    return _has_bfloat16(lines)


def _has_bfloat16(cpuinfo: Iterable[str]) -> bool:
    """`multiplies_bfloat16` of the lines of /proc/cpuinfo."""
    flags = [line.partition(":")[2].split() for line in cpuinfo if line.startswith(("flags", "Features"))]
    return not flags or not BFLOAT16_FLAGS.isdisjoint(flags[0])


def one_off_compiler_options() -> dict[str, int] | None:
    """Compiler options for a program that runs once on a CPU: it compiles faster, and the last bits may differ."""
    reduced = jax.config.read("jax_disable_most_optimizations")  # the level is already lower
    return {"xla_backend_optimization_level": 1} if mesh.platform() == "cpu" and not reduced else None


def step_compiler_options(current: jax.sharding.Mesh) -> dict[str, str] | None:
    """Compiler options for a training step on `current`: on a single CPU the order of operations that holds least.

    Decoders of the benchmark's width then hold 3 to 35 % fewer temporary arrays for the same processor time
    (docs/measurements/training.md). Several devices keep the default, since their collectives wait for each other.
    """
    alone = current.size == 1 and current.devices.flat[0].platform == "cpu"
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if alone else None


def exchanges_separately(*axes: tuple[str | None, int]) -> bool:
    """True if the compiler would all-reduce the gradient of x separately for each product of x with a kernel.

    If the mesh shards the products by output features, each device has a part of the gradient of x. The TPU compiler
    sums the parts of all products before the all-reduce; the CPU compiler does not.

    Args:
      axes: logical name and size of the first output axis of each product.
    """
    current = jax.sharding.get_abstract_mesh()
    if current.empty or mesh.platform() != "cpu":
        return False
    return all(rules.drop_uneven_axes(rules.spec((name,)), (size,), current)[0] for name, size in axes)


def dot(
    x: Float[Array, "..."], kernel: Num[Array, "..."], inputs: int, bias: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """`products.dot` on a single CPU, equal in value and gradient up to rounding."""
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
    saved: tuple, dy: Float[Array, "N O"]
) -> tuple[Float[Array, "N M"], Float[Array, "M O"], Float[Array, " O"] | None]:
    x, kernel, like, bias = saved
    dbias = None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)
    return input_gradient(dy, kernel), kernel_gradient(x, dy).astype(like.dtype), dbias


_dot.defvjp(_forward, _backward)


def input_gradient(dy: Float[Array, "N O"], kernel: Float[Array, "M O"]) -> Float[Array, "N M"]:
    """Gradient `[N, M]` of `x @ kernel` with respect to `x`, in the dtype of `dy`."""
    return _rounded(_product(dy, kernel, 1, 1), dy.dtype)


def kernel_gradient(x: Float[Array, "N M"], dy: Float[Array, "N O"]) -> Float32[Array, "M O"]:
    """Gradient `[M, O]` of `x @ kernel` with respect to `kernel`."""
    narrow, wide = (x, dy) if x.shape[1] <= dy.shape[1] else (dy, x)
    dkernel = jax.lax.optimization_barrier(_product(_transposed(narrow), wide, 1, 0))
    return dkernel if narrow is x else dkernel.T


def _rounded(y: Float32[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """`y` rounded to `dtype`; the barrier keeps the compiler from using the float32 value instead."""
    return y if dtype == jnp.float32 else jax.lax.optimization_barrier(y.astype(dtype))


def _product(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axis: int, other_axis: int) -> Float32[Array, "_ _"]:
    a, b = operands(a, b)
    return jax.lax.dot_general(a, b, (((axis,), (other_axis,)), ((), ())), preferred_element_type=jnp.float32)


def operands(*arrays: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """`arrays` as a product with a float32 result takes them: in float32 where the processor has no bfloat16."""
    return arrays if multiplies_bfloat16() else tuple(array.astype(jnp.float32) for array in arrays)


def _transposed(x: Float[Array, "N M"]) -> Float[Array, "M N"]:
    """x^T, materialised in memory: the extra axis keeps the compiler from fusing the transpose into a product."""
    return jax.lax.optimization_barrier(jnp.moveaxis(x[:, None], -1, 0)).reshape(x.shape[::-1])


@jax.custom_vjp
def share_input_gradient(
    x: Float[Array, "*batch D"], kernels: tuple[Float[Array, "D ..."], ...], ys: tuple[Float[Array, "*batch ..."], ...]
) -> tuple[Float[Array, "*batch ..."], ...]:
    """`ys`, the products of `x` with each of `kernels`, with one joint product for their gradients in `x`.

    Only `x` gets a gradient here: compute `ys` from `stop_gradient(x)` with the same kernels. The second axis of each
    kernel, which the mesh shards, must be a multiple of the shortest one.
    """
    return ys


def _share_forward(
    x: Float[Array, "*batch D"], kernels: tuple[Float[Array, "D ..."], ...], ys: tuple[Float[Array, "*batch ..."], ...]
) -> tuple[tuple[Float[Array, "*batch ..."], ...], tuple]:
    return ys, (x, kernels)


def _share_backward(saved: tuple, dys: tuple[Float[Array, "*batch ..."], ...]) -> tuple:
    x, kernels = saved
    groups = min(kernel.shape[1] for kernel in kernels)
    kernel = jnp.concatenate([_grouped(kernel.astype(x.dtype), 1, groups) for kernel in kernels], axis=1)
    dy = jnp.concatenate([_grouped(dy, x.ndim - 1, groups) for dy in dys], axis=-3)
    dx = jnp.einsum("...rgk,drgk->...d", dy, kernel)
    return dx, jax.tree.map(jnp.zeros_like, kernels), dys


share_input_gradient.defvjp(_share_forward, _share_backward)


def _grouped(array: Float[Array, "..."], axis: int, groups: int) -> Float[Array, "*_ R G K"]:
    """`array` `[..., G R, ...]`, where `axis` has G groups of R members, as `[..., R, G, K]`."""
    *outer, size = array.shape[: axis + 1]
    array = array.reshape(*outer, groups, size // groups, math.prod(array.shape[axis + 1 :]))
    return jnp.swapaxes(array, -3, -2)


@functools.cache
def _works(dtype: str) -> bool:
    """True if a small program of these products runs and is correct: some failures only appear at run time."""
    try:
        error = _error(dtype)
    except Exception as failure:
        log.warning("matrix products on CPU: plain ones are used, since the fast ones failed: %s", failure)
        return False
    if error > 0.05:
        log.warning("matrix products on CPU: plain ones are used, since the fast ones were off by %.1e", error)
    return error <= 0.05


def _error(dtype: str) -> float:
    """Largest relative error of the gradients of two layers, the first of which widens."""
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 8), (8, 16), (16, 8)))

    def transposed_gradients(x: Array, a: Array, b: Array) -> tuple[Array, ...]:
        x = x.astype(dtype)
        y, backward = jax.vjp(lambda a, b, c: _dot(_dot(x, a, c), b, None), a, b, jnp.zeros(16))
        return tuple(2.0 * gradient.T for gradient in backward(y))

    # Compiled ahead of time, since this function is called while another program is traced.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        results = (
            jax.jit(transposed_gradients)
            .lower(*(jax.ShapeDtypeStruct(z.shape, z.dtype) for z in (x, a, b)))
            .compile()(x, a, b)
        )
    y = x @ a @ b
    expected = (x.T @ y @ b.T, (x @ a).T @ y, (y @ b.T).sum(axis=0))
    errors = (np.abs(np.asarray(f) - 2.0 * w.T).max() / np.abs(w).max() for f, w in zip(results, expected, strict=True))
    return float(max(errors))
