"""The weights of a run: selecting checkpoints, averaging them, loading the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from jaxformer import registry
from jaxformer.checkpoint.directories import find_run, list_ranked, list_steps, read_about, step_directory
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.reading import ArrayTypes, Weights, array_types, check_same_arrays, read_weights, verify
from jaxformer.config import Config, overrides
from jaxformer.data import derived
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.runtime import directories
from jaxformer.types import PyTree

LOG = logging.getLogger("jaxformer")


class WeightsInfo(NamedTuple):
    """The checkpoints that a model's weights come from.

    Attributes:
      kind: "best", "last", or "step" if one was selected by its number.
      steps: steps of the checkpoints; with several, the weights are their mean.
      metric: the metric that the best are chosen by; None unless `kind` is "best".
      value: its value, of one checkpoint; else None.
      average: True if the weights are the moving average (train.ema) instead of the parameters.
    """

    kind: str
    steps: tuple[int, ...]
    metric: str | None
    value: float | None
    average: bool

    def describe(self) -> str:
        """For people: "best by loss (1.234), step 400"."""
        numbers = ", ".join(f"{step:,}" for step in self.steps)
        value = "" if self.value is None else f" ({self.value:.4g})"
        which = {"best": f"best by {self.metric}{value}", "last": "last", "step": "as chosen"}[self.kind]
        steps = f"step {numbers}" if len(self.steps) == 1 else f"mean of the steps {numbers}"
        return f"{which}, {steps}" + (", running average of the weights (train.ema)" if self.average else "")


class LoadedRun(NamedTuple):
    """A run as read from its workdir.

    Attributes:
      module: the model that the config describes.
      params: its parameters; the moving average if the run keeps one.
      variables: the other collections (batch-norm statistics).
      config: the resolved config.
      tokenizers: the run's tokenizers.
      weights: the checkpoints that the parameters come from.
    """

    module: nn.Module
    params: PyTree
    variables: dict[str, PyTree]
    config: Config
    tokenizers: Tokenizers | None
    weights: WeightsInfo


def load_run(path: str | Path, which: str = "") -> LoadedRun:
    """Reads a run from its workdir, with the weights that `config.checkpoint` selects.

    With `average` set, they are the mean of so many last or best checkpoints. Otherwise they are those of the best
    checkpoint, or of the newest if nothing was evaluated. The moving average replaces the parameters in runs that keep
    one.

    Args:
      path: a workdir; or, to select, its `checkpoints/best`, `checkpoints/last` or one checkpoint in them.
      which: selects too: "best", "last" or the number of a step; "": as `path` and the config say.

    Raises:
      ConfigError: `path` holds no run, its checkpoints cannot be read or do not fit its config, or there is no such
        checkpoint.
    """
    workdir, part, config = _find(path, which)
    checkpoints, count = select_checkpoints(workdir, config, part)
    module = build.build(config.model)
    (params, variables), read = _read_average(checkpoints, count)
    check_same_arrays(workdir, array_types(params), _expected_arrays(config, module))
    info = _describe_weights(read, config, numbered="/" in part)
    tokenizers = Tokenizers.load(workdir) if config.model.reads_tokens else None
    return LoadedRun(module, params, variables, config, tokenizers, info)


def _find(path: str | Path, which: str) -> tuple[Path, str, Config]:
    """The workdir of `path`, the part of its checkpoints that `path` or `which` names, and its config."""
    workdir, part = find_run(Path(path).absolute())
    if which and part:
        raise ConfigError(f"--checkpoint: got {which!a} with {path}, which names a checkpoint; give one of them")
    return workdir, _part_of(workdir, which) if which else part, overrides.read(workdir)


def checkpoints_of(path: str | Path, which: str = "") -> tuple[list[Path], int]:
    """The checkpoints that `load_run` tries with these arguments, in its order, and how many it needs.

    Their `about` and manifest must be there, but no array.
    """
    workdir, part, config = _find(path, which)
    return select_checkpoints(workdir, config, part)


def _expected_arrays(config: Config, module: nn.Module) -> ArrayTypes:
    """Dtype and shape of every parameter of `module`, from the cache if the same model was loaded before.

    Tracing the model says it, which is an eighth of the time in which `decode` answers one line.
    """

    def trace() -> dict[str, str]:
        types = array_types(nn.meta.unbox(build.shapes(module))["params"])
        return {"/".join(path): text for path, text in types.items()}

    if registry.has_external_members():
        found = trace()
    else:
        model = json.loads(overrides.to_json(config))["model"]
        depends_on = {"model": model, "code": derived.code_digest(derived.PROJECT)}
        found = derived.keep(directories.cache(), "arrays", depends_on, trace)
    return {tuple(path.split("/")): text for path, text in found.items()}


def param_shapes(config: Config, module: nn.Module) -> PyTree:
    """Shapes of the parameters of `module`, from the cache if the same model was loaded before."""
    shapes = {}
    for path, text in _expected_arrays(config, module).items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shapes[path] = jax.ShapeDtypeStruct([int(size) for size in sizes.split(",") if size], jnp.dtype(dtype))
    return traverse_util.unflatten_dict(shapes)


def select_checkpoints(workdir: Path, config: Config, part: str = "") -> tuple[list[Path], int]:
    """Checkpoints of a run in the order in which to try them, and the number of them to average.

    Args:
      part: "best", "last", one checkpoint as "last/400", or "" for what the config says.
    """
    keep = config.checkpoint
    last, best = (list_ranked(workdir, name, keep) for name in ("last", "best"))
    if part:
        name, _, step = part.partition("/")
        ranked = {"last": last, "best": best}[name]
        return [step_directory(workdir / "checkpoints" / name, int(step))] if step else ranked, 1
    if keep.average:
        return (best if keep.average_of == "best" else last) or best + last, keep.average
    return best + last, 1


def average_weights(checkpoints: Sequence[Path], count: int, shardings: PyTree | None = None) -> Weights:
    """The mean of the first `count` readable checkpoints' weights. Memory holds one of them beside the sum.

    Checkpoints that cannot be read are left out with a warning.

    Args:
      shardings: of the parameters; None: the default device.

    Raises:
      ConfigError: none can be read.
    """
    return _read_average(checkpoints, count, shardings)[0]


def _read_average(
    checkpoints: Sequence[Path], count: int, shardings: PyTree | None = None
) -> tuple[Weights, list[Path]]:
    """The mean, and the checkpoints that were read for it."""
    total, used, problem = None, [], "there is none"
    for directory in checkpoints:
        try:
            verify(directory)
            weights = read_weights(directory, shardings if count == 1 else None)
        except Damaged as error:
            LOG.warning("checkpoint %s cannot be read (%s); left out", directory, error)
            problem = f"{directory.name}: {error}"
            continue
        total = weights if total is None else jax.tree.map(np.add, total, weights)
        used.append(directory)
        if len(used) == count:
            break
    if total is None:
        where = checkpoints[0].parents[1] if checkpoints else "this run"
        raise ConfigError(f"checkpoints of {where}: got none that can be read ({problem}), expected at least one")
    if count > 1:
        total = jax.tree.map(lambda x: (x / len(used)).astype(x.dtype), total)
    if shardings is not None:
        return Weights(jax.device_put(total.params, shardings), jax.tree.map(jnp.asarray, total.variables)), used
    # Without shardings the arrays are not committed to a device, so they can be used with any mesh. They are copied one
    # at a time, and those on the host freed: a copy of all would need the memory of two models.
    leaves, structure = jax.tree.flatten(total)
    del total, weights
    for index, leaf in enumerate(leaves):
        # `jnp.asarray` would compile a program for each shape.
        leaves[index] = jax.device_put(leaf, may_alias=False).block_until_ready()
    return jax.tree.unflatten(structure, leaves), used


def _part_of(workdir: Path, which: str) -> str:
    """The part of a run's `checkpoints` that `which` names: "best", "last", "last/400".

    Raises:
      ConfigError: there is none.
    """
    parts = {part: sorted(list_steps(workdir / "checkpoints" / part)) for part in ("best", "last")}
    if parts.get(which):
        return which
    matches = [f"{part}/{which}" for part, steps in parts.items() if which.isdecimal() and int(which) in steps]
    if matches:
        return matches[-1]
    existing = "; ".join(f"{part}: {', '.join(map(str, steps)) or 'none'}" for part, steps in parts.items())
    raise ConfigError(f"--checkpoint: got {which!a}, expected best, last or a step of {workdir} ({existing})")


def _describe_weights(read: list[Path], config: Config, numbered: bool) -> WeightsInfo:
    """Info about the checkpoints that were `read`. `numbered`: one was selected by its step."""
    kind = "step" if numbered else read[0].parent.name
    value = None
    if kind == "best" and len(read) == 1:
        values = read_about(read[0]).get("values")
        value = values.get(config.checkpoint.metric) if isinstance(values, dict) else None
    metric = config.checkpoint.metric if kind == "best" else None
    steps = tuple(int(directory.name) for directory in read)
    return WeightsInfo(kind, steps, metric, value, config.train.ema is not None)
