"""Expected seconds of decoding, from shapes alone: a roofline with the tuned assumptions of `assumptions.py`.

A decode step adds a token to every sequence. It is the sum of these parts; each is the time of one device:

    parameters    bytes of the parameters that it reads, at a fraction of the memory's bandwidth, less the products
    caches        bytes of keys and values that it reads, at the same fraction
    products      2 FLOPs a parameter and sequence, and the scores, at the fraction of the peak that training reaches
    collectives   what the axes tensor and expert send in every layer: bytes at the network's bandwidth, and a latency
    gathering     parameters of the fsdp axis, which every step gathers

With few sequences, parameters and latencies are nearly all of it, and the time hardly depends on their number (Pope et
al. 2022, Efficiently scaling transformer inference, section 2). A prefill reads a prompt in one forward pass; its parts
are those of a forward pass in training. Parameters are read while earlier ones are multiplied, so only what takes
longer than the products counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.plan.assumptions import FAMILIES, TUNED, Assumptions
from jaxformer.plan.chips import Chip, name_of
from jaxformer.plan.step_time import RESIDUAL_CHANNELS, Layout, bandwidth

FORWARD = 1 / 3
"""Share of a training step's elementwise passes in its forward pass: the backward pass has twice as many."""


@dataclass(frozen=True)
class Decoded:
    """A model as a decode step sees it. Sizes are of the whole model, before any axis divides them, but for one.

    Attributes:
      layers: number of decoder layers.
      width: model width.
      bytes: bytes of an activation.
      read_bytes: bytes of the parameters that a step reads on one device, gathered over fsdp.
      multiplied: parameters that a token is multiplied with.
      scores: heads x head width, summed over the layers; of latent attention as a decode step absorbs it.
      reductions: collectives of a layer over the tensor axis.
      channels: activations of a token beside those of the model width in a layer.
      routed: experts of a token, each of which gets and returns its activations over the expert axis.
      head: those of `multiplied` that only the last token of a prompt is multiplied with.
      prompt_scores: `scores` where a prompt is read; None: the same.
    """

    layers: int
    width: int
    bytes: int
    read_bytes: float
    multiplied: float
    scores: float
    reductions: int
    channels: float
    routed: int = 0
    head: float = 0.0
    prompt_scores: float | None = None


def replicas(layout: Layout) -> int:
    """Devices that the rows of a batch are divided over."""
    return layout.size("data") * layout.size("fsdp") * layout.size("expert")


def decode_step_seconds(
    model: Decoded,
    rows: float,
    keys: float,
    cache_bytes: float,
    layout: Layout,
    chip: Chip,
    assumptions: Assumptions = TUNED,
) -> dict[str, float]:
    """Expected seconds of a decode step by part; their sum is the step.

    Args:
      model: the model.
      rows: sequences of all devices.
      keys: slots that a query is multiplied with.
      cache_bytes: bytes of the caches that one device reads.
      layout: the mesh; only the axes data, fsdp, expert and tensor count.
      chip: the devices.
      assumptions: what the roofline assumes.
    """
    name, tensor = name_of(chip), layout.size("tensor")
    memory = chip.bandwidth * assumptions.decode_memory
    own = rows / replicas(layout)
    flops = own * (2 * model.multiplied + 4 * model.scores * keys) / tensor
    collectives = model.reductions * (tensor > 1) + 2 * (model.routed > 0 and layout.size("expert") > 1)
    network = _sending_seconds(model, own, layout, chip)
    network += model.layers * collectives * assumptions.decode_latency[FAMILIES[name]]
    products = flops / (assumptions.products[name] * chip.flops)
    return {
        "parameters": max(model.read_bytes / memory - products, 0.0),
        "caches": cache_bytes / memory,
        "products": products,
        "collectives": network,
        "gathering": _gather_seconds(model, layout, chip),
    }


def prefill_seconds(
    model: Decoded, rows: float, length: int, layout: Layout, chip: Chip, assumptions: Assumptions = TUNED
) -> dict[str, float]:
    """Expected seconds of reading prompts of `length` tokens by part; their sum is the time to the first token."""
    name = name_of(chip)
    family, tensor = FAMILIES[name], layout.size("tensor")
    tokens = rows * length / replicas(layout)
    of_peak = assumptions.products[name] * chip.flops
    channels = RESIDUAL_CHANNELS * model.width + model.channels / tensor
    streamed = FORWARD * assumptions.passes * model.layers * channels * tokens * model.bytes
    memory = chip.bandwidth * assumptions.decode_memory
    sent = assumptions.activations[family] * _sending_seconds(model, tokens, layout, chip)
    products = 2 * (model.multiplied - model.head * (1 - 1 / length)) * tokens / tensor / of_peak
    scores = model.scores if model.prompt_scores is None else model.prompt_scores
    return {
        "parameters": max(model.read_bytes / memory - products, 0.0),
        "products": products,
        "scores": 4 * scores * (length + 1) / 2 * tokens / tensor / of_peak / assumptions.scores[family],
        "elementwise": streamed / chip.bandwidth,
        "collectives": sent,
        "gathering": _gather_seconds(model, layout, chip),
    }


def _sending_seconds(model: Decoded, tokens: float, layout: Layout, chip: Chip) -> float:
    """Seconds of what a forward pass sends for `tokens` of each group of devices.

    Over the tensor axis these are all-reduces, over the expert axis the way to a token's experts and back.
    """
    tensor = layout.size("tensor")
    payload = model.layers * model.reductions * tokens * model.width * model.bytes
    inner, outer = layout.inside.get("tensor", 1), layout.outside.get("tensor", 1)
    seconds = 2 * (1 - 1 / inner) * payload / bandwidth(chip, inner, layout.domain) if tensor > 1 else 0.0
    seconds += 2 * (1 - 1 / outer) * payload / inner / (layout.dcn or chip.dcn)
    experts = layout.size("expert")
    routed = 2 * model.layers * model.routed * tokens / tensor * model.width * model.bytes * (1 - 1 / experts)
    return seconds + routed / bandwidth(chip, experts, layout.domain)


def _gather_seconds(model: Decoded, layout: Layout, chip: Chip) -> float:
    """Seconds of gathering the parameters over fsdp."""
    shard = model.read_bytes
    inner, outer = layout.inside.get("fsdp", 1), layout.outside.get("fsdp", 1)
    seconds = (1 - 1 / inner) * shard / bandwidth(chip, inner, layout.domain)
    return seconds + (1 - 1 / outer) * shard / inner / (layout.dcn or chip.dcn)
