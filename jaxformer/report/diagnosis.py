"""Charts of what stands behind the scores of an evaluation: confusion, calibration, entities, lengths."""

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
