"""Recurrent cells as pure functions, and the loop over time that honours padding and segments.

States are float32 in any compute precision and unchanged by padding (segment 0); where a row's segment changes they
start anew, so packed examples do not see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int, Key, Shaped

from jaxformer.nn.products import kernel_gradient, wide_dot
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree

Carry = tuple[Array, ...]
"""The state of one layer, float32, the hidden state h `[B, W]` first: (h,) or, for an LSTM, (h, c). A layer with
input-feeding attention appends its last output."""


def rnn(inputs: Float32[Array, "B 1 W"], recurrent: Float32[Array, "B 1 W"], carry: Carry) -> Carry:
    """Elman (1990): h' = tanh(x W + b + h U)."""
    return (jnp.tanh(inputs[:, 0] + recurrent[:, 0]),)


def lstm(inputs: Float32[Array, "B 4 W"], recurrent: Float32[Array, "B 4 W"], carry: Carry) -> Carry:
    """Hochreiter and Schmidhuber (1997) with the forget gate of Gers et al. (2000). Gates: i f g o.

    i, f, o = sigmoid(x W + b + h U), g = tanh(x W + b + h U); c' = f c + i g; h' = o tanh(c'). The forget gate's bias
    is written as b + 1 (Jozefowicz et al. 2015), so that it starts at 1 while the parameter starts at 0.
    """
    i, f, g, o = jnp.moveaxis(inputs + recurrent, 1, 0)
    c = jax.nn.sigmoid(f + 1.0) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(inputs: Float32[Array, "B 3 W"], recurrent: Float32[Array, "B 3 W"], carry: Carry) -> Carry:
    """Cho et al. (2014, arXiv 1406.1078v1, where the reset gate follows the product). Gates: r z n.

    r, z = sigmoid(x W + b + h U + d), n = tanh(x W + b + r (h U + d)); h' = z h + (1 - z) n. Resetting after the
    product instead of before it leaves one matmul a step; it is also what cuDNN computes.
    """
    r, z = jnp.moveaxis(jax.nn.sigmoid(inputs[:, :2] + recurrent[:, :2]), 1, 0)
    n = jnp.tanh(inputs[:, 2] + r * recurrent[:, 2])
    return (z * carry[0] + (1.0 - z) * n,)


@dataclass(frozen=True)
class Cell:
    """One step of recurrence.

    Attributes:
      step: `(inputs [B, G, W], recurrent [B, G, W], carry) -> carry`, float32; G gates.
      gates: G.
      states: arrays in the carry.
      bias: the recurrent product has a bias of its own (`d` of the GRU, not redundant there).
    """

    step: Callable[[Array, Array, Carry], Carry]
    gates: int
    states: int = 1
    bias: bool = False


CELLS = {"rnn": Cell(rnn, 1), "lstm": Cell(lstm, 4, states=2), "gru": Cell(gru, 3, bias=True)}


class Marks(NamedTuple):
    """What a recurrence needs to know of the slots, bool `[B, T]`: is the slot `real`, and does a segment start there
    (`fresh`)?"""

    real: Array
    fresh: Array


def marks(segment: Int[Array, "B T"], reverse: bool = False) -> Marks:
    """Marks of segments read forwards or backwards. A gap of padding inside a segment is skipped."""
    if reverse:
        return Marks(*(x[:, ::-1] for x in marks(segment[:, ::-1])))
    real = segment != 0
    index = jnp.where(real, jnp.arange(segment.shape[1]), -1)
    before = jnp.pad(jax.lax.cummax(index, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    last = jnp.where(before < 0, 0, jnp.take_along_axis(segment, jnp.maximum(before, 0), axis=1))
    return Marks(real, real & (segment != last))


def ends(
    x: Float[Array, "B S D"], source: Int[Array, "B S"], target: Int[Array, "B T"], last: bool
) -> Float[Array, "B T D"]:
    """For every target slot, `x` at the last (or first) source slot of its segment.

    `source` and `target` are segments. Zero where the source has no such segment.
    """
    same = (target[:, :, None] == source[:, None, :]) & (source[:, None, :] != 0)
    size = source.shape[1]
    index = size - 1 - jnp.argmax(same[:, :, ::-1], axis=2) if last else jnp.argmax(same, axis=2)
    # A product with a one-hot matrix: the gradient of a gather is a scatter, which runs row by row on CPU.
    choice = jax.nn.one_hot(index, size, dtype=x.dtype) * jnp.any(same, axis=2, keepdims=True)
    return jnp.einsum("bts,bsd->btd", choice, x)


Dot = Callable[[str, Array], Array]
Kernels = dict[str, Float[Array, "_ _"]]
Body = Callable[[Dot, PyTree, Carry, PyTree], tuple[Carry, PyTree]]


def ordinary_scan(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree) -> PyTree:
    def step(carry: Carry, x: PyTree) -> tuple[Carry, PyTree]:
        return body(lambda name, a: wide_dot(a.astype(kernels[name].dtype), kernels[name]), consts, carry, x)

    return jax.lax.scan(step, carry, xs, reverse=reverse)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree) -> PyTree:
    """`lax.scan` over the leading axis of `xs` whose kernels get their gradients in one matmul after the loop.

    Differentiating an ordinary scan adds a kernel-sized gradient to an accumulator at every step; here the backward
    loop only collects the gradients of the products, and `dU = sum_t a_t^T dy_t` is one matmul over all steps.

    Args:
      body: `(dot, consts, carry, x) -> (carry, y)`, where `dot(name, a [B, M])` is the float32 product
        `a @ kernels[name]`; each kernel is used exactly once a step.
      reverse: run from the last step to the first; `y` keeps the order of `xs`.
      kernels: matrices `[M, N]` by name, in the compute dtype.
      consts, carry, xs: all else that the body reads; it must not close over traced values.
    """
    return ordinary_scan(body, reverse, kernels, consts, carry, xs)


def _scan_forward(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree):
    steps, rows = jax.tree.leaves(xs)[0].shape[0], carry[0].shape[0]

    def run(shifts: dict[str, Array], consts: PyTree, carry: Carry, xs: PyTree):
        def step(carry: Carry, slot: PyTree):
            x, shift = slot
            taken = {}

            def dot(name: str, a: Array) -> Array:
                taken[name] = a.astype(kernels[name].dtype)
                return wide_dot(taken[name], kernels[name]) + shift[name]

            carry, y = body(dot, consts, carry, x)
            return carry, (y, taken)

        last, (ys, taken) = jax.lax.scan(step, carry, (xs, shifts), reverse=reverse)
        return (last, ys), taken

    # The gradient with respect to a shift of zero is the gradient of the product it is added to.
    shifts = {name: jnp.zeros((steps, rows, kernel.shape[1])) for name, kernel in kernels.items()}
    out, pull, taken = jax.vjp(run, shifts, consts, carry, xs, has_aux=True)
    return out, (pull, taken, kernels)


def _scan_backward(body: Body, reverse: bool, saved: PyTree, cotangent: PyTree):
    pull, taken, kernels = saved
    shifts, consts, carry, xs = pull(cotangent)
    gradient = {
        name: kernel_gradient(taken[name], shifts[name].astype(kernel.dtype)).astype(kernel.dtype)
        for name, kernel in kernels.items()
    }
    return gradient, consts, carry, xs


scan.defvjp(_scan_forward, _scan_backward)


def over_time(
    body: Body,
    kernels: Kernels,
    consts: PyTree,
    carry: Carry,
    xs: PyTree,
    marks: Marks,
    first: Carry | None = None,
    reverse: bool = False,
) -> tuple[Carry, tuple[Carry, PyTree]]:
    """Runs `body` over the time axis of `xs` `[T, B, ...]`, honouring padding and segments.

    On a mesh only the rows are sharded inside the loop: kernels are gathered once before it, since a collective at
    every time step would cost more than it saves. (Left to itself, XLA's partitioner shards the loop along several
    axes and, in jax 0.10 to 0.12, returns wrong gradients on a mesh of batch, fsdp and tensor axes.)

    Args:
      carry: state before the first slot, each `[B, W]`.
      first: state `[T, B, W]` that a segment starting at a slot starts from; None: zeros.

    Returns:
      The last carry, and (carry, y) after every slot `[T, B, ...]`.
    """
    rows = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, None], marks)
    kernels = {name: constrain(kernel, None, None) for name, kernel in kernels.items()}
    carry, xs = tuple(constrain(x, "batch", None) for x in carry), jax.tree.map(by_row, xs)

    def guarded(dot: Dot, consts: PyTree, carry: Carry, slot: PyTree):
        x, here, first = slot
        first = carry_like(carry, first)
        carry = tuple(jnp.where(here.fresh, new, old) for new, old in zip(first, carry, strict=True))
        after, y = body(dot, consts, carry, x)
        carry = tuple(jnp.where(here.real, new, old) for new, old in zip(after, carry, strict=True))
        carry = tuple(constrain(x, "batch", None) for x in carry)
        return carry, (carry, y)

    return scan(guarded, reverse, kernels, consts, carry, (xs, rows, first))


def by_row(x: Shaped[Array, "T B *rest"]) -> Shaped[Array, "T B *rest"]:
    """`x`, laid out by its batch axis alone."""
    return constrain(x, None, "batch", *(None,) * (x.ndim - 2))


def carry_like(carry: Carry, first: Carry | None) -> Carry:
    """`first`, completed with zeros to the structure of `carry`."""
    given = first or ()
    return given + tuple(jnp.zeros_like(x) for x in carry[len(given) :])


def zeros(cell: Cell, rows: int, width: int) -> Carry:
    """The state before anything was read."""
    return (jnp.zeros((rows, width)),) * cell.states


def orthogonal(key: Key[Array, ""], shape: tuple[int, int, int], dtype: Any = jnp.float32) -> Float[Array, "W G W"]:
    """Initial recurrent kernel: an orthogonal matrix for each gate (Saxe et al. 2014)."""
    width, gates, _ = shape
    init = nn.initializers.orthogonal()
    return jnp.stack([init(k, (width, width), dtype) for k in jax.random.split(key, gates)], axis=1)


def batch_major(tree: PyTree) -> PyTree:
    """Exchanges the time and batch axes of every array: `[T, B, ...]` to `[B, T, ...]`, and back."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)
