"""From their tensors to our parameters and back, by a family's rows. Coverage is total in both directions."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import einops
import flax
import jax
import numpy as np

from jaxformer.config import ConfigError
from jaxformer.hf.files import Tensor
from jaxformer.hf.table import STACKED, Family, Row
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

Slice = Callable[[tuple[slice, ...]], np.ndarray]
"""Reads part of a parameter: `[L, ...]` indexed by one slice an axis."""


def canonical(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under today's names of a model with a head, without the buffers that old files carry.

    Raises:
      ConfigError: two of them come to the same name.
    """
    found: dict[str, Tensor] = {}
    bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in tensors)
    for name, tensor in tensors.items():
        new = family.prefix + name if bare else name
        for old, replacement in family.renamed:
            new = re.sub(old, replacement, new)
        if any(re.fullmatch(pattern, new) for pattern in family.ignored):
            continue
        if new in found:
            raise ConfigError(f"{tensor.file}: got tensors that both mean {new}, expected one; remove one")
        found[new] = tensor
    for name, weaker in family.twins:
        if name in found:
            found[weaker] = found.pop(name)
    return found


def read(
    rows: Sequence[Row],
    tensors: Mapping[str, Tensor],
    shapes: PyTree,
    layout: PyTree | None = None,
    fresh: Mapping[str, jax.Array] | None = None,
    unused: Callable[[str], bool] = lambda name: False,
) -> PyTree:
    """Our float32 parameters. Each device's part is read on its own, so host memory stays near one part.

    Args:
      tensors: by canonical name.
      shapes: the parameters wanted: a tree of `ShapeDtypeStruct`.
      layout: their shardings, the same tree; None: the default device.
      fresh: parameters by path that the file need not hold, and their values if it does not.
      unused: which of the file's tensors may be left over.

    Raises:
      ConfigError: a tensor is missing, left over, or of another shape than the config says.
    """
    wanted = flax.traverse_util.flatten_dict(shapes, sep="/")
    places = {} if layout is None else flax.traverse_util.flatten_dict(layout, sep="/")
    fresh, used, params = fresh or {}, set(), {}
    for row in rows:
        for i, path in enumerate(row.paths):
            if path not in wanted:
                raise ConfigError(f"family table: got {path} for {row.theirs}, expected a parameter of this model")
            names = _names(row, wanted[path].shape)
            missing = [name for name in names if name not in tensors]
            if missing and (path in fresh or row.optional):
                zeros = lambda index, size=wanted[path].shape: np.zeros(size, np.float32)[index]  # noqa: E731
                params[path] = fresh[path] if path in fresh else _place(zeros, wanted[path], places.get(path))
                continue
            if missing:
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise ConfigError(f"checkpoint: got no tensor {missing[0]}{more}, expected it for this config")
            used.update(names)
            _check_shapes(row, i, [tensors[name] for name in names], names, wanted[path].shape)
            part = _part(row, i, [tensors[name] for name in names], wanted[path].shape)
            params[path] = _place(part, wanted[path], places.get(path))
    unfilled = sorted(set(wanted) - set(params))
    if unfilled:
        raise ConfigError(f"family table: got no row for {', '.join(unfilled)}, expected one for every parameter")
    left = sorted(name for name in set(tensors) - used if not unused(name))
    if left:
        file, more = tensors[left[0]].file, f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise ConfigError(f"{file}: got tensor {left[0]}{more}, expected none of that name for this config")
    return flax.traverse_util.unflatten_dict(params, sep="/")


def write(rows: Sequence[Row], params: PyTree, dtype: Any = None) -> dict[str, Callable[[], np.ndarray]]:
    """Their tensors by name, each made only when it is called for.

    Raises:
      ConfigError: a parameter has no row.
    """
    ours, tensors, used = flax.traverse_util.flatten_dict(params, sep="/"), {}, set()
    for row in rows:
        used.update(row.paths)
        arrays = [ours[path] for path in row.paths]
        for index in np.ndindex(arrays[0].shape[: row.depth]):
            tensors[row.name(index)] = _tensor(row, arrays, index, dtype)
    if set(ours) - used:
        left = ", ".join(sorted(set(ours) - used))
        raise ConfigError(f"family table: got no row for {left}, expected one for every parameter")
    return tensors


def _names(row: Row, shape: tuple[int, ...]) -> list[str]:
    return [row.name(index) for index in np.ndindex(shape[: row.depth])]


def _ours(row: Row, i: int, array: np.ndarray) -> np.ndarray:
    """Parameter i of a row from one tensor of theirs: a view wherever numpy can make one."""
    y = einops.rearrange(array, row.layout, **_known(row)) if row.layout else array
    return y if isinstance(row.ours, str) else y[i]


def _known(row: Row) -> dict[str, int]:
    sizes = dict(row.sizes)
    return sizes if isinstance(row.ours, str) else {**sizes, "n": len(row.ours)}


def _check_shapes(row: Row, i: int, tensors: list[Tensor], names: list[str], shape: tuple[int, ...]) -> None:
    expected = shape[row.depth :]
    for name, tensor in zip(names, tensors, strict=True):
        try:
            got = _ours(row, i, tensor.array()).shape
        except einops.EinopsError:
            got = None
        if got != expected:
            raise ConfigError(
                f"{tensor.file}: got {name} of shape {list(tensor.shape)}, expected one that makes {row.paths[i]} "
                f"{list(expected)}; the file and its config.json contradict each other"
            )


def _part(row: Row, i: int, tensors: list[Tensor], shape: tuple[int, ...]) -> Slice:
    """Reads parts of a parameter, straight into the memory that the device will use where it is the host's own."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        part = _aligned(tuple(len(range(size)[one]) for size, one in zip(shape, index, strict=True)))
        depth = row.depth
        wanted = np.arange(len(tensors)).reshape(shape[:depth])[index[:depth]]
        for place, j in np.ndenumerate(wanted):
            part[place] = _ours(row, i, tensors[j].array())[index[depth:]]
            _check_finite(tensors[j], part[place])
            tensors[j].release()  # else the file would stand in memory beside the parameters
        return part

    return read


def _check_finite(tensor: Tensor, values: np.ndarray) -> None:
    """Refuses NaN, and names a tensor with infinities, which a bias may have on purpose.

    The sum tells at once that all is well; the values are looked at one by one only where it does not.

    Raises:
      ConfigError: a value is not a number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values)):
            return
    broken = int(np.isnan(values).sum())
    if broken:
        raise ConfigError(
            f"{tensor.file}: got {broken} of {values.size} values of {tensor.name} that are NaN, expected numbers; the "
            "run that wrote the file had diverged: take an earlier checkpoint"
        )
    if np.isinf(values).any():
        log.warning("%s: %s holds infinities, and so may the outputs", tensor.file, tensor.name)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An empty float32 array that begins at a multiple of 64 bytes: such a one a CPU device takes over uncopied."""
    size = int(np.prod(shape))
    room = np.empty(size + 16, np.float32)
    skip = -room.ctypes.data % 64 // 4
    return room[skip : skip + size].reshape(shape)


def _place(part: Slice, shape: jax.ShapeDtypeStruct, where: jax.sharding.Sharding | None) -> jax.Array:
    if where is None:
        x = jax.device_put(part((slice(None),) * len(shape.shape)), may_alias=True)
    else:
        x = jax.make_array_from_callback(shape.shape, where, part)
    return jax.block_until_ready(x)  # one parameter at a time: what waits to be copied takes memory


def _tensor(row: Row, arrays: list[Any], index: tuple[int, ...], dtype: Any) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        ours = [np.asarray(array[index]) for array in arrays]
        if row.layout:
            left, right = (text.strip() for text in row.layout.split("->"))
            whole = ours[0] if isinstance(row.ours, str) else np.stack(ours)
            theirs = einops.rearrange(whole, f"{right} -> {left}", **_exportable(row, right))
        else:
            theirs = ours[0]
        return np.ascontiguousarray(theirs if dtype is None else theirs.astype(dtype))

    return make


def _exportable(row: Row, right: str) -> dict[str, int]:
    """Sizes of the axes that stand in our side of the pattern; a 1 there needs none."""
    words = set(re.findall(r"[A-Za-z]+", right))
    return {name: size for name, size in row.sizes.items() if name in words}


def gradients(rows: Sequence[Row], grads: PyTree) -> dict[str, np.ndarray]:
    """A tree of our parameters' shape under their names: every row is a linear map, so gradients convert alike."""
    return {name: make() for name, make in write(rows, grads).items()}


def unknown(names: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """Names of theirs that no row mentions."""
    patterns = [re.escape(row.theirs) for row in rows]
    for word in STACKED:
        patterns = [pattern.replace(re.escape(word), r"\d+") for pattern in patterns]
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]
