"""Expert parallelism: exchange of tokens between devices, and the experts' feed-forward layers.

On a mesh this is written per device (`jax.shard_map`), since the partitioner would sort and gather the tokens of the
whole batch. Each device holds n tokens of the batch (rows sharded over data, fsdp and expert; slots over context) and
E / X of the experts, where X is the size of the mesh axis expert. The width of an expert is sharded over tensor.

There are two algorithms. In the forward pass each layer and device sends, in numbers of the compute dtype:

* dropless: an all-gather of the tokens and a reduce-scatter of the results, (X - 1) n D each. An all-to-all of the
  chosen tokens would send k (X - 1) / X n D each way, less if X > k. But the number of tokens for a device depends on
  the router, so static buffers must hold the worst case, and nothing would be saved.
* capacity: an all-to-all of the experts' slots in each direction, capacity k (X - 1) / X n D each. Shapes are static,
  since assignments beyond the capacity are dropped.

The backward pass sends the same again. As in a dense layer, fsdp gathers the kernels (and reduce-scatters their
gradients), and tensor sums the results. If context divides a row, so it does the row's queues: a reduce-scatter of the
slots, and an all-gather back.
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
from jaxformer.nn.layers import activate, keep_mask
from jaxformer.parallel import rules
from jaxformer.types import Array

Weights = dict[str, tuple[Array, Array | None]]
"""Kernel and bias (or None) by name: in and gate `[E, D, F]`, `[E, F]`; out `[E, F, D]`, `[E, D]`."""

NAMES = {"in": ("experts", "embed", "ffn"), "gate": ("experts", "embed", "ffn"), "out": ("experts", "ffn", "embed")}
"""Logical names of the axes of the kernels; a bias has the first and the last."""


class RoutedTokens(NamedTuple):
    """Tokens with the decisions of the router.

    Attributes:
      x: `[B, T, D]`.
      chosen: int32 `[B, T, k]`, the experts of each token; E for none (padding, dropped).
      gates: float32 `[B, T, k]`, the weight of each expert's output.
      queue_position: int32 `[B, T, k]`, the slot in the expert's queue for this row; None without queues (dropless).
      number: int32 `[B, T, k]`, unique in the batch, from which dropout is drawn: equal on every mesh.
    """

    x: Array
    chosen: Array
    gates: Array
    queue_position: Array | None
    number: Array


class MeshAxes(NamedTuple):
    """Mesh axes that divide rows, slots, experts and the kernels' other axes; () where there is none."""

    rows: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()


def apply_experts(
    config: FeedForwardConfig, weights: Weights, routed: RoutedTokens, queue: int, key: Key[Array, ""] | None
) -> Float[Array, "B T D"]:
    """Sum of the chosen experts' outputs times their gates, `[B, T, D]`; 0 for a token without an expert.

    Args:
      queue: number of slots that an expert has for a row; only used with `routed.queue_position`.
      key: key for dropout of the hidden activations; None for no dropout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(rules.auto_axes(mesh).values()) == 1:
        return _local(config, MeshAxes(), queue, weights, routed, key)
    fit = lambda names, x: rules.drop_uneven_axes(rules.spec(names), x.shape, mesh)  # noqa: E731
    specs = {
        name: (fit(NAMES[name], kernel), None if bias is None else fit((NAMES[name][0], NAMES[name][2]), bias))
        for name, (kernel, bias) in weights.items()
    }
    token = fit(("batch", "length", None), routed.x)
    axes = MeshAxes(*map(_names, token[:2]), *map(_names, specs["in"][0]))
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    function = functools.partial(_local, config, axes, queue)
    tokens = jax.tree.map(lambda _: token, routed)
    # jax 0.12 cannot evaluate the error function with check_vma.
    checked = config.activation != "gelu" or jax.__version_info__ < (0, 12)
    sharded = jax.shard_map(
        function, in_specs=(specs, tokens, PartitionSpec()), out_specs=token, axis_names=free, check_vma=checked
    )  # fmt: skip
    return sharded(weights, routed, key)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _local(
    config: FeedForwardConfig,
    axes: MeshAxes,
    queue: int,
    weights: Weights,
    routed: RoutedTokens,
    key: Key[Array, ""] | None,
) -> Float[Array, "B T D"]:
    """`apply_experts` on one device."""
    if axes.embed:  # FSDP: the transpose of this gather is a reduce-scatter of the gradients
        gather = lambda x, axis: jax.lax.all_gather(x, axes.embed, axis=axis, tiled=True)  # noqa: E731
        weights = {
            name: (
                gather(kernel, NAMES[name].index("embed")),
                bias if bias is None or name != "out" else gather(bias, 1),
            )
            for name, (kernel, bias) in weights.items()
        }
    kernel, bias = weights["out"]
    if axes.ffn and bias is not None:  # the parts are summed below: add the bias to one only
        weights = weights | {"out": (kernel, jnp.where(jax.lax.axis_index(axes.ffn) == 0, bias, 0))}
    hidden = functools.partial(_hidden, config, axes, key)
    # If the rows are not sharded (one prompt decoded on eight devices), every device has all tokens and an all-to-all
    # has nothing to exchange. Dropped assignments stay dropped in both algorithms.
    exchanged = not axes.experts or set(axes.experts) <= set(axes.rows)
    if routed.queue_position is not None and exchanged:
        y = _by_queue(hidden, axes, queue, weights, routed, routed.queue_position)
    else:
        y = _by_sorting(hidden, axes, weights, routed)
    if axes.ffn:
        y = jax.lax.psum(y, axes.ffn)
    same = tuple(set(axes.embed) - set(axes.rows))  # y is equal on these devices; pmean tells shard_map so
    return jax.lax.pmean(y, same) if same else y


def _hidden(
    config: FeedForwardConfig,
    axes: MeshAxes,
    key: Key[Array, ""] | None,
    product: Callable[[str, Array], Array],
    x: Float[Array, "*batch D"],
    number: Int[Array, "*batch"],
) -> Float[Array, "*batch D"]:
    """Output of the experts' feed-forward layer; `product(name, x)` multiplies rows with their experts' kernels."""
    y = product("in", x)
    y = activate(config, y, product("gate", x) if config.gated else None)
    if config.dropout > 0.0 and key is not None:
        width = y.shape[-1] * math.prod(jax.lax.axis_size(axis) for axis in axes.ffn)
        draw = lambda i: keep_mask(jax.random.fold_in(key, i), config.dropout, (width,))  # noqa: E731
        keep = jax.vmap(draw)(number.reshape(-1)).reshape(*number.shape, width)
        if axes.ffn:
            first = jax.lax.axis_index(axes.ffn) * y.shape[-1]
            keep = jax.lax.dynamic_slice_in_dim(keep, first, y.shape[-1], axis=-1)
        y = jnp.where(keep, y / (1.0 - config.dropout), jnp.zeros((), y.dtype))
    return product("out", y)


def _by_sorting(hidden: Callable, axes: MeshAxes, weights: Weights, routed: RoutedTokens) -> Float[Array, "B T D"]:
    """Dropless algorithm: assignments sorted by expert, one product of ragged groups (Gale et al. 2022, MegaBlocks)."""
    B, T, k = routed.chosen.shape
    spread = bool(axes.experts) and set(axes.experts) <= set(axes.rows)
    chosen, gates, number = (a.reshape(B * T, k) for a in (routed.chosen, routed.gates, routed.number))
    flat = RoutedTokens(routed.x.reshape(B * T, -1), chosen, gates, None, number)
    if spread:
        flat = jax.tree.map(lambda a: jax.lax.all_gather(a, axes.experts, axis=0, tiled=True), flat)
    count = weights["in"][0].shape[0]
    first = jax.lax.axis_index(axes.experts) * count if axes.experts else 0
    local = flat.chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # assignments to other devices' experts come last
    # jax (0.10 to 0.12) assumes that an argsort is equal on all devices, and then sums the gradient of the gather too
    # early; adding 0 times a value that differs between devices prevents it.
    order = jnp.argsort(local, stable=True) + 0 * local
    expert, token = local[order], order // k
    assigned = (expert < count)[:, None]
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)

    def product(name: str, x: Array) -> Array:
        kernel, bias = weights[name]
        y = jax.lax.ragged_dot(x, kernel, sizes)
        if bias is not None:
            y = y + bias.at[expert].get(mode="clip")
        return jnp.where(assigned, y, 0)  # rows beyond the groups are undefined: keep them out of values and gradients

    rows = jnp.where(assigned, flat.x[token], 0)
    y = hidden(product, rows, flat.number.reshape(-1)[order])
    # Undo the sort by the inverse permutation, a gather; adding each row to its token would be a scatter.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    y = y.at[back].get(unique_indices=True).reshape(*flat.gates.shape, -1)
    y = _gated_sum(y, flat.gates)
    if spread:
        y = jax.lax.psum_scatter(y, axes.experts, scatter_dimension=0, tiled=True)
    elif axes.experts:
        y = jax.lax.psum(y, axes.experts)
    return y.reshape(B, T, -1)


def _by_queue(
    hidden: Callable,
    axes: MeshAxes,
    queue: int,
    weights: Weights,
    routed: RoutedTokens,
    queue_position: Int[Array, "B T k"],
) -> Float[Array, "B T D"]:
    """Capacity algorithm: each expert has Q = `queue` slots for each row (Lepikhin et al. 2021, GShard; group = row).

    Slots are filled and read by gathers. The one-hot products of GShard cost as much as an expert once a row is as long
    as an expert is wide.
    """
    B, T, k = routed.chosen.shape
    experts = weights["in"][0].shape[0] * math.prod(jax.lax.axis_size(axis) for axis in axes.experts)
    parts = math.prod(jax.lax.axis_size(axis) for axis in axes.length)
    queue = -(-queue // parts) * parts
    chosen, position = routed.chosen.reshape(B, T * k), queue_position.reshape(B, T * k)
    slot = jnp.where(chosen < experts, chosen * queue + position, experts * queue)  # the extra slot is for no expert
    empty = jnp.full((B, experts * queue + 1), T * k, jnp.int32)
    assignment = empty.at[jnp.arange(B)[:, None], slot].set(jnp.arange(T * k, dtype=jnp.int32))[:, :-1]

    def gather(x: Array, index: Array) -> Array:
        """Rows `index[b, i]` of `x` `[B, m, D]`: `[B, n, D]`; 0 beyond the last."""
        return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)

    def to_experts(x: Array) -> Array:
        """Slots `[B, E Q, D]` of this device's tokens -> slots `[E / X, B X, Q, D]` of this device's experts."""
        x = jnp.moveaxis(x.reshape(B, experts, queue, -1), 1, 0)
        if axes.length:  # a row's tokens are on several devices; each computes a part of the slots
            x = jax.lax.psum_scatter(x, axes.length, scatter_dimension=2, tiled=True)
        if axes.experts:
            x = jax.lax.all_to_all(x, axes.experts, split_axis=0, concat_axis=1, tiled=True)
        return x

    def from_experts(y: Array) -> Array:
        """The inverse of `to_experts`."""
        if axes.experts:
            y = jax.lax.all_to_all(y, axes.experts, split_axis=1, concat_axis=0, tiled=True)
        if axes.length:
            y = jax.lax.all_gather(y, axes.length, axis=2, tiled=True)
        return jnp.moveaxis(y, 0, 1).reshape(B, experts * queue, -1)

    def product(name: str, x: Array) -> Array:
        kernel, bias = weights[name]
        y = jnp.einsum("ebqd,edf->ebqf", x, kernel)
        return y if bias is None else y + bias[:, None, None]

    number = to_experts(gather(routed.number.reshape(B, T * k, 1), assignment))[..., 0]
    y = from_experts(hidden(product, to_experts(gather(routed.x, assignment // k)), number))
    return _gated_sum(gather(y, slot).reshape(B, T, k, -1), routed.gates)


def _gated_sum(y: Float[Array, "*batch k D"], gates: Float32[Array, "*batch k"]) -> Float[Array, "*batch D"]:
    """Sum over the k choices of outputs times gates."""
    return jnp.einsum("...kd,...k->...d", y.astype(jnp.float32), gates).astype(y.dtype)
