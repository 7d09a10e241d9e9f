"""An estimate as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from jaxformer.plan import flops
from jaxformer.plan.chips import GIB, Hardware
from jaxformer.plan.estimate import Estimate, bytes_per_device, format_gib
from jaxformer.plan.program import Program
from jaxformer.runtime.units import format_duration

SHORTEST_PUBLISHED = 0.45
"""Seconds of the shortest step on which the expected one is tuned or judged."""


def format_page(title: str, program: Program, estimate: Estimate) -> str:
    """The text of a plan, in sections."""
    sections = {
        "parameters": _parameters(program, estimate),
        "work": _work(program, estimate),
        "memory of each device": _memory(estimate),
        "sent by each device in a step": _sent(estimate),
        "time of a step": _time(estimate),
        "expected time of a step": _expected(program, estimate),
        "verdict": f"  {verdict(estimate)}",
    }
    heading = (
        f"{title}\n  {describe_hardware(estimate.hardware, estimate.devices)}\n  mesh {format_mesh(estimate.mesh)}"
    )
    return heading + "\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in sections.items() if text)


def describe_hardware(hardware: Hardware, devices: int) -> str:
    """Two lines about the devices: names and numbers, and the peaks that the estimate uses."""
    chip = hardware.chip
    several = hardware.slices > 1
    name = f"{hardware.slices} x {hardware.topology}" if several and hardware.topology else hardware.topology
    name = name or (f"{hardware.slices} slices" if several else "no topology")
    dcn = f", {chip.dcn / 1e9:,.4g} GB/s to other slices" if several else ""
    how = (
        f"compiled by libtpu for {'these slices' if several else 'this slice'}"
        if hardware.topology
        else "compiled for simulated CPU devices, whose buffers stand in"
    )
    return (
        f"{name}: {devices:,} x {chip.kind}; {how}\n"
        f"  {chip.flops / 1e12:,.0f} TFLOP/s in bfloat16, {chip.memory / GIB:.2f} GiB at "
        f"{chip.bandwidth / 1e9:,.0f} GB/s, {hardware.network / 1e9:,.0f} GB/s sent along an axis{dcn} "
        f"({chip.source})"
    )


def format_mesh(mesh: dict[str, int]) -> str:
    """The sizes of a mesh: `data 2 x fsdp 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "of one device"


def verdict(estimate: Estimate) -> str:
    """One line: whether the step fits into the memory, and advice if it does not."""
    capacity = estimate.hardware.chip.memory
    if estimate.needed_bytes is None:
        return f"does not fit in {format_gib(capacity)} GiB; {estimate.advice}"
    share = f"{format_gib(estimate.needed_bytes)} of {format_gib(capacity)} GiB"
    return f"fits: {share}" if estimate.fits else f"does not fit: {share}; {estimate.advice}"


def _parameters(program: Program, estimate: Estimate) -> str:
    rows = [("total", f"{estimate.parameters:,}", "", f"{bytes_per_device(program.state.params) / 2**20:,.1f}")]
    for path, leaf in jax.tree.leaves_with_path(program.state.params):
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        rows.append((name, f"{leaf.size:,}", _spread(leaf), f"{bytes_per_device(leaf) / 2**20:,.1f}"))
    return table(("", "number", "shape / mesh axes", "MiB each"), rows, "<><>")


def _spread(leaf: jax.ShapeDtypeStruct) -> str:
    """Shape of a parameter with the mesh axes of each axis: `512/fsdp x 8/tensor x 64`."""
    spec: PartitionSpec = leaf.sharding.spec
    entries = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    names = ["" if e is None else "/" + (e if isinstance(e, str) else "/".join(e)) for e in entries]
    return " x ".join(f"{size}{name}" for size, name in zip(leaf.shape, names)) or "scalar"


def _work(program: Program, estimate: Estimate) -> str:
    rows, length = estimate.shape
    accumulation = program.config.train.accumulation
    micro = f", in {accumulation} microbatches" if accumulation > 1 else ""
    steps = program.config.train.steps
    most = ", at most: others are smaller" if program.shapes[:-1] else ""
    others = ", ".join(f"{each.rows} x {each.length}" for each in program.shapes[:-1])
    return table(
        None,
        [
            ("tokens a step", f"{rows * length:,}", f"{rows:,} rows of {length:,}{micro}"),
            *([("", "", f"the longest batch; others are {others}")] if others else []),
            (f"tokens in {steps:,} steps", f"{steps * rows * length:,}", f"train.steps times that{most}"),
            ("FLOPs a token", f"{estimate.flops_per_token:.3e}", flops.FORMULA),
            ("over visible keys", f"{estimate.flops_per_token_visible:.3e}", flops.FORMULA_VISIBLE),
            (
                "FLOPs a step",
                f"{estimate.flops_per_step:.3e}",
                "that times the tokens; MFU counts these, causal attention counts whole",
            ),
            (
                "in the program",
                f"{estimate.counted_flops:.3e}",
                "all its products: masked pairs and recomputation included",
            ),
        ],
        "<><",
    )


def _memory(estimate: Estimate) -> str:
    parts = estimate.memory or estimate.state
    rows = list(parts.items())
    if estimate.needed_bytes is not None:
        rows.append(("total", estimate.needed_bytes))
    small = sum(parts.values()) < GIB
    texts = [(name, f"{size / 2**20:,.2f}" if small else format_gib(size)) for name, size in rows]
    return table(("", "MiB" if small else "GiB"), texts, "<>")


def _sent(estimate: Estimate) -> str:
    rows = [(kind, axes, f"{n:,}", f"{size / 1e6:,.1f}") for (kind, axes), (n, size) in estimate.collectives.items()]
    if not rows:
        return "" if not estimate.memory else "  nothing"
    rows.append(("total", "", "", f"{sum(size for _, size in estimate.collectives.values()) / 1e6:,.1f}"))
    if estimate.hardware.slices > 1:
        rows.append(("of it between slices", "", "", f"{estimate.cross_slice_bytes / 1e6:,.1f}"))
    text = table(("", "along", "times", "MB"), rows, "<<>>")
    return text + (
        f"\n  {estimate.unknown_loops} are in loops of unknown length and count once" if estimate.unknown_loops else ""
    )


def _time(estimate: Estimate) -> str:
    if not estimate.seconds:
        return ""
    meaning = {
        "compute": "products at the peak",
        "memory": "state, weights and temporaries at the memory's bandwidth, at least",
        "network": "what is sent, at the bandwidth of one axis",
        "between slices": "what leaves the slice, at the bandwidth of the data centre's network",
    }
    rows = [(name, format_duration(seconds), meaning[name]) for name, seconds in estimate.seconds.items()]
    for name, seconds, words in (
        ("step, at least", estimate.min_seconds, "all of it at once"),
        ("step, at most", estimate.max_seconds, "one after the other"),
    ):
        rate = estimate.shape.rows * estimate.shape.length / seconds
        rows.append((name, format_duration(seconds), f"{words}: {rate:,.0f} tokens/s, MFU {estimate.mfu(seconds):.1%}"))
    return table(None, rows, "<><")


def _expected(program: Program, estimate: Estimate) -> str:
    if not estimate.expected:
        return f"  none: {estimate.not_expected}"
    meaning = {
        "products": "products with parameters, those that are computed again included",
        "scores": "products of queries with keys and of probabilities with values",
        "elementwise": "activations that other operations read and write",
        "bubble": "stages that wait for each other",
        "activations": "what is sent in every layer, as far as it is waited for",
        "parameters": "parameters and gradients, the same",
        "between": "the same between slices",
        "optimizer": "the state, read and written",
    }
    rows = [(name, format_duration(x), meaning[name]) for name, x in estimate.expected.items() if x]
    seconds = estimate.expected_seconds
    rate = estimate.shape.rows * estimate.shape.length / seconds
    words = f"{rate:,.0f} tokens/s, MFU {estimate.mfu(seconds):.1%}; errors by row: docs/measurements/plan.md"
    rows.append(("step", format_duration(seconds), words))
    if seconds < SHORTEST_PUBLISHED:
        rows.append(("", "", "shorter than any published step; starting the kernels, which takes time, is not counted"))
    if program.config.model.dtype == "float32":
        rows.append(("", "", "model.dtype is float32, which is counted at bfloat16's peak"))
    return table(None, rows, "<><")


def ranking(estimates: list[Estimate]) -> str:
    """Meshes in a table, the fastest that fit first."""
    rows = []
    for estimate in ranked(estimates):
        need = "?" if estimate.needed_bytes is None else format_gib(estimate.needed_bytes)
        time, mfu = (
            ("", "")
            if not estimate.seconds
            else (format_duration(estimate.min_seconds), f"{estimate.mfu(estimate.min_seconds):.1%}")
        )
        worst = "" if not estimate.seconds else format_duration(estimate.max_seconds)
        expected = format_duration(estimate.expected_seconds) if estimate.expected else "none"
        fits = "fits" if estimate.fits else f"does not fit: {estimate.advice}"
        rows.append((format_mesh(estimate.mesh), f"{estimate.shape.rows:,}", need, time, expected, worst, mfu, fits))
    return table(("mesh", "rows", "GiB", "step >=", "expected", "step <=", "MFU <=", ""), rows, "<>>>>>><")


def ranked(estimates: list[Estimate]) -> list[Estimate]:
    """Estimates that fit before those that do not, each by the upper bound of the time per row."""
    return sorted(estimates, key=lambda x: (not x.fits, x.max_seconds * x.shape.rows**-1, x.needed_bytes or 0))


def table(head: tuple[str, ...] | None, rows: Sequence[tuple[str, ...]], sides: str) -> str:
    """A table with columns as wide as their widest cell; `sides` has the alignment of each, "<" or ">"."""
    rows = [*([head] if head else []), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)
