"""What is in a checkpoint: whether it is whole, its state, its weights, the model that it belongs to."""

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

from jaxformer import overrides
from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.trees import abstract_data, is_key, plain
from jaxformer.config import CheckpointConfig, Config, ConfigError
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.train.optim import path_of
from jaxformer.types import PyTree, TrainState

LOG = logging.getLogger("jaxformer")

REPLACED = Path("saving", "replaced")
"""Folder in `checkpoints/` of those that give way to another of their step: `saving/replaced/last/400`."""


class Weights(NamedTuple):
    """What evaluating and decoding need of a state: parameters (the weight average, if the run keeps one) and the
    other collections."""

    params: PyTree
    variables: dict[str, PyTree]


# What is in a directory.


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory` (`checkpoints/last` or `best`), in no order."""
    found = (each for folder in (directory, _replaced(directory)) if folder.is_dir() for each in folder.iterdir())
    return list({int(each.name) for each in found if each.name.isdecimal() and each.is_dir()})


def directories(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory` (`checkpoints/last` or `best`), newest first."""
    return [of_step(directory, step) for step in sorted(steps(directory), reverse=True)]


def of_step(directory: Path, step: int) -> Path:
    """The checkpoint of `step` in `directory` (`checkpoints/last` or `best`), whether or not it is there.

    Where a process was killed while it replaced one by another of its step, that is the one that gave way.
    """
    place, replaced = directory / str(step), _replaced(directory) / str(step)
    return replaced if replaced.is_dir() and not place.is_dir() else place


def _replaced(directory: Path) -> Path:
    return directory.parent / REPLACED / directory.name


def about(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where that cannot be read."""
    try:
        return read_json(directory / "about")
    except Damaged:
        return {}


def verify(directory: Path, content: bool = True) -> None:
    """Checks a checkpoint against its manifest. Those of format 1 have none, and are taken as they are.

    Args:
      content: reads every file, not only the manifest.

    Raises:
      Damaged: it is not what was written.
      ConfigError: a newer version wrote it.
    """
    files = manifest.listed(directory)
    if files is None:
        if read_json(directory / "about").get("format") != 1:
            raise Damaged(f"{manifest.NAME} is missing")
    elif content:
        manifest.compare(directory, files)


def arrays(directory: Path) -> dict[tuple[str, ...], Any]:
    """Shape and dtype of every array in a checkpoint by its path (`params/...`), from its metadata: none is read.

    Raises:
      Damaged: the metadata cannot be read.
    """
    return _metadata(directory)


def quality(about: dict[str, Any], config: CheckpointConfig) -> float:
    """The metric, turned so that more is better; minus infinity where it is missing or not a finite number."""
    values = about.get("values")
    value = values.get(config.metric) if isinstance(values, dict) else None
    if not isinstance(value, float) or not math.isfinite(value):
        return -math.inf
    return -value if config.mode == "min" else value


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
      Damaged: files are missing or unreadable. Whether they are what was written, `verify` says.
      ConfigError: it is the state of a different model or optimizer.
    """
    wanted = plain(jax.tree.map(abstract_data, target))
    _compare(directory, _shapes(traverse_util.unflatten_dict(_metadata(directory))), _shapes(wanted))
    restore = ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
    values = traverse_util.flatten_dict(_arrays(directory, restore))
    key = read_json(directory / "about").get("key")

    def pick(keys: tuple, leaf: Any) -> Any:
        value = values[path_of(keys)]
        return jax.random.wrap_key_data(value, impl=key) if is_key(leaf) else value

    return jax.tree_util.tree_map_with_path(pick, target)


def read_data(directory: Path) -> dict:
    """The data state of this process.

    Raises:
      ConfigError: another number of processes saved it, each with a state of its own.
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


class Used(NamedTuple):
    """Which checkpoints a model's weights are of.

    Attributes:
      kind: "best", "last", or "step" where one was asked for by its number.
      steps: theirs; of several the weights are the mean.
      metric, value: what the best are chosen by, and what it was; None unless `kind` is "best".
      average: whether the running average of the weights (train.ema) took their place.
    """

    kind: str
    steps: tuple[int, ...]
    metric: str | None
    value: float | None
    average: bool

    def sentence(self) -> str:
        """For people: "best by loss (1.234), step 400"."""
        numbers = ", ".join(f"{step:,}" for step in self.steps)
        value = "" if self.value is None else f" ({self.value:.4g})"
        which = {"best": f"best by {self.metric}{value}", "last": "last", "step": "as chosen"}[self.kind]
        steps = f"step {numbers}" if len(self.steps) == 1 else f"mean of the steps {numbers}"
        return f"{which}, {steps}" + (", running average of the weights (train.ema)" if self.average else "")


def mean(found: Sequence[Path], limit: int, layout: PyTree | None = None) -> Weights:
    """The mean of the first `limit` weights that can be read, one in memory at a time beside the sum.

    Checkpoints that cannot be read are passed over with a warning.

    Raises:
      ConfigError: none can be read.
    """
    return _mean(found, limit, layout)[0]


def _mean(found: Sequence[Path], limit: int, layout: PyTree | None = None) -> tuple[Weights, list[Path]]:
    """The mean, and the checkpoints that were read for it."""
    total, used, reason = None, [], "there is none"
    for directory in found:
        try:
            verify(directory)
            weights = read_weights(directory, layout if limit == 1 else None)
        except Damaged as error:
            LOG.warning("checkpoint %s cannot be read (%s); left out", directory, error)
            reason = f"{directory.name}: {error}"
            continue
        total = weights if total is None else jax.tree.map(np.add, total, weights)
        used.append(directory)
        if len(used) == limit:
            break
    if total is None:
        where = found[0].parents[1] if found else "this run"
        raise ConfigError(f"checkpoints of {where}: got none that can be read ({reason}), expected at least one")
    if limit > 1:
        total = jax.tree.map(lambda x: (x / len(used)).astype(x.dtype), total)
    # Without a layout the arrays are not committed to a device, so they go along with whatever mesh they meet.
    params = jax.tree.map(jnp.asarray, total.params) if layout is None else jax.device_put(total.params, layout)
    return Weights(params, jax.tree.map(jnp.asarray, total.variables)), used


def load(path: str | Path, which: str = "") -> Model:
    """The model of a run, ready to use. Its `weights` say which they are.

    `config.checkpoint` says which weights: the mean of the last or best `average`; else the best checkpoint, or the
    newest where nothing was evaluated. The running average takes the place of the parameters in runs that keep one.

    Args:
      path: a workdir; or, to choose, its `checkpoints/best`, `checkpoints/last` or one checkpoint in them.
      which: chooses too: "best", "last" or the number of a step; "": as `path` and the config say.

    Raises:
      ConfigError: there is no run at `path`, or nothing of it can be read, or it does not fit its config, or it has no
        such checkpoint.
    """
    workdir, chosen = locate(Path(path).absolute())
    if which and chosen:
        raise ConfigError(f"--checkpoint: got {which!a} with {path}, which names a checkpoint; give one of them")
    chosen = _named(workdir, which) if which else chosen
    config = overrides.read(workdir)
    keep, limit = config.checkpoint, 1
    last, best = (ranked(workdir, part, keep) for part in ("last", "best"))
    if chosen:
        part, _, step = chosen.partition("/")
        found = {"last": last, "best": best}[part]
        found = [of_step(workdir / "checkpoints" / part, int(step))] if step else found
    elif keep.average:
        found, limit = (best if keep.average_of == "best" else last) or best + last, keep.average
    else:
        found = best + last
    module = build.build(config.model)
    (params, variables), read = _mean(found, limit)
    _compare(workdir, _shapes(params), _shapes(nn.meta.unbox(build.shapes(module))["params"]))
    used = _used(read, config, numbered="/" in chosen)
    return Model(module, params, variables, config, Tokenizers.load(workdir), config.task.classes or None, used)


def _named(workdir: Path, which: str) -> str:
    """The part of a run's `checkpoints` that `which` names: "best", "last", "last/400".

    Raises:
      ConfigError: there is none.
    """
    parts = {part: sorted(steps(workdir / "checkpoints" / part)) for part in ("best", "last")}
    if parts.get(which):
        return which
    found = [f"{part}/{which}" for part, held in parts.items() if which.isdecimal() and int(which) in held]
    if found:
        return found[-1]
    held = "; ".join(f"{part}: {', '.join(map(str, numbers)) or 'none'}" for part, numbers in parts.items())
    raise ConfigError(f"--checkpoint: got {which!a}, expected best, last or a step of {workdir} ({held})")


def _used(read: list[Path], config: Config, numbered: bool) -> Used:
    """What `read` checkpoints are; one found among the best is so by the metric that it was kept for."""
    kind = "step" if numbered else read[0].parent.name
    value = None
    if kind == "best" and len(read) == 1:
        values = about(read[0]).get("values")
        value = values.get(config.checkpoint.metric) if isinstance(values, dict) else None
    metric = config.checkpoint.metric if kind == "best" else None
    numbers = tuple(int(directory.name) for directory in read)
    return Used(kind, numbers, metric, value, config.train.ema is not None)


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


def read_json(directory: Path) -> dict[str, Any]:
    """The object in a part of a checkpoint that holds JSON."""
    value = _reading(lambda: json.loads((directory / "metadata").read_text(encoding="utf-8")))
    if not isinstance(value, dict):
        raise Damaged(f"{directory.name}/metadata is no JSON object")
    return value


def _reading(read: Callable[[], Any]) -> Any:
    """What `read` returns, with whatever Orbax and its storage raise on damaged files turned into `Damaged`."""
    try:
        return read()
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise Damaged(reason(error)) from error


def reason(error: BaseException) -> str:
    """The first cause of an error, on one line: how it begins and how it ends."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words if len(words) <= 180 else f'{words[:90]} ... {words[-90:]}'}"


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
