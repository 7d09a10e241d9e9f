"""Runs read from the files of their workdirs; missing and damaged files become notes."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import files, secrets
from jaxformer.train import results, seeds


@dataclass
class Run:
    """One run, from its files.

    Attributes:
      name: of the directory, with parents if two runs would have the same name.
      workdir: the directory.
      raw_config: content of `config.json`; empty if unreadable.
      config: the same as a checked `Config`; None if it does not fit this version.
      environment: content of `environment.json`.
      rows: of `metrics.jsonl` by split, in the order of their steps.
      result: the last measures, from `result.json`; empty while the run continues.
      evaluations: content of `eval-<split>.json` by split.
      samples: decoded examples by source: "step 400", "test".
      parameters: text of `parameters.txt`.
      notes: a line for each missing or unreadable file.
      number: of several runs, from 1 on; 0: it is the only one.
    """

    name: str
    workdir: Path
    raw_config: dict[str, Any] = field(default_factory=dict)
    config: Config | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    parameters: str = ""
    notes: list[str] = field(default_factory=list)
    number: int = 0

    @property
    def number_suffix(self) -> str:
        """Ends the ids of a run's charts, so that those of several runs differ."""
        return f"-run{self.number}" if self.number else ""

    def final(self) -> dict[str, Any]:
        """The measures of the last validation: those of `result.json`, or the last of `metrics.jsonl`."""
        values = {name: value for name, value in self.result.items() if name not in ("step", "config")}
        return values or {name: self.last("validation", name) for name in self.measures("validation")}

    def series(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] and values [n] of a measure where it was measured; NaN if it was not a finite number."""
        rows = [row for row in self.rows.get(split, []) if name in row]
        steps = np.array([row["step"] for row in rows], np.float64)
        return steps, np.array([as_float(row[name]) for row in rows], np.float64)

    def measures(self, split: str) -> list[str]:
        """Names of the measures of a split, in the order of their first appearance."""
        names = (name for row in self.rows.get(split, []) for name in row)
        return [name for name in dict.fromkeys(names) if name not in ("step", "wall_time", "split")]

    @property
    def step(self) -> int:
        """The last step of any row."""
        return max((row["step"] for rows in self.rows.values() for row in rows), default=0)

    @property
    def parameter_count(self) -> int | None:
        """Number of parameter entries, from the last line of `parameters.txt`."""
        match = re.search(r"of ([\d,]+) entries decay\s*$", self.parameters)
        return int(match[1].replace(",", "")) if match else None

    @property
    def training_seconds(self) -> float:
        """Approximate time of all steps without evaluation and saving: steps of each report over their rate."""
        steps, rates = self.series("train", "steps_per_second")
        done = np.diff(steps, prepend=0.0)
        usable = np.isfinite(rates) & (rates > 0)
        return float(np.sum(done[usable] / rates[usable]))

    def best(self) -> tuple[str, float, int] | None:
        """Name, best value and step of the validation measure by which the best checkpoint is chosen."""
        keep = self.config.checkpoint if self.config else None
        name, mode = (keep.metric, keep.mode) if keep else ("loss", "min")
        steps, values = self.series("validation", name)
        if not np.isfinite(values).any():
            return None
        index = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
        return name, float(values[index]), int(steps[index])

    def last(self, split: str, name: str) -> float:
        """The last value of a measure; NaN if there is none."""
        _, values = self.series(split, name)
        return float(values[-1]) if values.size else math.nan


def as_float(value: Any) -> float:
    """A JSON value as a number; NaN if it is none (values that are not finite are written as `null`)."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def read(workdirs: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `workdirs`, without duplicates, with distinct names.

    Raises:
      ConfigError: one of them is not a folder.
    """
    paths = list(dict.fromkeys(Path(workdir).absolute().resolve() for workdir in workdirs))
    for path in paths:
        if not path.is_dir():
            got = "a file" if path.exists() else "nothing there"
            raise ConfigError(f"{path}: got {got}, expected the workdir of a run; check --workdir")
    found = [_read_run(path, secrets.redact(name)) for path, name in zip(paths, _names(paths), strict=True)]
    for number, run in enumerate(found, 1):
        run.number = number if len(found) > 1 else 0
    return found


def expand(workdirs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The workdirs of runs: a folder of seeds, or of the runs of a sweep, stands for its runs."""
    found = []
    for path in seeds.expand(workdirs):
        inner = [] if (path / "config.json").exists() else sorted(path.glob("*/config.json"))
        found += [each.parent for each in inner] or [path]
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_run(workdir: Path, name: str) -> Run:
    run = Run(name, workdir)
    run.raw_config = _read_json(run, "config.json", dict)
    if run.raw_config:
        try:
            run.config = overrides.read(workdir)
        except ConfigError as error:
            run.notes.append(f"config.json does not fit this version: {secrets.redact(str(error))}")
    run.environment = _read_json(run, "environment.json", dict)
    _read_metrics(run)
    if (workdir / results.FILE_NAME).exists():
        _read_result(run)
    else:
        run.notes.append("no result.json: the run is not finished")
    for path in sorted(workdir.glob("eval-*.json")):
        run.evaluations[path.stem.removeprefix("eval-")] = _read_json(run, path.name, dict)
    if not run.evaluations:
        run.notes.append("no eval-<split>.json: evaluated on no split since; see jaxformer evaluate")
    for path in sorted((workdir / "samples").glob("*.json"), key=_sample_order):
        records = _read_json(run, f"samples/{path.name}", list)
        run.samples[path.stem.replace("step-", "step ")] = [record for record in records if isinstance(record, dict)]
    try:
        run.parameters = (workdir / "parameters.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        run.notes.append("no parameters.txt: the number of parameters is not known here")
    return run


def _read_result(run: Run) -> None:
    """Fills in `result` if it belongs to the last step of the run's config."""
    result = _read_json(run, results.FILE_NAME, dict)
    mismatch = results.mismatch(result, run.config) if result and run.config else ""
    if mismatch:
        run.notes.append(f"{results.FILE_NAME} is out of date ({mismatch}), left out: the run is not finished")
    else:
        run.result = result


def _sample_order(path: Path) -> tuple[bool, int, str]:
    """Final splits first, then training steps, newest first."""
    step = path.stem.removeprefix("step-")
    return (True, -int(step), "") if step != path.stem and step.isdecimal() else (False, 0, path.stem)


def _read_json(run: Run, name: str, value_type: type) -> Any:
    """The content of a file without its secrets; an empty `value_type` and a note if it cannot be read."""
    try:
        return secrets.redact_json(files.read_json(run.workdir / name, value_type))
    except FileNotFoundError:
        run.notes.append(f"no {name}")
    except ConfigError as error:
        run.notes.append(f"{name} cannot be read: {secrets.redact(str(error))}")
    return value_type()


def _read_metrics(run: Run) -> None:
    """Fills in `rows`. The last line may be incomplete: the run is writing it, or was killed."""
    try:
        lines = (run.workdir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        run.notes.append("no metrics.jsonl: no curves")
        return
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    torn = []
    for index, line in enumerate(lines):
        row = files.parse_metrics_row(line)
        if row is None:
            torn.append(index)
        else:
            rows[row["split"], row["step"]] = row  # the last row of a step that was repeated
    for (split, _), row in sorted(rows.items()):
        run.rows.setdefault(split, []).append(row)
    if torn == [len(lines) - 1]:
        run.notes.append("metrics.jsonl: the last line is torn, left out")
    elif torn:
        which = f"the first is line {torn[0] + 1}"
        run.notes.append(f"metrics.jsonl: {len(torn)} of {len(lines)} lines cannot be read, left out; {which}")
    if not rows:
        run.notes.append("metrics.jsonl: nothing in it, no curves")


def signatures(run: Run, split: str) -> dict[str, str]:
    """Exact definitions of the scores of a split: those of the evaluation, else those of this installation."""
    written = run.evaluations[split].get("signatures")
    if isinstance(written, dict):
        return {str(name): str(text) for name, text in written.items()}
    if run.config is None:
        return {}
    from jaxformer import tasks  # imports jax, which the rest of a report does not need

    return tasks.get(run.config.task.name).score_signatures(run.config)


def flatten(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The values of a nested dict by dotted path; an empty dict is a value."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        full_path = f"{path}.{name}" if path else name
        values.update(flatten(value, full_path) if isinstance(value, dict) and value else {full_path: value})
    return values
