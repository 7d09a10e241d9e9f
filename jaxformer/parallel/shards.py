"""Code that is written per device: which mesh axes it may divide arrays over, and running it there.

The partitioner divides most programs by itself. What it cannot divide well (a ring of devices, a sum over chunks) is
written for one device's part, under `shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType

from jaxformer.parallel import rules
from jaxformer.types import PyTree


def free() -> dict[str, int]:
    """The axes of the current mesh, with their sizes, that no surrounding `shard` has taken over; {} without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {name: size for name, size in mesh.shape.items() if kinds[name] != AxisType.Manual}


def alone() -> bool:
    """Whether there is nothing to divide over: no mesh, or free axes of size 1."""
    return math.prod(free().values()) == 1


def inside() -> bool:
    """Whether a surrounding `shard_map` has taken over some axes of the mesh and left others."""
    return 0 < len(free()) < len(jax.sharding.get_abstract_mesh().axis_names)


def parts(axes: tuple[str, ...]) -> int:
    """Into how many parts these axes divide."""
    sizes = free()
    return math.prod(sizes[axis] for axis in axes)


def fitting(name: str, size: int) -> tuple[str, ...]:
    """The mesh axes that divide an array axis of this logical name and size evenly, as `rules.constrain` divides it."""
    wanted = (rules.WEIGHTS | rules.ACTIVATIONS)[name]
    kept: tuple[str, ...] = ()
    for axis in (wanted,) if isinstance(wanted, str) else wanted or ():
        if axis in free() and free()[axis] > 1 and size % parts((*kept, axis)) == 0:
            kept += (axis,)
    return kept


def shard(function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`function` on every device's part. What crosses devices, sums of gradients included, is its own business."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(free()), check_vma=False)
