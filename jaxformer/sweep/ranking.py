"""The ranking of a sweep's finished runs, and the best of them as a recipe."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from jaxformer.config import CheckpointConfig, Config, overrides
from jaxformer.runtime import files
from jaxformer.sweep.planning import Plan, Run, format_value, run_name
from jaxformer.sweep.space import SEED

BEST = "best.py"
"""The recipe of the best run of the first row, in the sweep's folder."""

BEST_TEMPLATE = '''"""The best run of a sweep: {score}. Written by jaxformer sweep; every field is in it."""

from jaxformer.config import overrides

CONFIG = r"""
{config}
"""


def get_config():
    return overrides.editable(overrides.from_json(CONFIG))
'''


def write_ranking(
    plan: Plan, checkpoint: CheckpointConfig | None = None, trials: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Writes `ranking.json`, `ranking.md` and the recipe `best.py`, prints the table, and returns its rows, best first.

    Runs are ordered by `checkpoint.metric` of their final validation. Runs that differ in the seed only share a row,
    with the mean, the sample standard deviation (n - 1), and the 95 % interval of the mean over seeds.

    Args:
      checkpoint: names the measure; None: that of the runs.
      trials: of a search, whose complete trials are the runs of `plan`. Those that were pruned, have failed or are open
        stand in a table of their own.
    """
    groups: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in plan.runs:
        result = run.result
        if result is not None:
            edits = {path: value for path, value in run.edits.items() if path != SEED}
            groups.setdefault(run_name(edits), []).append((run, result))
    checkpoint = checkpoint or plan.runs[0].config.checkpoint
    rows = [_row(name, members, checkpoint.metric) for name, members in groups.items()]
    sign = 1 if checkpoint.mode == "min" else -1
    rows.sort(key=lambda row: math.inf if row["mean"] is None else sign * row["mean"])
    plan.workdir.mkdir(parents=True, exist_ok=True)
    table = _markdown(rows, checkpoint.metric) + _trials_markdown(trials or [], checkpoint.metric)
    files.write_atomic(plan.workdir / "ranking.md", table + "\n")
    missing = [run.workdir.name for run in plan.unfinished]
    if trials is not None:
        missing = [trial["run"] for trial in trials if trial["state"] in ("open", "failed")]
    if rows and rows[0]["mean"] is not None:
        values = rows[0]["runs"]
        best = min(groups[rows[0]["name"]], key=lambda member: sign * values[member[0].workdir.name])[0]
        score = f"{checkpoint.metric} {values[best.workdir.name]:.5g}"
        if len(values) > 1:
            score += f"; the mean of its {len(values)} seeds is {rows[0]['mean']:.5g}"
        files.write_atomic(plan.workdir / BEST, recipe(best.config, score))
    ranking = {"metric": checkpoint.metric, "mode": checkpoint.mode, "missing": missing, "rows": rows}
    if trials is not None:
        ranking["trials"] = trials
    files.write_atomic(plan.workdir / "ranking.json", json.dumps(ranking, indent=1) + "\n")
    print(table, flush=True)
    return rows


def recipe(config: Config, score: str) -> str:
    """The text of a recipe that has this config, whatever becomes of the recipe and the edits that it is from.

    Args:
      score: what the run reached, for the docstring.
    """
    return BEST_TEMPLATE.format(score=score, config=overrides.to_json(config).strip())


def interval(numbers: list[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean of runs, by Student's t; None for fewer than two."""
    if len(numbers) < 2:
        return None
    from scipy import special  # slow to import, and only needed here

    half = float(special.stdtrit(len(numbers) - 1, 0.975)) * statistics.stdev(numbers) / math.sqrt(len(numbers))
    mean = statistics.fmean(numbers)
    return mean - half, mean + half


def _row(name: str, members: list[tuple[Run, dict[str, Any]]], metric: str) -> dict[str, Any]:
    results = {run.workdir.name: result.get(metric) for run, result in members}
    values = [v for v in results.values() if isinstance(v, (int, float)) and math.isfinite(v)]
    is_complete = len(values) == len(members)  # the mean must not leave out a diverged seed
    return {
        "name": name,
        "edits": {path: format_value(value) for path, value in members[0][0].edits.items() if path != SEED},
        "mean": statistics.fmean(values) if is_complete else None,
        "deviation": statistics.stdev(values) if is_complete and len(values) > 1 else None,
        "interval": interval(values) if is_complete else None,
        "runs": results,
    }


def _markdown(rows: list[dict[str, Any]], metric: str) -> str:
    lines = [f"| rank | {metric} | deviation | 95 % interval | runs | edits |", "|---:|---:|---:|---:|---:|---|"]
    for rank, row in enumerate(rows, 1):
        mean, deviation = (f"{row[key]:.5g}" if row[key] is not None else "" for key in ("mean", "deviation"))
        bounds = "" if row["interval"] is None else " to ".join(f"{bound:.5g}" for bound in row["interval"])
        lines.append(f"| {rank} | {mean} | {deviation} | {bounds} | {len(row['runs'])} | {row['name']} |")
    return "\n".join(lines) if rows else "no run is finished yet"


def _trials_markdown(trials: list[dict[str, Any]], metric: str) -> str:
    """The trials without a rank, after a blank line; empty if there are none."""
    shown = [trial for trial in trials if trial["state"] != "complete"]
    if not shown:
        return ""
    lines = ["", "", f"| trial | state | step | {metric} there | run |", "|---:|---|---:|---:|---|"]
    for trial in shown:
        step, value = ("" if trial[key] is None else f"{trial[key]:.5g}" for key in ("step", "value"))
        lines.append(f"| {trial['number']} | {trial['state']} | {step} | {value} | {trial['run']} |")
    return "\n".join(lines)
