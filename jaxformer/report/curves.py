"""Curves of runs: every measure of training and validation against steps, tokens and time.

Long curves are thinned for a page: of each stretch of neighbouring points the smallest and the largest are kept, so
that no peak is lost. Runs that differ in their seed only are one curve, their mean, with a band from the smallest to
the largest of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.report import charts, measures
from jaxformer.report.blocks import format_value, table
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run, flatten

MAX_POINTS = 1000
"""Points of a curve, if there are few curves in a chart."""

MAX_CHART_POINTS = 6000
"""Points of all curves of a chart; each has at least `MIN_POINTS`."""

MIN_POINTS = 200

MAX_MARKED_POINTS = 60
"""Curves of no more points show each as a dot."""

MIN_LOG_RATIO = 3.0
"""From this ratio of largest to smallest value on, an axis is logarithmic at first."""

LOG_MEASURES = ("loss", "perplexity", "word_perplexity", "gradient_norm", "squared_error")
"""Measures whose axis may be logarithmic at first: those that fall by factors."""

TRAINING_FIRST = ("learning_rate", "gradient_norm", "tokens_per_second", "padding", "skipped", "spiked")
"""Training measures that are shown first, in this order."""

NOT_SHOWN = ("loss", "steps_per_second")
"""Training measures without a chart of their own: one is the first chart, one says what tokens per second says."""


@dataclass(frozen=True)
class Curve:
    """One curve: points that were measured and are finite.

    Attributes:
      name: as the legend shows it.
      split: "train" or "validation".
      step, tokens, hours, value: float64 `[n]`; tokens and hours of training until then, NaN if they are not known.
      low, high: smallest and largest value over seeds `[n]`; None for a single run.
      group: the run, or the seeds, that the curve is of; of a single run the split. It has the colour.
    """

    name: str
    split: str
    step: np.ndarray
    tokens: np.ndarray
    hours: np.ndarray
    value: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    group: str = ""


# --- curves of runs ---------------------------------------------------------------------------------------------------


def curve(run: Run, split: str, name: str) -> Curve:
    """The finite points of one measure of one run."""
    steps, values = run.series(split, name)
    is_finite = np.isfinite(values)
    steps, values = steps[is_finite], values[is_finite]
    tokens, hours = progress(run, steps)
    return Curve(run.name, split, steps, tokens, hours, values, group=run.name)


def progress(run: Run, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens read and hours of training until each step; evaluation and saving left out. NaN if no rates are known.

    Each report of training has the rates of the steps since the one before it.
    """
    reports, rates = run.series("train", "steps_per_second")
    _, speeds = run.series("train", "tokens_per_second")
    if len(rates) != len(speeds) or not len(rates):
        return np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    done = np.diff(reports, prepend=0.0)
    usable = np.isfinite(rates) & (rates > 0) & np.isfinite(speeds)
    seconds = np.where(usable, done / np.where(usable, rates, 1.0), 0.0)
    tokens = np.where(usable, seconds * speeds, 0.0)
    known = np.concatenate([[0.0], reports])
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (tokens, seconds / 3600)]
    return np.interp(steps, known, sums[0]), np.interp(steps, known, sums[1])


def mean_curve(name: str, members: Sequence[Curve]) -> Curve:
    """The mean of several curves over the steps that all of them have, with the range of their values."""
    common = members[0].step
    for each in members[1:]:
        common = np.intersect1d(common, each.step)
    index = [np.searchsorted(each.step, common) for each in members]
    rows = {
        key: np.stack([getattr(each, key)[i] for each, i in zip(members, index, strict=True)])
        for key in ("tokens", "hours", "value")
    }
    low, high = rows["value"].min(axis=0), rows["value"].max(axis=0)
    means = {key: value.mean(axis=0) for key, value in rows.items()}
    return Curve(name, members[0].split, common, **means, low=low, high=high, group=name)


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs, those that differ in their seed only together."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        fields = {path: value for path, value in flatten(run.raw_config).items() if path != "train.seed"}
        key = json.dumps(fields, sort_keys=True) if fields else f"run {number}"
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def group_name(members: Sequence[Run]) -> str:
    """The name of a run, or of several seeds: what their names have in common, and their number."""
    if len(members) == 1:
        return members[0].name
    names = [run.name for run in members]
    folders = {name.rpartition("/")[0] or run.workdir.parent.name for name, run in zip(names, members, strict=True)}
    common = folders.pop() if len(folders) == 1 else names[0]
    return f"{common}, {len(members)} seeds"


def thin(values: np.ndarray, limit: int) -> np.ndarray:
    """Indices of at most `limit` points: first, last, and smallest and largest of each stretch between them."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    bounds = np.linspace(0, count, max(1, (limit - 2) // 2) + 1).astype(int)
    kept = {0, count - 1}
    for low, high in itertools.pairwise(bounds):
        part = values[low:high]
        kept |= {int(low + np.argmin(part)), int(low + np.argmax(part))} if len(part) else set()
    return np.array(sorted(kept))


# --- charts -----------------------------------------------------------------------------------------------------------


def all_charts(runs: Sequence[Run]) -> list[Chart]:
    """The loss first, then every measure of validation, then those of training."""
    groups = seed_groups(runs)
    shown = [("loss", [("train", "loss"), ("validation", "loss")])]
    for split in ("validation", "train"):
        names = dict.fromkeys(name for run in runs for name in run.measures(split))
        main = (name for run in runs for name in measures.headline(dict.fromkeys(names), run.config)[:1])
        order = TRAINING_FIRST if split == "train" else tuple(main)
        for name in sorted(names, key=lambda each: order.index(each) if each in order else len(order)):
            is_left_out = name == "loss" or name.split("/")[0].startswith("cut_")
            if not (is_left_out if split == "validation" else name in NOT_SHOWN):
                shown.append((name, [(split, name)]))
    found: list[Chart] = []
    taken: set[str] = set()
    for measure, sources in shown:
        stem = measure if len(sources) > 1 else f"{sources[0][0]}-{measure}"
        name = charts.slug(stem, taken)
        chart = _measure_chart(groups, sources, measure, name)
        found += [] if chart is None else [chart]
    return found


def _measure_chart(
    groups: Sequence[Sequence[Run]], shown: Sequence[tuple[str, str]], measure: str, name: str
) -> Chart | None:
    """The chart of one measure, of one split or of two; None if it was never finite."""
    is_single = sum(map(len, groups)) == 1
    curves = [each for members in groups for each in _group_curves(members, shown, is_single)]
    if not curves:
        return None
    limit = max(MIN_POINTS, min(MAX_POINTS, MAX_CHART_POINTS // len(curves)))
    columns, most = _columns(curves, limit)
    split = shown[0][0]
    label = measures.LABELS.get(measure, measure.replace("_", " "))
    title = label if len(shown) > 1 or split == "train" else f"{split}: {label}"
    values = np.concatenate([each.value for each in curves])
    if measure in ("skipped", "spiked") and not values.any():
        return None  # the page says so in a sentence
    is_log = (
        measure.split("/")[0] in LOG_MEASURES and values.min() > 0 and values.max() / values.min() >= MIN_LOG_RATIO
    )  # as a run of losses is read: its last steps matter as much as its first
    spec = _spec(label, curves, most <= MAX_MARKED_POINTS, bool(is_log), len(shown) > 1 and not is_single, name)
    total = max(len(each.value) for each in curves)
    note = f"{most:,} of {total:,} points a curve: smallest and largest of each stretch." if most < total else ""
    return Chart(
        name=name,
        title=title,
        spec=spec,
        description=_description(title, curves),
        data={name: columns},
        table=_summary(curves),
        table_summary="first, last, smallest and largest value of each curve",
        note=note,
        readout=("x", "value", "series", "group"),
        curve=True,
    )


def _group_curves(members: Sequence[Run], shown: Sequence[tuple[str, str]], is_single: bool) -> list[Curve]:
    """The curves of one run or of the seeds of one config; empty ones are left out."""
    found = []
    for split, name in shown:
        parts = [each for each in (curve(run, split, name) for run in members) if len(each.value)]
        if not parts:
            continue
        joined = parts[0] if len(parts) == 1 else mean_curve(group_name(members), parts)
        if not len(joined.value):
            continue
        text = split if is_single else joined.name if len(shown) == 1 else f"{joined.name}, {split}"
        found.append(dataclasses.replace(joined, name=text, group=split if is_single else joined.group))
    return found


def _columns(curves: Sequence[Curve], limit: int) -> tuple[dict[str, Any], int]:
    """The data set of a chart, and the number of points of its longest curve."""
    kept = [thin(each.value, limit) for each in curves]
    pairs = list(zip(curves, kept, strict=True))

    def joined(key: str, digits: int) -> list[float | None]:
        return [_rounded(v, digits) for each, index in pairs for v in getattr(each, key)[index]]

    columns: dict[str, Any] = {
        "series": ("repeat", [(each.name, len(index)) for each, index in pairs]),
        "group": ("repeat", [(each.group, len(index)) for each, index in pairs]),
        "split": ("repeat", [(each.split, len(index)) for each, index in pairs]),
        "step": joined("step", 12),
        "tokens": joined("tokens", 7),
        "hours": joined("hours", 5),
        "value": joined("value", 6),
    }
    if any(each.low is not None for each in curves):
        for name in ("low", "high"):
            bands = [getattr(each, "value" if each.low is None else name) for each in curves]
            columns[name] = [_rounded(v, 6) for band, index in zip(bands, kept, strict=True) for v in band[index]]
    return columns, max(map(len, kept))


def _rounded(value: float, digits: int) -> float | int | None:
    """`value` with this many digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _summary(curves: Sequence[Curve]) -> Any:
    """A row for each curve, in words and numbers."""
    rows = []
    for each in curves:
        low, high = int(np.argmin(each.value)), int(np.argmax(each.value))
        row = [each.name, len(each.value), float(each.value[0]), float(each.value[-1])]
        row += [f"{format_value(float(each.value[i]))} at step {each.step[i]:,.0f}" for i in (low, high)]
        rows.append(row)
    return table(["curve", "points", "first", "last", "smallest", "largest"], rows)


def _description(title: str, curves: Sequence[Curve]) -> str:
    """The chart in words: where each curve begins and ends; of many the first ones."""
    words = [
        f"{each.name} from {format_value(float(each.value[0]))} at step {each.step[0]:,.0f} "
        f"to {format_value(float(each.value[-1]))} at step {each.step[-1]:,.0f}"
        for each in curves[:4]
    ]
    more = f"; {len(curves) - 4} more in the table below" if len(curves) > 4 else ""
    return f"Line chart of {title}: {'; '.join(words)}{more}."


def _spec(
    label: str, curves: Sequence[Curve], has_dots: bool, is_log: bool, has_dashes: bool, name: str
) -> dict[str, Any]:
    """The Vega-Lite specification of curves over `series`; its parameters are those that the page's controls set."""
    # Of one run the splits have colours of their own; of several, train and validation of a run share one.
    groups = list(dict.fromkeys(each.group for each in curves))
    colours = [charts.COLOURS[i % len(charts.COLOURS)] for i in range(len(groups))]
    lines: dict[str, Any] = {"type": "line", "clip": True, "strokeWidth": 1.6, "interpolate": "linear"}
    dots = {"point": {"size": 22, "filled": True}} if has_dots else {}
    layers: list[dict[str, Any]] = []
    if any(each.low is not None for each in curves):
        band: dict[str, Any] = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
        band |= {"strokeDash": None} if has_dashes else {}
        layers.append({"mark": {"type": "area", "clip": True, "opacity": 0.18}, "encoding": band})
    faint = {"opacity": {"expr": "smooth > 0 ? 0.3 : 1"}}
    layers.append({"params": [charts.ZOOM], "mark": {**lines, **faint, **dots}})
    strong = {"opacity": {"condition": {"test": "smooth > 0", "value": 1}, "value": 0}}
    mean = {"y": {"field": "mean", "type": "quantitative"}, **strong}
    layers.append({"mark": {**lines, "strokeWidth": 2}, "encoding": mean})
    encoding: dict[str, Any] = {
        "x": {"field": "x", "type": "quantitative", "title": "step", "axis": {"grid": False, "format": "~s"},
              "scale": {"type": "linear", "nice": False, "zero": False}},
        "y": {"field": "value", "type": "quantitative", "title": label, "axis": {"tickCount": 6},
              "scale": {"type": "log", "nice": False} if is_log else {"type": "linear", "zero": False}},
        "color": {"field": "group", "type": "nominal", "title": None, "scale": {"domain": groups, "range": colours},
                  "legend": {"symbolType": "stroke", "symbolOpacity": 1}},
        "detail": {"field": "series", "type": "nominal"},
    }  # fmt: skip
    if len(groups) == 1:
        encoding["color"]["legend"] = None
    if has_dashes:
        stroke = {"legend": {"symbolType": "stroke"}}
        dash: dict[str, Any] = {"domain": ["train", "validation"], "range": [[4, 3], [1, 0]]}
        encoding["strokeDash"] = {"field": "split", "type": "nominal", "scale": dash, "title": None, **stroke}
    return {
        "data": {"name": name},
        "height": 250,
        "params": [
            {"name": "axis", "value": "step"},
            {"name": "smooth", "value": 0},
            {"name": "log_x", "value": False},
            {"name": "log_y", "value": is_log},
            charts.CURSOR,
        ],
        "transform": _transforms(),
        "layer": [{"encoding": encoding, "layer": layers}, charts.CURSOR_RULE],
    }


def _transforms() -> list[dict[str, Any]]:
    """The place on the chosen axis, the moving mean, and what a zoomed axis shows.

    The window of the mean is a signal: Vega takes one there, and Vega-Lite hands it on, although its schema names
    numbers only. With a zoomed axis the points outside are left out, but for one on either side, to which the curve
    leads; so the other axis fits what is seen.
    """
    order = {"groupby": ["series"], "sort": [{"field": "x"}]}
    neighbours = [{"op": "lag", "field": "x", "as": "before"}, {"op": "lead", "field": "x", "as": "after"}]
    is_seen = (
        "!isValid(zoom_x) || ((!isValid(datum.after) || datum.after >= zoom_x[0]) "
        "&& (!isValid(datum.before) || datum.before <= zoom_x[1]))"
    )
    return [
        {"calculate": "datum[axis]", "as": "x"},
        {"filter": "isValid(datum.x) && (!log_x || datum.x > 0) && (!log_y || datum.value > 0)"},
        {"window": [{"op": "mean", "field": "value", "as": "mean"}], "frame": {"signal": "[-smooth, smooth]"}, **order},
        {"window": neighbours, **order},
        {"filter": is_seen},
    ]
