"""A workdir read back, whatever of it there is."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from jaxformer import files, overrides, redaction, results
from jaxformer.config import Config, ConfigError


@dataclass
class Run:
    """One run, from its files.

    Attributes:
      name: the folder's name, longer where two would be the same.
      config: what `config.json` says; empty if unreadable. `typed` is the same past the door, where it still fits.
      rows: of `metrics.jsonl`, by split, in the order of their steps.
      result: the last measures, from `result.json`; empty while the run goes on.
      evaluations: content of `eval-<split>.json`, by split.
      samples: decoded examples by what they are of: "step 400", "test".
      parameters: text of `parameters.txt`.
      notes: what is missing or could not be read, a line each.
    """

    name: str
    workdir: Path
    config: dict[str, Any] = field(default_factory=dict)
    typed: Config | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    parameters: str = ""
    notes: list[str] = field(default_factory=list)

    def series(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] and values [n] of a measure; NaN where it was not a finite number, nothing where not measured."""
        found = [(row["step"], number(row[name])) for row in self.rows.get(split, []) if name in row]
        return np.array([step for step, _ in found], np.float64), np.array([value for _, value in found], np.float64)

    def measures(self, split: str) -> list[str]:
        """Names of the measures of a split, in the order of their first appearance."""
        names = (name for row in self.rows.get(split, []) for name in row)
        return [name for name in dict.fromkeys(names) if name not in ("step", "wall_time", "split")]

    @property
    def step(self) -> int:
        """The last step that anything is known of."""
        return max((row["step"] for rows in self.rows.values() for row in rows), default=0)

    @property
    def parameter_count(self) -> int | None:
        """Entries of all parameters, from the last line of `parameters.txt`."""
        found = re.search(r"of ([\d,]+) entries decay\s*$", self.parameters)
        return int(found[1].replace(",", "")) if found else None

    @property
    def training_seconds(self) -> float:
        """About how long the steps took, evaluation and saving left out: steps of each report over their rate."""
        steps, rates = self.series("train", "steps_per_second")
        done = np.diff(steps, prepend=0.0)
        usable = np.isfinite(rates) & (rates > 0)
        return float(np.sum(done[usable] / rates[usable]))

    def best(self) -> tuple[str, float, int] | None:
        """The validation measure that the best checkpoint is chosen by: its name, best value and step."""
        keep = self.typed.checkpoint if self.typed else None
        name, mode = (keep.metric, keep.mode) if keep else ("loss", "min")
        steps, values = self.series("validation", name)
        if not np.isfinite(values).any():
            return None
        index = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
        return name, float(values[index]), int(steps[index])

    def last(self, split: str, name: str) -> float:
        """The last value of a measure; NaN where there is none."""
        _, values = self.series(split, name)
        return float(values[-1]) if values.size else math.nan


def number(value: Any) -> float:
    """A JSON value as a number; NaN if it is none (`null` is how a value that is not finite is written)."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def read(workdirs: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `workdirs`, each once, with names that differ.

    Raises:
      ConfigError: one of them is not a folder.
    """
    paths = list(dict.fromkeys(Path(each).absolute().resolve() for each in workdirs))
    for path in paths:
        if not path.is_dir():
            what = "a file" if path.exists() else "nothing there"
            raise ConfigError(f"{path}: got {what}, expected the workdir of a run; check --workdir")
    return [_run(path, redaction.text(name)) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _run(workdir: Path, name: str) -> Run:
    run = Run(name, workdir)
    run.config = _json(run, "config.json", dict)
    if run.config:
        try:
            run.typed = overrides.read(workdir)
        except ConfigError as error:
            run.notes.append(f"config.json does not fit this version: {redaction.text(str(error))}")
    run.environment = _json(run, "environment.json", dict)
    _metrics(run)
    if (workdir / results.NAME).exists():
        _result(run)
    else:
        run.notes.append("no result.json: the run is not finished")
    for path in sorted(workdir.glob("eval-*.json")):
        run.evaluations[path.stem.removeprefix("eval-")] = _json(run, path.name, dict)
    if not run.evaluations:
        run.notes.append("no eval-<split>.json: evaluated on no split since; see jaxformer evaluate")
    for path in sorted((workdir / "samples").glob("*.json"), key=_sample_order):
        records = _json(run, f"samples/{path.name}", list)
        run.samples[path.stem.replace("step-", "step ")] = [each for each in records if isinstance(each, dict)]
    try:
        run.parameters = (workdir / "parameters.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        run.notes.append("no parameters.txt: the number of parameters is not known here")
    return run


def _result(run: Run) -> None:
    """Fills in `result`, if it is that of the run's config at its last step."""
    found = _json(run, results.NAME, dict)
    stale = results.problem(found, run.typed) if found and run.typed else ""
    if stale:
        run.notes.append(f"{results.NAME} is out of date ({stale}), left out: the run is not finished")
    else:
        run.result = found


def _sample_order(path: Path) -> tuple[bool, int, str]:
    """Final splits first, then training steps, newest first."""
    step = path.stem.removeprefix("step-")
    return (True, -int(step), "") if step != path.stem and step.isdecimal() else (False, 0, path.stem)


def _json(run: Run, name: str, kind: type) -> Any:
    """The content of a file without its secrets; an empty `kind`, and a note, where that cannot be had."""
    try:
        return redaction.tree(files.read_json(run.workdir / name, kind))
    except FileNotFoundError:
        run.notes.append(f"no {name}")
    except ConfigError as error:
        run.notes.append(f"{name} cannot be read: {redaction.text(str(error))}")
    return kind()


def _metrics(run: Run) -> None:
    """Fills in `rows`. The last line may be torn: the run may be writing it, or was killed while it did."""
    try:
        lines = (run.workdir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        run.notes.append("no metrics.jsonl: no curves")
        return
    held: dict[tuple[str, int], dict[str, Any]] = {}
    torn = []
    for index, line in enumerate(lines):
        row = files.metrics_row(line)
        if row is None:
            torn.append(index)
        else:
            held[row["split"], row["step"]] = row  # a step that comes twice counts as it came last
    for (split, _), row in sorted(held.items()):
        run.rows.setdefault(split, []).append(row)
    if torn == [len(lines) - 1]:
        run.notes.append("metrics.jsonl: the last line is torn, left out")
    elif torn:
        which = f"the first is line {torn[0] + 1}"
        run.notes.append(f"metrics.jsonl: {len(torn)} of {len(lines)} lines cannot be read, left out; {which}")
    if not held:
        run.notes.append("metrics.jsonl: nothing in it, no curves")


def signatures(run: Run, split: str) -> dict[str, str]:
    """What exactly the scores of a split are: as the evaluation says, else as this installation would score."""
    written = run.evaluations[split].get("signatures")
    if isinstance(written, dict):
        return {str(name): str(text) for name, text in written.items()}
    if run.typed is None:
        return {}
    from jaxformer import tasks  # brings in jax, which the rest of a report does without

    return tasks.get(run.typed.task.name).signatures(run.typed)


def flat(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """A nested dict by dotted paths; an empty dict is a value."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        here = f"{path}.{name}" if path else name
        out.update(flat(value, here) if isinstance(value, dict) and value else {here: value})
    return out
