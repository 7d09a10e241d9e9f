"""The parameter trees of the old Flax classes, as a table derived from the families' rows and read in both directions.

The old library made a tree from tensor names by rules: a Linear's `weight` `[out, in]` is `kernel` `[in, out]`, a
norm's is `scale` (an RMS norm's stays `weight`), an embedding's `embedding`, and the numbers of layers are keys. A
family's rows (`jaxformer/hf/table.py`) say of each tensor which of these it is, so the old tree needs none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxformer.errors import ConfigError
from jaxformer.hf.table import Row
from jaxformer.types import PyTree

Path = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A row of the table: the leaves of the old tree that one row of the family holds.

    Attributes:
      row: the family's row, from the tensor to the parameter.
      path: path of the leaf, with the row's placeholders.
      transposed: the leaf is the tensor's transpose.
      count: lengths of the axes over which the parameter is stacked.
    """

    row: Row
    path: Path
    transposed: bool
    count: tuple[int, ...]

    def leaf(self, index: Sequence[int]) -> Path:
        """Path of one leaf."""
        numbers = dict(zip([p for p in ("{layer}", "{expert}") if p in self.row.hf_name], map(str, index)))
        return tuple(numbers.get(part, part) for part in self.path)


def entries(rows: Sequence[Row], shapes: PyTree, norm: str = "scale", prefix: str = "") -> list[Entry]:
    """The table of a model.

    Args:
      shapes: the parameters here, as a tree of shapes.
      norm: name of a norm's weight.
      prefix: start of the body's tensor names, to leave out.
    """
    by_path, table = traverse_util.flatten_dict(shapes, sep="/"), []
    for row in rows:
        shape = by_path[row.param_paths[0]].shape
        *modules, leaf = row.hf_name.removeprefix(prefix).split(".")
        kind = row.param_paths[0].rsplit("/", 1)[1]
        if leaf == "weight":
            leaf = {"kernel": "kernel", "scale": norm}.get(kind, "embedding")
        table.append(Entry(row, (*modules, leaf), leaf == "kernel", shape[: row.stacked_axes]))
    return table


def to_params(table: Sequence[Entry], tree: PyTree) -> PyTree:
    """Our parameters from an old tree: linear, so it may stand under `jit` and `grad`.

    Raises:
      ConfigError: a leaf is missing.
    """
    leaves, params = traverse_util.flatten_dict(tree), {}
    for entry in table:
        sizes = dict(entry.row.sizes)
        if not isinstance(entry.row.param_path, str):
            sizes["n"] = len(entry.row.param_path)
        parts = []
        for index in np.ndindex(entry.count):
            path = entry.leaf(index)
            if path not in leaves:
                raise ConfigError(f"params: got no {'/'.join(path)}, expected it; see `required_params`")
            tensor = leaves[path].T if entry.transposed else leaves[path]
            parts.append(einops.rearrange(tensor, entry.row.layout, **sizes) if entry.row.layout else tensor)
        whole = jnp.stack(parts).reshape(*entry.count, *parts[0].shape) if entry.count else parts[0]
        if isinstance(entry.row.param_path, str):
            params[entry.row.param_path] = whole
        else:
            axis = len(entry.count)
            for i, path in enumerate(entry.row.param_path):
                params[path] = whole[(slice(None),) * axis + (i,)]
    return traverse_util.unflatten_dict(params, sep="/")


def from_params(table: Sequence[Entry], params: PyTree) -> PyTree:
    """The old tree of our parameters, the inverse of `to_params`."""
    leaves, tree = traverse_util.flatten_dict(params, sep="/"), {}
    for entry in table:
        row = entry.row
        axis = len(entry.count)
        arrays = [leaves[path] for path in row.param_paths]
        whole = arrays[0] if isinstance(row.param_path, str) else jnp.stack(arrays, axis)
        for index in np.ndindex(entry.count):
            tensor = whole[index]
            if row.layout:
                left, right = (text.strip() for text in row.layout.split("->"))
                words = set(re.findall(r"[A-Za-z]+", right))
                sizes = {name: size for name, size in row.sizes.items() if name in words}
                tensor = einops.rearrange(tensor, f"{right} -> {left}", **sizes)
            tree[entry.leaf(index)] = tensor.T if entry.transposed else tensor
    return traverse_util.unflatten_dict(tree)


def shapes_of(table: Sequence[Entry], shapes: PyTree) -> dict[Path, jax.ShapeDtypeStruct]:
    """Shapes of the leaves of an old tree, from those of our parameters."""
    found = traverse_util.flatten_dict(shapes, sep="/")
    used = {path: found[path] for entry in table for path in entry.row.param_paths}
    params = traverse_util.unflatten_dict(used, sep="/")
    return traverse_util.flatten_dict(jax.eval_shape(lambda params: from_params(table, params), params))
