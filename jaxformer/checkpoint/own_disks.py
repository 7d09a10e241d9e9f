"""Checkpoints of processes that share no disk: each holds a part on its own, and the storage holds the whole.

Orbax then writes one file a chunk (zarr, a chunk is a shard) instead of its database, which one process would have to
merge from the files of all. So the whole checkpoint is the union of the files that the processes write, and a process
that restores reads the chunks that overlap its own shards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged, FileList
from jaxformer.checkpoint.trees import stored_shape
from jaxformer.errors import StorageError
from jaxformer.parallel.messages import Messages
from jaxformer.types import PyTree, leaf_path

if TYPE_CHECKING:
    import orbax.checkpoint as ocp  # at run time in the functions that need it: it takes a tenth of a command's start

CHUNK = re.compile(r"state/(.+)/(\d+(?:\.\d+)*)")
"""Path of a chunk of an array in a checkpoint: its array, and its index along each axis (0 for a scalar)."""


class OwnDisks:
    """Saving and restoring by `Checkpoints` where the processes of its run share no disk. All methods are collective.

    Args:
      fetch: brings files of a checkpoint (its directory, their paths in it) to this process. Files that the storage
        lacks or has damaged stay missing or damaged here.
      publish: returns when the new checkpoints are in the storage; called on the first process.
      messages: to the other processes.
    """

    def __init__(
        self,
        fetch: Callable[[Path, Iterable[str]], None],
        publish: Callable[[], None],
        messages: Messages,
    ) -> None:
        self._fetch, self._publish, self.messages = fetch, publish, messages
        self.is_first = self.messages.index == 0

    def complete(self, staging: Path, act: Callable[[], object]) -> None:
        """Writes the manifest of the files of all processes, once `act` has written those of this one.

        A file that several have written is that of the first of them.

        Raises:
          StorageError: some process could not write its files.
        """

        def list_own() -> FileList:
            act()
            return manifest.list_files(staging)

        listed: FileList = {}
        for part in self._together(list_own):
            listed = part | listed
        manifest.write_list(staging, dict(sorted(listed.items())))

    def publish(self, act: Callable[[], object]) -> None:
        """Calls `act`, and returns when the checkpoints that are then on the disks are in the storage.

        Raises:
          StorageError: some process failed.
        """
        self._together(act)
        self._together(self._publish if self.is_first else lambda: None)

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """The result of `act` on every process. If it raises on one, all raise."""
        try:
            answer = act()
        except Exception as error:
            self.messages.exchange([f"{type(error).__name__}: {error}", None])
            raise
        answers = self.messages.exchange(["", answer])
        for index, (problem, _) in enumerate(answers):
            if problem:
                raise StorageError(f"process {index}: {problem}")
        return [answer for _, answer in answers]

    def fetch_needed(self, directory: Path, target: PyTree) -> FileList:
        """Brings to this process what it needs of a checkpoint. Its list, with the paths of only these files.

        Args:
          target: abstract state, with shardings.

        Raises:
          Damaged: there is no manifest, or it differs from what was written.
          StorageError: the storage does not answer.
        """
        listed = manifest.read(directory)
        if listed is None:
            raise Damaged(f"{manifest.FILE_NAME} is missing")
        self._fetch(directory, [key for key in listed if not CHUNK.fullmatch(key)])
        needed = needed_files(directory, listed, target)
        self._fetch(directory, needed)
        return {key: listed[key] for key in needed}

    def fetch_all(self, directory: Path) -> None:
        """Brings all of a damaged checkpoint to the first process, as far as the storage has it."""
        if self.is_first:
            with contextlib.suppress(Damaged):  # its manifest, without which nobody knows its files
                self._fetch(directory, manifest.read(directory) or {})


def needed_files(directory: Path, listed: Iterable[str], target: PyTree) -> list[str]:
    """Paths of the files that this process needs to restore its shards of `target`.

    All files but the chunks that overlap no shard here. `directory` holds the `.zarray` files of the arrays.
    """
    chunks: dict[str, list[str]] = {}
    needed = []
    for key in listed:
        match = CHUNK.fullmatch(key)
        if match is None:
            needed.append(key)
        else:
            chunks.setdefault(match[1], []).append(match[2])
    names = {
        ".".join(leaf_path(keys)): stored_shape(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(target)
    }
    for name, indices in chunks.items():
        wanted = None
        try:
            about = json.loads((directory / "state" / name / ".zarray").read_text(encoding="utf-8"))
            array = names[name]
            if tuple(about["shape"]) == array.shape and array.sharding is not None:
                wanted = overlapping_chunks(about["chunks"], array.shape, array.sharding)
        except (OSError, ValueError, LookupError, TypeError):
            pass  # all of an array that is no part of the target, or cannot be read: whoever restores it says so
        needed += [f"state/{name}/{index}" for index in indices if wanted is None or index in wanted]
    return needed


def overlapping_chunks(chunks: Sequence[int], shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> set[str]:
    """Indices, as in zarr's file names, of the chunks of this size that overlap a shard on a device of this process."""
    found = set()
    for slices in sharding.addressable_devices_indices_map(shape).values():
        ranges = []
        for part, size, length in zip(slices or (), chunks, shape, strict=True):
            begin, end, _ = part.indices(length)
            ranges.append(range(begin // size, -(-end // size)))
        found |= {".".join(map(str, index)) or "0" for index in itertools.product(*ranges)}
    return found


def is_expected(record: logging.LogRecord) -> bool:
    """True for warnings of Orbax about what is meant to be: processes write to their own disks, without a database."""
    return any(words in str(record.msg) for words in ("Skipping merge of OCDBT", "Global object size logging disabled"))


def make_writer(handler: Callable[..., Any]) -> ocp.AsyncCheckpointer:
    """Orbax's writer of which every process writes its shards to its own disk.

    Args:
      handler: makes the registry of array handlers, with `primary_host`.
    """
    import orbax.checkpoint as ocp

    everyone = ocp.options.MultiprocessingOptions(primary_host=None)
    arrays = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=handler(primary_host=None), multiprocessing_options=everyone
    )
    return ocp.AsyncCheckpointer(arrays, multiprocessing_options=everyone)
