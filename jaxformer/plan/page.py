"""An estimate as text for a terminal."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from jaxformer.plan import flops
from jaxformer.plan.chips import GIB, Place
from jaxformer.plan.estimate import Estimate, gib, held
from jaxformer.plan.program import Program


def page(title: str, program: Program, estimate: Estimate) -> str:
    """All that a plan says, section by section."""
    sections = {
        "parameters": _parameters(program, estimate),
        "work": _work(program, estimate),
        "memory of each device": _memory(estimate),
        "sent by each device in a step": _sent(estimate),
        "time of a step": _time(estimate),
        "verdict": f"  {verdict(estimate)}",
    }
    heading = f"{title}\n  {where(estimate.place, estimate.devices)}\n  mesh {mesh_words(estimate.mesh)}"
    return heading + "\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in sections.items() if text)


def where(place: Place, devices: int) -> str:
    chip = place.chip
    several = place.slices > 1
    name = f"{place.slices} x {place.topology}" if several and place.topology else place.topology
    name = name or (f"{place.slices} slices" if several else "no topology")
    dcn = f", {chip.dcn / 1e9:,.4g} GB/s to other slices" if several else ""
    how = (
        f"compiled by libtpu for {'these slices' if several else 'this slice'}"
        if place.topology
        else "compiled for simulated CPU devices, whose buffers stand in"
    )
    return (
        f"{name}: {devices:,} x {chip.kind}; {how}\n"
        f"  {chip.flops / 1e12:,.0f} TFLOP/s in bfloat16, {chip.memory / GIB:.2f} GiB at "
        f"{chip.bandwidth / 1e9:,.0f} GB/s, {place.network / 1e9:,.0f} GB/s sent along an axis{dcn} "
        f"({chip.source})"
    )


def mesh_words(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "of one device"


def verdict(estimate: Estimate) -> str:
    capacity = estimate.place.chip.memory
    if estimate.need is None:
        return f"does not fit in {gib(capacity)} GiB; {estimate.advice}"
    share = f"{gib(estimate.need)} of {gib(capacity)} GiB"
    return f"fits: {share}" if estimate.fits else f"does not fit: {share}; {estimate.advice}"


def _parameters(program: Program, estimate: Estimate) -> str:
    rows = [("total", f"{estimate.parameters:,}", "", f"{held(program.state.params) / 2**20:,.1f}")]
    for path, leaf in jax.tree.leaves_with_path(program.state.params):
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        rows.append((name, f"{leaf.size:,}", _spread(leaf), f"{held(leaf) / 2**20:,.1f}"))
    return _table(("", "number", "shape / mesh axes", "MiB each"), rows, "<><>")


def _spread(leaf: jax.ShapeDtypeStruct) -> str:
    """`512/fsdp x 8/tensor x 64`: every axis with the mesh axes that it is divided over."""
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
    return _table(
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
            ("in the program", f"{estimate.counted:.3e}", "all its products: masked pairs and recomputation included"),
        ],
        "<><",
    )


def _memory(estimate: Estimate) -> str:
    parts = estimate.memory or estimate.state
    rows = list(parts.items())
    if estimate.need is not None:
        rows.append(("total", estimate.need))
    small = sum(parts.values()) < GIB
    texts = [(name, f"{size / 2**20:,.2f}" if small else gib(size)) for name, size in rows]
    return _table(("", "MiB" if small else "GiB"), texts, "<>")


def _sent(estimate: Estimate) -> str:
    rows = [(kind, axes, f"{n:,}", f"{size / 1e6:,.1f}") for (kind, axes), (n, size) in estimate.sent.items()]
    if not rows:
        return "" if not estimate.memory else "  nothing"
    rows.append(("total", "", "", f"{sum(size for _, size in estimate.sent.values()) / 1e6:,.1f}"))
    if estimate.place.slices > 1:
        rows.append(("of it between slices", "", "", f"{estimate.between / 1e6:,.1f}"))
    text = _table(("", "along", "times", "MB"), rows, "<<>>")
    return text + (f"\n  {estimate.unknown} are in loops of unknown length and count once" if estimate.unknown else "")


def _time(estimate: Estimate) -> str:
    if not estimate.seconds:
        return ""
    meaning = {
        "compute": "products at the peak",
        "memory": "state, weights and temporaries at the memory's bandwidth, at least",
        "network": "what is sent, at the bandwidth of one axis",
        "between slices": "what leaves the slice, at the bandwidth of the data centre's network",
    }
    rows = [(name, _duration(seconds), meaning[name]) for name, seconds in estimate.seconds.items()]
    for name, seconds, words in (
        ("step, at least", estimate.best, "all of it at once"),
        ("step, at most", estimate.worst, "one after the other"),
    ):
        rate = estimate.shape.rows * estimate.shape.length / seconds
        rows.append((name, _duration(seconds), f"{words}: {rate:,.0f} tokens/s, MFU {estimate.mfu(seconds):.1%}"))
    return _table(None, rows, "<><")


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:,.3g} us"
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def ranking(estimates: list[Estimate]) -> str:
    """Meshes in a table, the fastest that fit first."""
    rows = []
    for each in ranked(estimates):
        need = "?" if each.need is None else gib(each.need)
        time, mfu = ("", "") if not each.seconds else (_duration(each.best), f"{each.mfu(each.best):.1%}")
        worst = "" if not each.seconds else _duration(each.worst)
        fits = "fits" if each.fits else f"does not fit: {each.advice}"
        rows.append((mesh_words(each.mesh), f"{each.shape.rows:,}", need, time, worst, mfu, fits))
    return _table(("mesh", "rows", "GiB", "step >=", "step <=", "MFU <=", ""), rows, "<>>>>><")


def ranked(estimates: list[Estimate]) -> list[Estimate]:
    """Those that fit before those that don't, each by the time of a step in which nothing overlaps."""
    return sorted(estimates, key=lambda each: (not each.fits, each.worst * each.shape.rows**-1, each.need or 0))


def _table(head: tuple[str, ...] | None, rows: list[tuple[str, ...]], sides: str) -> str:
    """Columns as wide as their widest cell; `sides` aligns them."""
    rows = [*([head] if head else []), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)
