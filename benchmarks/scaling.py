"""What large recipes need on TPU slices that are not here: compiled by libtpu, estimated, written to docs/scaling.md.

    python benchmarks/scaling.py                    compiles the cases of which there is no row yet, writes the page
    python benchmarks/scaling.py --only=llama_7b    cases whose name begins so, again
    python benchmarks/scaling.py --page             only the page

Needs the extra [tpu], no chip. A case takes one to several minutes of two cores, so each is a process of its own and
its row is kept as soon as it is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "scaling.jsonl"
PAGE = ROOT / "docs" / "scaling.md"
SLICES = {"v5e-16": "v5e:4x4", "v5e-256": "v5e:16x16", "v5p-128": "v5p:4x4x8", "v6e-256": "v6e:16x16"}
"""Slices by their number of chips. (In Google's names of v5p the number is that of cores, two a chip.)"""
LIMIT = 3000
"""Seconds for one case."""


@dataclass(frozen=True)
class Case:
    """A recipe on a slice: `rows` of a batch on each device (of each group of devices that shares a row)."""

    model: str
    recipe: str
    slice: str
    rows: float
    edits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}@{self.slice}"

    @property
    def devices(self) -> int:
        return math.prod(map(int, SLICES[self.slice].partition(":")[2].split("x")))

    @property
    def arguments(self) -> list[str]:
        batch = round(self.rows * self.devices)
        return [f"--config=configs/{self.recipe}", f"--config.data.batch={batch}", *self.edits]


BIG = (
    "--config.data.buckets=()", "--config.data.tokens=none", "--config.mesh.data=1", "--config.mesh.fsdp=-1",
)  # fmt: skip
CASES = [
    *(Case("transformer_big", "transformer_big.py", each, 16, BIG) for each in SLICES),
    *(Case("llama_1b", "llama.py:1b", each, 1) for each in SLICES),
    *(Case("llama_7b", "llama.py:7b", each, 1) for each in SLICES),
    *(Case("t5_11b", "t5_11b.py", each, 2) for each in SLICES),
    *(Case("moe_8x7b", "moe_8x7b.py", each, 1) for each in SLICES),
    Case("llama_7b_128k", "llama.py:7b_128k", "v5p-128", 1 / 16),
    *(
        Case(f"depth_{layers}", "llama.py:1b", "v5e-16", 1, (f"--config.model.decoder.layers={layers}",))
        for layers in (6, 24, 96)
    ),
]


def measure(case: Case, keep: str) -> dict:
    """The row of one case, and the compiled program in the folder `keep`, if one is named."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxformer import overrides
    from jaxformer.plan import chips, estimate, page, program

    place = chips.place(SLICES[case.slice], "", None)
    config = overrides.parse(case.arguments)
    traced = program.trace(config, program.mesh_of(config, program.devices(place, config)))
    compiled = program.compile(traced)
    if keep and compiled.executable is not None:
        with gzip.open(Path(keep) / f"{case.name}.hlo.gz", "wt") as file:
            file.write(compiled.executable.as_text())
    found = estimate.estimate(traced, compiled, place)
    print(page.page(case.name, traced, found), file=sys.stderr, flush=True)
    return {"case": case.name, "model": case.model, "slice": case.slice, "arguments": case.arguments, **found.row()}


def rows() -> dict[str, dict]:
    """The newest row of every case that is still one."""
    known = {case.name for case in CASES}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["case"]: row for row in map(json.loads, lines) if row["case"] in known}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name begins so; measured again")
    parser.add_argument("--page", action="store_true", help="write the page from the rows that are there")
    parser.add_argument("--keep", default="", help="folder for the compiled programs, as text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        print(json.dumps(measure(next(case for case in CASES if case.name == flags.case), flags.keep)))
        return 0
    have = rows()
    chosen = [c for c in CASES if c.name.startswith(flags.only or "") and (flags.only or c.name not in have)]
    failed = 0
    for case in [] if flags.page else chosen:
        command = [sys.executable, __file__, f"--case={case.name}", f"--keep={flags.keep}"]
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            failed += 1
            continue
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
