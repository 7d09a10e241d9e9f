"""Trackers of experiments: one file each, or a module of the user's own that defines `TRACKER`.

`config.train.trackers` names them. `TRACKER` is a class (or a function without arguments) whose objects have the five
methods of `Tracker`. Only the first process of a run tracks, and every tracker works in a thread of its own
(`_delivery.py`), so a tracker that raises, hangs or is slow neither stops nor changes a run.

A tracker shows the rows of `metrics.jsonl`, each once. When a run is resumed, `metrics.jsonl` is cut back to the step
of the checkpoint, and `rewind` makes the tracker show the same rows.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxformer import registry
from jaxformer.errors import ConfigError

PROJECT = "jaxformer"
"""Project (wandb, trackio) or experiment (MLflow) of runs, unless the tracker's own variable names another."""

METHODS = ("start", "config", "rewind", "scalars", "finish")


class Row(NamedTuple):
    """A row of `metrics.jsonl`.

    Attributes:
      index: its line in the file, from 0.
      step: number of updates of the parameters.
      split: "train", "validation", "skipped", or "final" for measures of a finished run.
      values: measures by name; None where a value is not finite.
      wall_time: Unix seconds.
    """

    index: int
    step: int
    split: str
    values: Mapping[str, Any]
    wall_time: float

    @classmethod
    def from_json(cls, index: int, row: Mapping[str, Any]) -> Row:
        """The row from a parsed line of `metrics.jsonl`."""
        values = {name: value for name, value in row.items() if name not in ("step", "wall_time", "split")}
        return cls(index, row["step"], row["split"], values, row.get("wall_time", 0.0))

    def numbers(self) -> dict[str, float]:
        """The finite values as floats, by "split/name"."""
        return {
            f"{self.split}/{name}": float(value)
            for name, value in self.values.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Identity of a run for its trackers.

    Attributes:
      id: the same for every start of the run; it is stored in the workdir and moves with it.
      name: for people; the folder of the run when it started, with the folder around it for a run of several seeds.
      group: name that the runs of several seeds or a sweep share; "": none.
      workdir: absolute.
    """

    id: str
    name: str
    group: str
    workdir: Path


class Tracker(Protocol):
    """The hook. `start`, `config` and `rewind` are called once each, in this order, then `scalars`, then `finish`.

    All calls come from one thread that is not the main thread. An exception ends the tracking of this start of the run.
    """

    def start(self, run: RunInfo) -> None:
        """Opens what the tracker writes to. A run that starts again has the same `run.id`."""
        ...

    def config(self, values: Mapping[str, Any]) -> None:
        """Records the config as nested JSON values, with `environment.json` as "environment"; secrets are redacted."""
        ...

    def rewind(self, rows: Sequence[Row]) -> None:
        """Makes the tracker show `rows` and no others of this run.

        What it has beyond them is dropped, and what it lacks is added.

        Args:
          rows: all rows that the run keeps, in order; none if it starts from step 0.
        """
        ...

    def scalars(self, rows: Sequence[Row]) -> None:
        """Adds new rows, in order: one, or all that came while the tracker was busy."""
        ...

    def finish(self, measures: Sequence[Row]) -> None:
        """Records final measures, writes what is buffered and closes.

        Args:
          measures: rows of split "final": of `result.json` and of every `eval-<split>.json`; none if the run has not
            finished.
        """
        ...


def check_available(names: Sequence[str]) -> None:
    """Checks that every tracker can be used here. Imports none of their packages.

    Raises:
      ConfigError: a package is not installed, or `TRACKER` is no tracker, or a variable asks for what it cannot do.
    """
    for name in names:
        tracker = registry.member(__name__, name, "TRACKER")
        for module in getattr(tracker, "modules", ()):
            if importlib.util.find_spec(module) is None:
                package = module if registry.is_external(__name__, name) else f"'jaxformer[{name}]'"
                raise ConfigError(
                    f"config.train.trackers: got {name!a}, but the package {module} is not installed, expected it; "
                    f"pip install {package}, or leave {name} out"
                )
        missing = [method for method in METHODS if not callable(getattr(tracker, method, None))]
        if isinstance(tracker, type) and missing:
            raise ConfigError(
                f"config.train.trackers: got {name!a}, whose TRACKER has no {', '.join(missing)}, expected a class "
                f"with {', '.join(METHODS)}"
            )
        for variable in getattr(tracker, "refused_variables", ()):
            if os.environ.get(variable):
                raise ConfigError(
                    f"config.train.trackers: got {name!a} with the variable {variable}, expected it unset: "
                    f"{tracker.refused_variables[variable]}"
                )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys: `{"train": {"steps": 5}}` is `{"train.steps": 5}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
