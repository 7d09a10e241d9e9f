"""How tokens reach the experts that were chosen for them, and come back: two ways, both of them really sharded.

On a mesh the work is done by hand (`jax.shard_map`), since the partitioner would sort and gather the tokens of the
whole batch. Every device holds n of the batch's tokens (rows over data, fsdp and expert; slots over context) and
E / X of the experts, X being the size of the mesh's expert axis; an expert's width lies over tensor. Per layer and
device, forward, in numbers of the compute dtype sent or received over the expert axis:

* dropless: all-gather of the tokens and reduce-scatter of the results, (X - 1) n D each. All-to-all of the chosen
  tokens alone would move k (X - 1) / X n D each way, less if X > k; but how many each device gets is only known when
  the router has spoken, so with static shapes its buffers must hold the worst case and nothing would be saved.
* capacity: all-to-all of the experts' slots there and back, factor k (X - 1) / X n D each. The shapes are static
  because what does not fit is dropped.

The backward pass moves the same again. As in a dense layer, fsdp gathers the experts' kernels (and reduce-scatters
their gradients), and tensor sums the results. Where context splits a row, its queues are shared out over it, for a
reduce-scatter of the slots and an all-gather back.
"""

from __future__ import annotations

import functools
import math
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Float, Float32, Int, Key

from jaxformer.config import FeedForwardConfig
from jaxformer.nn.layers import ACTIVATIONS, keep_mask
from jaxformer.parallel import rules
from jaxformer.types import Array

Weights = dict[str, tuple[Array, Array | None]]
"""in, gate (where gated) and out -> kernel `[E, D, F]` or `[E, F, D]` and bias `[E, F]` or `[E, D]`."""

NAMES = {"in": ("experts", "embed", "ffn"), "gate": ("experts", "embed", "ffn"), "out": ("experts", "ffn", "embed")}
"""Logical names of the kernels' axes; a bias has the first and the last."""


class Sent(NamedTuple):
    """What travels: tokens with what was decided about them.

    Attributes:
      x: `[B, T, D]`.
      chosen: int32 `[B, T, k]`, the experts of every token; E where there is none (padding, dropped).
      gates: float32 `[B, T, k]`, the weight of each expert's output.
      place: int32 `[B, T, k]`, the slot in the expert's queue of this row; None: there are no queues (dropless).
      number: int32 `[B, T, k]`, different for all of the batch, so that dropout is the same on every mesh.
    """

    x: Array
    chosen: Array
    gates: Array
    place: Array | None
    number: Array


class Axes(NamedTuple):
    """The mesh axes over which things lie, as a device inside `shard_map` must know them; () where they are whole."""

    rows: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()


def run(
    config: FeedForwardConfig, weights: Weights, sent: Sent, queue: int, key: Key[Array, ""] | None
) -> Float[Array, "B T D"]:
    """The gated sum of the chosen experts' outputs; 0 for a token without an expert.

    Args:
      queue: slots that an expert has for a row, if `sent.place` says who gets which.
      key: for dropout of the hidden activations; None: no dropout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return _local(config, Axes(), queue, weights, sent, key)
    fit = lambda names, x: rules.fit(rules.spec(names), x.shape, mesh)  # noqa: E731
    places = {
        name: (fit(NAMES[name], kernel), None if bias is None else fit((NAMES[name][0], NAMES[name][2]), bias))
        for name, (kernel, bias) in weights.items()
    }
    token = fit(("batch", "length", None), sent.x)
    axes = Axes(*map(_names, token[:2]), *map(_names, places["in"][0]))
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    function = functools.partial(_local, config, axes, queue)
    spread = jax.tree.map(lambda _: token, sent)
    # jax 0.12 cannot evaluate the error function where it checks what varies over the mesh.
    checked = config.activation != "gelu" or jax.__version_info__ < (0, 12)
    share = jax.shard_map(
        function, in_specs=(places, spread, PartitionSpec()), out_specs=token, axis_names=free, check_vma=checked
    )  # fmt: skip
    return share(weights, sent, key)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _local(
    config: FeedForwardConfig, axes: Axes, queue: int, weights: Weights, sent: Sent, key: Key[Array, ""] | None
) -> Float[Array, "B T D"]:
    """One device's part of `run`."""
    if axes.embed:  # FSDP, done here so that its transpose is a reduce-scatter of the gradients
        whole = lambda x, axis: jax.lax.all_gather(x, axes.embed, axis=axis, tiled=True)  # noqa: E731
        weights = {
            name: (whole(kernel, NAMES[name].index("embed")), bias if bias is None or name != "out" else whole(bias, 1))
            for name, (kernel, bias) in weights.items()
        }
    if axes.ffn and weights["out"][1] is not None:  # the parts are summed below, and the bias belongs in one of them
        kernel, bias = weights["out"]
        weights = weights | {"out": (kernel, jnp.where(jax.lax.axis_index(axes.ffn) == 0, bias, 0))}
    hidden = functools.partial(_hidden, config, axes, key)
    # Where the rows do not divide (one prompt decoded on eight devices) every device has all tokens, and an
    # all-to-all would have nothing to exchange; an assignment that was dropped stays dropped either way.
    exchanged = not axes.experts or set(axes.experts) <= set(axes.rows)
    if sent.place is not None and exchanged:
        y = _by_queue(hidden, axes, queue, weights, sent)
    else:
        y = _by_sorting(hidden, axes, weights, sent)
    if axes.ffn:
        y = jax.lax.psum(y, axes.ffn)
    same = tuple(set(axes.embed) - set(axes.rows))  # all of these devices have the same y, which has to be said
    return jax.lax.pmean(y, same) if same else y


def _hidden(
    config: FeedForwardConfig,
    axes: Axes,
    key: Key[Array, ""] | None,
    product: Callable[[str, Array], Array],
    x: Float[Array, "*batch D"],
    number: Int[Array, "*batch"],
) -> Float[Array, "*batch D"]:
    """An expert's feed-forward layer, written for any way of multiplying rows with their experts' kernels."""
    activation = ACTIVATIONS[config.activation]
    y = product("in", x)
    y = activation(product("gate", x)) * y if config.gated else activation(y)
    if config.dropout > 0.0 and key is not None:
        width = y.shape[-1] * math.prod(jax.lax.axis_size(axis) for axis in axes.ffn)
        draw = lambda i: keep_mask(jax.random.fold_in(key, i), config.dropout, (width,))  # noqa: E731
        keep = jax.vmap(draw)(number.reshape(-1)).reshape(*number.shape, width)
        if axes.ffn:
            first = jax.lax.axis_index(axes.ffn) * y.shape[-1]
            keep = jax.lax.dynamic_slice_in_dim(keep, first, y.shape[-1], axis=-1)
        y = jnp.where(keep, y / (1.0 - config.dropout), jnp.zeros((), y.dtype))
    return product("out", y)


def _by_sorting(hidden: Callable, axes: Axes, weights: Weights, sent: Sent) -> Float[Array, "B T D"]:
    """Dropless: assignments sorted by expert, one product over groups of any size (Gale et al. 2022, MegaBlocks)."""
    B, T, k = sent.chosen.shape
    spread = bool(axes.experts) and set(axes.experts) <= set(axes.rows)
    flat = Sent(sent.x.reshape(B * T, -1), *(a.reshape(B * T, k) for a in (sent.chosen, sent.gates)), None,
                sent.number.reshape(B * T, k))  # fmt: skip
    if spread:
        flat = jax.tree.map(lambda a: jax.lax.all_gather(a, axes.experts, axis=0, tiled=True), flat)
    count = weights["in"][0].shape[0]
    first = jax.lax.axis_index(axes.experts) * count if axes.experts else 0
    mine = flat.chosen.reshape(-1) - first
    mine = jnp.where((mine >= 0) & (mine < count), mine, count)  # other devices' assignments come last
    # jax (0.10 to 0.12) takes a permutation for the same on all devices, whatever was sorted, and then sums the
    # gradient of what it gathers too early; adding nothing of what was sorted tells it otherwise.
    order = jnp.argsort(mine, stable=True) + 0 * mine
    expert, token = mine[order], order // k
    there = (expert < count)[:, None]
    sizes = jnp.bincount(mine, length=count + 1)[:count].astype(jnp.int32)

    def product(name: str, x: Array) -> Array:
        kernel, bias = weights[name]
        y = jax.lax.ragged_dot(x, kernel, sizes)
        if bias is not None:
            y = y + bias.at[expert].get(mode="clip")
        return jnp.where(there, y, 0)  # rows beyond the groups hold anything, and gradients must not see it

    rows = jnp.where(there, flat.x[token], 0)
    y = hidden(product, rows, flat.number.reshape(-1)[order])
    # Back by the inverse permutation: a gather, where adding each row to its token would be a scatter.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    y = y.at[back].get(unique_indices=True).reshape(*flat.gates.shape, -1)
    y = _weigh(y, flat.gates)
    if spread:
        y = jax.lax.psum_scatter(y, axes.experts, scatter_dimension=0, tiled=True)
    elif axes.experts:
        y = jax.lax.psum(y, axes.experts)
    return y.reshape(B, T, -1)


def _by_queue(hidden: Callable, axes: Axes, queue: int, weights: Weights, sent: Sent) -> Float[Array, "B T D"]:
    """Capacity: every expert has `queue` slots for every row (Lepikhin et al. 2021, GShard, with a row as the group).

    The slots are filled and read by gathers: the one-hot products of GShard cost as much as an expert once a row is
    as long as an expert is wide.
    """
    B, T, k = sent.chosen.shape
    held = weights["in"][0].shape[0]
    experts = held * math.prod(jax.lax.axis_size(axis) for axis in axes.experts)
    parts = math.prod(jax.lax.axis_size(axis) for axis in axes.length)
    queue = -(-queue // parts) * parts
    chosen, place = sent.chosen.reshape(B, T * k), sent.place.reshape(B, T * k)
    slot = jnp.where(chosen < experts, chosen * queue + place, experts * queue)  # one more, for those without
    nobody = jnp.full((B, experts * queue + 1), T * k, jnp.int32)
    who = nobody.at[jnp.arange(B)[:, None], slot].set(jnp.arange(T * k, dtype=jnp.int32))[:, :-1]

    def pick(x: Array, index: Array) -> Array:
        """`[B, n, D]`: row `index[b, i]` of `x` `[B, m, D]`; 0 beyond the last."""
        return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)

    def send(x: Array) -> Array:
        """`[B, E Q, D]`, filled from this device's tokens -> `[E / X, B X, Q, D]`, all that this device computes."""
        x = jnp.moveaxis(x.reshape(B, experts, queue, -1), 1, 0)
        if axes.length:  # the tokens of a row lie on several devices; each takes a part of the slots
            x = jax.lax.psum_scatter(x, axes.length, scatter_dimension=2, tiled=True)
        if axes.experts:
            x = jax.lax.all_to_all(x, axes.experts, split_axis=0, concat_axis=1, tiled=True)
        return x

    def back(y: Array) -> Array:
        if axes.experts:
            y = jax.lax.all_to_all(y, axes.experts, split_axis=1, concat_axis=0, tiled=True)
        if axes.length:
            y = jax.lax.all_gather(y, axes.length, axis=2, tiled=True)
        return jnp.moveaxis(y, 0, 1).reshape(B, experts * queue, -1)

    def product(name: str, x: Array) -> Array:
        kernel, bias = weights[name]
        y = jnp.einsum("ebqd,edf->ebqf", x, kernel)
        return y if bias is None else y + bias[:, None, None]

    number = send(pick(sent.number.reshape(B, T * k, 1), who))[..., 0]
    y = back(hidden(product, send(pick(sent.x, who // k)), number))
    return _weigh(pick(y, slot).reshape(B, T, k, -1), sent.gates)


def _weigh(y: Float[Array, "*batch k D"], gates: Float32[Array, "*batch k"]) -> Float[Array, "*batch D"]:
    """The sum of `y` over choices."""
    return jnp.einsum("...kd,...k->...d", y.astype(jnp.float32), gates).astype(y.dtype)
