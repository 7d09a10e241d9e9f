"""Loader processes (`config.data.workers`): input tokens/s, time to the first batch, time of the run's own process.

    python benchmarks/loaders.py [--workers=0,1,2] [--rounds=3]

Batches of 16 rows of 512 tokens of the source text of Python's standard library (BPE, 4,000 pieces), by three ways from
text to batches. Nothing trains beside them. Each round makes every kind once with each number of processes, by turns;
figures are medians. Writes the table of docs/measurements/data.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402

PAGE = ROOT / "docs" / "measurements" / "data.md"
KINDS = {
    "`concat`, language model": {"batches": "400", "task.name": "language_modelling", "data.packing": "concat"},
    "`concat`, `masked_lm` of whole words": {
        "batches": "100", "task.name": "masked_lm", "data.packing": "concat", "task.whole_words": "True",
    },
    "a row a document, which is tokenized first": {"batches": "20", "task.name": "language_modelling"},
}  # fmt: skip


def config(edits: dict[str, str], cache: str) -> Any:
    from jaxformer.config import StackConfig, overrides

    found = overrides.defaults()
    found.data.source, found.data.cache = "pylib", cache
    found.data.tokenizer.kind, found.data.tokenizer.vocab = "bpe", 4000
    found.data.batch, found.data.length = 16, 512
    part = "encoder" if edits["task.name"] == "masked_lm" else "decoder"
    setattr(found.model, part, overrides.section(StackConfig))
    for path, value in list(edits.items())[1:]:
        overrides.override(found, path, value)
    return overrides.freeze(found)


def pipeline(settings: Any, known: dict[str, Any]) -> Any:
    """A pipeline whose tokenizer has seen nothing."""
    from jaxformer.tasks import _datasets
    from jaxformer.train import setup

    dataset = _datasets.build(settings)
    if "tokenizers" not in known:
        known["tokenizers"] = setup.build_or_load_tokenizers(settings, dataset, Path("/nonexistent"))
    settings = setup.resolve_config(settings, dataset, known["tokenizers"])
    return setup.build_pipelines(settings, dataset, known["tokenizers"])[""]


def measure(pipe: Any, batches: int) -> dict[str, float]:
    """Seconds to the first batch, and tokens a second, and this process's processor time a batch, of the others."""
    begun = time.monotonic()
    iterator = pipe.train()
    next(iterator)
    first = time.monotonic() - begun
    begun, own, tokens = time.monotonic(), time.process_time(), 0.0
    for _ in range(batches):
        batch = next(iterator)
        tokens += float((_slots(batch).segment != 0).sum())
    seconds, own = time.monotonic() - begun, time.process_time() - own
    iterator.close()
    return {"first": first, "rate": tokens / seconds, "own": own / batches * 1e3}


def _slots(batch: Any) -> Any:
    return (batch.source if batch.target is None else batch.target).slots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    workers = list(map(int, options.workers.split(",")))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    known: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(options.rounds):
            for name, edits in KINDS.items():
                settings = config(edits, cache)
                for count in workers if number % 2 == 0 else reversed(workers):
                    mine = dataclasses.replace(settings, data=dataclasses.replace(settings.data, workers=count))
                    row = measure(pipeline(mine, known), int(edits["batches"]))
                    found.setdefault((name, count), []).append(row)
                    print(name, count, {key: round(value, 2) for key, value in row.items()}, flush=True)
    middle = lambda key, what: statistics.median(row[what] for row in found[key])  # noqa: E731
    head = (
        "batches",
        "loader processes",
        "tokens/s",
        "to the first batch, s",
        "processor time of the run's process, ms a batch",
    )
    cells = [
        (name, str(count), f"{middle((name, count), 'rate'):,.0f}", f"{middle((name, count), 'first'):.1f}",
         f"{middle((name, count), 'own'):.2f}")
        for name in KINDS for count in workers
    ]  # fmt: skip
    pages.put(PAGE, "loaders", pages.table(head, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
