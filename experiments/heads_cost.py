"""Cost of more heads, in operations and in time (Vaswani et al. 2017, end of section 3.2.2).

"Due to the reduced dimension of each head, the total computational cost is similar to that of single-head attention
with full dimensionality." Narrow heads share the model width D, K = D / H; wide ones have K = D each. The counts repeat
exactly; the times are those of the machine, the least of several turns.

    jaxformer experiment heads_cost --scale=full --workdir=runs/heads_cost
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Callable

import jax
import numpy as np
from flax import linen as nn

from jaxformer import experiment
from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.nn.attention import Attention
from jaxformer.nn.masks import Mask
from jaxformer.plan.flops import count_flops
from jaxformer.types import Array, Slots

CLAIM = (
    "Heads that share the model width take no more products however many they are, and little more time; heads of the "
    "full width take as many times more of both as there are heads."
)
RULE = (
    "Supported if narrow heads of every number take the same FLOPs and wide ones H times those of one, and in the "
    "median of the seeds the most narrow heads take less than 2 times the time of one, and the most wide heads, H of "
    "them, more than H / 2 times. Not supported if the FLOPs are otherwise, or the most narrow heads take more than 4 "
    "times the time of one."
)
NARROW, WIDE = "narrow", "wide"


@dataclass(frozen=True)
class Scale:
    """Size of the trial: the least time of `turns` forward passes over `rows` sequences of `length` slots."""

    heads: tuple[int, ...]
    seeds: int
    turns: int
    width: int
    length: int
    rows: int


SCALES = {
    "smoke": Scale((1, 4), seeds=2, turns=2, width=16, length=16, rows=1),
    "full": Scale((1, 2, 4, 8, 16), seeds=5, turns=30, width=128, length=256, rows=4),
}


def layer_of(kind: str, heads: int, scale: Scale) -> tuple[Callable[[Array], Array], float]:
    """A compiled layer of attention with random weights, and the FLOPs that it takes."""
    config = AttentionConfig(heads=heads, head_width=scale.width if kind == WIDE else None, kernel="dense")
    module = Attention(config, EncodingConfig(kind="none"), scale.width)
    ids = np.ones((scale.rows, scale.length), np.int32)
    slots = Slots(np.cumsum(ids, axis=1, dtype=np.int32) - 1, ids)
    x = np.zeros((scale.rows, scale.length, scale.width), np.float32)
    mask, rng = Mask(slots, slots, same_slots=True), np.random.default_rng(0)
    shapes = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), x, mask)))
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32) / leaf.shape[0] ** 0.5, shapes)
    function = jax.jit(lambda x: module.apply(variables, x, mask)[0])
    return function, count_flops(jax.make_jaxpr(function)(x).jaxpr)


def timed(functions: list[Callable[[Array], Array]], x: Array, turns: int) -> list[float]:
    """Minimum milliseconds of each function. They are called in turns, so that other load affects all alike.

    In another order at each turn: what comes after a large program finds the caches emptied.
    """
    least, rng = [float("inf")] * len(functions), np.random.default_rng(0)
    for turn in range(turns + 1):  # the first one compiles
        for number in rng.permutation(len(functions)):
            begun = time.perf_counter()
            jax.block_until_ready(functions[number](x))
            if turn:
                least[number] = min(least[number], 1000 * (time.perf_counter() - begun))
    return least


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    names = [(kind, heads) for kind in (NARROW, WIDE) for heads in size.heads]
    layers = [layer_of(kind, heads, size) for kind, heads in names]
    for seed in range(size.seeds):
        x = np.random.default_rng(seed).standard_normal((size.rows, size.length, size.width), np.float32)
        least = timed([function for function, _ in layers], jax.device_put(x), size.turns)
        for (kind, heads), (_, flops), spent in zip(names, layers, least, strict=True):
            row = {"kind": kind, "heads": heads, "seed": seed, "flops": flops, "milliseconds": spent}
            rows.append(row | {"scores": float(size.rows * heads * size.length**2)})
        progress(f"seed {seed}: " + ", ".join(f"{kind} {heads} {ms:.1f} ms" for (kind, heads), ms in zip(names, least)))
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("kind", "heads"), tuple(rows), "unclear", "")
    heads = sorted(result.levels("heads"))
    most = heads[-1]

    def times(measure: str, kind: str, number: int) -> float:
        """Ratio to the value of one head, median over seeds."""
        one, many = (np.array(result.values(measure, kind=kind, heads=count)) for count in (heads[0], number))
        return float(np.median(many / one))

    exact = all(
        abs(times("flops", kind, number) - (number if kind == WIDE else 1)) < 1e-6
        for kind in (NARROW, WIDE)
        for number in heads
    )
    narrow, wide = (times("milliseconds", kind, most) for kind in (NARROW, WIDE))
    products = {kind: times("flops", kind, most) for kind in (NARROW, WIDE)}
    reason = (
        f"{most} narrow heads take {products[NARROW]:.3g} times the FLOPs of one and {narrow:.2f} times the time, "
        f"{most} wide ones {products[WIDE]:.3g} and {wide:.2f} times (median of {len(result.levels('seed'))} inputs)."
    )
    supported, refuted = exact and narrow < 2 and wide > most / 2, not exact or narrow > 4
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("products of a layer", "time of a layer")
    for panel, measure, label in zip(panels, ("flops", "milliseconds"), ("FLOPs (forward)", "milliseconds")):
        experiment.curves(panel, result, "heads", measure, by="kind")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("heads"), map(str, result.levels("heads")))
        panel.set_yscale("log")
        panel.set_xlabel("heads")
        panel.set_ylabel(label)
    experiment.legend(made, panels[0], "width of a head")
    return made
