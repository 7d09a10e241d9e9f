"""Checkpoints: a training state, where its data stood, and what it measured. The only module that knows Orbax.

    workdir/checkpoints/last/<step>/    the newest `keep_last`, to resume from
    workdir/checkpoints/best/<step>/    the best `keep_best` by `metric`
    workdir/checkpoints/damaged/        what could not be read and was set aside

Each `<step>` is whole by itself: `state/` (arrays: step, params, opt_state, key, variables), `data/` (JSON: the state
of every process's batches) and `about/` (JSON: step, values, key implementation, resolved config). A step becomes
visible only when all of it is on disk, so a killed process leaves the earlier ones as they were.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import linen as nn
from flax import traverse_util
from jax.experimental import multihost_utils

from jaxformer import overrides
from jaxformer.config import CheckpointConfig, ConfigError
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.train.optim import path_of
from jaxformer.types import PyTree, TrainState

FORMAT = 1
LOG = logging.getLogger("jaxformer")


class Weights(NamedTuple):
    """What evaluating and decoding need of a state: parameters (the weight average, if the run keeps one) and the
    other collections."""

    params: PyTree
    variables: dict[str, PyTree]


class Damaged(Exception):
    """A checkpoint that cannot be read. The message is one line."""


class Checkpoints:
    """The checkpoints that a training run writes, and resumes from."""

    def __init__(self, workdir: str | Path, config: CheckpointConfig) -> None:
        self.workdir, self.config = Path(workdir).absolute(), config
        self.managers = {"last": self._manager("last", ocp.checkpoint_managers.LatestN(config.keep_last))}
        if config.keep_best:
            self.keep_best = KeepBest(self._directory("best"), config)
            self.managers["best"] = self._manager("best", self.keep_best)

    def save(self, state: TrainState, data_state: dict, values: dict[str, float], force: bool = False) -> bool:
        """Saves in the background: when this returns, `state` may be changed or donated, but is not yet on disk.

        Args:
          data_state: where this process's batches stand, as JSON values.
          values: measures of exactly this state; empty where it was not evaluated. One that ranks among the best
            `keep_best` by `config.metric` is kept there too. A metric that is not a finite number never ranks.
          force: replaces a checkpoint of the same step, which is otherwise left as it is.

        Returns:
          Whether anything is being saved.

        Raises:
          ConfigError: `values` lacks the metric that the best are chosen by (the state is saved for resuming first).
        """
        step = int(state.step)
        values = {name: float(value) for name, value in values.items()}
        about = {"format": FORMAT, "step": step, "values": values, "config": self._config()}
        if is_key(state.key):
            about["key"] = str(jax.random.key_impl(state.key))
        data = [json.loads(text) for text in every_process(json.dumps(data_state))]
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(plain(jax.tree.map(key_to_data, state))),
            data=ocp.args.JsonSave({"processes": data}),
            about=ocp.args.JsonSave(about),
        )
        saved = self._put("last", step, items, force)
        if "best" in self.managers and values:
            if self.config.metric not in values:
                raise ConfigError(
                    f"config.checkpoint.metric: got {self.config.metric!r}, expected a measure of the validation split "
                    f"({', '.join(sorted(values))}); choose one of these, or set checkpoint.keep_best to 0"
                )
            if self.keep_best.admits(step, values, self.managers["best"].all_steps()):
                saved |= self._put("best", step, items, force)
        return saved

    def restore(self, target: TrainState) -> tuple[TrainState, dict] | None:
        """The newest state that can be read, and this process's data state; None where nothing was ever saved.

        Checkpoints that cannot be read are set aside in `checkpoints/damaged/`, with a warning that names each.

        Args:
          target: abstract state: shapes, dtypes and shardings, of any mesh.

        Raises:
          ConfigError: none of the checkpoints can be read, or they hold another model.
        """
        self.wait()
        found = [(step, part) for part in self.managers for step in steps(self._directory(part))]
        damaged: list[tuple[Path, Damaged]] = []
        for step, part in sorted(found, key=lambda each: (each[0], each[1] == "last"), reverse=True):
            directory = self._directory(part) / str(step)
            try:
                restored = read_state(directory, target), read_data(directory)
            except Damaged as error:
                damaged.append((directory, error))
                continue
            for broken, error in damaged:
                LOG.warning("checkpoint %s cannot be read (%s); going back to %s", broken, error, directory)
            self._set_aside([broken for broken, _ in damaged])
            return restored
        if damaged:
            newest, error = damaged[0]
            raise ConfigError(
                f"checkpoints: got {len(damaged)} in {newest.parents[1]}, none of which can be read (newest "
                f"{newest.name}: {error}), expected one to resume from; put back a copy, or use another --workdir"
            )
        return None

    def average(self, n: int, of: str = "last", layout: PyTree | None = None) -> PyTree:
        """The mean of the parameters of the `n` newest ("last") or best checkpoints, read one at a time.

        Of runs with a weight average, that is averaged. Fewer than `n` are averaged where there are no more.

        Args:
          layout: shardings of the parameters; None: the default device.
        """
        self.wait()
        return mean(ranked(self.workdir, of, self.config), n, layout).params

    def wait(self) -> None:
        """Returns when all is on disk. Raises the error of a save that failed."""
        for manager in self.managers.values():
            manager.wait_until_finished()
        self.check()

    def check(self) -> None:
        """Raises the error of a save that failed since the last call. Cheap: call it every step."""
        for manager in self.managers.values():
            manager.check_for_errors()

    def close(self) -> None:
        """Waits and stops the background threads. Raises the error of a save that failed."""
        try:
            self.wait()
        finally:
            for manager in self.managers.values():
                manager.close()

    def _directory(self, part: str) -> Path:
        return self.workdir / "checkpoints" / part

    def _manager(self, part: str, policy: ocp.checkpoint_managers.PreservationPolicy) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=part),
        )
        return ocp.CheckpointManager(self._directory(part), options=options)

    def _config(self) -> Any:
        path = self.workdir / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _put(self, part: str, step: int, items: ocp.args.Composite, force: bool) -> bool:
        manager = self.managers[part]
        if step in manager.all_steps():
            if not force:
                return False
            manager.wait_until_finished()
            manager.delete(step)
        return manager.save(step, args=items, force=True)

    def _set_aside(self, broken: list[Path]) -> None:
        """Moves checkpoints out of the way, so that their steps can be saved again; nothing is deleted."""
        if not broken:
            return
        if jax.process_index() == 0:
            for directory in broken:
                target = self._directory("damaged") / f"{directory.parent.name}-{directory.name}"
                target.parent.mkdir(exist_ok=True)
                while target.exists():
                    target = target.with_name(target.name + "-again")
                directory.rename(target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxformer: damaged checkpoints set aside")
        for manager in self.managers.values():
            manager.reload()


class KeepBest(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the best checkpoints by what they say of themselves, so that it is right after reopening too.

    (Orbax's own `BestN` needs the measures in a file of its own, and does not open if that is damaged.)
    """

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory, self.config = directory, config
        self.scores: dict[int, float] = {}  # also of what is still being written

    def score(self, step: int) -> float:
        """More is better, whatever the mode."""
        if step not in self.scores:
            self.scores[step] = quality(about(self.directory / str(step)), self.config)
        return self.scores[step]

    def admits(self, step: int, values: dict[str, float], held: Sequence[int]) -> bool:
        """Whether a state with these `values` ranks among the best, beside the steps that are `held` already."""
        self.scores[step] = mine = quality({"values": values}, self.config)
        better = sum(self.score(other) >= mine for other in held if other != step)
        return mine > -math.inf and better < self.config.keep_best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of `checkpoints`, in the order of their steps, stay. Of equals, the earlier one does."""
        found = [each.step for each in checkpoints]
        kept = sorted(found, key=self.score, reverse=True)[: self.config.keep_best]
        return [step in kept for step in found]


# What is in a directory.


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, in no order."""
    if not directory.is_dir():
        return []
    found = (each for each in directory.iterdir() if each.name.isdecimal() and each.is_dir())
    return [int(each.name) for each in found if ocp.utils.is_checkpoint_finalized(each)]


def directories(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, newest first."""
    return [directory / str(step) for step in sorted(steps(directory), reverse=True)]


def about(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where that cannot be read."""
    try:
        return dict(_json(directory / "about"))
    except Damaged:
        return {}


def arrays(directory: Path) -> dict[tuple[str, ...], Any]:
    """Shape and dtype of every array in a checkpoint by its path (`params/...`), from its metadata: none is read.

    Raises:
      Damaged: the metadata cannot be read.
    """
    return _metadata(directory)


def quality(about: dict[str, Any], config: CheckpointConfig) -> float:
    """The metric, turned so that more is better; minus infinity where it is missing or not a finite number."""
    value = about.get("values", {}).get(config.metric, math.nan)
    return (-value if config.mode == "min" else value) if math.isfinite(value) else -math.inf


def ranked(workdir: Path, part: str, config: CheckpointConfig) -> list[Path]:
    """The checkpoints of one part: the newest first ("last"), or the best first ("best")."""
    found = directories(workdir / "checkpoints" / part)
    if part == "best":
        # Of equals the earlier one first, as they are kept.
        found.sort(key=lambda each: (-quality(about(each), config), int(each.name)))
    return found


# Reading.


def read_state(directory: Path, target: TrainState) -> TrainState:
    """The state in `directory`, laid out as the abstract `target` says.

    Raises:
      Damaged: files are missing or their content is not what was written.
      ConfigError: it is the state of a different model or optimizer.
    """
    wanted = plain(jax.tree.map(abstract_data, target))
    _compare(directory, _shapes(traverse_util.unflatten_dict(_metadata(directory))), _shapes(wanted))
    restore = ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
    values = traverse_util.flatten_dict(_arrays(directory, restore))
    key = _json(directory / "about").get("key")

    def pick(keys: tuple, leaf: Any) -> Any:
        value = values[path_of(keys)]
        return jax.random.wrap_key_data(value, impl=key) if is_key(leaf) else value

    return jax.tree_util.tree_map_with_path(pick, target)


def read_data(directory: Path) -> dict:
    """The data state of this process.

    Raises:
      ConfigError: another number of processes saved it, each with a state of its own.
    """
    states, count = _json(directory / "data").get("processes"), jax.process_count()
    if not states:
        raise Damaged("no data state in it")
    if len(states) != count and any(state != states[0] for state in states):
        raise ConfigError(
            f"checkpoint {directory}: got the data states of {len(states)} processes, expected {count}; resume with as "
            "many processes as saved it"
        )
    return states[jax.process_index()] if len(states) == count else states[0]


def read_weights(directory: Path, layout: PyTree | None = None) -> Weights:
    """Parameters and other collections in `directory`, without the optimizer's state.

    Args:
      layout: shardings of the parameters; None: everything stays on the host, as numpy arrays.
    """
    held = {path: each for path, each in _metadata(directory).items() if path[0] in ("params", "variables")}
    source = ("variables", "ema") if any(path[:2] == ("variables", "ema") for path in held) else ("params",)
    if source != ("params",):
        held = {path: each for path, each in held.items() if path[0] != "params"}
    places = {} if layout is None else traverse_util.flatten_dict(plain(layout))
    item, args = {}, {}
    for path, each in held.items():
        place = places.get(path[len(source) :]) if path[: len(source)] == source else None
        item[path] = jax.ShapeDtypeStruct(each.shape, each.dtype)
        args[path] = ocp.RestoreArgs(np.ndarray) if place is None else ocp.ArrayRestoreArgs(sharding=place)
    item, args = traverse_util.unflatten_dict(item), traverse_util.unflatten_dict(args)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
    tree = _arrays(directory, restore)
    variables = dict(tree.get("variables", {}))
    params = tree["params"] if source == ("params",) else variables.pop("ema")
    return Weights(params, variables)


def mean(found: Sequence[Path], limit: int, layout: PyTree | None = None) -> Weights:
    """The mean of the first `limit` weights that can be read, one in memory at a time beside the sum.

    Checkpoints that cannot be read are passed over with a warning.

    Raises:
      ConfigError: none can be read.
    """
    total, count, reason = None, 0, "there is none"
    for directory in found:
        try:
            weights = read_weights(directory, layout if limit == 1 else None)
        except Damaged as error:
            LOG.warning("checkpoint %s cannot be read (%s); left out", directory, error)
            reason = f"{directory.name}: {error}"
            continue
        total = weights if total is None else jax.tree.map(np.add, total, weights)
        count += 1
        if count == limit:
            break
    if total is None:
        where = found[0].parents[1] if found else "this run"
        raise ConfigError(f"checkpoints of {where}: got none that can be read ({reason}), expected at least one")
    if limit > 1:
        total = jax.tree.map(lambda x: (x / count).astype(x.dtype), total)
    # Without a layout the arrays are not committed to a device, so they go along with whatever mesh they meet.
    params = jax.tree.map(jnp.asarray, total.params) if layout is None else jax.device_put(total.params, layout)
    return Weights(params, jax.tree.map(jnp.asarray, total.variables))


def load(path: str | Path) -> Model:
    """The model of a run, ready to use.

    `config.checkpoint` says which weights: the mean of the last or best `average`; else the best checkpoint, or the
    newest where nothing was evaluated. The running average takes the place of the parameters in runs that keep one.

    Args:
      path: a workdir; or, to choose, its `checkpoints/best`, `checkpoints/last` or one checkpoint in them.

    Raises:
      ConfigError: there is no run at `path`, or nothing of it can be read, or it does not fit its config.
    """
    workdir, chosen = locate(Path(path).absolute())
    config = overrides.from_json((workdir / "config.json").read_text(encoding="utf-8"))
    keep, limit = config.checkpoint, 1
    last, best = (ranked(workdir, part, keep) for part in ("last", "best"))
    if chosen:
        found = {"last": last, "best": best}.get(chosen) or [workdir / "checkpoints" / chosen]
    elif keep.average:
        found, limit = (best if keep.average_of == "best" else last) or best + last, keep.average
    else:
        found = best + last
    module = build.build(config.model)
    params, variables = mean(found, limit)
    _compare(workdir, _shapes(params), _shapes(nn.meta.unbox(build.shapes(module))["params"]))
    return Model(module, params, variables, config, Tokenizers.load(workdir), config.task.classes or None)


def locate(path: Path) -> tuple[Path, str]:
    """The workdir that `path` is or lies in, and what of its `checkpoints` is meant ("": nothing in particular)."""
    remedy = "expected a workdir, its checkpoints/best or checkpoints/last, or one checkpoint in these; check the path"
    if not path.is_dir():
        raise ConfigError(f"{path}: got {'a file' if path.exists() else 'nothing there'}, {remedy}")
    above = [each for each in path.parents if path.relative_to(each).parts[0] == "checkpoints"]
    workdir = next((each for each in (path, *above) if (each / "config.json").is_file()), None)
    if workdir is None:
        raise ConfigError(f"{path}: got a directory without a config.json, {remedy}")
    if not any(steps(workdir / "checkpoints" / part) for part in ("last", "best")):
        raise ConfigError(f"{workdir}: got a config.json but no checkpoints, expected a trained run; train it first")
    chosen = path.relative_to(workdir).parts
    known = (), ("checkpoints",), ("checkpoints", "last"), ("checkpoints", "best")
    checkpoint = chosen[:2] in known[2:] and chosen[2:] in [(str(step),) for step in steps(path.parent)]
    if chosen not in known and not checkpoint:
        raise ConfigError(f"{path}: got a directory inside the run {workdir}, {remedy}")
    return workdir, "/".join(chosen[1:])


def _metadata(directory: Path) -> dict[tuple[str, ...], Any]:
    """Shape and dtype of every array, by path."""
    # From the handler, not a Checkpointer, which warns that the part has no metadata of a whole checkpoint.
    handler = ocp.PyTreeCheckpointHandler()
    return _reading(lambda: traverse_util.flatten_dict(handler.metadata(epath.Path(directory / "state")).tree))


def _arrays(directory: Path, args: ocp.args.PyTreeRestore) -> dict:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return _reading(lambda: reader.restore(directory / "state", args=args))


def _json(directory: Path) -> dict:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return _reading(lambda: dict(reader.restore(directory, args=ocp.args.JsonRestore())))


def _reading(read: Callable[[], dict]) -> dict:
    """What `read` returns, with whatever Orbax and its storage raise on damaged files turned into `Damaged`."""
    try:
        return read()
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        words = " ".join(str(cause).split())
        raise Damaged(f"{type(cause).__name__}: {words[:160]}{'...' if len(words) > 160 else ''}") from error


def _shapes(tree: PyTree) -> dict[tuple[str, ...], str]:
    """`float32[2, 8]` of every array of nested dicts, by path."""
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in traverse_util.flatten_dict(tree).items()}


def _compare(directory: Path, held: dict[tuple[str, ...], str], wanted: dict[tuple[str, ...], str]) -> None:
    """Raises a ConfigError at the first array that is not as wanted."""
    for path in sorted({*held, *wanted}):
        if held.get(path) != wanted.get(path):
            raise ConfigError(
                f"checkpoint {directory}: got {'/'.join(path)} {held.get(path, 'absent')}, expected "
                f"{wanted.get(path, 'no such array')}; it belongs to another config: use that, or another --workdir"
            )


# Trees as nested dicts of arrays, which stay readable whatever classes optax or flax hold them in.


def plain(tree: PyTree) -> dict[str, Any]:
    """Nested dicts with the leaves of `tree` at their paths; empty nodes vanish."""
    return traverse_util.unflatten_dict({path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)})


def is_key(leaf: Any) -> bool:
    """Whether an array, abstract or not, is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_to_data(leaf: Any) -> Any:
    """Typed keys as the integers behind them; anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def abstract_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that `leaf` of a target is stored as, with its sharding."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    stored = jax.eval_shape(jax.random.key_data, shape) if is_key(leaf) else shape
    place = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=place)


def every_process(text: str) -> list[str]:
    """`text` of every process, in their order, known to all of them."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray(mine.size)).reshape(-1)
    padded = np.pad(mine, (0, int(lengths.max()) - mine.size))
    return [
        bytes(row[:size]).decode() for row, size in zip(multihost_utils.process_allgather(padded), lengths, strict=True)
    ]
