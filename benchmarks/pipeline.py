"""How fast batches are made beside how fast they are used: every pipeline on one core, its model on all of them.

    python benchmarks/pipeline.py --data=DIR [--recipes=multi30k_tiny,shakespeare_char] [--rounds=5]
    python benchmarks/pipeline.py --page       only writes the table of docs/measurements/data.md

DIR holds multi30k_en_de/, wikitext2/ and tiny_shakespeare/. For each recipe three programs take turns (see turns.py):
one reads its data from nothing, with an empty cache, learns the tokenizer and makes the batches of an epoch; one makes
the batches of later epochs; one trains the recipe's model on batches that lie ready, all of the recipe's commonest
shape. The first two have one core. Rates count real tokens of both sides. Exits 1 where a pipeline makes less than
TIMES what its model uses.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["JAX_PLATFORMS"] = "cpu"

import pages  # noqa: E402
import turns  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pipeline.jsonl"
PAGE = ROOT / "docs" / "measurements" / "data.md"
FOLDERS = {"multi30k_tiny": "multi30k_en_de", "shakespeare_char": "tiny_shakespeare", "wikitext2": "wikitext2"}
TIMES = 20.0
BATCHES, STEPS = 300, 8
"""Batches of later epochs in one turn, and steps of training."""
Row = dict[str, Any]


def prepared(recipe: str, folder: str, cache: str) -> tuple[Any, Any, dict[str, float]]:
    """A recipe's resolved config, its pipeline, and the seconds that data set and tokenizer took."""
    from jaxformer import tasks
    from jaxformer.config import overrides
    from jaxformer.data import sources
    from jaxformer.data.pipeline import Pipeline
    from jaxformer.data.tokenizers import Tokenizers
    from jaxformer.train import loop

    edited = overrides.load(str(ROOT / "configs" / f"{recipe}.py"))
    edited.data.cache, edited.data.dir = cache, folder
    config = overrides.freeze(edited)
    begun = time.perf_counter()
    dataset = sources.build(config.data)
    read = time.perf_counter()
    task = tasks.get(config.task.name)
    tokenizers = Tokenizers.build(config.data, dataset.splits["train"], task.roles)
    learnt = time.perf_counter()
    config = loop.resolve_config(config, dataset, tokenizers)
    pipeline = Pipeline(config, dataset, tokenizers, task)  # for a running text, encodes it
    made = time.perf_counter()
    return config, pipeline, {"data": read - begun, "tokenizer": learnt - read, "pipeline": made - learnt}


def real(batch: Any) -> int:
    """Tokens of both sides that are no padding."""
    return sum(int((side.slots.segment != 0).sum()) for side in (batch.source, batch.target) if side is not None)


def cold(task: Row) -> Row:
    """From files to the last batch of the first epoch, with nothing prepared."""
    with tempfile.TemporaryDirectory() as cache:
        _, pipeline, seconds = prepared(task["recipe"], task["folder"], cache)
        batches, begun, tokens = pipeline.train(), time.perf_counter(), 0
        for number in itertools.count():
            tokens += real(next(batches))
            if number == 0:
                seconds["first batch"] = time.perf_counter() - begun
            if number + 1 == task["batches"] or batches.get_state()["epoch"] > 0:
                break
        batches.close()
        return {"seconds": seconds, "tokens": tokens, "epoch": time.perf_counter() - begun}


def main_of(task: Row) -> None:
    """In a child: the program that `task` names."""
    if task["part"] != "model":
        os.sched_setaffinity(0, {0})  # before any thread is started
    if task["part"] == "cold":
        turns.serve(lambda: cold(task))
        return
    with tempfile.TemporaryDirectory() as cache:
        config, pipeline, _ = prepared(task["recipe"], task["folder"], cache)
        batches = pipeline.train()
        if task["part"] == "later":
            while batches.get_state()["epoch"] < 1:  # all texts have been encoded once
                next(batches)
            turns.serve(lambda: {"tokens": sum(real(next(batches)) for _ in range(task["batches"]))})
            return
        turns.serve(training(config, batches, task["steps"]))


def training(config: Any, batches: Any, count: int) -> Any:
    """A function that trains on `count` batches of the shape that most have, and says how many tokens those were."""
    import jax

    from jaxformer.train import in_memory

    found = collections.defaultdict(list)
    for batch in itertools.islice(batches, 20 * count):
        found[jax.tree.leaves(batch)[0].shape].append(batch)
    batches.close()
    chosen = max(found.values(), key=len)[:count]
    trainer = in_memory.Trainer(dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=1)))
    kept = [None]

    def run() -> Row:
        kept[0] = jax.block_until_ready(trainer.train(0, chosen, kept[0]))
        return {"tokens": sum(map(real, chosen))}

    return run


def measure(recipe: str, folder: str, rounds: int, batches: int, steps: int) -> Row:
    """One row."""
    import importlib.metadata

    from jaxformer.runtime import memory

    task = {"recipe": recipe, "folder": folder, "batches": batches, "steps": steps}
    command = [sys.executable, str(Path(__file__)), "--child"]
    programs = {part: turns.Program(command, task | {"part": part}) for part in ("later", "model", "cold")}
    found = turns.take(programs, rounds, {**os.environ, memory.VARIABLE: memory.tunables({})})
    failed = [f"{name}: {row['failed']}" for name, row in found.items() if "failed" in row]
    if failed:
        raise RuntimeError("; ".join(failed))
    rate = lambda part: [found[part]["result"]["tokens"] / seconds for seconds in found[part]["rounds"]]  # noqa: E731
    last = found["cold"]["result"]
    used, later = rate("model"), rate("later")
    return {
        "recipe": recipe, "rounds": rounds, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
        "jax": importlib.metadata.version("jax"), "build_seconds": last["seconds"],
        "build_total": statistics.median(found["cold"]["rounds"]) - last["epoch"] + last["seconds"]["first batch"],
        "first_epoch": last["tokens"] / last["epoch"], "later": statistics.median(later),
        "model": statistics.median(used), "spread": (max(used) - min(used)) / statistics.median(used),
        "times": statistics.median(a / b for a, b in zip(later, used, strict=True)),
    }  # fmt: skip


COLUMNS = (
    "recipe", "from files to the first batch, s", "first epoch, tokens/s", "later", "its model uses, tokens/s",
    "first epoch / model", "later / model",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["build_seconds"].items())
    return [
        row["recipe"], f"{row['build_total']:.1f} ({parts})", f"{row['first_epoch']:,.0f}", f"{row['later']:,.0f}",
        f"{row['model']:,.0f}", f"{row['first_epoch'] / row['model']:.0f}", f"{row['times']:.0f}",
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="")
    parser.add_argument("--recipes", default=",".join(FOLDERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(argv)
    if flags.child:
        main_of(turns.task())
        return 0
    if not flags.page:
        print(" | ".join(COLUMNS))
        for recipe in flags.recipes.split(","):
            folder = str(Path(flags.data).resolve() / FOLDERS[recipe])
            row = measure(recipe, folder, flags.rounds, BATCHES, STEPS)
            print(" | ".join(cells(row)), flush=True)
            with flags.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = {row["recipe"]: row for row in map(json.loads, flags.results.read_text().splitlines())}
    if flags.page:
        pages.put(PAGE, "pipeline", pages.table(COLUMNS, [cells(row) for row in rows.values()]))
    return int(any(row["times"] < TIMES for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
