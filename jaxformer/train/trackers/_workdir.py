"""The parts of a workdir that trackers read: the identity of its run, its rows, and its final measures."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import files
from jaxformer.train import results, seeds
from jaxformer.train.trackers import Row, RunInfo

FILE_NAME = "trackers.json"
"""Identity of the run, written when it starts: a workdir that is moved keeps it."""

MEMBER = re.compile(r"seed-\d+|(?:.*=.*|base)-[0-9a-f]{8}")
"""Names of the folders that `train --seeds` and `sweep` make: their runs are a group."""
MAX_NAME = 120
"""Characters of a run's name; wandb takes 128."""


def identify(workdir: Path, log: Callable[[str], None]) -> RunInfo:
    """The identity in `trackers.json`; a new one where there is none."""
    path = workdir / FILE_NAME
    try:
        saved = files.read_json(path)
        identity = {name: saved[name] for name in ("id", "name", "group")}
        if all(isinstance(value, str) for value in identity.values()) and re.fullmatch(r"[\w-]+", identity["id"]):
            return RunInfo(**identity, workdir=workdir)
        problem = "holds no identity"
    except FileNotFoundError:
        problem = ""
    except (ConfigError, KeyError):
        problem = "cannot be read"
    if problem:
        log(f"{path} {problem}: trackers show this run as a new one")
    group = workdir.parent.name if MEMBER.fullmatch(workdir.name) else ""
    name = f"{group}/{workdir.name}" if group else workdir.name or "run"
    run = RunInfo(uuid.uuid4().hex[:12], name[:MAX_NAME], group, workdir)
    files.write_json(path, {"id": run.id, "name": run.name, "group": run.group})
    return run


def read_rows(workdir: Path) -> list[Row]:
    """The rows of `metrics.jsonl` that can be read."""
    try:
        lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = filter(None, map(files.parse_metrics_row, lines))
    return [Row.from_json(index, row) for index, row in enumerate(rows)]


def final_measures(workdir: Path) -> list[Row]:
    """Measures of `result.json` ("final/validation/...") and of each `eval-<split>.json` ("final/<split>/...")."""
    found = [(workdir / results.FILE_NAME, "validation", results.read(workdir))]
    for path in sorted(workdir.glob("eval-*.json")):
        try:
            content = files.read_json(path)
        except (ConfigError, FileNotFoundError):
            continue
        found.append((path, path.stem.removeprefix("eval-"), content))
    rows = []
    for path, split, content in found:
        if isinstance(content, dict):
            values = {f"{split}/{name}": value for name, value in content.items() if _is_measure(name, value)}
            rows.append(Row(len(rows), _step(content), "final", values, path.stat().st_mtime))
    return rows


def _is_measure(name: str, value: Any) -> bool:
    return name not in seeds.NO_MEASURES and isinstance(value, (int, float)) and not isinstance(value, bool)


def _step(content: dict[str, Any]) -> int:
    """The step of `result.json`, or the newest of the checkpoints that an evaluation measured."""
    checkpoint = content.get("checkpoint")
    steps = [content.get("step"), *(checkpoint.get("steps", []) if isinstance(checkpoint, dict) else [])]
    return max((step for step in steps if type(step) is int), default=0)
