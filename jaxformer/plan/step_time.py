"""Expected seconds of a training step, from shapes alone: a roofline with the tuned assumptions of `assumptions.py`.

A step is the sum of these parts; each is the time of one device:

    products      6 FLOPs a parameter and token, and 2 more for those that are recomputed, at a fraction of the peak
    scores        products of queries with keys and of probabilities with values, visible pairs only if the kernel skips
    elementwise   bytes of activations that operations other than products read and write, at the memory's bandwidth
    bubble        (stages - 1) / (microbatches x interleaving) of all that, where stages wait for each other
    activations   what axes tensor, context and expert send in every layer, as far as it is waited for
    parameters    what axes fsdp and data send within a slice or host, as far as computing does not hide it
    between       the same between slices or hosts
    optimizer     the state, read and written once

The formulas of traffic are those of bandwidth-optimal collectives (`parallel/collectives.py`). They know nothing of the
compiler: `estimate.py` reads the compiled program instead, and bounds the step from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxformer.plan.assumptions import FAMILIES, TUNED, Assumptions
from jaxformer.plan.chips import Chip, name_of

RECOMPUTED = {
    "none": frozenset(),
    "scores": frozenset({"scores"}),
    "minimal": frozenset({"scores"}),
    "projections": frozenset({"scores", "up"}),
    "qkv": frozenset({"scores", "out", "up"}),
    "context": frozenset({"qkv", "up"}),
    "full": frozenset({"qkv", "scores", "out", "up"}),
    "whole": frozenset({"qkv", "scores", "out", "up", "down"}),
}
"""Products of a layer that the backward pass computes again, by rematerialisation policy: query, key and value
projections, scores, output projection, and the projections into and out of the feed-forward layer. XLA leaves out the
last one, whose result nobody reads ("full"); PyTorch does not ("whole")."""
FUSED_BACKWARD = 2.5
"""Score products of a fused kernel's backward pass, as a multiple of the forward pass: scores are computed again."""
STATE_BYTES = 28
"""Bytes read and written for a parameter by Adam in float32: it, two moments and the gradient read, three written."""
RESIDUAL_CHANNELS = 4
"""Activations of the model width in a layer: two norms and two sums."""


@dataclass(frozen=True)
class Layers:
    """A group of equal layers.

    Attributes:
      count: number of layers.
      width: model width.
      qkv, out, up, down: parameters that a token is multiplied with in a layer: projections of attention, then those
        into and out of the feed-forward layer (of the experts of a token).
      channels: activations of a token besides those of the model width: queries, keys, values, hidden ones.
      scores: heads x head width x keys of a query, on average over the queries: visible keys if `fused`.
      tables: heads x keys of a query that the kernel writes to memory; 0 if it is fused.
      recomputed: products that the backward pass computes again, see `RECOMPUTED`.
      joined: True if attention and feed-forward layer are parallel, with one collective for both.
      memory_channels: keys and values of a token, which an axis of context sends.
      routed: experts of a token, each of which gets and returns its activations over the expert axis.
    """

    count: int
    width: int
    qkv: float
    out: float
    up: float
    down: float
    channels: float
    scores: float
    tables: float = 0.0
    recomputed: frozenset[str] = frozenset()
    joined: bool = False
    memory_channels: int = 0
    routed: int = 0

    @property
    def multiplied(self) -> float:
        """Parameters that a token is multiplied with in all these layers."""
        return self.count * (self.qkv + self.out + self.up + self.down)

    @property
    def product_flops(self) -> float:
        """FLOPs of a token's products with these parameters in a step: forward, backward, and computed again."""
        parts = {"qkv": self.qkv, "out": self.out, "up": self.up, "down": self.down}
        return 6 * self.multiplied + 2 * self.count * sum(parts[name] for name in self.recomputed if name in parts)

    @property
    def score_flops(self) -> float:
        """FLOPs of a token's products of queries with keys and of probabilities with values in a step."""
        rounds = (3 if self.tables else 1 + FUSED_BACKWARD) + ("scores" in self.recomputed)
        return 4 * self.count * self.scores * rounds


@dataclass(frozen=True)
class Shapes:
    """A model as the estimate sees it.

    Attributes:
      layers: groups of equal layers.
      head: parameters of the output matrix.
      vocab: its columns; 0: no logits.
      parameters: all parameters.
      bytes: bytes of an activation and of a gathered parameter.
    """

    layers: tuple[Layers, ...]
    head: float
    vocab: int
    parameters: float
    bytes: int = 2


@dataclass(frozen=True)
class Layout:
    """Division of a step among devices.

    Attributes:
      inside: sizes of the mesh axes within a slice or host.
      outside: their sizes across slices or hosts.
      accumulation: microbatches of a step, each of which gathers parameters.
      microbatches: microbatches of the pipeline.
      interleave: groups of layers that a stage has (1: they are neighbours).
      sequence: the residual stream is divided over the tensor axis.
      zero1: the optimizer state is divided over the data axis too.
      dcn: bytes/s of a device to other slices or hosts; None: those of the chip.
    """

    inside: Mapping[str, int] = field(default_factory=dict)
    outside: Mapping[str, int] = field(default_factory=dict)
    accumulation: int = 1
    microbatches: int = 1
    interleave: int = 1
    sequence: bool = True
    zero1: bool = False
    dcn: float | None = None

    def size(self, axis: str) -> int:
        """Full size of a mesh axis."""
        return self.inside.get(axis, 1) * self.outside.get(axis, 1)

    @property
    def domain(self) -> int:
        """Devices of a slice or host."""
        return math.prod(self.inside.values())

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.domain * math.prod(self.outside.values())


def split_axes(mesh: Mapping[str, int], domain: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of mesh axes within hosts of `domain` devices, and across them.

    Axes are packed from the fastest (the last of `AXES`) on.
    """
    inside, outside, left = {}, {}, domain
    for axis in ("tensor", "context", "expert", "fsdp", "data", "stage"):
        size = mesh.get(axis, 1)
        inside[axis] = math.gcd(size, left)
        outside[axis] = size // inside[axis]
        left //= inside[axis]
    return inside, outside


def bandwidth(chip: Chip, size: int, domain: int) -> float:
    """Bytes/s that a device sends along a mesh axis of `size` devices of a slice of `domain` devices.

    A torus of three sides has six links. An axis gets two for each side that it spans, on average, and half of them if
    the sides are too short to be closed rings.
    """
    if chip.ring is None:
        return chip.link
    spanned = max(1, round(chip.sides * math.log(max(size, 2)) / math.log(max(domain, 2))))
    closed = domain ** (1 / chip.sides) >= chip.ring
    return chip.link * spanned * (2 if closed else 1)


def step_seconds(
    shapes: Shapes, layout: Layout, tokens: float, chip: Chip, assumptions: Assumptions = TUNED
) -> dict[str, float]:
    """Expected seconds of a training step by part; their sum is the step.

    Args:
      shapes: the model.
      layout: how the step is divided.
      tokens: tokens of a step, over all devices.
      chip: the devices.
      assumptions: what the roofline assumes.
    """
    name, share = name_of(chip), tokens / layout.devices
    of_peak, family = assumptions.products[name], FAMILIES[name]
    products = scores = elementwise = activations = 0.0
    tensor, context, expert = (layout.size(axis) for axis in ("tensor", "context", "expert"))
    for each in shapes.layers:
        again = each.recomputed
        products += share * each.product_flops
        work = share * each.score_flops
        scores += work if each.tables else work / assumptions.scores[family]
        residual = RESIDUAL_CHANNELS * each.width * (1 if layout.sequence else tensor)
        streamed = assumptions.passes * (residual + each.channels)
        tables = assumptions.score_passes * each.tables * (4 / 3 if "scores" in again else 1)
        elementwise += each.count * share * shapes.bytes * (streamed + tables)
        reduced = (1 if each.joined else 2) * 2 + (1 if "out" in again else 0) + (1 if "down" in again else 0)
        sent = reduced * 2 * (tensor - 1) * each.width / bandwidth(chip, tensor, layout.domain)
        sent += 3 * (context - 1) * each.memory_channels / bandwidth(chip, context, layout.domain)
        sent += 4 * (1 - 1 / expert) * each.routed * each.width / bandwidth(chip, expert, layout.domain)
        activations += each.count * share * shapes.bytes * sent
    products += 6 * shapes.head * share
    elementwise += assumptions.passes * 4 * shapes.vocab * share
    computing = {
        "products": products / (of_peak * chip.flops),
        "scores": scores / (of_peak * chip.flops),
        "elementwise": elementwise / chip.bandwidth,
    }
    stages = layout.size("stage")
    bubble = (stages - 1) / (layout.microbatches * layout.interleave)
    waited = assumptions.activations[family] * activations
    computing["bubble"] = bubble * (sum(computing.values()) + waited)
    computed = sum(computing.values())
    within, between = _parameter_seconds(shapes, layout, chip)
    replicas = tensor * stages * layout.size("fsdp") * (layout.size("data") if layout.zero1 else 1)
    return computing | {
        "activations": waited,
        "parameters": max(assumptions.parameters[family] * within, within - computed),
        "between": max(assumptions.between[family] * between, between - computed),
        "optimizer": STATE_BYTES * shapes.parameters / replicas / chip.bandwidth,
    }


def _parameter_seconds(shapes: Shapes, layout: Layout, chip: Chip) -> tuple[float, float]:
    """Seconds of sending parameters and gradients within a slice or host, and between them, if nothing is hidden.

    Over fsdp, every microbatch gathers the parameters twice and scatters their gradients once. Over data, float32
    gradients are all-reduced once a step. A group across slices or hosts sends its part of the data once over there,
    shared between the devices of a slice or host.
    """
    shard = shapes.parameters / (layout.size("tensor") * layout.size("stage"))
    within = between = 0.0
    for axis, payload in (
        ("fsdp", 3 * layout.accumulation * shapes.bytes * shard),
        ("data", 2 * 4 * shard / layout.size("fsdp")),
    ):
        inner, outer = layout.inside.get(axis, 1), layout.outside.get(axis, 1)
        within += payload * (1 - 1 / inner) / bandwidth(chip, inner, layout.domain)
        between += payload / inner * (1 - 1 / outer) / (layout.dcn or chip.dcn)
    return within, between
