"""Charts of what stands behind the scores of an evaluation: confusion, calibration, entities, sets, numbers, forecasts,
lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.report import charts, measures
from jaxformer.report.blocks import Figure, table
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run, as_float

MAX_LABELLED = 12
"""Confusion matrices of more classes show no numbers in their cells."""

ENTITY_ERRORS = {
    "correct": "correct",
    "wrong_type": "wrong type",
    "wrong_bounds": "wrong bounds",
    "missed": "missed",
    "spurious": "spurious",
}
"""Entries of a diagnosis of entities, in words."""

ENTITY_COLOURS = ("#2aa15c", "#9068d6", "#e0761a", "#d8444f", "#b08a1e")


def figures(run: Run, split: str) -> list[Figure]:
    """The charts of one split of one run."""
    found: list[Chart | None] = []
    for key, values in run.evaluations.get(split, {}).items():
        if key.split("/")[0] == "diagnosis" and isinstance(values, dict):
            suffix = charts.slug(f"{split} {key.partition('/')[2]}") + run.number_suffix
            of = f"{split}{', ' + key.partition('/')[2] if '/' in key else ''}"
            found += [
                _confusion(values.get("confusion"), suffix, of),
                _calibration(values.get("calibration"), suffix, of),
                _entities(values.get("entities"), suffix, of),
                _sets(values.get("sets"), suffix, of),
                _numbers(values.get("numbers"), suffix, of),
                _groups(values.get("numbers"), suffix, of),
                _steps(values.get("forecast"), suffix, of),
                _channels(values.get("forecast"), suffix, of),
            ]
    found.append(_by_length(run, split))
    return [Figure(chart) for chart in found if chart is not None]


def _confusion(value: Any, suffix: str, of: str) -> Chart | None:
    """Rows are true classes, columns predicted ones; colour is the share of the true class."""
    if not isinstance(value, dict) or not _is_square(value.get("classes"), value.get("counts")):
        return None
    names, counts = [str(name) for name in value["classes"]], value["counts"]
    columns: dict[str, list[Any]] = {"true": [], "predicted": [], "count": [], "share": []}
    for name, row in zip(names, counts, strict=True):
        for other, count in zip(names, row, strict=True):
            share = round(count / sum(row), 4) if sum(row) else None
            for key, cell in (("true", name), ("predicted", other), ("count", count), ("share", share)):
                columns[key].append(cell)
    total, right = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    wrong = [(row[j], names[i], names[j]) for i, row in enumerate(counts) for j in range(len(names)) if i != j]
    worst = max(wrong, default=(0, "", ""))
    words = f" Most often {worst[1]} is taken for {worst[2]}: {worst[0]:,} times." if worst[0] else ""
    name = f"confusion-{suffix}"
    encoding: dict[str, Any] = {
        "x": {
            "field": "predicted",
            "type": "nominal",
            "scale": {"domain": names},
            "title": "predicted",
            "axis": {"labelLimit": 90},
        },
        "y": {
            "field": "true",
            "type": "nominal",
            "scale": {"domain": names},
            "title": "true",
            "axis": {"labelLimit": 90},
        },
    }
    shade = {"field": "share", "type": "quantitative", "title": "share of the true class",
             "scale": {"scheme": "blues", "domain": [0, 1]}, "legend": {"gradientLength": 160}}  # fmt: skip
    tips = [{"field": key, "type": "nominal"} for key in ("true", "predicted", "count", "share")]
    layers: list[dict[str, Any]] = [{"mark": "rect", "encoding": {"color": shade, "tooltip": tips}}]
    if len(names) <= MAX_LABELLED:
        ink = {"condition": {"test": "datum.share > 0.5", "value": "white"}, "value": "#1c2127"}
        text = {"field": "count", "type": "quantitative"}
        layers.append({"mark": {"type": "text", "fontSize": 11}, "encoding": {"text": text, "color": ink}})
    size = max(160, min(420, 26 * len(names)))
    spec = {"data": {"name": name}, "height": size, "encoding": encoding, "layer": layers}
    description = f"Confusion matrix of {len(names)} classes: {right:,} of {total:,} right.{words}"
    body = table(["true \\ predicted", *names], [[n, *row] for n, row in zip(names, counts, strict=True)])
    return Chart(name, f"{of}: confusion of classes", spec, description, {name: columns}, body, width=460)


def _is_square(names: Any, counts: Any) -> bool:
    if not isinstance(names, list) or not isinstance(counts, list) or len(names) != len(counts) or not names:
        return False
    return all(isinstance(row, list) and len(row) == len(names) and all(type(n) is int for n in row) for row in counts)


def _calibration(value: Any, suffix: str, of: str) -> Chart | None:
    """Accuracy against the probability of the answer: on the diagonal, probabilities are what they say."""
    bins = value.get("bins") if isinstance(value, dict) else None
    if not isinstance(bins, list) or not bins or not all(isinstance(each, dict) for each in bins):
        return None
    keys = ("low", "high", "count", "confidence", "accuracy")
    columns = {key: [round(as_float(each.get(key)), 4) for each in bins] for key in keys}
    if any(cell != cell for column in columns.values() for cell in column):
        return None
    name, error = f"calibration-{suffix}", as_float(value.get("error"))
    columns["x"], columns["diagonal"] = columns["confidence"], columns["confidence"]
    share = {"scale": {"domain": [0, 1]}, "type": "quantitative"}
    tips = [{"field": key, "type": "quantitative"} for key in ("confidence", "accuracy", "count")]
    mark = {"type": "circle", "opacity": 0.9}
    size = {
        "field": "count",
        "type": "quantitative",
        "title": "answers",
        "scale": {"range": [30, 500]},
        "legend": {"tickCount": 3, "columns": 4},
    }
    layers = [
        {"data": {"values": [{"a": 0, "b": 0}, {"a": 1, "b": 1}]}, "mark": {"type": "line", "strokeDash": [4, 4],
         "color": "gray"}, "encoding": {"x": {"field": "a", **share}, "y": {"field": "b", **share}}},
        {"mark": {"type": "line", "strokeWidth": 1}, "encoding": {
            "x": {"field": "confidence", **share}, "y": {"field": "accuracy", **share}}},
        {"mark": mark, "encoding": {
            "x": {"field": "confidence", "title": "probability of the answer", **share},
            "y": {"field": "accuracy", "title": "share of right answers", **share}, "size": size, "tooltip": tips}},
    ]  # fmt: skip
    spec = {"data": {"name": name}, "height": 260, "layer": layers}
    words = f"Calibration: expected error {error:.3f}; on the dashed diagonal, probabilities are what they say."
    rows = [[f"{a:g} to {b:g}", int(n), c, d] for a, b, n, c, d in zip(*(columns[k] for k in keys), strict=True)]
    body = table(["probability", "answers", "mean probability", "share of right answers"], rows)
    title = f"{of}: calibration, expected error {error:.3f}"
    return Chart(name, title, spec, words, {name: columns}, body, width=460)


def _entities(value: Any, suffix: str, of: str) -> Chart | None:
    """Bars of what became of the entities of each type."""
    if not isinstance(value, list) or not value or not all(isinstance(row, dict) for row in value):
        return None
    columns: dict[str, list[Any]] = {"type": [], "outcome": [], "count": [], "order": []}
    for row in value:
        for order, (key, word) in enumerate(ENTITY_ERRORS.items()):
            for name, cell in (("type", str(row.get("type"))), ("outcome", word), ("order", order)):
                columns[name].append(cell)
            columns["count"].append(int(as_float(row.get(key, 0)) if as_float(row.get(key, 0)) >= 0 else 0))
    name, words = f"entities-{suffix}", list(ENTITY_ERRORS.values())
    spec = {
        "data": {"name": name},
        "height": 44 * len(value) + 20,
        "mark": "bar",
        "encoding": {
            "y": {"field": "type", "type": "nominal", "title": None},
            "x": {"field": "count", "type": "quantitative", "title": "entities"},
            "color": {"field": "outcome", "type": "nominal", "title": None,
                      "scale": {"domain": words, "range": list(ENTITY_COLOURS)}},
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [{"field": key, "type": "nominal"} for key in ("type", "outcome", "count")],
        },
    }  # fmt: skip
    head = ["type", "true", "predicted", *words]
    rows = [[row.get(key) for key in ("type", "true", "predicted", *ENTITY_ERRORS)] for row in value]
    found = ", ".join(f"{row.get('type')}: {row.get('correct')} of {row.get('true')} correct" for row in value[:6])
    note = "Spurious: predicted where no true entity is. Wrong bounds: overlaps a predicted one."
    title = f"{of}: entities by outcome"
    return Chart(name, title, spec, f"Entities by outcome. {found}.", {name: columns}, table(head, rows), note=note)


def _columns(value: Any, names: Sequence[str]) -> dict[str, list[float]] | None:
    """Columns of numbers of the same length from `{name: [...]}` or rows `[{name: ...}]`; None: it is another value."""
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        value = {name: [row.get(name) for row in value] for name in names}
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in names):
        return None
    columns = {name: [as_float(cell) for cell in value[name]] for name in names}
    sizes = {len(column) for column in columns.values()}
    if len(sizes) != 1 or sizes == {0} or any(cell != cell for column in columns.values() for cell in column):
        return None
    return columns


def _sets(value: Any, suffix: str, of: str) -> Chart | None:
    """Precision and recall of each class of sets."""
    counts = _columns(value, ("true", "predicted", "correct"))
    if counts is None:
        return None
    labels = [str(row.get("label")) for row in value]
    rows = list(zip(labels, *(map(int, counts[key]) for key in ("true", "predicted", "correct")), strict=True))
    shares = [(right / found if found else None, right / own if own else None) for _, own, found, right in rows]
    columns: dict[str, list[Any]] = {"label": [], "measure": [], "value": [], "true": [], "predicted": []}
    for (label, own, found, _), pair in zip(rows, shares, strict=True):
        for measure, share in zip(("precision", "recall"), pair, strict=True):
            cells = (label, measure, None if share is None else round(share, 4), own, found)
            for key, cell in zip(columns, cells, strict=True):
                columns[key].append(cell)
    name = f"sets-{suffix}"
    spec = {
        "data": {"name": name},
        "height": 36 * len(rows) + 20,
        "mark": "bar",
        "encoding": {
            "y": {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 120}},
            "yOffset": {"field": "measure"},
            "x": {"field": "value", "type": "quantitative", "title": "share", "scale": {"domain": [0, 1]}},
            "color": {"field": "measure", "type": "nominal", "title": None,
                      "scale": {"domain": ["precision", "recall"], "range": list(charts.COLOURS[:2])}},
            "tooltip": [{"field": key, "type": "nominal"} for key in columns],
        },
    }  # fmt: skip
    body = table(
        ["label", "true", "predicted", "correct", "precision", "recall"],
        [[*row, *("-" if share is None else f"{share:.3f}" for share in pair)] for row, pair in zip(rows, shares)],
    )
    found = "; ".join(f"{label}: {right} of {own} found, {put} predicted" for label, own, put, right in rows[:6])
    words = f"Precision and recall of each label, most frequent first. {found}."
    return Chart(name, f"{of}: precision and recall of labels", spec, words, {name: columns}, body, width=460)


def _numbers(value: Any, suffix: str, of: str) -> Chart | None:
    """Predicted numbers against true ones."""
    points = value.get("points") if isinstance(value, dict) else None
    if not isinstance(points, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in points):
        return None
    columns = _columns({"true": [pair[0] for pair in points], "predicted": [pair[1] for pair in points]},
                       ("true", "predicted"))  # fmt: skip
    if columns is None:
        return None
    name, error, bias = f"numbers-{suffix}", as_float(value.get("error")), as_float(value.get("bias"))
    shown = {key: [round(cell, 6) for cell in column] for key, column in columns.items()}
    spec = {"data": {"name": name}, "height": 300, "layer": [
        _diagonal([*columns["true"], *columns["predicted"]], "true", "predicted"),
        {"mark": {"type": "circle", "opacity": 0.5, "color": charts.COLOURS[0]}, "encoding": {
            "x": _axis("true", "true number"), "y": _axis("predicted", "predicted number"),
            "tooltip": [{"field": key, "type": "quantitative"} for key in ("true", "predicted")]}},
    ]}  # fmt: skip
    count, all_of = len(points), int(as_float(value.get("examples")))
    some = f" {count:,} of {all_of:,} examples are shown." if count < all_of else ""
    words = (
        f"Predicted against true numbers: root of the mean squared error {error:.4g}, mean of predicted less true "
        f"{bias:.4g}. On the dashed diagonal both are the same.{some}"
    )
    return Chart(name, f"{of}: predicted against true numbers", spec, words, {name: shown}, note=words, width=460)


def _groups(value: Any, suffix: str, of: str) -> Chart | None:
    """Mean of the true numbers among similar predictions: on the diagonal, predictions are calibrated."""
    columns = _columns(value.get("groups") if isinstance(value, dict) else None,
                       ("predicted", "true", "deviation", "count"))  # fmt: skip
    if columns is None:
        return None
    name = f"number-groups-{suffix}"
    low = [mean - spread for mean, spread in zip(columns["true"], columns["deviation"], strict=True)]
    high = [mean + spread for mean, spread in zip(columns["true"], columns["deviation"], strict=True)]
    shown = {key: [round(cell, 6) for cell in column] for key, column in (columns | {"low": low, "high": high}).items()}
    x = _axis("predicted", "mean of similar predictions")
    tips = [{"field": key, "type": "quantitative"} for key in ("predicted", "true", "deviation", "count")]
    spec = {"data": {"name": name}, "height": 260, "layer": [
        _diagonal([*columns["predicted"], *columns["true"]], "predicted", "low"),
        {"mark": {"type": "rule", "color": charts.COLOURS[0]}, "encoding": {
            "x": x, "y": _axis("low", "mean of true numbers"), "y2": {"field": "high"}}},
        {"mark": {"type": "circle", "size": 60, "opacity": 1, "color": charts.COLOURS[0]}, "encoding": {
            "x": x, "y": _axis("true", "mean of true numbers"), "tooltip": tips}},
    ]}  # fmt: skip
    rows = [[f"{p:.4g}", f"{t:.4g}", f"{d:.4g}", int(n)] for p, t, d, n in zip(*columns.values(), strict=True)]
    body = table(["mean prediction", "mean true number", "its deviation", "examples"], rows)
    words = (
        "Calibration: examples in groups of similar predictions. On the dashed diagonal true numbers are on average "
        "what was predicted; the lines reach one standard deviation of the true numbers."
    )
    return Chart(name, f"{of}: calibration of numbers", spec, words, {name: shown}, body, note=words, width=460)


def _axis(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}, "axis": {"tickCount": 5}}


def _diagonal(values: Sequence[float], x: str, y: str) -> dict[str, Any]:
    """A dashed line from the smallest to the largest number."""
    ends = [{x: end, y: end} for end in (min(values), max(values))]
    mark = {"type": "line", "strokeDash": [4, 4], "color": "gray"}
    return {"data": {"values": ends}, "mark": mark, "encoding": {"x": _axis(x, ""), "y": _axis(y, "")}}


FORECASTS = {"mse": "squared error", "mae": "absolute error", "naive_mse": "squared error of the last known step"}
"""Entries of a diagnosis of forecasts, in words."""


def _steps(value: Any, suffix: str, of: str) -> Chart | None:
    """Error against the time step that is forecast."""
    columns = _columns(value.get("steps") if isinstance(value, dict) else None, ("step", *FORECASTS))
    if columns is None:
        return None
    name = f"forecast-steps-{suffix}"
    long: dict[str, list[Any]] = {"step": [], "error": [], "value": []}
    for key, word in FORECASTS.items():
        long["step"] += [int(step) for step in columns["step"]]
        long["error"] += [word] * len(columns["step"])
        long["value"] += [round(cell, 6) for cell in columns[key]]
    spec = {
        "data": {"name": name},
        "height": 260,
        "mark": {"type": "line", "point": len(columns["step"]) <= 2 * MAX_LABELLED},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "time steps after the last known one",
                  "scale": {"zero": False, "nice": False}},
            "y": {"field": "value", "type": "quantitative", "title": "error of standardised values"},
            "color": {"field": "error", "type": "nominal", "title": None,
                      "scale": {"domain": list(FORECASTS.values()), "range": list(charts.COLOURS[:3])}},
            "tooltip": [{"field": key, "type": "nominal"} for key in long],
        },
    }  # fmt: skip
    first, last = (f"{columns['mse'][end]:.4g}" for end in (0, -1))
    words = f"Squared error of the forecast: {first} one step ahead, {last} at step {int(columns['step'][-1])}."
    rows = list(zip(map(int, columns["step"]), *([f"{v:.4g}" for v in columns[key]] for key in FORECASTS), strict=True))
    body = table(["step", *FORECASTS.values()], rows)
    return Chart(name, f"{of}: error by horizon", spec, words, {name: long}, body, width=460)


def _channels(value: Any, suffix: str, of: str) -> Chart | None:
    """Error of each channel of a forecast."""
    found = value.get("channels") if isinstance(value, dict) else None
    names = found.get("channel") if isinstance(found, dict) else None
    columns = _columns(found, tuple(FORECASTS))
    if columns is None or not isinstance(names, list) or len(names) != len(columns["mse"]):
        return None
    labels, name = [str(channel) for channel in names], f"forecast-channels-{suffix}"
    shown = {"channel": labels, **{key: [round(cell, 6) for cell in column] for key, column in columns.items()}}
    y = {"field": "channel", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 120}}
    x = {"type": "quantitative", "title": "squared error of standardised values"}
    tips = [{"field": key, "type": "nominal"} for key in shown]
    spec = {"data": {"name": name}, "height": 24 * len(labels) + 20, "encoding": {"y": y}, "layer": [
        {"mark": {"type": "bar", "color": charts.COLOURS[0]},
         "encoding": {"x": {"field": "mse", **x}, "tooltip": tips}},
        {"mark": {"type": "tick", "color": "gray", "thickness": 2}, "encoding": {"x": {"field": "naive_mse", **x}}},
    ]}  # fmt: skip
    words = "Squared error of each channel; the grey tick is that of repeating the last known step."
    rows = list(zip(labels, *([f"{v:.4g}" for v in columns[key]] for key in FORECASTS), strict=True))
    body = table(["channel", *FORECASTS.values()], rows)
    return Chart(name, f"{of}: error by channel", spec, words, {name: shown}, body, note=words, width=460)


def _by_length(run: Run, split: str) -> Chart | None:
    """The main measure of a split for each interval of source lengths."""
    rows = run.evaluations.get(split, {}).get("by_length")
    if not isinstance(rows, list) or len(rows) < 2 or not all(isinstance(row, dict) for row in rows):
        return None
    names = [key for row in rows for key in row if key not in ("tokens", "examples", "decoded_examples")]
    main = main_measure(dict.fromkeys(names), run)
    if main is None:
        return None
    values = [as_float(row.get(main)) for row in rows]
    labels = [str(row.get("tokens")) for row in rows]
    name, label = f"length-{charts.slug(split)}{run.number_suffix}", measures.LABELS.get(main, main)
    spec = {
        "data": {"name": name},
        "height": 220,
        "mark": {"type": "bar", "width": {"band": 0.6}},
        "encoding": {
            "x": {"field": "tokens", "type": "ordinal", "scale": {"domain": labels}, "title": "tokens of the input",
                  "axis": {"labelAngle": 0}},
            "y": {"field": "value", "type": "quantitative", "title": label},
            "tooltip": [{"field": key, "type": "nominal"} for key in ("tokens", "value", "examples")],
        },
    }  # fmt: skip
    shown = [None if value != value else round(value, 6) for value in values]
    columns = {"tokens": labels, "value": shown, "examples": [row.get("examples") for row in rows]}
    words = "; ".join(f"{a} tokens: {b}" for a, b in zip(labels, shown, strict=True))
    return Chart(name, f"{split}: {label} by input length", spec, f"By length. {words}.", {name: columns}, width=460)


def main_measure(names: Mapping[str, Any], run: Run) -> str | None:
    """The main measure of those that there are."""
    order: Sequence[str] = measures.headline(dict(names), run.config)
    return order[0] if order else None
