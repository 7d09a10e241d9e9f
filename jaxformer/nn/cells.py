"""Recurrent cells as pure functions, and the loop over time with support for padding and packed segments.

States are float32 in any compute precision. Padding (segment 0) leaves them unchanged. They are reset where the segment
of a row changes, so packed examples are independent.
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
"""State of one layer, float32 `[B, W]` arrays: (h,), or (h, c) for an LSTM. Input-feeding attention appends its last
output."""


def rnn(inputs: Float32[Array, "B 1 W"], recurrent: Float32[Array, "B 1 W"], carry: Carry) -> Carry:
    """Simple recurrent cell (Elman 1990): h' = tanh(x W + b + h U)."""
    return (jnp.tanh(inputs[:, 0] + recurrent[:, 0]),)


def lstm(inputs: Float32[Array, "B 4 W"], recurrent: Float32[Array, "B 4 W"], carry: Carry) -> Carry:
    """LSTM cell (Hochreiter and Schmidhuber 1997) with a forget gate (Gers et al. 2000). Gates: i f g o.

    i, f, o = sigmoid(x W + b + h U), g = tanh(x W + b + h U); c' = f c + i g; h' = o tanh(c'). The forget gate adds 1
    to its bias, which therefore starts at 1 (Jozefowicz et al. 2015).
    """
    i, f, g, o = jnp.moveaxis(inputs + recurrent, 1, 0)
    c = jax.nn.sigmoid(f + 1.0) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(inputs: Float32[Array, "B 3 W"], recurrent: Float32[Array, "B 3 W"], carry: Carry) -> Carry:
    """GRU cell (Cho et al. 2014, arXiv 1406.1078v1). Gates: r z n.

    r, z = sigmoid(x W + b + h U + d), n = tanh(x W + b + r (h U + d)); h' = z h + (1 - z) n. As in cuDNN, the reset
    gate is applied after the product with U, so that a step needs only one product.
    """
    r, z = jnp.moveaxis(jax.nn.sigmoid(inputs[:, :2] + recurrent[:, :2]), 1, 0)
    n = jnp.tanh(inputs[:, 2] + r * recurrent[:, 2])
    return (z * carry[0] + (1.0 - z) * n,)


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Attributes:
      step: `(inputs [B, G, W], recurrent [B, G, W], carry) -> carry`, float32.
      gates: number of gates G.
      states: number of arrays in the carry.
      bias: the recurrent product has a separate bias (`d` of the GRU, where it is not redundant).
    """

    step: Callable[[Array, Array, Carry], Carry]
    gates: int
    states: int = 1
    bias: bool = False


CELLS = {"rnn": Cell(rnn, 1), "lstm": Cell(lstm, 4, states=2), "gru": Cell(gru, 3, bias=True)}


class Boundaries(NamedTuple):
    """Segment boundaries, bool `[B, T]`: `real` is False at padding, `starts` True at the first slot of a segment."""

    real: Array
    starts: Array


def segment_boundaries(segment: Int[Array, "B T"], reverse: bool = False) -> Boundaries:
    """Boundaries of segments read forwards, or backwards if `reverse`. Padding inside a segment is skipped."""
    if reverse:
        return Boundaries(*(x[:, ::-1] for x in segment_boundaries(segment[:, ::-1])))
    real = segment != 0
    index = jnp.where(real, jnp.arange(segment.shape[1]), -1)
    before = jnp.pad(jax.lax.cummax(index, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    last = jnp.where(before < 0, 0, jnp.take_along_axis(segment, jnp.maximum(before, 0), axis=1))
    return Boundaries(real, real & (segment != last))


def at_segment_edge(
    x: Float[Array, "B S D"], source: Int[Array, "B S"], target: Int[Array, "B T"], last: bool
) -> Float[Array, "B T D"]:
    """For each target slot, `x` at the last (or first) source slot of the same segment: `[B, T, D]`.

    `source` and `target` are segment ids. The result is 0 where the source has no such segment.
    """
    same = (target[:, :, None] == source[:, None, :]) & (source[:, None, :] != 0)
    size = source.shape[1]
    index = size - 1 - jnp.argmax(same[:, :, ::-1], axis=2) if last else jnp.argmax(same, axis=2)
    # A product with a one-hot matrix: the gradient of a gather would be a scatter, which is slow on CPU.
    choice = jax.nn.one_hot(index, size, dtype=x.dtype) * jnp.any(same, axis=2, keepdims=True)
    return jnp.einsum("bts,bsd->btd", choice, x)


Dot = Callable[[str, Array], Array]
Kernels = dict[str, Float[Array, "_ _"]]
Body = Callable[[Dot, PyTree, Carry, PyTree], tuple[Carry, PyTree]]


def plain_scan(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree) -> PyTree:
    """`scan` with the gradient of `lax.scan`."""

    def step(carry: Carry, x: PyTree) -> tuple[Carry, PyTree]:
        return body(lambda name, a: wide_dot(a.astype(kernels[name].dtype), kernels[name]), consts, carry, x)

    return jax.lax.scan(step, carry, xs, reverse=reverse)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree) -> PyTree:
    """`lax.scan` over the leading axis of `xs`, with one product for each kernel's gradient after the backward loop.

    The gradient of a plain scan adds a kernel-sized array to an accumulator at every step. Here the backward loop only
    collects the cotangents of the products, and `dU = sum_t a_t^T dy_t` is one product over all steps.

    Args:
      body: `(dot, consts, carry, x) -> (carry, y)`, where `dot(name, a [B, M])` is the float32 product
        `a @ kernels[name]`; each kernel is used exactly once a step.
      reverse: run from the last step to the first; `y` has the order of `xs`.
      kernels: matrices `[M, N]` by name, in the compute dtype.
      consts, carry, xs: all other inputs of the body, which must not close over traced values.
    """
    return plain_scan(body, reverse, kernels, consts, carry, xs)


def _scan_forward(body: Body, reverse: bool, kernels: Kernels, consts: PyTree, carry: Carry, xs: PyTree):
    steps, rows = jax.tree.leaves(xs)[0].shape[0], carry[0].shape[0]

    def run(shifts: dict[str, Array], consts: PyTree, carry: Carry, xs: PyTree):
        def step(carry: Carry, slot: PyTree):
            x, shift = slot
            operands = {}

            def dot(name: str, a: Array) -> Array:
                operands[name] = a.astype(kernels[name].dtype)
                return wide_dot(operands[name], kernels[name]) + shift[name]

            carry, y = body(dot, consts, carry, x)
            return carry, (y, operands)

        last, (ys, operands) = jax.lax.scan(step, carry, (xs, shifts), reverse=reverse)
        return (last, ys), operands

    # The gradient with respect to a shift of zero is the cotangent of the product it is added to.
    shifts = {name: jnp.zeros((steps, rows, kernel.shape[1])) for name, kernel in kernels.items()}
    out, backward, operands = jax.vjp(run, shifts, consts, carry, xs, has_aux=True)
    return out, (backward, operands, kernels)


def _scan_backward(body: Body, reverse: bool, saved: PyTree, cotangent: PyTree):
    backward, operands, kernels = saved
    shifts, consts, carry, xs = backward(cotangent)
    gradient = {
        name: kernel_gradient(operands[name], shifts[name].astype(kernel.dtype)).astype(kernel.dtype)
        for name, kernel in kernels.items()
    }
    return gradient, consts, carry, xs


scan.defvjp(_scan_forward, _scan_backward)


def scan_time(
    body: Body,
    kernels: Kernels,
    consts: PyTree,
    carry: Carry,
    xs: PyTree,
    boundaries: Boundaries,
    first: Carry | None = None,
    reverse: bool = False,
) -> tuple[Carry, tuple[Carry, PyTree]]:
    """Runs `body` over the time axis of `xs` `[T, B, ...]`, skipping padding and resetting at segment starts.

    On a mesh only the rows are sharded inside the loop. Kernels are gathered once before it, since a collective at each
    time step would cost more than it saves. (XLA's partitioner alone would shard the loop along several axes; in jax
    0.10 to 0.12 it then returns wrong gradients on a mesh of batch, fsdp and tensor axes.)

    Args:
      carry: state before the first slot, `[B, W]` arrays.
      first: initial state `[T, B, W]` of a segment that starts at a slot; None for zeros.

    Returns:
      The last carry, and (carry, y) after each slot `[T, B, ...]`.
    """
    rows = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, None], boundaries)
    kernels = {name: constrain(kernel, None, None) for name, kernel in kernels.items()}
    carry, xs = tuple(constrain(x, "batch", None) for x in carry), jax.tree.map(shard_rows, xs)

    def guarded(dot: Dot, consts: PyTree, carry: Carry, slot: PyTree):
        x, slot, first = slot
        first = carry_like(carry, first)
        carry = tuple(jnp.where(slot.starts, new, old) for new, old in zip(first, carry, strict=True))
        after, y = body(dot, consts, carry, x)
        carry = tuple(jnp.where(slot.real, new, old) for new, old in zip(after, carry, strict=True))
        carry = tuple(constrain(x, "batch", None) for x in carry)
        return carry, (carry, y)

    return scan(guarded, reverse, kernels, consts, carry, (xs, rows, first))


def shard_rows(x: Shaped[Array, "T B *rest"]) -> Shaped[Array, "T B *rest"]:
    """`x`, sharded along its batch axis only."""
    return constrain(x, None, "batch", *(None,) * (x.ndim - 2))


def carry_like(carry: Carry, first: Carry | None) -> Carry:
    """`first` with zeros appended for the arrays that it lacks of `carry`."""
    first = first or ()
    return first + tuple(jnp.zeros_like(x) for x in carry[len(first) :])


def zeros(cell: Cell, rows: int, width: int) -> Carry:
    """The initial state of `cell`: zeros `[B, W]`."""
    return (jnp.zeros((rows, width)),) * cell.states


def orthogonal(key: Key[Array, ""], shape: tuple[int, int, int], dtype: Any = jnp.float32) -> Float[Array, "W G W"]:
    """Initial recurrent kernel `[W, G, W]`: an orthogonal matrix for each gate (Saxe et al. 2014)."""
    width, gates, _ = shape
    init = nn.initializers.orthogonal()
    return jnp.stack([init(k, (width, width), dtype) for k in jax.random.split(key, gates)], axis=1)


def batch_major(tree: PyTree) -> PyTree:
    """`tree` with the time and batch axes of each array exchanged: `[T, B, ...]` to `[B, T, ...]`, and back."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)
