"""Saving checkpoints so that each appears complete or not at all, and restoring the newest intact one."""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from jaxformer.checkpoint import directories, manifest, own_disks, reading, weights
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.own_disks import OwnDisks
from jaxformer.checkpoint.trees import allgather_text, is_key, to_nested_dict, unwrap_key
from jaxformer.config import CheckpointConfig
from jaxformer.errors import ConfigError, StorageError
from jaxformer.types import PyTree, TrainState

if TYPE_CHECKING:
    import orbax.checkpoint as ocp  # at run time in the functions that need it: it takes a tenth of a command's start

LOG = logging.getLogger("jaxformer")
ORBAX_LOG = logging.getLogger("absl")

MIN_REPLICA_PARALLEL_BYTES = 1 << 20
"""Smallest part of a replicated array that the devices write in parallel.

Orbax compiles a program for every shape that it divides, which costs more than it saves for small arrays: 4 seconds for
48 of them on 8 devices.
"""


class RestoredCheckpoint(NamedTuple):
    """The content of a checkpoint, restored.

    Attributes:
      state: the training state.
      data: state of this process's batches.
      about: everything else: `step`, `values`, `progress`, `config`.
    """

    state: TrainState
    data: dict[str, Any]
    about: dict[str, Any]


class Checkpoints:
    """The checkpoints that a training run writes and resumes from. One run at a time uses a workdir.

    A save goes to `checkpoints/saving/<step>`: first the arrays, then `about` and `data`, then the manifest. It is then
    renamed to `last/<step>` and copied to `best/<step>` if it ranks there, and old checkpoints are deleted.

    Args:
      disks: given if the processes share no disk. Then each does so in its own workdir with its own files, and a save
        ends when the checkpoint is in the storage. None: the first process completes the files of all.
    """

    def __init__(self, workdir: str | Path, config: CheckpointConfig, disks: OwnDisks | None = None) -> None:
        self.workdir, self.config, self.disks = Path(workdir).absolute(), config, disks
        self.completes = disks is not None or jax.process_index() == 0
        self.root = self.workdir / "checkpoints"
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.saving = -1
        # Orbax's threads log the errors that Orbax then raises, as pages of stack frames. The filter is removed by
        # `close`, so importing this package changes no other program's logs.
        self.filter = lambda record: (
            not (
                "orbax" in record.pathname
                and (record.exc_info or (disks is not None and own_disks.is_expected(record)))
            )
        )
        ORBAX_LOG.addFilter(self.filter)
        if self.completes:
            self._remove_leftovers()

    @functools.cached_property
    def writer(self) -> ocp.AsyncCheckpointer:
        """Orbax's writer, made by the first save."""
        import orbax.checkpoint as ocp

        if self.disks is not None:
            return own_disks.make_writer(_array_handlers)
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=_array_handlers()))

    def save(
        self,
        state: TrainState,
        data_state: dict[str, Any],
        values: dict[str, float],
        progress: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves in the background. When this returns, `state` may be changed or donated, but is not yet on disk.

        Args:
          data_state: state of this process's batches, as JSON values.
          values: measures of exactly this state; empty if it was not evaluated. A checkpoint that ranks among the best
            `keep_best` by `config.metric` is copied there. A metric that is not finite never ranks.
          progress: whatever else the resumed run needs, as JSON values.
          force: replace a checkpoint of the same step, which is otherwise left as it is.

        Returns:
          True if the state is being saved.

        Raises:
          ConfigError: `values` lacks the metric that the best are chosen by (the state is saved for resuming first).
          StorageError: this save or the one before could not be written. Earlier checkpoints are unchanged.
        """
        self.wait()
        step = int(state.step)
        values = {name: float(value) for name, value in values.items()}
        data = [json.loads(text) for text in allgather_text(json.dumps(data_state))]
        about = {"format": manifest.FORMAT, "step": step, "values": values, "progress": progress or {}}
        about["config"] = json.loads(allgather_text(json.dumps(self._run_config()))[0])
        if is_key(state.key):
            about["key"] = str(jax.random.key_impl(state.key))
        exists = allgather_text(str(step in directories.list_steps(self.root / "last")))[0] == "True"
        if not exists or force:
            self._start_save(state, step, about, {"processes": data})
        elif self.disks is not None:  # the copy among the best may be missing if the run was killed before it
            self.disks.publish(lambda: self._update_best(step, values))
        elif self.completes:
            self._with_storage_error(step, lambda: self._update_best(step, values))
        if self.config.keep_best and values and self.config.metric not in values:
            self.wait()
            raise ConfigError(
                f"config.checkpoint.metric: got {self.config.metric!r}, expected a measure of the validation split "
                f"({', '.join(sorted(values))}); choose one of these, or set checkpoint.keep_best to 0"
            )
        return not exists or force

    def restore(self, target: TrainState) -> RestoredCheckpoint | None:
        """The newest intact checkpoint; None if nothing was ever saved.

        Damaged checkpoints are moved to `checkpoints/damaged/`, each with a warning. All processes restore the same
        checkpoint: the first reads all of it to verify it, and each reads its own shards.

        Args:
          target: abstract state with the shapes, dtypes and shardings of any mesh.

        Raises:
          ConfigError: no checkpoint can be read, or they hold another model, or a newer version wrote them.
        """
        self.wait()
        damaged: list[tuple[Path, str]] = []
        for directory in self._candidates():
            restored, problem = self._try_restore(directory, target)
            if restored is None:
                damaged.append((directory, problem))
                continue
            for path, reason in damaged:
                LOG.warning("checkpoint %s cannot be used (%s); going back to %s", path, reason, directory)
            self._move_damaged([path for path, _ in damaged])
            if self.completes:  # a kill between publishing a checkpoint and deleting an old one leaves both
                self._with_storage_error(int(restored.state.step), self._delete_old)
            return restored
        if damaged:
            newest, reason = damaged[0]
            raise ConfigError(
                f"checkpoints: got {len(damaged)} in {self.root}, none of which can be read (newest {newest.name}: "
                f"{reason}), expected one to resume from; put back a copy, or use another --workdir"
            )
        if (self.root / "last").is_dir():  # created with the first checkpoint, and never empty afterwards
            raise ConfigError(
                f"checkpoints: got none in {self.root}, where there was one, expected one to resume from; put back a "
                f"copy, or delete {self.root} to start again from nothing"
            )
        return None

    def average(self, count: int, of: str = "last", shardings: PyTree | None = None) -> PyTree:
        """The mean of the parameters of the `count` newest ("last") or best checkpoints, or of all if they are fewer.

        In runs with a moving average it is the mean of that.

        Args:
          shardings: of the parameters; None: the default device.
        """
        self.wait()
        ranked = directories.list_ranked(self.workdir, of, self.config)
        return weights.average_weights(ranked, count, shardings).params

    def newest(self) -> Path | None:
        """The newest checkpoint on disk, or None."""
        return next(iter(directories.list_checkpoints(self.root / "last")), None)

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          StorageError: a save failed.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        """Raises the StorageError of a save that failed since the last call. Cheap enough for every step."""
        error, self.error = self.error, None
        if error is not None:
            raise self._storage_error(self.saving, error) from error

    def close(self) -> None:
        """Waits, and stops the background threads.

        Raises:
          StorageError: a save failed.
        """
        try:
            self.wait()
        finally:
            if "writer" in vars(self):
                self.writer.close()
            ORBAX_LOG.removeFilter(self.filter)

    # Saving.

    def _start_save(self, state: TrainState, step: int, about: dict[str, Any], data: dict[str, Any]) -> None:
        """Copies the arrays off the device, then writes everything in a background thread."""
        import orbax.checkpoint as ocp

        staging = self.root / "saving" / str(step)
        if self.completes:
            self._with_storage_error(step, lambda: _make_empty(staging))
        arrays = ocp.args.PyTreeSave(to_nested_dict(jax.tree.map(unwrap_key, state)))
        self._with_storage_error(step, lambda: self.writer.save(staging / "state", args=arrays))
        self.saving = step
        arguments = (staging, step, about, data)
        self.thread = threading.Thread(target=self._finish_save, args=arguments, name="checkpoint")
        self.thread.start()

    def _finish_save(self, staging: Path, step: int, about: dict[str, Any], data: dict[str, Any]) -> None:
        """In the background: waits for the arrays of all processes; then the first process completes the checkpoint."""
        try:
            if self.disks is not None:
                self.disks.complete(staging, lambda: self._write_parts(staging, about, data))
                self.disks.publish(lambda: self._complete(staging, step, about["values"]))
            else:
                self._write_parts(staging, about, data)
                if self.completes:
                    manifest.write(staging)
                    self._complete(staging, step, about["values"])
        except BaseException as error:
            self.error = error

    def _write_parts(self, staging: Path, about: dict[str, Any], data: dict[str, Any]) -> None:
        """Waits for the arrays, and writes `about` and `data` beside them."""
        self.writer.wait_until_finished()
        for name, content in (("about", about), ("data", data)) if self.completes else ():
            (staging / name).mkdir()
            (staging / name / "metadata").write_text(json.dumps(content), encoding="utf-8")

    def _complete(self, staging: Path, step: int, values: dict[str, float]) -> None:
        """Gives a checkpoint with a manifest its name, copies it if it ranks among the best, and deletes old ones."""
        self._publish(staging, self.root / "last" / staging.name)
        self._update_best(step, values)
        self._delete_old()

    def _publish(self, staging: Path, target: Path) -> None:
        """Renames a complete checkpoint to its final name.

        One of the same step is moved to `REPLACED` first and deleted afterwards. If the process is killed between the
        two renames, readers look there, and `_restore_replaced` moves it back.
        """
        target.parent.mkdir(exist_ok=True)
        replaced = self.root / directories.REPLACED / target.parent.name / target.name
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            replaced.parent.mkdir(parents=True, exist_ok=True)
            target.rename(replaced)
        staging.rename(target)
        manifest.sync_directory(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _update_best(self, step: int, values: dict[str, float]) -> None:
        """Copies `last/<step>` to the best checkpoints if it ranks there, and deletes those beyond `keep_best`.

        It is a copy instead of a link, so damage to one leaves the other intact. Among equals the earlier one stays.
        """
        if not self.config.keep_best:
            return
        best, score = self.root / "best", directories.ranking_score({"values": values}, self.config)
        others = [directories.read_about(best / str(other)) for other in directories.list_steps(best) if other != step]
        better = sum(directories.ranking_score(other, self.config) >= score for other in others)
        if score > -math.inf and better < self.config.keep_best and not (best / str(step)).exists():
            staging = self.root / "saving" / f"best-{step}"
            shutil.copytree(self.root / "last" / str(step), staging)
            if self.disks is None:  # else the bucket is what has to be durable
                manifest.write(staging)  # and makes the copied files durable
            self._publish(staging, best / str(step))
        self._delete(directories.list_ranked(self.workdir, "best", self.config)[self.config.keep_best :])

    def _delete_old(self) -> None:
        """Deletes the checkpoints that are older than the newest `keep_last`."""
        self._delete(directories.list_checkpoints(self.root / "last")[self.config.keep_last :])

    def _delete(self, checkpoints: list[Path]) -> None:
        """Moves each checkpoint out of sight before deleting it, so that no partly deleted one is ever listed."""
        for directory in checkpoints:
            hidden = self.root / "saving" / f"deleted-{directory.parent.name}-{directory.name}"
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.parent.mkdir(exist_ok=True)
            directory.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _with_storage_error(self, step: int, act: Callable[[], object]) -> None:
        """Calls `act`; any error becomes the StorageError of the checkpoint of `step`."""
        try:
            act()
        except Exception as error:
            raise self._storage_error(step, error) from error

    def _storage_error(self, step: int, error: BaseException) -> StorageError:
        newest = self.newest()
        remaining = f"the newest complete one is {newest}" if newest else "there is no earlier one"
        return StorageError(
            f"checkpoint of step {step} in {self.root}: could not be written ({directories.root_cause(error)}); "
            f"{remaining}; check the disk, then run the same command"
        )

    def _run_config(self) -> Any:
        path = self.workdir / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    # Restoring.

    def _remove_leftovers(self) -> None:
        """Removes what a killed process left behind, in this version's layout and in those before."""
        self._restore_replaced()
        shutil.rmtree(self.root / "saving", ignore_errors=True)
        for part in ("last", "best"):
            for leftover in (self.root / part).glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Moves back a checkpoint that was being replaced by another of its step when the process was killed."""
        for replaced in (self.root / directories.REPLACED).glob("*/*"):
            target = self.root / replaced.parent.name / replaced.name
            if not target.exists():
                replaced.rename(target)
                manifest.sync_directory(target.parent)

    def _candidates(self) -> list[Path]:
        """All checkpoints as the first process sees them, newest first; of one step, `last` before `best`."""
        names = [(step, part) for part in ("last", "best") for step in directories.list_steps(self.root / part)]
        names.sort(key=lambda name: (name[0], name[1] == "last"), reverse=True)
        return [self.root / part / str(step) for step, part in json.loads(allgather_text(json.dumps(names))[0])]

    def _try_restore(self, directory: Path, target: TrainState) -> tuple[RestoredCheckpoint | None, str]:
        """The checkpoint, or None and the problem. The answer is the same on every process."""
        restored, problem, failure = None, "", ""
        try:
            if self.disks is not None:
                manifest.check_files(directory, self.disks.fetch_needed(directory, target))
            else:
                reading.verify(directory, content=jax.process_index() == 0)
        except Damaged as error:
            problem = str(error)
        except StorageError as error:
            failure = str(error)
        failure = next(filter(None, allgather_text(failure)), "")
        if failure:
            raise StorageError(failure)
        problem = next(filter(None, allgather_text(problem)), "")
        if problem:
            return None, problem
        try:
            about = directories.read_json(directory / "about")
            restored = RestoredCheckpoint(reading.read_state(directory, target), reading.read_data(directory), about)
            if about["format"] == 1:
                LOG.warning("checkpoint %s has no checksums: an earlier version wrote it", directory)
        except (Damaged, KeyError) as error:
            problem = str(error)
        problem = next(filter(None, allgather_text(problem)), "")
        return (None, problem) if problem else (restored, "")

    def _move_damaged(self, damaged: list[Path]) -> None:
        """Moves checkpoints to `checkpoints/damaged/`, so that their steps can be saved again. Deletes nothing."""
        if damaged and self.completes:
            for directory in damaged:
                if self.disks is not None:
                    self.disks.fetch_all(directory)  # what is kept is the whole
                target = self.root / "damaged" / f"{directory.parent.name}-{directory.name}"
                target.parent.mkdir(exist_ok=True)
                while target.exists():
                    target = target.with_name(target.name + "-again")
                directory.rename(target)
        if damaged and jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxformer: damaged checkpoints moved")


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _array_handlers(primary_host: int | None = 0) -> ocp.type_handlers.TypeHandlerRegistry:
    """Orbax's handlers for the leaves of a state, which are all arrays.

    Args:
      primary_host: index of the process that writes what describes the arrays; None: all do.
    """
    import orbax.checkpoint as ocp

    handler = ocp.type_handlers.ArrayHandler(
        primary_host=primary_host, min_slice_bytes_for_replica_parallel=MIN_REPLICA_PARALLEL_BYTES
    )
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
