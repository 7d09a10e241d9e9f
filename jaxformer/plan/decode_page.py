"""A plan of decoding as text for a terminal."""

from __future__ import annotations

from jaxformer.config import AXES
from jaxformer.plan.chips import CHIPS
from jaxformer.plan.decoding import DecodePlan
from jaxformer.plan.page import format_mesh, table
from jaxformer.runtime.units import format_duration, format_size

SHORTEST_PUBLISHED = 3e-3
"""Seconds of the shortest decode step on which the expected one is tuned or judged."""

MEANING = {
    "parameters": "parameters that are read, beyond the time of the products",
    "caches": "keys and values that are read",
    "products": "products with parameters",
    "scores": "products of queries with keys and of probabilities with values",
    "elementwise": "activations that other operations read and write",
    "collectives": "what the axes tensor and expert send in every layer",
    "gathering": "parameters of the fsdp axis, gathered",
}


def format_page(title: str, plan: DecodePlan) -> str:
    """The text of a plan of decoding, in sections."""
    request, chip = plan.request, plan.hardware.chip
    mesh = {axis: plan.layout.size(axis) for axis in AXES if plan.layout.size(axis) > 1}
    what = "a source" if plan.config.model.is_seq2seq else "a prompt"
    heading = (
        f"{title}\n  {plan.layout.devices:,} x {chip.kind}, {format_size(chip.memory)} at "
        f"{chip.bandwidth / 1e9:,.0f} GB/s ({chip.source})\n  mesh {format_mesh(mesh)}\n"
        f"  {request.batch:,} prompts at a time, {request.prompt:,} tokens in {what}, {request.tokens:,} new ones; "
        f"{_method(plan)}"
    )
    sections = {
        "caches of one prompt, over all devices": _caches(plan),
        "memory of each device": _memory(plan),
        "expected time": _time(plan),
        "largest batch on as many devices of each kind": _largest(plan),
        "verdict": f"  {verdict(plan)}",
    }
    return heading + "\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in sections.items())


def _method(plan: DecodePlan) -> str:
    decode = plan.config.decode
    words = {"beam": f"{decode.beams} beams", "sample": f"{decode.hypotheses} samples a prompt"}
    proposals = ", a token a pass (decode.speculate is not counted)" if decode.speculate else ""
    return f"{words.get(decode.method, decode.method)}, {decode.weights} weights{proposals}"


def _caches(plan: DecodePlan) -> str:
    rows = [(name, format_size(size)) for name, size in plan.prompt_bytes.items()]
    rows.append(("total", format_size(sum(plan.prompt_bytes.values()))))
    return table(None, rows, "<>")


def _memory(plan: DecodePlan) -> str:
    rows = [
        ("parameters", format_size(plan.parameter_bytes), f"{plan.parameters:,} of them, as decoding keeps them"),
        ("caches", format_size(plan.cache_bytes), "at their largest"),
        ("smaller caches", format_size(plan.growing_bytes), "beside them, while they grow for the last time"),
        ("working memory", format_size(plan.working_bytes), "logits, and one layer's activations of the prompts"),
        ("total", format_size(plan.needed_bytes), ""),
    ]
    return table(None, [row for row in rows if row[1] != "0 B"], "<><")


def _time(plan: DecodePlan) -> str:
    rows = [(f"prompts, {name}", format_duration(x), MEANING[name]) for name, x in plan.prefill.items() if x]
    rows.append(("prompts", format_duration(plan.prefill_seconds), "time to the first token"))
    rows += [(f"token, {name}", format_duration(x), MEANING[name]) for name, x in plan.step.items() if x]
    first, last = format_duration(plan.first_step), format_duration(plan.last_step)
    rate = plan.request.batch / plan.step_seconds
    rows.append(
        ("token", format_duration(plan.step_seconds), f"of every prompt; from {first} to {last}: {rate:,.0f} tokens/s")
    )
    total = plan.prefill_seconds + (plan.request.tokens - 1) * plan.step_seconds
    rows.append(("all tokens", format_duration(total), "errors against published times: docs/measurements/plan.md"))
    if plan.step_seconds < SHORTEST_PUBLISHED:
        rows.append(("", "", "shorter than any published step; starting the kernels, which takes time, is not counted"))
    if plan.config.model.dtype == "float32":
        rows.append(("", "", "model.dtype is float32, whose products are counted at bfloat16's peak"))
    return table(None, rows, "<><")


def _largest(plan: DecodePlan) -> str:
    rows = []
    for name, found in plan.largest.items():
        memory = format_size(CHIPS[name].memory)
        if found is None:
            rows.append((name, memory, "none", "", ""))
            continue
        batch, seconds = found
        rows.append((name, memory, f"{batch:,}", format_duration(seconds), f"{batch / seconds:,.0f}"))
    return table(("", "memory", "prompts", "token", "tokens/s"), rows, "<>>>>")


def verdict(plan: DecodePlan) -> str:
    """One line: whether decoding fits into the memory, and advice if it does not."""
    share = f"{format_size(plan.needed_bytes)} of {format_size(plan.hardware.chip.memory)}"
    if plan.fits:
        return f"fits: {share}"
    if plan.parameter_bytes > 0.8 * plan.hardware.chip.memory:
        return f"does not fit: {share}; the parameters take it: raise config.mesh.tensor, or set decode.weights=int8"
    return f"does not fit: {share}; lower --batch, --prompt or --tokens, or raise config.mesh.tensor"
