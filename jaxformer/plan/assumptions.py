"""Every assumption of the estimated times of `step_time.py` and `decode_time.py`, tuned on published times.

`benchmarks/plan_calibration.py` tunes these numbers on half of the rows of `benchmarks/published_times.json` and judges
them on the other half. A model is in one half only, with all its rows on a kind of chip. docs/measurements/plan.md has
the errors by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Fractions of the peaks of `chips.py` that real programs reach.

    Mappings have a number for each kind of chip, or family of chips (see `FAMILIES`).

    Attributes:
      products: products with parameters, by kind: fraction of the peak.
      scores: fused products of queries, keys and values, by family: speed as a fraction of that of `products`.
      passes: times that an activation is read or written in a step by operations that are not products.
      score_passes: the same for a table of attention scores, where the kernel writes it to memory.
      activations: by family: fraction of the time of sending activations (axes tensor, context, expert) that is waited
        for.
      parameters: by family: the same for parameters and gradients sent within a slice or host (axes fsdp, data).
      between: by family: the same between slices or hosts.
      decode_memory: fraction of the memory's bandwidth at which a decode step reads parameters and caches.
      decode_latency: by family: seconds of one collective of a decode step beyond its bytes.
    """

    products: Mapping[str, float]
    scores: Mapping[str, float]
    passes: float
    score_passes: float
    activations: Mapping[str, float]
    parameters: Mapping[str, float]
    between: Mapping[str, float]
    decode_memory: float
    decode_latency: Mapping[str, float]


FAMILIES = {"v4": "tpu", "v5e": "tpu", "v5p": "tpu", "v6e": "tpu", "a100": "a100", "h100": "h100", "h200": "h100"}
"""Families of chips that share the less certain numbers. The H200 has no row; it is an H100 with more memory."""

TUNED = Assumptions(
    products={"v4": 0.727, "v5e": 0.825, "v5p": 0.869, "v6e": 0.639, "a100": 0.639, "h100": 0.599, "h200": 0.599},
    scores={"tpu": 0.757, "a100": 0.532, "h100": 0.321},
    passes=9.51,
    score_passes=22.4,
    activations={"tpu": 0.526, "a100": 0.992, "h100": 0.431},
    parameters={"tpu": 0.874, "a100": 0.417, "h100": 0.434},
    between={"tpu": 0.961, "a100": 0.291, "h100": 0.271},
    decode_memory=0.702,
    decode_latency={"tpu": 0.000123, "a100": 2.38e-05, "h100": 2.38e-05},
)
