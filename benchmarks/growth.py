"""What a token costs as the work grows, on this CPU, and whether the plan's count of operations is the compiler's.

    python benchmarks/growth.py [--axes=width,layers,length,rows,vocab,beams,prompts] [--rounds=5]
    python benchmarks/growth.py --page       only writes the tables of docs/measurements/growth.md
    python benchmarks/growth.py --recount    model FLOPs of all rows by today's formula, and the tables
    python benchmarks/growth.py --smoke      toy sizes

One number of a decoder is varied, the others stay: a step of training for `width` (of 64 a head), `layers`, `length`
(with as many rows as make the same tokens), `rows` and `vocab`; decoding for `beams` and for `prompts` of a batch, with
greedy search. All sizes of an axis take turns, a step each. An exponent is the slope of log seconds a token over log
size, by least squares over all sizes and over the largest two; beside it that of the operations counted. The second
table has the operations of a step by PaLM's formula (over all keys, and over visible keys only), as counted in the
traced program, and by XLA, which counts a loop once: so layers are unrolled there. Exits 1 where the count is off by
more than OFF.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["JAX_PLATFORMS"] = "cpu"

import decoding_jax  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pages  # noqa: E402
import training_jax  # noqa: E402
import training_shared as shared  # noqa: E402
from flax import linen as nn  # noqa: E402

from jaxformer.config import DataConfig  # noqa: E402
from jaxformer.models import build  # noqa: E402
from jaxformer.plan import flops  # noqa: E402
from jaxformer.train import step as steps  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "growth.jsonl"
PAGE = ROOT / "docs" / "measurements" / "growth.md"
BASE = shared.Shape("decoder", 4, 256, 4, 256, 8, 1024, 0.0)
AXES = {
    "width": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "length": (128, 256, 512, 1024, 2048),
    "rows": (1, 2, 4, 8, 16),
    "vocab": (1024, 4096, 16384, 65536),
    "beams": (1, 2, 4, 8, 16),
    "prompts": (1, 4, 16, 64),
}
TOY = {axis: tuple(max(size // 8, 1) for size in sizes[-2:]) for axis, sizes in AXES.items()}
COUNTED = {
    "encoder": shared.Shape("encoder", 4, 512, 8, 256, 8, 4096, 0.0),
    "decoder": shared.Shape("decoder", 4, 512, 8, 256, 8, 4096, 0.0),
    "seq2seq": shared.Shape("seq2seq", 2, 512, 8, 64, 32, 4096, 0.0),
}
NEW, OFF = 64, 0.02
"""New tokens of a decoded prompt; by how much the count may differ from XLA's."""
Row = dict[str, Any]


def shape_of(axis: str, size: int, base: shared.Shape) -> shared.Shape:
    """`base` with one number changed."""
    if axis == "width":
        return dataclasses.replace(base, width=size, heads=max(size // 64, 1))
    if axis == "length":
        return dataclasses.replace(base, length=size, rows=max(base.rows * base.length // size, 1))
    return dataclasses.replace(base, **{axis: size})


def training(shape: shared.Shape) -> tuple[Callable[[], object], int, float]:
    """A step, its tokens, and the operations counted in it."""
    made = training_jax.Training(training_jax.config(shape, "float32"), [training_jax.batch(shared.batch(shape, 0))])
    return made.run, shared.positions(shape), flops.count_flops(traced(made).jaxpr.jaxpr)


def traced(made: training_jax.Training) -> Any:
    with jax.set_mesh(made.mesh):
        return made.step.trace(made.state, steps.shard_batch(next(made.turn), made.mesh))


def decoding(axis: str, size: int, base: shared.Shape) -> tuple[Callable[[], object], int, float]:
    """A batch decoded, the tokens it gives, and 0 for the operations, which nobody counts."""
    rows, beams = (16, size) if axis == "beams" else (size, 1)
    new = min(NEW, base.length - 8)
    task = {"layers": base.layers, "width": base.width, "vocab": base.vocab, "prompt": 8, "tokens": new, "batch": rows}
    method = {"method": "beam", "beams": beams} if axis == "beams" else {"method": "greedy"}
    return decoding_jax.continued(task | method | {"dtype": "float32"}), rows * new, 0.0


def measure(axis: str, sizes: tuple[int, ...], base: shared.Shape, rounds: int) -> Row:
    """The row of an axis."""
    decodes = axis in ("beams", "prompts")
    found = [decoding(axis, size, base) if decodes else training(shape_of(axis, size, base)) for size in sizes]
    taken: list[list[float]] = [[] for _ in sizes]
    for run, _, _ in found:
        run(), run()  # compiles, and gives the heap its size
    for _ in range(rounds):
        for each, (run, _, _) in zip(taken, found, strict=True):
            begun = time.perf_counter()
            run()
            each.append(time.perf_counter() - begun)
    seconds = [statistics.median(each) / tokens for each, (_, tokens, _) in zip(taken, found, strict=True)]
    spread = max((max(each) - min(each)) / statistics.median(each) for each in taken)
    counted = [count / tokens for _, tokens, count in found]
    row = {"axis": axis, "sizes": sizes, "microseconds": [1e6 * each for each in seconds], "spread": spread}
    row |= {"exponent": slope(sizes, seconds), "last": slope(sizes[-2:], seconds[-2:])}
    if not decodes:
        row |= {
            "counted": counted,
            "counted_exponent": slope(sizes, counted),
            "counted_last": slope(sizes[-2:], counted[-2:]),
        }
    return row | {"rounds": rounds} | where()


def slope(sizes: tuple[int, ...], values: list[float]) -> float:
    """The exponent e of values ~ size^e."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def operations(name: str, shape: shared.Shape) -> Row:
    """A step's operations by formula, counted, and by XLA."""
    config = training_jax.config(shape, "float32")
    sides = {side: getattr(config.model, side) for side in ("encoder", "decoder")}
    unrolled = {side: dataclasses.replace(stack, unroll=stack.layers) for side, stack in sides.items() if stack}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **unrolled))
    made = training_jax.Training(config, [training_jax.batch(shared.batch(shape, 0))])
    trace = traced(made)
    row = {
        "family": name,
        **formula(shape),
        "counted": flops.count_flops(trace.jaxpr.jaxpr),
        "xla": trace.lower().compile().cost_analysis()["flops"],
    }
    return row | where()


def formula(shape: shared.Shape) -> Row:
    """Model FLOPs of a step over all keys, as PaLM counts them, and over visible keys only."""
    config = dataclasses.replace(training_jax.config(shape, "float32"), data=DataConfig(length=shape.length))
    module = build.build(config.model)
    of = (config, nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module), shape.length)
    slots = shape.rows * shape.length
    return {
        "formula": slots * flops.flops_per_token(*of),
        "formula_visible": slots * flops.flops_per_token_visible(*of),
    }


def recount(row: Row) -> Row:
    """The row with the formula of today for its family's shape; the rest, and rows of times, stay as they are."""
    if "family" not in row:
        return row
    found = formula(COUNTED[row["family"]])
    return {"family": row["family"], **found, **{key: row[key] for key in row if key not in found}}


def where() -> Row:
    return {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "jax": jax.__version__}


def tables(rows: list[Row]) -> list[str]:
    """Both tables, of the newest row of each kind."""
    growing = {row["axis"]: row for row in rows if "axis" in row}
    counted = {row["family"]: row for row in rows if "family" in row}
    lines = []
    for row in growing.values():
        pair = "{:.2f}, {:.2f}".format
        own = pair(row["exponent"], row["last"])
        theirs = pair(row["counted_exponent"], row["counted_last"]) if "counted" in row else ""
        times = ", ".join(f"{each:,.0f}" for each in row["microseconds"])
        what = "decoding" if row["axis"] in ("beams", "prompts") else "training"
        sizes = ", ".join(f"{size:,}" for size in row["sizes"])
        lines.append([what, f"{row['axis']} {sizes}", times, own, theirs, f"{row['spread']:.0%}"])
    head = ("what", "size", "microseconds a token", "exponent: all, last two", "of operations", "spread")
    text = [*pages.table(head, lines), ""]
    head = ("family", "formula, GFLOP a step", "visible keys", "counted", "XLA", "counted / XLA", "formula / XLA")
    lines = [
        [row["family"], *(f"{row[key] / 1e9:,.1f}" for key in ("formula", "formula_visible", "counted", "xla")),
         *(f"{row[key] / row['xla']:.3f}" for key in ("counted", "formula"))]
        for row in counted.values()
    ]  # fmt: skip
    return [*text, *pages.table(head, lines)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES), help="with `operations`, also the second table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--recount", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(argv)
    if flags.recount:
        lines = [json.dumps(recount(json.loads(line))) for line in flags.results.read_text().splitlines()]
        flags.results.write_text("\n".join(lines) + "\n")
    if flags.page or flags.recount:
        pages.put(PAGE, "growth", tables([json.loads(line) for line in flags.results.read_text().splitlines()]))
        return 0
    base = dataclasses.replace(BASE, layers=1, width=64, heads=1, length=16, vocab=32) if flags.smoke else BASE
    rows: list[Row] = []
    for axis in flags.axes.split(","):
        if axis == "operations":
            rows += [operations(name, shape) for name, shape in COUNTED.items()]
        else:
            rows.append(measure(axis, (TOY if flags.smoke else AXES)[axis], base, flags.rounds))
        print(json.dumps(rows[-1]), flush=True)
    with flags.results.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any(not math.isclose(row["counted"], row["xla"], rel_tol=OFF) for row in rows if "family" in row))


if __name__ == "__main__":
    sys.exit(main())
