"""What large recipes need on TPU slices, compiled by libtpu and estimated: writes docs/measurements/scaling.md.

    python benchmarks/scaling.py                    compiles the cases of which there is no row yet, writes the page
    python benchmarks/scaling.py --only=llama_7b    cases whose name begins so, again
    python benchmarks/scaling.py --page             only the page
    python benchmarks/scaling.py --recount          model FLOPs and MFU of all rows by today's formula, and the page

Needs the extra [tpu], no chip. A case takes one to several minutes of two cores, so each is a process of its own and
its row is kept as soon as it is there. `--recount` compiles nothing: it computes `flops_token`, `flops_token_visible`,
`flops_step` and `mfu` of every row again from the row's own arguments, shape and seconds, and leaves the rest.
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

from jaxformer.plan.chips import CHIPS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scaling.jsonl"
PAGE = ROOT / "docs" / "measurements" / "scaling.md"
SLICES = {"v5e-16": "v5e:4x4", "v5e-256": "v5e:16x16", "v5p-128": "v5p:4x4x8", "v6e-256": "v6e:16x16"}
"""Slices by their number of chips. (In Google's names of v5p the number is that of cores, two a chip.)"""
LIMIT = 3000
"""Seconds for one case."""


@dataclass(frozen=True)
class Case:
    """A recipe on slices: `rows` of a batch on each device (of each group of devices that shares a row)."""

    model: str
    recipe: str
    slice: str
    rows: float
    edits: tuple[str, ...] = ()
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}@{self.slice}" + (f"x{self.slices}" if self.slices > 1 else "")

    @property
    def devices(self) -> int:
        return math.prod(map(int, SLICES[self.slice].partition(":")[2].split("x"))) * self.slices

    @property
    def arguments(self) -> list[str]:
        batch = round(self.rows * self.devices)
        several = [f"--config.mesh.dcn.data={self.slices}"] if self.slices > 1 else []
        return [f"--config=configs/{self.recipe}", f"--config.data.batch={batch}", *self.edits, *several]


BIG = (
    "--config.data.buckets=()", "--config.data.tokens=none", "--config.mesh.data=1", "--config.mesh.fsdp=-1",
)  # fmt: skip
LONG = (
    "--config.data.length=131072", "--config.model.decoder.encoding.base=5e6", "--config.mesh.context=16",
    "--config.model.decoder.attention.kernel=ring",
)  # fmt: skip
CASES = [
    *(Case("transformer_big", "transformer_big.py", each, 16, BIG) for each in SLICES),
    *(Case("llama_1b", "llama.py:1b", each, 1) for each in SLICES),
    *(Case("llama_7b", "llama.py:7b", each, 1) for each in SLICES),
    *(Case("t5_11b", "t5_11b.py", each, 2) for each in SLICES),
    *(Case("moe_8x7b", "moe_8x7b.py", each, 1) for each in SLICES),
    Case("transformer_big", "transformer_big.py", "v5e-256", 16, BIG, slices=16),
    *(Case("llama_7b", "llama.py:7b", "v5e-256", 1, slices=n) for n in (2, 4, 16)),
    Case("llama_1b", "llama.py:1b", "v5e-256", 1, slices=16),
    Case("t5_11b", "t5_11b.py", "v5e-256", 2, slices=16),
    Case("llama_7b_128k", "llama.py:7b", "v5p-128", 1 / 16, LONG),
    *(
        Case(f"depth_{layers}", "llama.py:1b", "v5e-16", 1, (f"--config.model.decoder.layers={layers}",))
        for layers in (6, 24, 96)
    ),
]


def measure(case: Case, keep: str) -> dict:
    """The row of one case, and the compiled program in the folder `keep`, if one is named."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxformer.config import overrides
    from jaxformer.plan import chips, estimate, page, program

    config = overrides.parse(case.arguments)
    place = chips.parse_hardware(SLICES[case.slice], "", None, config.mesh.slices)
    traced = program.trace(config, program.build_mesh(config, program.devices(place, config)))
    compiled = program.compile(traced)
    if keep and compiled.executable is not None:
        with gzip.open(Path(keep) / f"{case.name}.hlo.gz", "wt") as file:
            file.write(compiled.executable.as_text())
    found = estimate.estimate(traced, compiled, place)
    print(page.format_page(case.name, traced, found), file=sys.stderr, flush=True)
    return {"case": case.name, "model": case.model, "slice": case.slice, "arguments": case.arguments, **found.row()}


def recount(row: dict) -> dict:
    """The row with model FLOPs and MFU by today's formula, from the shapes of its parameters.

    Raises:
      ValueError: its arguments name a model of another size today.
    """
    from flax import linen as nn

    from jaxformer.config import overrides
    from jaxformer.models import build
    from jaxformer.plan import flops, program

    config = program.resolve(overrides.parse(row["arguments"]))
    module = build.build(config.model)
    params, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    count = build.count_params(params)
    if count != row["parameters"]:
        raise ValueError(f"{row['case']}: got {count:,} parameters from its arguments, expected {row['parameters']:,}")
    per_token = flops.flops_per_token(config, params, names, row["length"])
    visible = flops.flops_per_token_visible(config, params, names, row["length"])
    step = per_token * row["rows"] * row["length"]
    peak = row["devices"] * next(chip.flops for chip in CHIPS.values() if chip.kind == row["chip"])
    mfu = row["step_seconds"] and [step / (seconds * peak) for seconds in reversed(row["step_seconds"])]
    found = {"flops_token": per_token, "flops_token_visible": visible, "flops_step": step, "mfu": mfu}
    place = list(row).index("flops_token") + 1  # an older row gets its new key where new rows have it
    keys = dict.fromkeys([*list(row)[:place], "flops_token_visible", *list(row)[place:]])
    return {key: found[key] if key in found else row[key] for key in keys}


def recount_all() -> None:
    """Recounts every row of the results, older ones of a case too; writes none if one cannot be recounted."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.chdir(ROOT)  # the rows name their recipes from here
    lines = [json.dumps(recount(json.loads(line))) for line in RESULTS.read_text().splitlines()]
    RESULTS.write_text("\n".join(lines) + "\n")


def rows() -> dict[str, dict]:
    """The newest row of every case that is still one."""
    known = {case.name for case in CASES}
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["case"]: row for row in map(json.loads, lines) if row["case"] in known}


HEAD = """# Scaling

Written by `benchmarks/scaling.py` from `benchmarks/results/scaling.jsonl`; no chip was used. Each row is the whole step
of training (forward, backward, clipping, optimizer) of a recipe of `configs/`, compiled ahead of time by the TPU's own
compiler (libtpu, the extra `[tpu]`) for a named slice: `jaxformer plan --config=... --topology=...` does the same for
any config. Slices are named by their number of chips; 16 x v5e-256 are sixteen of them, 4,096 chips, joined by the data
centre's network along `data` (`--config.mesh.dcn.data=16`).

- GiB: what the compiled program needs on each chip, and what it may use there.
- FLOPs a token: 6 x matmul parameters + 12 x layers x heads x head width x keys, as in PaLM's appendix B (Chowdhery et
  al. 2022). Keys are all of the row, masked or not. With an encoder and a decoder, a token is one position of each.
  "Visible": the same over visible keys only, half of them where attention is causal. `jaxformer plan` prints both.
- MFU counts the FLOPs a token over all keys, causal attention counts whole, as in published figures. Recomputation (all
  rows but transformer_big recompute whole layers) takes time and adds no model FLOPs, so it lowers MFU.
- sent: bytes that each chip sends in a step, read from the compiled HLO, loops multiplied out; of several slices, also
  those that leave the slice.
- step and MFU: from the roofline of `jaxformer/plan/estimate.py`. The better figure is the longest of compute, memory,
  network and network between slices, each at its public peak; the worse one is their sum. Both are bounds of a model
  and not measurements: real kernels do not reach the peak.
"""

WEAK = """
## Weak scaling

Extrapolated from the compiled collectives, rows on each chip kept the same. Parameters and optimizer are divided over
all chips (fsdp), so a chip gathers and reduce-scatters every layer: p (n - 1) / n bytes of a layer of p bytes on n
chips, which hardly grows from n = 16 on. Compute on a chip does not change. So inside a slice the bytes of the compiled
rows are scaled by (n - 1) / n, and a closed ring of links sends them at one rate, whatever its length; slices too small
to be closed (v5e below 256 chips, v5p below 64) have half of it. {check} On 16 chips the compiler writes
most gathers and scatters as chains of collective-permutes beside the products, which send up to twice as much in all,
so those rows do not follow the rule.

A v5e slice has at most 256 chips. Beyond, each slice keeps a whole copy, divided over its 256 chips, and gradients are
added between slices over the data centre's network: 2 (s - 1) / s x 4 bytes x parameters / 256 from each chip of s
slices, at 6.4 Tbit/s a pod of 256 (cloud.google.com/tpu/docs/v5e). {slices} The compiler adds up most gradients in
bfloat16, as they come out of the products, so most stay below the rule. With `train.accumulation` they are added up
before, in float32: still once a step (docs/measurements/meshes.md). A v5p slice has up to 6,144 chips.

What the model leaves out, and what grows: the latency of a ring's hops (a collective of n chips has n - 1 of them on a
ring, about three times the cube root of n on a 3D torus), stragglers, and the input pipeline.

"""

DEPTH = """
## Depth

The layers are one scanned loop, so the program does not grow with them. Compiling the step of the 1B decoder with 6, 24
and 96 layers for v5e-16:

"""
POD = 256
"""Chips of the largest v5e slice."""


RING = {"v5e": 256, "v5p": 64}
"""From so many chips on the sides of a slice are closed rings, of which both directions send."""


def table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines]) + "\n"


def named(row: dict) -> str:
    several = f"{row['slices']} x " if row.get("slices", 1) > 1 else ""  # older rows are all of one slice
    return several + row["slice"]


def cells(row: dict) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
    need = "?" if row["need"] is None else f"{row['need'] / 2**30:.1f}"
    start = [row["model"], named(row), mesh, f"{row['rows']:,} x {row['length']:,}"]
    middle = [
        f"{need} of {row['capacity'] / 2**30:.1f}",
        f"{row['flops_token']:.2e}",
        f"{row['flops_token_visible']:.2e}",
    ]
    if not row["seconds"]:
        return [*start, *middle, "", "does not fit", ""]
    sent = f"{sum(size for *_, size in row['sent']) / 1e9:.1f} GB"
    if row.get("slices", 1) > 1:
        sent += f", {row['between_slices'] / 1e6:.0f} MB between"
    low, high = row["step_seconds"]
    worse, better = row["mfu"]
    return [*start, *middle, sent, f"{low:.2f} to {high:.2f} s", f"{worse:.0%} to {better:.0%}"]


def gradients(row: dict, slices: int, inside: int) -> float:
    """Bytes that a chip sends to other slices in a step, by the rule of the page."""
    return 2 * (1 - 1 / slices) * 4 * row["parameters"] / inside


def weak(row: dict, chips: int) -> list[str]:
    """A row's figures on another number of chips, by the reasoning of the page."""
    kind, here = row["slice"][:3], row["devices"]
    inside = min(chips, POD) if kind == "v5e" else chips
    slices, closed = chips // inside, inside >= RING[kind]
    seconds = dict(row["seconds"])
    seconds["network"] *= (1 - 1 / inside) / (1 - 1 / here) * (1 if closed else 2)
    seconds["between slices"] = gradients(row, slices, inside) / CHIPS["v5e"].dcn
    useful = row["mfu"][1] * row["step_seconds"][0]  # seconds of a step at the peak, had it only model FLOPs
    worse, better = useful / sum(seconds.values()), useful / max(seconds.values())
    network, between = f"{1e3 * seconds['network']:.0f} ms", f"{1e3 * seconds['between slices']:.0f} ms"
    return [row["model"], kind, f"{chips:,}", network, between, f"{worse:.0%} to {better:.0%}"]


def page(found: dict[str, dict]) -> str:
    """The page of the rows that are there."""
    models = [row for name, row in found.items() if not name.startswith("depth_")]
    models.sort(key=lambda row: [case.name for case in CASES].index(row["case"]))
    head = ["model", "slice", "mesh", "rows x length", "GiB", "FLOPs a token", "visible", "sent", "step", "MFU"]
    text = HEAD + "\n" + table(head, [cells(row) for row in models])
    missing = [case.name for case in CASES if case.name not in found]
    if missing:
        text += f"\nNot compiled yet: {', '.join(missing)}.\n"
    for row in [row for row in models if not row["seconds"]]:
        least = 8 * row["parameters"] / row["devices"] / 2**30
        text += f"\n{row['case']}: parameters and their gradients alone, in float32, are {least:.1f} GiB a chip.\n"
    alone = [row for row in models if row["seconds"] and row.get("slices", 1) == 1]
    bases = [row for row in alone if row["slice"] in ("v5e-256", "v5p-128")]
    bases = [row for row in bases if set(row["mesh"]) == {"fsdp"}]
    if bases:
        lines = [weak(row, chips) for row in bases for chips in (16, 64, 256, 1024, 4096)]
        head = ["model", "chip", "chips", "network inside", "between slices", "MFU"]
        text += WEAK.replace("{check}", checked(found)).replace("{slices}", between(models)) + table(head, lines)
    depths = {name: found[name] for name in (f"depth_{n}@v5e-16" for n in (6, 24, 96)) if name in found}
    if depths:
        lines = [[name.partition("@")[0][6:], f"{row['compile_core_seconds']:.0f}"] for name, row in depths.items()]
        text += DEPTH + table(["layers", "compiled in, seconds of a core"], lines)
    return text


def checked(found: dict[str, dict]) -> str:
    """How the rule holds between two slices of one model that were both compiled."""
    words = []
    for model in dict.fromkeys(case.model for case in CASES):
        small, large = (found.get(f"{model}@{each}") for each in ("v5e-16", "v5e-256"))
        if small and large and small["seconds"] and large["seconds"]:
            sent = [sum(size for *_, size in row["sent"]) for row in (small, large)]
            words.append(f"{model} {sent[1] / sent[0]:.3f}")
    rule = f"{16 * 255 / 15 / 256:.3f}"
    return (
        f"Bytes compiled for 256 chips over those for 16, where the rule is {rule}: {', '.join(words)}."
        if words
        else ""
    )


def between(models: list[dict]) -> str:
    """What leaves a slice in the programs that were compiled for several, and by the rule."""
    words = []
    for row in (row for row in models if row.get("slices", 1) > 1):
        rule = gradients(row, row["slices"], row["devices"] // row["slices"]) / 1e6
        words.append(f"{row['model']}, {row['slices']} slices: {row['between_slices'] / 1e6:.0f} MB (rule: {rule:.0f})")
    return f"Compiled for several: {'; '.join(words)}." if words else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name begins so; measured again")
    parser.add_argument("--page", action="store_true", help="write the page from the rows that are there")
    parser.add_argument(
        "--recount", action="store_true", help="model FLOPs and MFU by today's formula; compiles nothing"
    )
    parser.add_argument("--keep", default="", help="folder for the compiled programs, as text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        print(json.dumps(measure(next(case for case in CASES if case.name == flags.case), flags.keep)))
        return 0
    if flags.recount:
        try:
            recount_all()
        except ValueError as error:
            parser.error(str(error))
    have = rows()
    chosen = [c for c in CASES if c.name.startswith(flags.only or "") and (flags.only or c.name not in have)]
    failed = 0
    for case in [] if flags.page or flags.recount else chosen:
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
    PAGE.write_text(page(rows()), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
