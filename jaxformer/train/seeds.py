"""Several seeds of one config: a run for each in `seed-<number>` of a folder, and the mean of their measures.

`jaxformer train --seeds=3` trains the seeds `train.seed`, `train.seed + 1` and `train.seed + 2` one after the other.
The folder holds `seeds.json`:

    {"seeds": [0, 1, 2], "mean": {"loss": 2.31}, "deviation": {"loss": 0.02}, "runs": {"seed-0": {"loss": 2.3}, ...}}
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.runtime import files
from jaxformer.train import results

LOG = logging.getLogger("jaxformer")

FILE_NAME = "seeds.json"
MAX_SEED = 2**32 - 1
NO_MEASURES = ("step", "config", "stopped_early", "seconds", "split", "changed")
"""Numbers in the results of runs and evaluations whose mean says nothing."""


def members(workdir: str | os.PathLike[str]) -> list[Path]:
    """The workdirs of a folder of seeds, in the order of their seeds; none if it is the workdir of one run."""
    path = Path(workdir)
    if not (path / FILE_NAME).exists():
        return []
    seeds = files.read_json(path / FILE_NAME).get("seeds")
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise ConfigError(f"{path / FILE_NAME}: got seeds {seeds!a}, expected a list of numbers; restore the file")
    return [path / f"seed-{seed}" for seed in sorted(seeds)]


def expand(workdirs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The workdirs, with the runs of each folder of seeds in its place."""
    return [run for workdir in workdirs for run in members(workdir) or [Path(workdir)]]


def train(
    config: Config,
    workdir: str | os.PathLike[str],
    count: int,
    start: Callable[[Config, Path], int],
    writes: bool = True,
) -> int:
    """Trains `count` seeds of `config`, from `config.train.seed` on, each in a folder of its own, or resumes them.

    Runs that are done are left as they are. A run that fails (its loss diverged) is reported, and the others are
    trained all the same.

    Args:
      start: trains a config in a workdir and returns the exit code.
      writes: this process writes `seeds.json`: the first one of a job.

    Returns:
      The exit code: 0 when all are done, 2 if one failed, else that of the run that was stopped (143: preempted).

    Raises:
      ConfigError: the folder holds a single run, or the seeds are too large; or no run can start.
    """
    folder, first = Path(workdir), config.train.seed
    if (folder / "config.json").exists():
        raise ConfigError(f"--workdir: got {folder}, which holds a run without --seeds, expected another folder")
    if first + count - 1 > MAX_SEED:
        raise ConfigError(f"--seeds: got {count} from config.train.seed {first}, expected seeds up to {MAX_SEED}")
    seeds = list(range(first, first + count))
    others = {int(path.name.removeprefix("seed-")) for path in members(folder)} - set(seeds)
    failed = []
    for seed in seeds:
        run, own = folder / f"seed-{seed}", dataclasses.replace(config.train, seed=seed)
        own_config = dataclasses.replace(config, train=own)
        if results.finished_result(run, own_config) is not None:
            LOG.warning("seed %d: done", seed)
            continue
        try:
            code = start(own_config, run)
        except ConfigError as error:
            if not (run / "config.json").exists() or count == 1:
                raise
            LOG.warning("seed %d: %s", seed, error)
            failed.append(seed)
            continue
        finally:
            if writes and folder.exists():
                _write(folder, sorted({*seeds, *others}))
        if code:
            return code
    return 2 if failed else 0


def _write(folder: Path, seeds: list[int]) -> None:
    """Writes `seeds.json` from the results that there are."""
    runs = {f"seed-{seed}": results.finished_result(folder / f"seed-{seed}") for seed in seeds}
    summary = summarise({name: result for name, result in runs.items() if result is not None})
    files.write_json(folder / FILE_NAME, {"seeds": seeds, **summary})


def read_summary(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Content of a folder's `seeds.json`."""
    return files.read_json(Path(workdir) / FILE_NAME)


def summarise(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation (n - 1) of every measure of several runs.

    A measure that one of them lacks, or that is not finite there, has neither: a mean without a diverged run misleads.

    Args:
      runs: measures by run.

    Returns:
      "mean", "deviation" (None for one run) and "runs", each by measure.
    """
    names = dict.fromkeys(
        name for values in runs.values() for name, value in values.items() if _is_measure(name, value)
    )
    mean: dict[str, float | None] = {}
    deviation: dict[str, float | None] = {}
    for name in names:
        numbers = [values[name] for values in runs.values() if _is_measure(name, values.get(name))]
        numbers = [float(number) for number in numbers if math.isfinite(number)]
        is_complete = len(numbers) == len(runs)
        mean[name] = statistics.fmean(numbers) if is_complete else None
        deviation[name] = statistics.stdev(numbers) if is_complete and len(numbers) > 1 else None
    measured = {run: {name: values.get(name) for name in names} for run, values in runs.items()}
    return {"mean": mean, "deviation": deviation, "runs": measured}


def _is_measure(name: str, value: Any) -> bool:
    return name not in NO_MEASURES and isinstance(value, int | float) and not isinstance(value, bool)


def format_table(summary: Mapping[str, Any]) -> str:
    """A line for each measure: mean, deviation, and the value of each run."""
    runs = summary["runs"]
    rows = [("measure", "mean", "deviation", *runs)]
    for name, mean in summary["mean"].items():
        cells = (mean, summary["deviation"][name], *(values[name] for values in runs.values()))
        rows.append((name, *("-" if value is None else f"{value:.6g}" for value in cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
