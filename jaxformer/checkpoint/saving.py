"""Writing checkpoints so that none is ever half there, and finding the newest whole one again."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxformer.checkpoint import manifest, reading
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.trees import every_process, is_key, key_to_data, plain
from jaxformer.config import CheckpointConfig, ConfigError, StorageError
from jaxformer.types import PyTree, TrainState

LOG = logging.getLogger("jaxformer")
ORBAX_LOG = logging.getLogger("absl")
# Of an array that several devices hold whole, each may write a part, for which Orbax compiles a program a shape. With
# parts of fewer bytes than this that costs more than it saves: 4 seconds for 48 small arrays on 8 devices.
SHARED = 1 << 20


class Saved(NamedTuple):
    """What a checkpoint gives back: the state, where this process's batches stood, and what else was said of it
    (`step`, `values`, `progress`)."""

    state: TrainState
    data: dict[str, Any]
    about: dict[str, Any]


class Checkpoints:
    """The checkpoints that a training run writes, and resumes from. One run at a time has a workdir's.

    A save goes to `checkpoints/saving/<step>`: arrays first, then what is said of them, then the manifest. Only then it
    is renamed to `last/<step>`, copied to `best/<step>` if it ranks there, and what is no longer kept is deleted.
    """

    def __init__(self, workdir: str | Path, config: CheckpointConfig) -> None:
        self.workdir, self.config = Path(workdir).absolute(), config
        self.root = self.workdir / "checkpoints"
        self.writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=_arrays()))
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.saving = -1
        # Orbax's threads print the errors that it then raises, with pages of frames before our line. The filter is this
        # object's, and goes with `close`: importing this package changes nobody's logs.
        self.filter = lambda record: not (record.exc_info and "orbax" in record.pathname)
        ORBAX_LOG.addFilter(self.filter)
        if jax.process_index() == 0:
            self._clean()

    def save(
        self,
        state: TrainState,
        data_state: dict,
        values: dict[str, float],
        progress: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves in the background: when this returns, `state` may be changed or donated, but is not yet on disk.

        Args:
          data_state: where this process's batches stand, as JSON values.
          values: measures of exactly this state; empty where it was not evaluated. One that ranks among the best
            `keep_best` by `config.metric` is kept there too. A metric that is not a finite number never ranks.
          progress: what else the run wants back, as JSON values.
          force: replaces a checkpoint of the same step, which is otherwise left as it is.

        Returns:
          Whether anything is being saved.

        Raises:
          ConfigError: `values` lacks the metric that the best are chosen by (the state is saved for resuming first).
          StorageError: this save or the one before could not be written. The checkpoints before are as they were.
        """
        self.wait()
        step = int(state.step)
        values = {name: float(value) for name, value in values.items()}
        data = [json.loads(text) for text in every_process(json.dumps(data_state))]
        about = {"format": manifest.FORMAT, "step": step, "values": values, "progress": progress or {}}
        about["config"] = self._config()
        if is_key(state.key):
            about["key"] = str(jax.random.key_impl(state.key))
        there = every_process(str(step in reading.steps(self.root / "last")))[0] == "True"
        if not there or force:
            self._begin(state, about, {"processes": data})
        elif jax.process_index() == 0:  # the copy among the best may be missing, where the run was killed before it
            self._storing(step, lambda: self._keep_best(step, about["values"]))
        if self.config.keep_best and values and self.config.metric not in values:
            self.wait()
            raise ConfigError(
                f"config.checkpoint.metric: got {self.config.metric!r}, expected a measure of the validation split "
                f"({', '.join(sorted(values))}); choose one of these, or set checkpoint.keep_best to 0"
            )
        return not there or force

    def restore(self, target: TrainState) -> Saved | None:
        """The newest state that is whole; None where nothing was ever saved.

        Checkpoints that are not what was written are set aside in `checkpoints/damaged/`, with a warning that names
        each. All processes use the same one: the first reads all of it to check it, each reads its own part.

        Args:
          target: abstract state: shapes, dtypes and shardings, of any mesh.

        Raises:
          ConfigError: none of the checkpoints can be read, or they hold another model, or a newer version wrote them.
        """
        self.wait()
        damaged: list[tuple[Path, str]] = []
        for directory in self._found():
            saved, problem = self._attempt(directory, target)
            if saved is None:
                damaged.append((directory, problem))
                continue
            for broken, reason in damaged:
                LOG.warning("checkpoint %s cannot be used (%s); going back to %s", broken, reason, directory)
            self._set_aside([broken for broken, _ in damaged])
            if jax.process_index() == 0:  # a kill between naming a checkpoint and deleting an old one leaves both
                self._storing(int(saved.state.step), self._forget)
            return saved
        if damaged:
            newest, reason = damaged[0]
            raise ConfigError(
                f"checkpoints: got {len(damaged)} in {self.root}, none of which can be read (newest {newest.name}: "
                f"{reason}), expected one to resume from; put back a copy, or use another --workdir"
            )
        if (self.root / "last").is_dir():  # made with the first checkpoint, which always has a successor
            raise ConfigError(
                f"checkpoints: got none in {self.root}, where there was one, expected one to resume from; put back a "
                f"copy, or delete {self.root} to start again from nothing"
            )
        return None

    def average(self, n: int, of: str = "last", layout: PyTree | None = None) -> PyTree:
        """The mean of the parameters of the `n` newest ("last") or best checkpoints, read one at a time.

        Of runs with a weight average, that is averaged. Fewer than `n` are averaged where there are no more.

        Args:
          layout: shardings of the parameters; None: the default device.
        """
        self.wait()
        return reading.mean(reading.ranked(self.workdir, of, self.config), n, layout).params

    def newest(self) -> Path | None:
        """The newest checkpoint on disk."""
        return next(iter(reading.directories(self.root / "last")), None)

    def wait(self) -> None:
        """Returns when all is on disk. Raises the StorageError of a save that failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        """Raises the StorageError of a save that failed since the last call. Cheap: call it every step."""
        error, self.error = self.error, None
        if error is not None:
            raise self._failed(self.saving, error) from error

    def close(self) -> None:
        """Waits and stops the background threads. Raises the StorageError of a save that failed."""
        try:
            self.wait()
        finally:
            self.writer.close()
            ORBAX_LOG.removeFilter(self.filter)

    # Saving.

    def _begin(self, state: TrainState, about: dict[str, Any], data: dict[str, Any]) -> None:
        step = about["step"]
        place = self.root / "saving" / str(step)
        if jax.process_index() == 0:
            self._storing(step, lambda: (shutil.rmtree(place, ignore_errors=True), place.mkdir(parents=True)))
        arrays = ocp.args.PyTreeSave(plain(jax.tree.map(key_to_data, state)))
        self._storing(step, lambda: self.writer.save(place / "state", args=arrays))
        self.saving = step
        self.thread = threading.Thread(target=self._finish, args=(place, about, data), name="checkpoint")
        self.thread.start()

    def _finish(self, place: Path, about: dict[str, Any], data: dict[str, Any]) -> None:
        """In the background: once every process has written its arrays, the first makes them a checkpoint."""
        try:
            self.writer.wait_until_finished()
            if jax.process_index() == 0:
                for name, content in (("about", about), ("data", data)):
                    (place / name).mkdir()
                    (place / name / "metadata").write_text(json.dumps(content), encoding="utf-8")
                manifest.write(place)
                self._publish(place, self.root / "last" / place.name)
                self._keep_best(about["step"], about["values"])
                self._forget()
        except BaseException as error:
            self.error = error

    def _publish(self, place: Path, target: Path) -> None:
        """Gives a whole checkpoint its name. One of the same step gives way to it, and is deleted only afterwards: a
        process killed between the two renames leaves it where readers look for it, and `_put_back`."""
        target.parent.mkdir(exist_ok=True)
        replaced = self.root / reading.REPLACED / target.parent.name / target.name
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            replaced.parent.mkdir(parents=True, exist_ok=True)
            target.rename(replaced)
        place.rename(target)
        manifest.sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _keep_best(self, step: int, values: dict[str, float]) -> None:
        """Copies `last/<step>` to the best if it ranks there, and deletes who is no longer among them.

        A copy is no link: damage to one is not damage to the other. Of equals, the earlier one stays.
        """
        if not self.config.keep_best:
            return
        best, mine = self.root / "best", reading.quality({"values": values}, self.config)
        others = [each for each in reading.steps(best) if each != step]
        better = sum(reading.quality(reading.about(best / str(other)), self.config) >= mine for other in others)
        if mine > -math.inf and better < self.config.keep_best and not (best / str(step)).exists():
            place = self.root / "saving" / f"best-{step}"
            shutil.copytree(self.root / "last" / str(step), place)
            manifest.write(place)  # syncs
            self._publish(place, best / str(step))
        self._delete(reading.ranked(self.workdir, "best", self.config)[self.config.keep_best :])

    def _forget(self) -> None:
        """Deletes what newer checkpoints have taken the place of."""
        self._delete(reading.directories(self.root / "last")[self.config.keep_last :])

    def _delete(self, directories: list[Path]) -> None:
        """Out of sight first: a checkpoint of which a part is deleted must not be found."""
        for directory in directories:
            gone = self.root / "saving" / f"deleted-{directory.parent.name}-{directory.name}"
            shutil.rmtree(gone, ignore_errors=True)
            gone.parent.mkdir(exist_ok=True)
            directory.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _storing(self, step: int, act: Any) -> None:
        try:
            act()
        except Exception as error:
            raise self._failed(step, error) from error

    def _failed(self, step: int, error: BaseException) -> StorageError:
        newest = self.newest()
        kept = f"the newest whole one is {newest}" if newest else "there is no earlier one"
        return StorageError(
            f"checkpoint of step {step} in {self.root}: could not be written ({reading.reason(error)}); {kept}; "
            "see to the disk, then run the same command"
        )

    def _config(self) -> Any:
        path = self.workdir / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    # Restoring.

    def _clean(self) -> None:
        """Removes what a killed process left, of this version and of those before."""
        self._put_back()
        shutil.rmtree(self.root / "saving", ignore_errors=True)
        for part in ("last", "best"):
            for left in (self.root / part).glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)

    def _put_back(self) -> None:
        """Names a checkpoint again that was giving way to another of its step when the process was killed."""
        for replaced in (self.root / reading.REPLACED).glob("*/*"):
            target = self.root / replaced.parent.name / replaced.name
            if not target.exists():
                replaced.rename(target)
                manifest.sync(target.parent)

    def _found(self) -> list[Path]:
        """Every checkpoint, newest first; of one step the one kept for resuming first. As the first process sees it."""
        names = [(step, part) for part in ("last", "best") for step in reading.steps(self.root / part)]
        names.sort(key=lambda each: (each[0], each[1] == "last"), reverse=True)
        return [self.root / part / str(step) for step, part in json.loads(every_process(json.dumps(names))[0])]

    def _attempt(self, directory: Path, target: TrainState) -> tuple[Saved | None, str]:
        """The checkpoint, or why not; the same answer on every process."""
        saved, problem = None, ""
        try:
            reading.verify(directory, content=jax.process_index() == 0)
        except Damaged as error:
            problem = str(error)
        problem = next(filter(None, every_process(problem)), "")
        if problem:
            return None, problem
        try:
            about = reading.read_json(directory / "about")
            saved = Saved(reading.read_state(directory, target), reading.read_data(directory), about)
            if about["format"] == 1:
                LOG.warning("checkpoint %s has no checksums: an earlier version wrote it", directory)
        except (Damaged, KeyError) as error:
            problem = str(error)
        problem = next(filter(None, every_process(problem)), "")
        return (None, problem) if problem else (saved, "")

    def _set_aside(self, broken: list[Path]) -> None:
        """Moves checkpoints out of the way, so that their steps can be saved again; nothing is deleted."""
        if broken and jax.process_index() == 0:
            for directory in broken:
                target = self.root / "damaged" / f"{directory.parent.name}-{directory.name}"
                target.parent.mkdir(exist_ok=True)
                while target.exists():
                    target = target.with_name(target.name + "-again")
                directory.rename(target)
        if broken and jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxformer: damaged checkpoints set aside")


def _arrays() -> ocp.type_handlers.TypeHandlerRegistry:
    """How the leaves of a state are written: all are arrays."""
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED)
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
