"""Reading a checkpoint: verifying it, restoring a training state, reading its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from jaxformer.checkpoint import arrays, manifest
from jaxformer.checkpoint.directories import raise_damaged, read_json
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.trees import is_key, stored_shape, to_nested_dict
from jaxformer.errors import ConfigError
from jaxformer.types import EMA, MEMORY, PyTree, TrainState, leaf_path, overlaid

if TYPE_CHECKING:
    import orbax.checkpoint as ocp  # at run time in the functions that need it: it takes a tenth of a command's start

ArrayTypes = Mapping[tuple[str, ...], str]
"""Dtype and shape of every array by path, as `float32[2, 8]`."""


class Weights(NamedTuple):
    """The part of a state that evaluation and decoding need.

    Attributes:
      params: the parameters; the moving average in place of those that have one.
      variables: the other collections.
    """

    params: PyTree
    variables: dict[str, PyTree]


def verify(directory: Path, content: bool = True) -> None:
    """Checks a checkpoint against its manifest. Checkpoints of format 1 have none and are accepted.

    Args:
      content: read every file, not only the manifest.

    Raises:
      Damaged: the checkpoint is not what was written.
      ConfigError: a newer version wrote it.
    """
    files = manifest.read(directory)
    if files is None:
        if read_json(directory / "about").get("format") != 1:
            raise Damaged(f"{manifest.FILE_NAME} is missing")
    elif content:
        manifest.check_files(directory, files)


def array_metadata(directory: Path) -> dict[tuple[str, ...], Any]:
    """Shape and dtype of every array in a checkpoint by path (`params/...`). Reads metadata only.

    Raises:
      Damaged: the metadata cannot be read.
    """
    import orbax.checkpoint as ocp

    # From the handler, not a Checkpointer, which warns that this part has no metadata of a complete checkpoint.
    handler = ocp.PyTreeCheckpointHandler()
    return raise_damaged(lambda: traverse_util.flatten_dict(handler.metadata(epath.Path(directory / "state")).tree))


def read_state(directory: Path, target: TrainState) -> TrainState:
    """The state in `directory`, with the shapes and shardings of the abstract `target`.

    Raises:
      Damaged: files are missing or unreadable. Wrong bytes are found by `verify` only.
      ConfigError: it is the state of a different model or optimizer.
    """
    import orbax.checkpoint as ocp

    item = to_nested_dict(jax.tree.map(stored_shape, target))
    stored = traverse_util.unflatten_dict(array_metadata(directory))
    check_same_arrays(directory, array_types(stored), array_types(item))
    restore = ocp.args.PyTreeRestore(item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
    values = traverse_util.flatten_dict(_arrays(directory, restore))
    key = read_json(directory / "about").get("key")

    def pick(keys: tuple[Any, ...], leaf: Any) -> Any:
        value = values[leaf_path(keys)]
        return jax.random.wrap_key_data(value, impl=key) if is_key(leaf) else value

    return jax.tree_util.tree_map_with_path(pick, target)


def read_data(directory: Path) -> dict[str, Any]:
    """The data state of this process.

    Raises:
      Damaged: there is none.
      ConfigError: another number of processes saved the checkpoint, and their states differ.
    """
    states, count = read_json(directory / "data").get("processes"), jax.process_count()
    if not isinstance(states, list) or not states or not all(isinstance(state, dict) for state in states):
        raise Damaged("no data state in it")
    if len(states) != count and any(state != states[0] for state in states):
        raise ConfigError(
            f"checkpoint {directory}: got the data states of {len(states)} processes, expected {count}; resume with as "
            "many processes as saved it"
        )
    return states[jax.process_index()] if len(states) == count else states[0]


def read_weights(directory: Path, shardings: PyTree | None = None) -> Weights:
    """Parameters and other collections in `directory`, without the optimizer's state and the memories of rows.

    Args:
      shardings: of the parameters; None: everything stays on the host, as numpy arrays.
    """
    if shardings is None and jax.process_count() == 1:
        read = arrays.read(directory, weight_paths)
        if read is not None:
            return _weights(traverse_util.unflatten_dict(read))
    import orbax.checkpoint as ocp

    found, average = array_metadata(directory), ("variables", EMA)
    param_shardings = {} if shardings is None else traverse_util.flatten_dict(to_nested_dict(shardings))
    item, args = {}, {}
    for path in weight_paths(found):
        array, name = found[path], path[2:] if path[:2] == average else path[1:]
        sharding = param_shardings.get(name) if path[0] == "params" or path[:2] == average else None
        item[path] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        args[path] = ocp.RestoreArgs(np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)
    item, args = traverse_util.unflatten_dict(item), traverse_util.unflatten_dict(args)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
    return _weights(_arrays(directory, restore))


def weight_paths(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths of a stored state that weights are made of: no parameter that has a moving average, no memories."""
    average, memory = ("variables", EMA), ("variables", MEMORY)
    found = [path for path in paths if path[0] in ("params", "variables") and path[:2] != memory]
    averaged = {path[2:] for path in found if path[:2] == average}  # frozen parameters have no average
    return [path for path in found if path[0] != "params" or path[1:] not in averaged]


def _weights(tree: dict[str, Any]) -> Weights:
    """The weights of what a checkpoint holds, the moving average in place of the parameters that have one."""
    variables = dict(tree.get("variables", {}))
    return Weights(overlaid(tree.get("params", {}), variables.pop(EMA, {})), variables)


def _arrays(directory: Path, args: ocp.args.PyTreeRestore) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return raise_damaged(lambda: reader.restore(directory / "state", args=args))


def array_types(tree: PyTree) -> ArrayTypes:
    """Dtype and shape of every array of nested dicts."""
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in traverse_util.flatten_dict(tree).items()}


def check_same_arrays(directory: Path, stored: ArrayTypes, expected: ArrayTypes) -> None:
    """Raises a ConfigError at the first array in the checkpoint that differs from what the config expects."""
    for path in sorted({*stored, *expected}):
        if stored.get(path) != expected.get(path):
            raise ConfigError(
                f"checkpoint {directory}: got {'/'.join(path)} {stored.get(path, 'absent')}, expected "
                f"{expected.get(path, 'no such array')}; it belongs to another config: use that, or another --workdir"
            )
