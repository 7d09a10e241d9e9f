"""The table from logical axis names to mesh axes: every sharding decision of the project is a row of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.errors import ConfigError
from jaxformer.types import Array, PyTree

Axes = str | tuple[str, ...] | None
"""Mesh axes that an array axis is divided over: an entry of a `PartitionSpec`."""

WEIGHTS: dict[str, Axes] = {
    "vocab": "tensor",
    "table": "fsdp",  # width of an embedding table; a name of its own, since look-ups need another layout than matmuls
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "ffn": "tensor",
    "experts": "expert",
    "layers": "stage",
    "buckets": None,
    "rank": None,  # of low-rank adapters: their other axes are those of the kernel
}
ACTIVATIONS: dict[str, Axes] = {
    "batch": ("data", "fsdp", "expert", "stage"),
    "microbatches": "stage",
    "length": "context",
    "act_length": ("context", "tensor"),  # of the residual stream, where slots are independent (see nn/block.py)
    "act_embed": None,
    "act_heads": "tensor",
    "act_ffn": "tensor",
    "act_vocab": "tensor",
}
RULES = tuple((WEIGHTS | ACTIVATIONS).items())


def spec(names: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of an array whose axes have these logical names (None: replicated).

    Raises:
      ValueError: a name is not in the table. (Linen would replicate that axis without an error.)
    """
    table = dict(RULES)
    for name in names:
        if name is not None and name not in table:
            raise ValueError(f"logical axis: got {name!r}, expected one of {', '.join(table)}; add it to rules.py")
    return PartitionSpec(*(None if name is None else table[name] for name in names))


def constrain(x: Array, *names: str | None) -> Array:
    """Adds a sharding constraint to `x` from its axes' logical names; no effect where no axis can divide it.

    An axis that its mesh axes do not divide evenly is replicated.

    Raises:
      ValueError: the number of names is not that of the axes, or a name is not in the table.
    """
    requested = spec(names)
    if len(names) != x.ndim:
        raise ValueError(f"constrain: got {len(names)} names for shape {x.shape}, expected one name an axis")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(auto_axes(mesh).values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, drop_uneven_axes(requested, x.shape, mesh))


def auto_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Axes of `mesh` that the partitioner may divide arrays over, with sizes: no `shard_map` is manual over them."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {name: size for name, size in mesh.shape.items() if types[name] != AxisType.Manual}


def dividing_axes(axes: Axes, size: int, mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """Those of `axes` that divide an array axis of this size evenly, together. Axes of size 1 are left out.

    Args:
      axes: mesh axes in order.
      size: size of the array axis.
      mesh_axes: sizes of the mesh axes that may be used.
    """
    dividing: tuple[str, ...] = ()
    for axis in as_tuple(axes):
        if mesh_axes.get(axis, 1) > 1 and size % mesh_axes[axis] == 0:
            dividing += (axis,)
            size //= mesh_axes[axis]
    return dividing


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`: `"fsdp"` -> `("fsdp",)`, `None` -> `()`."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def drop_uneven_axes(requested: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """`requested` without the mesh axes that do not divide their array axis, and without manual axes."""
    mesh_axes = auto_axes(mesh)
    entries = tuple(requested) + (None,) * (len(shape) - len(requested))
    return PartitionSpec(
        *(_entry(dividing_axes(entry, size, mesh_axes)) for size, entry in zip(shape, entries, strict=True))
    )


def _entry(axes: tuple[str, ...]) -> Axes:
    """The canonical entry of a `PartitionSpec`: one name instead of a tuple of one."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def shardings(boxed: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of a tree of (boxed) abstract arrays, as `jax.eval_shape` of an `init` returns it."""
    specs = nn.get_partition_spec(boxed)

    def sharding(names: PartitionSpec, value: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, drop_uneven_axes(spec(tuple(names)), value.shape, mesh))

    return jax.tree.map(sharding, specs, nn.meta.unbox(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec))


def shard_over_axis(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """`sharding` with an array of this shape divided over one more mesh axis, at the first array axis it divides."""
    mesh, entries = sharding.mesh, list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    for i, entry in enumerate(entries):
        names = as_tuple(entry)
        shards = math.prod(mesh.shape[name] for name in names) * mesh.shape[axis]
        if axis not in names and shape[i] % shards == 0:
            entries[i] = (*names, axis)
            return NamedSharding(mesh, PartitionSpec(*entries))
    return sharding


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of a batch array `[B]` or `[B, T, ...]`: rows over the data axes, slots over the context axis."""
    names = ("batch", "length", *(None,) * (len(shape) - 2))[: len(shape)]
    return NamedSharding(mesh, drop_uneven_axes(spec(names), shape, mesh))


def process_part(mesh: Mesh) -> tuple[int, int]:
    """The part `(i, n)` of every batch's rows that this process reads: number i of n equal parts.

    Processes whose devices hold the same rows (other slots, or other parts of the model) read the same part.

    Raises:
      ConfigError: two processes share some of their rows, but not all.
    """
    names = as_tuple(dict(RULES)["batch"])
    indices = [mesh.axis_names.index(name) for name in names]
    devices = np.moveaxis(mesh.devices, indices, range(len(indices)))
    devices = devices.reshape(math.prod(mesh.shape[name] for name in names), -1)
    rows_of: dict[int, list[int]] = {}
    for row, row_devices in enumerate(devices):
        for process in {device.process_index for device in row_devices}:
            rows_of.setdefault(process, []).append(row)
    parts = sorted({tuple(rows) for rows in rows_of.values()})
    if sum(map(len, parts)) != len(devices):
        raise ConfigError(
            f"config.mesh: got {dict(mesh.shape)} on {len(rows_of)} processes, some of which share a part of their "
            "rows, expected all of them or none; make context x tensor a multiple or a divisor of a process's devices"
        )
    return parts.index(tuple(rows_of[jax.process_index()])), len(parts)


def zigzag_order(length: int, devices: int) -> np.ndarray | None:
    """Order of slots that gives each device an equal share of a causal mask: int `[T]`, or None if T is not divisible.

    The row is split into 2 c equal pieces for c devices. Device i gets piece i and piece 2 c - 1 - i, an early and a
    late one. Slots carry their positions with them, so nothing else changes.
    """
    if length % (2 * devices):
        return None
    pieces = np.arange(length).reshape(2 * devices, -1)
    return np.stack([pieces[:devices], pieces[: devices - 1 : -1]], axis=1).reshape(-1)
