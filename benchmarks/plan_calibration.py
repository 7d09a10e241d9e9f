"""Step times that `jaxformer plan` expects against published ones: tunes its assumptions, prints the errors by row.

    python benchmarks/plan_calibration.py           tunes on half of the rows, prints both halves, writes the page
    python benchmarks/plan_calibration.py --check   the same without tuning and writing: of the assumptions as they are

Rows, with their sources, are in benchmarks/published_times.json. Models are split, not rows: of the models of a kind of
chip, in order of source and size, the 1st, 3rd, ... are tuned on with all their rows, the 2nd, 4th, ... judged. So no
model is in both halves on the same chip, and every kind of chip is in both. Of the decode rows of a chip, every other
row is judged. A source weighs as much as another of the same chip, whatever its number of rows.

The error of a row is expected / published seconds - 1. jaxformer/plan/assumptions.py keeps the tuned assumptions; after
a change of rows or of the estimate copy the printed ones there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxformer.plan import decode_time, step_time  # noqa: E402
from jaxformer.plan.assumptions import TUNED, Assumptions  # noqa: E402
from jaxformer.plan.chips import CHIPS  # noqa: E402
from jaxformer.runtime.units import format_duration  # noqa: E402

DATA = ROOT / "benchmarks" / "published_times.json"
PAGE = ROOT / "docs" / "measurements" / "plan.md"


@dataclass(frozen=True)
class Row:
    """A published time: what the estimate gets, and the seconds that it should give."""

    source: str
    model: str
    chip: str
    chips: int
    part: str
    label: str
    seconds: float
    expected: Callable[[Assumptions], float]
    at_peak: float = 0.0  # seconds of the model FLOPs, visible keys only, at the peak of all chips


def parameters(model: dict[str, Any]) -> tuple[float, float]:
    """Parameters of all layers, and of the output matrix. Biases, norms and positions are left out."""
    heads = model["head_width"] * (2 * model["heads"] + 2 * model["kv_heads"])
    layer = model["width"] * (heads + model["ffn"] * (3 if model["gated"] else 2))
    return model["layers"] * layer, model["vocab"] * model["width"]


def step_flops(kind: str, model: dict[str, Any], rows: int, length: int) -> float:
    """FLOPs of a step as a source counts them: "causal", "megatron-2021" or "megatron-2024"."""
    layers, head = parameters(model)
    tokens, width = rows * length, model["heads"] * model["head_width"]
    scores = 12 * model["layers"] * width * length
    if kind == "causal":
        return tokens * (6 * (layers + head * (1 if model["tied"] else 2)) + scores / 2)
    if kind == "megatron-2021":
        return tokens * (8 * layers + 6 * head + scores * 4 / 3)
    return tokens * (6 * (layers + head) + scores)


def published_seconds(row: dict[str, Any], flops: str | None, model: dict[str, Any]) -> float:
    """Seconds of a step from what is published."""
    value, tokens = row["published"], row["rows"] * row["length"]
    if row["unit"] == "seconds":
        return value
    if row["unit"] == "TFLOP/s/chip":
        return step_flops(str(flops), model, row["rows"], row["length"]) / (value * 1e12 * row["chips"])
    return tokens / value / (row["chips"] if row["unit"].endswith("/chip") else 1)


def shapes_of(model: dict[str, Any], length: int, attention: str, remat: str) -> step_time.Shapes:
    """The model of a training row."""
    layers, head = parameters(model)
    width, own = model["width"], model["heads"] * model["head_width"]
    keys = model["kv_heads"] * model["head_width"]
    gated, fused = 2 if model["gated"] else 1, attention == "fused"
    layer = step_time.Layers(
        count=model["layers"], width=width, qkv=width * (own + 2 * keys), out=own * width,
        up=gated * width * model["ffn"], down=model["ffn"] * width, channels=own + 2 * keys + gated * model["ffn"],
        scores=own * ((length + 1) / 2 if fused else length), tables=0 if fused else model["heads"] * length,
        recomputed=step_time.RECOMPUTED[remat], joined=model["parallel"], memory_channels=2 * keys,
    )  # fmt: skip
    total = layers + head * (1 if model["tied"] else 2)
    return step_time.Shapes((layer,), head, model["vocab"], total)


def training_row(row: dict[str, Any], data: dict[str, Any]) -> Row:
    """A row of training as the estimate sees it."""
    source, model = data["sources"][row["source"]], data["models"][row["model"]]
    inside, outside = step_time.split_axes(row["mesh"], row["domain"])
    layout = step_time.Layout(
        inside, outside, row.get("accumulation", 1), row.get("microbatches", 1), row.get("interleave", 1),
        sequence=source["sequence"], dcn=source.get("dcn"),
    )  # fmt: skip
    shapes = shapes_of(model, row["length"], source["attention"], row["remat"])
    tokens, chip = row["rows"] * row["length"], CHIPS[row["chip"]]
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items()) or "one device"
    label = f"{mesh}; {row['rows']:,} x {row['length']:,}"
    at_peak = step_flops("causal", model, row["rows"], row["length"]) / (chip.flops * row["chips"])
    return Row(
        row["source"], row["model"], row["chip"], row["chips"], row.get("part", ""), label,
        published_seconds(row, source["flops"], model),
        lambda assumptions: sum(step_time.step_seconds(shapes, layout, tokens, chip, assumptions).values()),
        at_peak,
    )  # fmt: skip


def split(rows: list[Row]) -> list[Row]:
    """The rows with `part` "tuned" or "judged", by model; a part that is set already stays."""
    order: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in rows:
        if (row.source, row.model) not in order[row.chip]:
            order[row.chip].append((row.source, row.model))
    found = []
    for row in rows:
        index = order[row.chip].index((row.source, row.model))
        found.append(dataclasses.replace(row, part=row.part or ("judged" if index % 2 else "tuned")))
    return found


def decode_row(row: dict[str, Any], data: dict[str, Any]) -> Row:
    """A row of decoding as the estimate sees it."""
    source, model = data["decode_sources"][row["source"]], data["models"][row["model"]]
    chip = CHIPS[row["chip"]]
    if "bandwidth" in source:
        chip = dataclasses.replace(chip, bandwidth=source["bandwidth"])
    layers, head = parameters(model)
    keys, tensor = model["kv_heads"] * model["head_width"], row["mesh"].get("tensor", 1)
    scores = model["layers"] * model["heads"] * model["head_width"]
    decoded = decode_time.Decoded(
        model["layers"], model["width"], 2, row["weights"] * (layers + head) / tensor, layers + head, scores,
        1 if model["parallel"] else 2, model["ffn"] + model["heads"] * model["head_width"] + 2 * keys, head=head,
    )  # fmt: skip
    # Pope et al. divide the rows, and with them the caches, over all chips; one shared key head cannot be divided.
    caches = 2 * 2 * model["layers"] * keys * row["batch"] * row["context"] / row["chips"]
    layout = step_time.Layout(row["mesh"])
    seconds = row["batch"] / row["published"] if row["unit"] == "tokens/s" else row["published"]
    reads = row["unit"] == "seconds of prefill"

    def expected(assumptions: Assumptions) -> float:
        if reads:
            found = decode_time.prefill_seconds(decoded, row["batch"], row["context"], layout, chip, assumptions)
            return sum(found.values())
        parts = decode_time.decode_step_seconds(
            decoded, row["batch"], row["context"], caches, layout, chip, assumptions
        )
        return sum(parts.values())

    what = "prefill" if reads else "token"
    label = f"{what}, batch {row['batch']}, {row['context']:,} keys, {8 * row['weights']}-bit weights"
    part = "prefill" if reads else ""
    return Row(row["source"], row["model"], row["chip"], row["chips"], part, label, seconds, expected)


SHARED = ("passes", "score_passes", "decode_memory")
"""Assumptions that are one number for all chips."""
UNBOUNDED = ("passes", "score_passes", "decode_latency")
"""Assumptions that are no fractions, whose maximum is 1."""
COPIED = {"products.h200": "products.h100", "decode_latency.h100": "decode_latency.a100"}
"""Numbers without a row, and those that they get."""
START = Assumptions(
    products=dict.fromkeys(TUNED.products, 0.7), scores=dict.fromkeys(TUNED.scores, 0.5), passes=10.0,
    score_passes=20.0, activations=dict.fromkeys(TUNED.activations, 0.5),
    parameters=dict.fromkeys(TUNED.parameters, 0.5), between=dict.fromkeys(TUNED.between, 0.5), decode_memory=0.8,
    decode_latency=dict.fromkeys(TUNED.decode_latency, 20e-6),
)  # fmt: skip
"""Where the search starts, whatever the stored assumptions are."""
PULL = 0.05
"""Weight of the distance from `START`, a logarithm, beside the errors: numbers that no row decides stay near it."""


def names(assumptions: Assumptions) -> list[str]:
    """Names of all numbers: "passes", "products.v5e", ..."""
    found = []
    for field in dataclasses.fields(assumptions):
        value = getattr(assumptions, field.name)
        found += [field.name] if field.name in SHARED else [f"{field.name}.{key}" for key in value]
    return found


def number(assumptions: Assumptions, name: str) -> float:
    """One number by its name."""
    field, _, key = name.partition(".")
    return getattr(assumptions, field)[key] if key else getattr(assumptions, field)


def replace(assumptions: Assumptions, name: str, value: float) -> Assumptions:
    """The assumptions with one number changed."""
    field, _, key = name.partition(".")
    changed = {**getattr(assumptions, field), key: value} if key else value
    return dataclasses.replace(assumptions, **{field: changed})


def residuals(rows: list[Row], assumptions: Assumptions) -> list[float]:
    """Residuals of the fit: logarithmic errors, as the mean over the rows of a source and chip, and the pull."""
    counts = Counter((row.source, row.chip) for row in rows)
    found = [math.log(row.expected(assumptions) / row.seconds) / counts[row.source, row.chip] ** 0.5 for row in rows]
    searched = [name for name in names(START) if name not in COPIED]
    return found + [PULL * math.log(number(assumptions, name) / number(START, name)) for name in searched]


def tune(rows: list[Row]) -> Assumptions:
    """The assumptions with the least squared residuals, to three digits.

    The search is deterministic (trust-region reflective, `scipy.optimize.least_squares`), over logarithms.
    """
    from scipy.optimize import least_squares

    searched = [name for name in names(START) if name not in COPIED]

    def at(values: Sequence[float], digits: int = 17) -> Assumptions:
        assumptions = START
        for name, value in zip(searched, values):
            assumptions = replace(assumptions, name, float(f"{math.exp(value):.{digits}g}"))
        for name, other in COPIED.items():
            assumptions = replace(assumptions, name, number(assumptions, other))
        return assumptions

    start = [math.log(number(START, name)) for name in searched]
    upper = [math.inf if name.partition(".")[0] in UNBOUNDED else 1e-9 for name in searched]
    return at(least_squares(lambda values: residuals(rows, at(values)), start, bounds=(-math.inf, upper)).x, 3)


def errors(rows: list[Row], assumptions: Assumptions) -> list[float]:
    """Absolute errors: |expected / published - 1|."""
    return [abs(row.expected(assumptions) / row.seconds - 1) for row in rows]


def summary(rows: list[Row], assumptions: Assumptions) -> str:
    """Number of rows, median, mean and largest absolute error."""
    found = errors(rows, assumptions)
    return f"{len(found)} | {statistics.median(found):.1%} | {statistics.mean(found):.1%} | {max(found):.0%}"


def one_utilisation(rows: list[Row]) -> float:
    """Median error on the judged rows of what the estimate has to beat: one utilisation a kind of chip.

    It is the median over the tuned rows of that chip, of model FLOPs over visible keys.
    """
    shares = defaultdict(list)
    for row in rows:
        if row.part == "tuned":
            shares[row.chip].append(row.at_peak / row.seconds)
    judged = [row for row in rows if row.part == "judged"]
    return statistics.median(abs(row.at_peak / statistics.median(shares[row.chip]) / row.seconds - 1) for row in judged)


def page(rows: list[Row], decoding: list[Row], assumptions: Assumptions, exchanged: str) -> str:
    """The page of docs/measurements: what was tuned, medians, and all rows."""
    data = json.loads(DATA.read_text())
    lines = [HEAD.format(date=datetime.date.today().isoformat(), rows=len(rows), decoding=len(decoding)).rstrip(), ""]
    lines += ["| | rows | median error | mean | largest |", "|---|---|---|---|---|"]
    for name, group in (("training", rows), ("decoding, time a token", decoding)):
        for part in ("tuned", "judged"):
            lines.append(f"| {name}, {part} | {summary([r for r in group if r.part == part], assumptions)} |")
    read = [row for row in decoding if row.part == "prefill"]
    lines.append(f"| decoding, reading a prompt: nothing is tuned on it | {summary(read, assumptions)} |")
    count = len(names(assumptions)) - len(COPIED)
    lines += [
        "",
        f"{count} numbers are tuned. One utilisation for each kind of chip, the median of the tuned rows, has a",
    ]
    lines += [f"median error of {one_utilisation(rows):.1%} on the judged rows of training."]
    lines += ["", *textwrap.wrap(exchanged, 118), "", "By chip and source, training:", ""]
    lines += ["| chip | source | tuned: rows, median | judged: rows, median |", "|---|---|---|---|"]
    for chip, source in dict.fromkeys((row.chip, row.source) for row in rows):
        cells = []
        for part in ("tuned", "judged"):
            found = errors([r for r in rows if (r.chip, r.source, r.part) == (chip, source, part)], assumptions)
            cells.append(f"{len(found)}, {statistics.median(found):.1%}" if found else "none")
        lines.append(f"| {chip} | {source} | {cells[0]} | {cells[1]} |")
    lines += ["", "## Assumptions", "", "| assumption | value |", "|---|---|"]
    lines += [f"| {name} | {number(assumptions, name):g} |" for name in names(assumptions)]
    lines += ["", "## Sources", ""]
    for key, source in (data["sources"] | data["decode_sources"]).items():
        lines.append(f"- **{key}**: {source['title']}. <{source['url']}>, {source['table']}. {source['note']}")
    for title, group in (("Training", rows), ("Decoding", decoding)):
        lines += [
            "",
            f"## {title}",
            "",
            "| chip | source | model | chips | what | part | published | expected | error |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for row in group:
            expected = row.expected(assumptions)
            lines.append(
                f"| {row.chip} | {row.source} | {row.model} | {row.chips:,} | {row.label} | {row.part} "
                f"| {format_duration(row.seconds)} | {format_duration(expected)} | {expected / row.seconds - 1:+.0%} |"
            )
    return "\n".join(lines) + "\n"


HEAD = """# Expected times against published ones

`python benchmarks/plan_calibration.py`, {date}. {rows} rows of training and {decoding} of decoding, from
`benchmarks/published_times.json`. The error is expected / published seconds - 1; medians, means and maxima are of its
absolute value.

Assumptions are tuned on half of the models and judged on the other half: of the models of a kind of chip, in order of
source and size, the 1st, 3rd, ... are tuned on, with all their rows. Rows of decoding alternate. A source counts as
much as another of the same chip. The form of the estimate and the loss (squared logarithmic errors) were chosen with
the errors of both halves in sight; the numbers below saw one half only. Rows marked "shown" take no part.

Left out: rows in 8 bits, mixtures of experts and models with windows (the estimate has them, untested), torchtitan (its
H100 have other memory and half the power), chips that are not in `jaxformer/plan/chips.py` (A100 with 40 GB, Ironwood),
sizes whose number of devices is not published (LLaMA 7B to 33B, Llama 2), and papers whose tables could not be read
here. The H200 has no row. Latencies of decoding on TPUs rest on two rows, one of them tuned on.
"""


def load() -> tuple[list[Row], list[Row]]:
    """The rows of training and of decoding, with their parts."""
    data = json.loads(DATA.read_text())
    decoding = [decode_row(row, data) for row in data["decode_rows"]]
    counts: dict[str, int] = defaultdict(int)
    for index, row in enumerate(decoding):
        decoding[index] = dataclasses.replace(row, part=row.part or ("judged" if counts[row.chip] % 2 else "tuned"))
        counts[row.chip] += 1
    return split([training_row(row, data) for row in data["rows"]]), decoding


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="errors of the stored assumptions; nothing is tuned")
    arguments = parser.parse_args(argv)
    rows, decoding = load()
    everything = rows + decoding
    assumptions, exchanged = TUNED, ""
    if not arguments.check:
        assumptions = tune([row for row in everything if row.part == "tuned"])
        other = tune([row for row in everything if row.part == "judged"])
        medians = [
            statistics.median(errors([row for row in group if row.part == "tuned"], other))
            for group in (rows, decoding)
        ]
        exchanged = (
            "With the halves exchanged, tuned on the rows that are judged here, the median error of the others is "
            f"{medians[0]:.1%} (training) and {medians[1]:.1%} (decoding)."
        )
    text = page(rows, decoding, assumptions, exchanged)
    print(text)
    if arguments.check:
        return
    PAGE.write_text(text)
    if assumptions != TUNED:
        print("The stored assumptions differ from the tuned ones; copy these into jaxformer/plan/assumptions.py:\n")
        for field in dataclasses.fields(assumptions):
            print(f"    {field.name}={getattr(assumptions, field.name)!r},")


if __name__ == "__main__":
    main()
