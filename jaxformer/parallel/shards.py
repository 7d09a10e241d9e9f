"""Per-device code under `shard_map`: which mesh axes it may divide arrays over, and running it.

XLA's partitioner shards most programs by itself. What it shards badly (a ring of devices, a sum over chunks) is written
for one device's part of the arrays and run with `shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from jaxformer.parallel import rules
from jaxformer.types import PyTree


def auto_axes() -> dict[str, int]:
    """Axes of the current mesh that no surrounding `shard_map` is manual over, with sizes; {} without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else rules.auto_axes(mesh)


def is_unsharded() -> bool:
    """True if arrays cannot be divided here: there is no mesh, or its auto axes have size 1."""
    return math.prod(auto_axes().values()) == 1


def is_inside_shard_map() -> bool:
    """True inside a `shard_map` that is manual over some axes of the mesh but not all."""
    return 0 < len(auto_axes()) < len(jax.sharding.get_abstract_mesh().axis_names)


def shard_count(axes: tuple[str, ...]) -> int:
    """Number of shards of an array axis that is divided over these mesh axes."""
    sizes = auto_axes()
    return math.prod(sizes[axis] for axis in axes)


def dividing_axes(name: str, size: int) -> tuple[str, ...]:
    """Mesh axes over which `rules.constrain` divides an array axis of this logical name and size."""
    return rules.dividing_axes((rules.WEIGHTS | rules.ACTIVATIONS)[name], size, auto_axes())


def shard(function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`function` under a `shard_map` over all auto axes. It must do all communication itself, also for gradients."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(auto_axes()), check_vma=False)
