"""The ranking of a sweep's finished runs."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from jaxformer.runtime import files
from jaxformer.sweep.planning import Plan, Run, format_value, run_name
from jaxformer.sweep.space import SEED


def write_ranking(plan: Plan) -> list[dict[str, Any]]:
    """Writes `ranking.json` and `ranking.md`, prints the table, and returns its rows, best first.

    Runs are ordered by `checkpoint.metric` of their final validation. Runs that differ in the seed only share a row,
    with the mean and the sample standard deviation (n - 1) over seeds.
    """
    groups: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in plan.runs:
        result = run.result
        if result is not None:
            edits = {path: value for path, value in run.edits.items() if path != SEED}
            groups.setdefault(run_name(edits), []).append((run, result))
    checkpoint = plan.runs[0].config.checkpoint
    rows = [_row(name, members, checkpoint.metric) for name, members in groups.items()]
    sign = 1 if checkpoint.mode == "min" else -1
    rows.sort(key=lambda row: math.inf if row["mean"] is None else sign * row["mean"])
    plan.workdir.mkdir(parents=True, exist_ok=True)
    table = _markdown(rows, checkpoint.metric)
    files.write_atomic(plan.workdir / "ranking.md", table + "\n")
    missing = [run.workdir.name for run in plan.unfinished]
    ranking = {"metric": checkpoint.metric, "mode": checkpoint.mode, "missing": missing, "rows": rows}
    files.write_atomic(plan.workdir / "ranking.json", json.dumps(ranking, indent=1) + "\n")
    print(table, flush=True)
    return rows


def _row(name: str, members: list[tuple[Run, dict[str, Any]]], metric: str) -> dict[str, Any]:
    results = {run.workdir.name: result.get(metric) for run, result in members}
    values = [v for v in results.values() if isinstance(v, (int, float)) and math.isfinite(v)]
    is_complete = len(values) == len(members)  # the mean must not leave out a diverged seed
    return {
        "name": name,
        "edits": {path: format_value(value) for path, value in members[0][0].edits.items() if path != SEED},
        "mean": statistics.fmean(values) if is_complete else None,
        "deviation": statistics.stdev(values) if is_complete and len(values) > 1 else None,
        "runs": results,
    }


def _markdown(rows: list[dict[str, Any]], metric: str) -> str:
    lines = [f"| rank | {metric} | deviation | runs | edits |", "|---:|---:|---:|---:|---|"]
    for rank, row in enumerate(rows, 1):
        mean, deviation = (f"{row[key]:.5g}" if row[key] is not None else "" for key in ("mean", "deviation"))
        lines.append(f"| {rank} | {mean} | {deviation} | {len(row['runs'])} | {row['name']} |")
    return "\n".join(lines)
