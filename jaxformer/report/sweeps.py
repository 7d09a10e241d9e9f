"""Charts of several runs of different settings: parallel coordinates, and the result against each setting."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxformer.report import measures
from jaxformer.report.blocks import format_value, table
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run, as_float, flatten

MIN_RUNS = 3
"""Fewer runs have no charts of their settings: their differences are a table."""

MAX_SETTINGS = 8
"""Settings that are shown, those with the most values first; the page says how many differ."""

MIN_LOG_RATIO = 20.0
"""From this ratio of largest to smallest value on, a setting's axis is logarithmic."""

NOT_SETTINGS = ("train.seed",)
"""Fields that are no settings: their effect is noise."""


def all_charts(runs: Sequence[Run]) -> list[Chart]:
    """Parallel coordinates and a response plot for each setting; none for fewer than three runs with a result."""
    found = result(runs)
    if found is None:
        return []
    measure, values = found
    shown = [(run, value) for run, value in zip(runs, values, strict=True) if math.isfinite(value)]
    settings = differing([run for run, _ in shown])
    if len(shown) < MIN_RUNS or not settings:
        return []
    dropped = f"{len(settings) - MAX_SETTINGS} more settings differ." if len(settings) > MAX_SETTINGS else ""
    settings = settings[:MAX_SETTINGS]
    columns: dict[str, list[Any]] = {"run": [run.name for run, _ in shown], "result": [_short(v) for _, v in shown]}
    for number, name in enumerate(settings):
        columns[f"s{number}"] = [flatten(run.raw_config).get(name) for run, _ in shown]
    axes = [_Axis(name, columns[f"s{number}"]) for number, name in enumerate(settings)]
    axes.append(_Axis(measure, columns["result"]))
    body = table(["run", *settings, measure], [list(row) for row in zip(*_as_read(columns), strict=True)])
    parallel = _parallel(axes, columns, measure, body, dropped)
    return [parallel, *(_response(axis, columns, number, measure) for number, axis in enumerate(axes[:-1]))]


def result(runs: Sequence[Run]) -> tuple[str, list[float]] | None:
    """The main measure that most runs have, and its value in each (NaN: none): of the last validation."""
    finals = [run.final() for run in runs]
    names: dict[str, int] = {}
    for run, values in zip(runs, finals, strict=True):
        for name in measures.headline(values, run.config)[:1]:
            names[name] = names.get(name, 0) + 1
    if not names:
        return None
    measure = max(names, key=lambda name: names[name])
    return measure, [as_float(values.get(measure)) for values in finals]


def differing(runs: Sequence[Run]) -> list[str]:
    """Config fields in which the runs differ, those with the most values first."""
    configs = [flatten(run.raw_config) for run in runs]
    counts = {
        name: len({json.dumps(values.get(name)) for values in configs})
        for name in sorted({name for values in configs for name in values})
    }
    names = [name for name, count in counts.items() if count > 1 and name not in NOT_SETTINGS]
    return sorted(names, key=lambda name: -counts[name])


class _Axis:
    """One vertical axis of the parallel coordinates: where each value lies between 0 and 1, and its labels."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.name = name
        numbers = [as_float(value) for value in values]
        self.is_number = all(math.isfinite(number) for number in numbers)
        self.values: list[Any] = list(values)
        if not self.is_number:
            self.values = [_text(value) for value in values]
            names = sorted(set(self.values))
            self.is_log = False
            steps = max(len(names) - 1, 1)
            self.places = [names.index(value) / steps for value in self.values]
            self.labels = [(i / steps, name) for i, name in enumerate(names)]
            return
        low, high = min(numbers), max(numbers)
        self.is_log = low > 0 and high / low >= MIN_LOG_RATIO
        scale = math.log if self.is_log else float
        span = scale(high) - scale(low) or 1.0
        self.places = [(scale(number) - scale(low)) / span for number in numbers]
        self.labels = (
            [(0.0, format_value(low)), (1.0, format_value(high))] if high > low else [(0.0, format_value(low))]
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _as_read(columns: dict[str, list[Any]]) -> list[list[Any]]:
    keys = ["run", *(key for key in columns if key.startswith("s")), "result"]
    return [columns[key] for key in keys]


def _parallel(axes: Sequence[_Axis], columns: dict[str, list[Any]], measure: str, body: Any, note: str) -> Chart:
    """A line for each run through its value on each axis, coloured by its result."""
    count = len(columns["run"])
    lines: dict[str, list[Any]] = {key: [] for key in ("run", "axis", "place", "value", "result")}
    for index in range(count):
        for axis in axes:
            lines["run"].append(columns["run"][index])
            lines["axis"].append(axis.name)
            lines["place"].append(round(axis.places[index], 5))
            lines["value"].append(format_value(axis.values[index]))
            lines["result"].append(columns["result"][index])
    labels = [(axis.name, round(place, 5), text) for axis in axes for place, text in axis.labels]
    marks = {"axis": [a for a, _, _ in labels], "place": [b for _, b, _ in labels], "text": [c for _, _, c in labels]}
    names = [axis.name for axis in axes]
    x = {"field": "axis", "type": "nominal", "title": None, "scale": {"padding": 0.1, "domain": names},
         "axis": {"labelAngle": -20, "labelLimit": 130, "domain": False, "grid": True,
                  "bandPosition": 0.5}}  # fmt: skip
    y = {"field": "place", "type": "quantitative", "axis": None, "scale": {"domain": [0, 1]}}
    label = measures.LABELS.get(measure, measure)
    colour = {"field": "result", "type": "quantitative", "scale": {"scheme": "viridis"}, "title": label,
              "legend": {"gradientLength": 200, "titleLimit": 300}}  # fmt: skip
    tips = [{"field": key, "type": "nominal"} for key in ("run", "axis", "value", "result")]
    line = {"mark": {"type": "line", "strokeWidth": 1.8, "opacity": 0.8}, "encoding": {
        "x": x, "y": y, "color": colour, "detail": {"field": "run", "type": "nominal"}, "tooltip": tips}}  # fmt: skip
    dot = {"mark": {"type": "circle", "size": 40}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tips}}
    text = {
        "data": {"name": "sweep-labels"},
        "mark": {"type": "text", "align": "left", "dx": 5, "dy": -5, "fontSize": 11, "limit": 110},
        "encoding": {"x": x, "y": y, "text": {"field": "text", "type": "nominal"}},
    }
    spec = {"data": {"name": "sweep"}, "height": 300, "layer": [line, dot, text]}
    best = max(range(count), key=lambda i: columns["result"][i])
    description = f"Parallel coordinates of {count} runs over {', '.join(names)}. Largest {measure}: "
    description += f"{format_value(columns['result'][best])} of {columns['run'][best]}."
    data = {"sweep": lines, "sweep-labels": marks}
    return Chart(
        "sweep", f"settings and {label}", spec, description, data, body, "the runs as a table", note, width=760
    )


def _response(axis: _Axis, columns: dict[str, list[Any]], number: int, measure: str) -> Chart:
    """The result of each run against one setting."""
    name = f"response-{number}"
    kind = "quantitative" if axis.is_number and len(set(map(str, axis.values))) > 2 else "nominal"
    values = axis.values if kind == "quantitative" else [_text(value) for value in axis.values]
    scale = {"scale": {"type": "log" if axis.is_log else "linear", "zero": False}} if kind == "quantitative" else {}
    label = measures.LABELS.get(measure, measure)
    tips = [{"field": key, "type": "nominal"} for key in ("run", "setting", "result")]
    spec = {
        "data": {"name": name},
        "height": 200,
        "mark": {"type": "circle", "size": 60, "opacity": 0.8},
        "encoding": {
            "x": {"field": "setting", "type": kind, "title": axis.name, **scale},
            "y": {"field": "result", "type": "quantitative", "title": label, "scale": {"zero": False}},
            "tooltip": tips,
        },
    }
    data = {"run": columns["run"], "setting": values, "result": columns["result"]}
    words = f"{label} of {len(values)} runs against {axis.name}. The values are in the table of the runs above."
    return Chart(name, f"{label} by {axis.name}", spec, words, {name: data}, width=420)
