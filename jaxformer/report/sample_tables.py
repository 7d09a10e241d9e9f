"""Samples of a run: worst and best by score, as they are in the file, and as they improved over training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxformer.report.blocks import Block, Details, Figure, Paragraph, table
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run

MAX_SAMPLES = 25
"""Samples shown of one file in their order; the page says how many there are."""

MAX_EXTREMES = 10
"""Samples shown as the worst, and as the best."""

MAX_SCORED = 2000
"""Samples of one file that are scored, the first ones; the page says so."""

MAX_FOLLOWED = 8
"""Samples whose outputs are followed over training."""

LABEL_TASKS = ("classification", "series_classification", "multi_label")
NUMBER_TASKS = ("regression", "similarity")

Record = dict[str, Any]


def score_name(task: str) -> str:
    """Name of the score of one sample of a task."""
    if task in LABEL_TASKS:
        return "probability, negative where wrong"
    if task in NUMBER_TASKS:
        return "minus absolute error"
    return "words tagged right (share)" if task == "tagging" else "chrF (0 to 100)"


def scores(task: str, records: Sequence[Record]) -> list[float]:
    """The score of each record, larger is better; NaN if it has no reference."""
    if task in LABEL_TASKS:
        return [_of_texts(r, _signed_probability) for r in records]
    if task in NUMBER_TASKS:
        return [_of_texts(r, _minus_error) for r in records]
    if task == "tagging":
        return [_of_texts(r, _tag_share) for r in records]
    import sacrebleu  # slow to import

    metric = sacrebleu.CHRF()
    return [_of_texts(r, lambda a, b: float(metric.sentence_score(a, [b]).score)) for r in records]


def _of_texts(record: Record, score: Any) -> float:
    output, reference = record.get("output"), record.get("reference")
    return score(output, reference) if isinstance(output, str) and isinstance(reference, str) else math.nan


def _signed_probability(output: str, reference: str) -> float:
    """The probability of the label, negative if it is wrong; 1 where the output has none."""
    label, _, probability = output.partition("\t")
    try:
        size = float(probability or 1)
    except ValueError:
        size = 1.0
    return size if label == reference else -size


def _minus_error(output: str, reference: str) -> float:
    try:
        return -abs(float(output) - float(reference))
    except ValueError:
        return math.nan


def _tag_share(output: str, reference: str) -> float:
    tags, true = output.split(), reference.split()
    return sum(a == b for a, b in zip(tags, true, strict=False)) / len(true) if true else math.nan


# --- blocks -----------------------------------------------------------------------------------------------------------


def samples(run: Run) -> list[Block]:
    """The newest samples by score, the samples in their order, and how they improved."""
    names = [name for name, records in run.samples.items() if records]
    blocks = extremes(run)
    is_scored = bool(blocks)
    blocks += _improvement(run, _task(run))
    has_step = False
    for name in names:
        records = run.samples[name]
        count = f"{min(len(records), MAX_SAMPLES)} of {len(records):,}" if len(records) > MAX_SAMPLES else len(records)
        is_step = name.startswith("step ")
        is_open = not (run.number or is_scored or (is_step and has_step))
        blocks.append(Details(f"{name}: {count} decoded", _table(records[:MAX_SAMPLES]), is_open))
        has_step |= is_step
    return blocks


def extremes(run: Run) -> list[Block]:
    """The worst and the best samples of each split that was evaluated; else of the newest step."""
    names = [name for name, records in run.samples.items() if records]
    finals = [name for name in names if not name.startswith("step ")]
    steps = [name for name in names if name.startswith("step ")]
    found: list[Block] = []
    for name in finals or steps[:1]:
        found += _extremes(name, run.samples[name], _task(run), not run.number)
    return found


def _task(run: Run) -> str:
    return run.config.task.name if run.config else ""


def _table(records: Sequence[Record], values: Sequence[float] | None = None) -> Any:
    """Records as rows: their number from 1, their score if it is given, and their texts."""
    keys = [key for key in ("component", "input", "output", "reference") if any(key in r for r in records)]
    head = ["", *(["score"] if values is not None else []), *keys]
    rows = []
    for index, record in enumerate(records):
        score = [] if values is None else [None if math.isnan(values[index]) else round(values[index], 4)]
        number = record.get("number", index + 1)
        rows.append([number, *score, *(str(record.get(key, "")) for key in keys)])
    return table(head, rows)


def _extremes(name: str, records: Sequence[Record], task: str, is_open: bool) -> list[Block]:
    """The worst and the best samples of one file; none if there are too few to choose from."""
    records = [{**record, "number": number} for number, record in enumerate(records[:MAX_SCORED], 1)]
    if len(records) <= 2 or any("component" in record for record in records):
        return []
    values = scores(task, records)
    order = [i for i in sorted(range(len(values)), key=lambda i: values[i]) if not math.isnan(values[i])]
    count = min(MAX_EXTREMES, len(order) // 2)
    if not count:
        return []
    title = score_name(task)
    found: list[Block] = []
    for word, chosen in (("worst", order[:count]), ("best", order[::-1][:count])):
        body = _table([records[i] for i in chosen], [values[i] for i in chosen])
        summary = f"{name}: the {count} {word} of {len(records):,} by {title}"
        found.append(Details(summary, body, is_open and word == "worst"))
    return found


def _improvement(run: Run, task: str) -> list[Block]:
    """The outputs for the same inputs at each evaluation: a chart of their scores, and a table for each input."""
    steps = {int(name.removeprefix("step ")): records for name, records in run.samples.items() if _is_step(name)}
    if len(steps) < 2:
        return []
    by_input: dict[str, dict[int, Record]] = {}
    for step in sorted(steps):
        for record in steps[step]:
            if isinstance(record.get("input"), str) and "component" not in record:
                by_input.setdefault(record["input"], {})[step] = record
    followed = [found for found in by_input.values() if len(found) > 1][:MAX_FOLLOWED]
    blocks: list[Block] = []
    points: dict[str, list[Any]] = {"sample": [], "step": [], "score": [], "input": [], "output": []}
    for number, found in enumerate(followed, 1):
        values = scores(task, list(found.values()))
        rows = []
        for (step, record), value in zip(found.items(), values, strict=True):
            output = str(record.get("output", ""))
            rows.append([step, None if math.isnan(value) else round(value, 4), output])
            for key, cell in (("sample", number), ("step", step), ("input", record["input"]), ("output", output)):
                points[key].append(cell[:200] if isinstance(cell, str) else cell)
            points["score"].append(rows[-1][1])
        last = next(reversed(found.values()))
        head = ["step", "score", "output"]
        words = " ".join(str(last["input"]).split())
        words = f"{words[:80]}…" if len(words) > 80 else words
        reference = " ".join(str(last.get("reference", "")).split())
        rows.append(["reference", None, reference])
        blocks.append(Details(f"sample {number}: {words}", table(head, rows)))
    if not blocks:
        return []
    chart = _improvement_chart(points, score_name(task), run)
    return [Paragraph("The same inputs at each evaluation:", is_soft=True), Figure(chart), *blocks]


def _is_step(name: str) -> bool:
    return name.startswith("step ") and name.removeprefix("step ").isdecimal()


def _improvement_chart(points: dict[str, list[Any]], title: str, run: Run) -> Chart:
    """A row for each sample, a column for each evaluation, coloured by score."""
    name = f"samples-over-training{run.number_suffix}"
    tooltip = [{"field": key, "type": "nominal"} for key in ("step", "score", "input", "output")]
    count = len(set(points["sample"]))
    first = points["score"][0]
    return Chart(
        name,
        f"samples over training: {title}",
        {
            "data": {"name": name},
            "height": 24 * count,
            "mark": {"type": "rect", "stroke": "gray", "strokeOpacity": 0.3},
            "encoding": {
                "x": {"field": "step", "type": "ordinal", "title": "step", "axis": {"labelAngle": 0}},
                "y": {"field": "sample", "type": "ordinal", "title": "sample"},
                "color": {"field": "score", "type": "quantitative", "title": title, "scale": {"scheme": "viridis"},
                          "legend": {"gradientLength": 180, "titleLimit": 260}},
                "tooltip": tooltip,
            },
        },
        f"Scores of {count} samples at each evaluation, from {first} for the first sample at first.",
        {name: points},
    )  # fmt: skip
