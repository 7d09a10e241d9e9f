"""The checkpoints of a run: their directories, what each says about itself, and their ranking."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.checkpoint.manifest import Damaged
from jaxformer.config import CheckpointConfig
from jaxformer.errors import ConfigError

Result = TypeVar("Result")

REPLACED = Path("saving", "replaced")
"""Directory in `checkpoints/` of checkpoints being replaced by one of the same step: `saving/replaced/last/400`."""


def list_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory` (`checkpoints/last` or `checkpoints/best`), unordered."""
    folders = [folder for folder in (directory, _replaced(directory)) if folder.is_dir()]
    entries = (entry for folder in folders for entry in folder.iterdir())
    return list({int(entry.name) for entry in entries if entry.name.isdecimal() and entry.is_dir()})


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory` (`checkpoints/last` or `checkpoints/best`), newest first."""
    return [step_directory(directory, step) for step in sorted(list_steps(directory), reverse=True)]


def step_directory(directory: Path, step: int) -> Path:
    """Directory of the checkpoint of `step` in `directory`, which need not exist.

    If a process was killed while it replaced a checkpoint by another of the same step, it is the replaced one.
    """
    current, replaced = directory / str(step), _replaced(directory) / str(step)
    return replaced if replaced.is_dir() and not current.is_dir() else current


def _replaced(directory: Path) -> Path:
    return directory.parent / REPLACED / directory.name


def find_run(path: Path) -> tuple[Path, str]:
    """The workdir that `path` is or lies in, and the selected part of its `checkpoints`: "best", "last/400", or "".

    Raises:
      ConfigError: `path` is not a trained run, nor a part of its checkpoints.
    """
    remedy = "expected a workdir, its checkpoints/best or checkpoints/last, or one checkpoint in these; check the path"
    if not path.is_dir():
        raise ConfigError(f"{path}: got {'a file' if path.exists() else 'nothing there'}, {remedy}")
    above = [parent for parent in path.parents if path.relative_to(parent).parts[0] == "checkpoints"]
    workdir = next((parent for parent in (path, *above) if (parent / "config.json").is_file()), None)
    if workdir is None:
        raise ConfigError(f"{path}: got a directory without a config.json, {remedy}")
    if not any(list_steps(workdir / "checkpoints" / part) for part in ("last", "best")):
        raise ConfigError(f"{workdir}: got a config.json but no checkpoints, expected a trained run; train it first")
    selected = path.relative_to(workdir).parts
    known = (), ("checkpoints",), ("checkpoints", "last"), ("checkpoints", "best")
    is_checkpoint = selected[:2] in known[2:] and selected[2:] in [(str(step),) for step in list_steps(path.parent)]
    if selected not in known and not is_checkpoint:
        raise ConfigError(f"{path}: got a directory inside the run {workdir}, {remedy}")
    return workdir, "/".join(selected[1:])


# What a checkpoint says about itself.


def read_about(directory: Path) -> dict[str, Any]:
    """The `about` of a checkpoint (format, step, measures, progress, config); empty if it cannot be read."""
    try:
        return read_json(directory / "about")
    except Damaged:
        return {}


def read_json(directory: Path) -> dict[str, Any]:
    """The object in a part of a checkpoint that holds JSON (`about`, `data`).

    Raises:
      Damaged: it cannot be read, or is no object.
    """
    value = raise_damaged(lambda: json.loads((directory / "metadata").read_text(encoding="utf-8")))
    if not isinstance(value, dict):
        raise Damaged(f"{directory.name}/metadata is no JSON object")
    return value


def raise_damaged(read: Callable[[], Result]) -> Result:
    """Result of `read`. Any error of Orbax, its storage or a parser becomes `Damaged`, except lack of memory."""
    try:
        return read()
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise Damaged(root_cause(error)) from error


def root_cause(error: BaseException) -> str:
    """The first cause of an error on one line, shortened in the middle."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words if len(words) <= 180 else f'{words[:90]} ... {words[-90:]}'}"


def ranking_score(about: dict[str, Any], config: CheckpointConfig) -> float:
    """The metric `config.metric`, negated if smaller is better; minus infinity if it is missing or not finite."""
    values = about.get("values")
    value = values.get(config.metric) if isinstance(values, dict) else None
    if not isinstance(value, float) or not math.isfinite(value):
        return -math.inf
    return -value if config.mode == "min" else value


def list_ranked(workdir: Path, part: str, config: CheckpointConfig) -> list[Path]:
    """The checkpoints of one part of a run: the newest first for "last", the best first for "best"."""
    checkpoints = list_checkpoints(workdir / "checkpoints" / part)
    if part == "best":
        # Among equals the earlier one comes first, as saving ranks them.
        checkpoints.sort(key=lambda path: (-ranking_score(read_about(path), config), int(path.name)))
    return checkpoints
