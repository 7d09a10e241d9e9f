"""THE table: where each logical axis goes on the mesh. Every sharding decision of the project is a row of it."""

from __future__ import annotations

import math

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ConfigError
from jaxformer.types import Array, PyTree

WEIGHTS: dict[str, str | tuple[str, ...] | None] = {
    "vocab": "tensor",
    "table": "fsdp",  # width of an embedding table: its own name, since look-ups and matmuls want it differently
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "ffn": "tensor",
    "experts": "expert",
    "layers": "stage",
    "buckets": None,
}
ACTIVATIONS: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert", "stage"),
    "microbatches": "stage",
    "length": "context",
    "act_length": ("context", "tensor"),  # of the residual stream, where each slot is for itself (see nn/block.py)
    "act_embed": None,
    "act_heads": "tensor",
    "act_ffn": "tensor",
    "act_vocab": "tensor",
}
RULES = tuple((WEIGHTS | ACTIVATIONS).items())


def spec(names: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of an array whose axes have these logical names (None: replicated).

    Raises:
      ValueError: a name is not in the table. (Linen would replicate it silently.)
    """
    table = dict(RULES)
    for name in names:
        if name is not None and name not in table:
            raise ValueError(f"logical axis: got {name!r}, expected one of {', '.join(table)}; add it to rules.py")
    return PartitionSpec(*(None if name is None else table[name] for name in names))


def constrain(x: Array, *names: str | None) -> Array:
    """Asks the partitioner to lay `x` out by its axes' logical names; does nothing without a mesh of several devices.

    An axis that the mesh does not divide evenly stays whole, as does one whose mesh axes have size 1.
    """
    wanted = spec(names)
    if len(names) != x.ndim:
        raise ValueError(f"constrain: got {len(names)} names for shape {x.shape}, expected one name an axis")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fit(wanted, x.shape, mesh))


def fit(wanted: PartitionSpec, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """`wanted` with every mesh axis dropped that does not divide its array axis.

    Inside a `shard_map` those that it is manual over are dropped too: there they are not the partitioner's.
    """
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    axes = []
    for size, entry in zip(shape, tuple(wanted) + (None,) * (len(shape) - len(wanted)), strict=True):
        kept: list[str] = []
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis not in manual and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0:
                kept.append(axis)
                size //= mesh.shape[axis]
        axes.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    return PartitionSpec(*axes)


def shardings(boxed: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of a tree of (boxed) abstract arrays, as `jax.eval_shape` of an `init` returns it."""
    specs = nn.get_partition_spec(boxed)

    def place(names: PartitionSpec, value: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, fit(spec(tuple(names)), value.shape, mesh))

    return jax.tree.map(place, specs, nn.meta.unbox(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec))


def spread(place: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """`place` with an array of this shape divided over one more mesh axis: its first axis that divides evenly."""
    mesh, entries = place.mesh, list(place.spec) + [None] * (len(shape) - len(place.spec))
    for i, entry in enumerate(entries):
        names = (entry,) if isinstance(entry, str) else entry or ()
        ways = math.prod(mesh.shape[name] for name in names) * mesh.shape[axis]
        if axis not in names and shape[i] % ways == 0:
            entries[i] = (*names, axis)
            return NamedSharding(mesh, PartitionSpec(*entries))
    return place


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where a batch array `[B]` or `[B, T, ...]` goes: its rows over the data axes, its slots over the context axis."""
    names = ("batch", "length", *(None,) * (len(shape) - 2))[: len(shape)]
    return NamedSharding(mesh, fit(spec(names), shape, mesh))


def reader(mesh: Mesh) -> tuple[int, int]:
    """Which rows of every batch this process reads: the i-th of n parts. Returns `(i, n)`.

    Processes that hold the same rows (other slots of them, other parts of the model) read the same part.

    Raises:
      ConfigError: two processes share some of their rows, and not all.
    """
    names = dict(RULES)["batch"]
    places = [mesh.axis_names.index(name) for name in names]
    devices = np.moveaxis(mesh.devices, places, range(len(places)))
    devices = devices.reshape(math.prod(mesh.shape[name] for name in names), -1)
    held: dict[int, list[int]] = {}
    for row, of_row in enumerate(devices):
        for process in {device.process_index for device in of_row}:
            held.setdefault(process, []).append(row)
    parts = sorted({tuple(rows) for rows in held.values()})
    if sum(map(len, parts)) != len(devices):
        raise ConfigError(
            f"config.mesh: got {dict(mesh.shape)} on {len(held)} processes, some of which share a part of their rows, "
            "expected all of them or none; make context x tensor a multiple or a divisor of a process's devices"
        )
    return parts.index(tuple(held[jax.process_index()])), len(parts)


def zigzag(length: int, devices: int) -> np.ndarray | None:
    """The order of slots that gives each of `devices` parts as much of a causal mask as the others: int `[T]`.

    Of 2 c equal pieces, part i gets piece i and piece 2 c - 1 - i, an early one and a late one. Slots carry their
    positions with them, so nothing else changes. None where the pieces would not be equal.
    """
    if length % (2 * devices):
        return None
    pieces = np.arange(length).reshape(2 * devices, -1)
    return np.stack([pieces[:devices], pieces[: devices - 1 : -1]], axis=1).reshape(-1)
