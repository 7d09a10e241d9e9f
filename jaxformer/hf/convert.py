"""Converts tensors of a checkpoint to parameters and back, by the rows of a family.

Coverage is total in both directions: a tensor left over, or a parameter without a row, is an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import einops
import flax
import jax
import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.hf import blocks
from jaxformer.hf.blocks import in_threads
from jaxformer.hf.reading import Tensor
from jaxformer.hf.table import STACKED_AXES, Family, Row
from jaxformer.hf.writing import Deferred
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

ReadPart = Callable[[tuple[slice, ...]], np.ndarray]
"""Reads a part of a parameter `[L, ...]`, given one slice for each axis."""


def canonical_tensors(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the current names of a model with a head, without the buffers of old files.

    Raises:
      ConfigError: two tensors have the same current name.
    """
    renamed: dict[str, Tensor] = {}
    for start in set(family.head_prefixes.values()):
        if any(name.startswith(start) for name in tensors):
            own = lambda name, start=start: name.startswith(start)  # noqa: E731
            tensors = {
                family.prefix + name.removeprefix(start) if own(name) else name: x for name, x in tensors.items()
            }
    bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in tensors)
    for name, tensor in tensors.items():
        new = family.prefix + name if bare else name
        for old, replacement in family.renamed_tensors:
            new = re.sub(old, replacement, new)
        if any(re.fullmatch(pattern, new) for pattern in family.ignored_tensors):
            continue
        if new in renamed:
            raise ConfigError(f"{tensor.file}: got tensors that both mean {new}, expected one; remove one")
        renamed[new] = tensor
    for name, duplicate in family.duplicate_tensors:
        if name in renamed:
            renamed[duplicate] = renamed.pop(name)
    return renamed


def import_params(
    rows: Sequence[Row],
    tensors: Mapping[str, Tensor],
    shapes: PyTree,
    shardings: PyTree | None = None,
    initial: Mapping[str, jax.Array] | None = None,
    can_drop: Callable[[str], bool] = lambda name: False,
) -> PyTree:
    """The parameters, in float32. Every device reads its own part, so the host holds about one part at a time.

    Args:
      tensors: tensors by name, as `canonical_tensors` returns them.
      shapes: the parameters to read, as a tree of `ShapeDtypeStruct`.
      shardings: their shardings, as the same tree; None: the default device.
      initial: values of parameters, by path, that the file need not hold. They count if it does not.
      can_drop: True for the name of a tensor that may be left over.

    Raises:
      ConfigError: a tensor is missing, left over, or of another shape than the config says.
    """
    by_path = flax.traverse_util.flatten_dict(shapes, sep="/")
    sharding_of = {} if shardings is None else flax.traverse_util.flatten_dict(shardings, sep="/")
    initial, used, params = initial or {}, set(), {}
    for row in rows:
        for i, path in enumerate(row.param_paths):
            if path not in by_path:
                raise ConfigError(f"family table: got {path} for {row.hf_name}, expected a parameter of this model")
            names = _tensor_names(row, by_path[path].shape)
            missing = [name for name in names if name not in tensors]
            if missing and (path in initial or row.optional):
                zeros = lambda index, size=by_path[path].shape: np.zeros(size, np.float32)[index]  # noqa: E731
                value = initial.get(path)
                params[path] = _to_device(zeros, by_path[path], sharding_of.get(path)) if value is None else value
                continue
            if missing:
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise ConfigError(f"checkpoint: got no tensor {missing[0]}{more}, expected it for this config")
            used.update(names)
            _check_shapes(row, i, [tensors[name] for name in names], names, by_path[path].shape)
            part = _part_reader(row, i, [tensors[name] for name in names], by_path[path].shape)
            params[path] = _to_device(part, by_path[path], sharding_of.get(path))
    unfilled = sorted(set(by_path) - set(params))
    if unfilled:
        raise ConfigError(f"family table: got no row for {', '.join(unfilled)}, expected one for every parameter")
    left = sorted(name for name in set(tensors) - used if not can_drop(name))
    if left:
        file, more = tensors[left[0]].file, f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise ConfigError(f"{file}: got tensor {left[0]}{more}, expected none of that name for this config")
    return flax.traverse_util.unflatten_dict(params, sep="/")


def export_tensors(rows: Sequence[Row], params: PyTree, dtype: Any = None) -> dict[str, Deferred]:
    """The tensors of a checkpoint, by name, which are computed when they are called.

    Args:
      dtype: element type of the tensors; None: that of the parameters.

    Raises:
      ConfigError: a parameter has no row.
    """
    by_path, tensors, used = flax.traverse_util.flatten_dict(params, sep="/"), {}, set()
    for row in rows:
        used.update(row.param_paths)
        arrays = [by_path[path] for path in row.param_paths]
        shape = _tensor_shape(row, arrays)
        for index in np.ndindex(arrays[0].shape[: row.stacked_axes]):
            tensors[row.name(index)] = _deferred(row, arrays, index, dtype, shape)
    if set(by_path) - used:
        left = ", ".join(sorted(set(by_path) - used))
        raise ConfigError(f"family table: got no row for {left}, expected one for every parameter")
    return tensors


def _tensor_names(row: Row, shape: tuple[int, ...]) -> list[str]:
    return [row.name(index) for index in np.ndindex(shape[: row.stacked_axes])]


def _to_param(row: Row, i: int, array: np.ndarray) -> np.ndarray:
    """The parameter `i` of a row, from one tensor: a view wherever numpy can make one; of `row.groups` a copy."""
    if row.splits:
        first = sum(row.splits[:i])
        if row.groups == 1:
            return einops.rearrange(array[first : first + row.splits[i]], row.layout, **row.sizes)
        grouped = array.reshape(row.groups, -1, *array.shape[1:])[:, first : first + row.splits[i]]
        return einops.rearrange(grouped.reshape(-1, *array.shape[1:]), row.layout, **row.sizes)
    y = einops.rearrange(array, row.layout, **_axis_sizes(row)) if row.layout else array
    return y if isinstance(row.param_path, str) else y[i]


def _axis_sizes(row: Row) -> dict[str, int]:
    sizes = dict(row.sizes)
    return sizes if isinstance(row.param_path, str) else {**sizes, "n": len(row.param_path)}


def _check_shapes(row: Row, i: int, tensors: list[Tensor], names: list[str], shape: tuple[int, ...]) -> None:
    expected = shape[row.stacked_axes :]
    for name, tensor in zip(names, tensors, strict=True):
        try:
            got = _to_param(row, i, np.broadcast_to(np.empty((), tensor.dtype), tensor.shape)).shape
        except (einops.EinopsError, ValueError):  # the latter of groups that do not divide the tensor
            got = None
        if got != expected or (row.splits and tensor.shape[0] != row.groups * sum(row.splits)):
            raise ConfigError(
                f"{tensor.file}: got {name} of shape {list(tensor.shape)}, expected one that makes "
                f"{row.param_paths[i]} {list(expected)}; the file and its config.json contradict each other"
            )


def _part_reader(row: Row, i: int, tensors: list[Tensor], shape: tuple[int, ...]) -> ReadPart:
    """A function that reads parts of a parameter, into memory that a CPU device uses without a copy."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        part = _aligned_empty(tuple(len(range(size)[axis]) for size, axis in zip(shape, index, strict=True)))
        depth = row.stacked_axes
        numbers = np.arange(len(tensors)).reshape(shape[:depth])[index[:depth]]

        def read_tensor(entry: tuple[tuple[int, ...], Any]) -> None:
            stacked, j = entry
            target = part[stacked]
            release = tensors[j].release_part if row.groups == 1 else _keep
            if not _copy(_to_param(row, i, tensors[j].array())[index[depth:]], target, release):
                _check_finite(tensors[j], target)
            tensors[j].release()  # else the file stays in memory beside the parameters

        in_threads(read_tensor, list(np.ndenumerate(numbers)), part.nbytes)
        return part

    return read


def _keep(block: np.ndarray) -> None:
    """Releases nothing: a block of a copy is no part of a file."""


def _copy(source: np.ndarray, target: np.ndarray, done: Callable[[np.ndarray], None]) -> bool:
    """Copies `source` to `target` of the same shape, and converts it; True if the sum of every block is finite.

    Args:
      done: called with each block of `source` that has been read.
    """
    finite = True
    for old, new in blocks.pairs(source, target):
        # Conversion is fast in the order of the file, and so is the sum; only the copy changes the order.
        values = old if old.dtype == new.dtype else old.astype(new.dtype, order="K")
        new[...] = values
        with np.errstate(over="ignore", invalid="ignore"):
            finite = finite and bool(np.isfinite(np.sum(values)))
        done(old)
    return finite


def _check_finite(tensor: Tensor, values: np.ndarray) -> None:
    """Refuses NaN, and warns of infinities, which a bias may have on purpose.

    A finite sum proves that all values are finite (`_copy`); only otherwise are the values checked one by one.

    Raises:
      ConfigError: a value is NaN.
    """
    nan_count = int(np.isnan(values).sum())
    if nan_count:
        raise ConfigError(
            f"{tensor.file}: got {nan_count} of {values.size} values of {tensor.name} that are NaN, expected numbers; "
            "the run that wrote the file had diverged: take an earlier checkpoint"
        )
    if np.isinf(values).any():
        log.warning("%s: %s holds infinities, and so may the outputs", tensor.file, tensor.name)


def _aligned_empty(shape: tuple[int, ...]) -> np.ndarray:
    """An uninitialised float32 array, aligned to 64 bytes: a CPU device takes such an array over without a copy."""
    size = int(np.prod(shape))
    buffer = np.empty(size + 16, np.float32)
    skip = -buffer.ctypes.data % 64 // 4
    return buffer[skip : skip + size].reshape(shape)


def _to_device(part: ReadPart, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """The parameter on its devices; devices that hold the same part read it once."""
    if sharding is None:
        x = jax.device_put(part((slice(None),) * len(shape.shape)), may_alias=True)
    else:
        read: dict[tuple[Any, ...], np.ndarray] = {}

        def part_of(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            key = tuple((piece.start, piece.stop) for piece in index)
            if key not in read:
                read[key] = part(index)
            return read[key]

        x = jax.make_array_from_callback(shape.shape, sharding, part_of)
    return jax.block_until_ready(x)  # one parameter at a time: pending copies take memory


def _deferred(row: Row, arrays: list[Any], index: tuple[int, ...], dtype: Any, shape: tuple[int, ...]) -> Deferred:
    """The tensor of a row for one layer: the parameters' part, in the file's order of axes."""
    dtype = np.dtype(arrays[0].dtype if dtype is None else dtype)

    def make() -> np.ndarray:
        parts = [_on_host(array, index) for array in arrays]
        if not row.layout:
            return blocks.contiguous(parts[0], dtype)
        pattern, sizes = _export_pattern(row)
        if row.splits:
            pieces = [einops.rearrange(part, pattern, **sizes) for part in parts]
            grouped = [piece.reshape(row.groups, -1, *piece.shape[1:]) for piece in pieces]
            return blocks.contiguous(np.concatenate(grouped, axis=1).reshape(shape), dtype)
        return blocks.contiguous(
            einops.rearrange(parts[0] if isinstance(row.param_path, str) else np.stack(parts), pattern, **sizes), dtype
        )

    return Deferred(shape, dtype, make)


def _on_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` on the host: a view where the array lies there as a whole, else a copy of this part alone."""
    if isinstance(array, jax.Array) and not (len(array.devices()) == 1 and array.device.platform == "cpu"):
        return np.asarray(array[index])
    return np.asarray(array)[index]


def _export_pattern(row: Row) -> tuple[str, dict[str, int]]:
    """The pattern from the parameter to the tensor, and the sizes of axes that it needs."""
    left, right = (text.strip() for text in row.layout.split("->"))
    return f"{right} -> {left}", _export_sizes(row, right)


def _tensor_shape(row: Row, arrays: list[Any]) -> tuple[int, ...]:
    """Shape of each tensor of a row."""
    shape = arrays[0].shape[row.stacked_axes :]
    if not row.layout:
        return tuple(shape)
    pattern, sizes = _export_pattern(row)
    several = not isinstance(row.param_path, str) and not row.splits
    whole = (len(arrays), *shape) if several else shape
    found = jax.eval_shape(
        lambda x: einops.rearrange(x, pattern, **sizes), jax.ShapeDtypeStruct(whole, np.float32)
    ).shape
    return (row.groups * sum(row.splits), *found[1:]) if row.splits else found


def _export_sizes(row: Row, right: str) -> dict[str, int]:
    """Sizes of the axes in the parameter's side of the pattern; einops refuses others."""
    words = set(re.findall(r"[A-Za-z]+", right))
    return {name: size for name, size in row.sizes.items() if name in words}


def export_gradients(rows: Sequence[Row], grads: PyTree) -> dict[str, np.ndarray]:
    """Gradients of the parameters by tensor name: every row is a linear map, so they convert as parameters do."""
    return {name: make() for name, make in export_tensors(rows, grads).items()}


def unmatched_names(names: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """The tensor names that no row describes."""
    patterns = [re.escape(row.hf_name) for row in rows]
    for placeholder in STACKED_AXES:
        patterns = [pattern.replace(re.escape(placeholder), r"\d+") for pattern in patterns]
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]
