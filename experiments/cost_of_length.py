"""Cost of length: operations of self-attention and recurrence, counted (Vaswani et al. 2017, table 1).

Nothing is timed. The products of a layer's forward pass are counted in its program as `jaxformer plan` counts them
(2 x entries x terms, loops as often as they run), and so is the longest chain of products each of which waits for the
one before: what no number of processors shortens.

    jaxformer experiment cost_of_length --scale=full --workdir=runs/cost_of_length
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.extend import core

from jaxformer import experiment
from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.experiment import Result, verdict
from jaxformer.nn.attention import Attention
from jaxformer.nn.cells import segment_boundaries
from jaxformer.nn.masks import Mask
from jaxformer.nn.recurrent import Layer
from jaxformer.plan.flops import count_flops
from jaxformer.types import Slots

CLAIM = (
    "With the length T, what self-attention computes grows towards T^2 and what a recurrent layer computes as T, while "
    "the chain of products that wait for each other stays the same in self-attention and grows as T in recurrence."
)
RULE = (
    "Supported if, for every shape drawn, over the last quadrupling of the length the exponent of the FLOPs is above "
    "1.9 for self-attention and within 0.02 of 1 for every recurrent layer, and over all lengths the exponent of the "
    "chain is 0 for self-attention and above 0.95 for recurrence. Not supported if for some shape self-attention's "
    "FLOPs grow with an exponent below 1.5 there, or its chain grows, or a recurrent layer's chain with an exponent "
    "below 0.5."
)
ATTENTION = "self-attention"
LAYERS = (ATTENTION, "rnn", "gru", "lstm")
SEEDS = {"smoke": 2, "full": 5}
LENGTHS = {"smoke": (32, 512, 2048), "full": (32, 128, 512, 2048, 8192)}
WIDTHS, HEADS, ROWS = {"smoke": (16, 32), "full": (32, 64, 96, 128)}, (1, 2, 4, 8), (1, 2, 4)
"""Shapes that a seed draws from, since the exponents must not depend on the shape."""


def program(layer: str, length: int, width: int, heads: int, rows: int) -> core.ClosedJaxpr:
    """The forward pass of one layer over `rows` sequences, traced from shapes: nothing is computed."""
    ids = jax.ShapeDtypeStruct((rows, length), np.int32)
    x = jax.ShapeDtypeStruct((rows, length, width), np.float32)
    if layer == ATTENTION:
        module: nn.Module = Attention(AttentionConfig(heads=heads, kernel="dense"), EncodingConfig(kind="none"), width)
    else:
        module = Layer(layer, width)

    def call(method: Any, *args: Any) -> Any:
        *args, x, ids = args
        inputs = (
            Mask(Slots(ids, ids), Slots(ids, ids), same_slots=True) if layer == ATTENTION else segment_boundaries(ids)
        )
        return method(*args, x, inputs)

    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda *args: call(module.init, *args), key, x, ids)
    return jax.make_jaxpr(lambda *args: call(module.apply, *args)[0])(nn.meta.unbox(variables), x, ids)


def chain(jaxpr: core.Jaxpr, before: list[int]) -> list[int]:
    """The longest chain of products that each output of `jaxpr` waits for, given those of its inputs."""
    depth = dict(zip(jaxpr.invars, before, strict=True))
    at = lambda var: 0 if isinstance(var, core.Literal) else depth.get(var, 0)  # noqa: E731
    for eqn in jaxpr.eqns:
        ins, name = [at(var) for var in eqn.invars], eqn.primitive.name
        inner = [value for value in eqn.params.values() if isinstance(value, core.ClosedJaxpr | core.Jaxpr)]
        if name == "scan":
            outs = _scan(eqn, ins)
        elif len(inner) >= 1 and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(ins):
            outs = chain(getattr(inner[0], "jaxpr", inner[0]), ins)  # a call; of a custom rule, its forward
        elif inner or name in ("while", "cond"):
            raise ValueError(
                f"chain: got {name}, expected calls and scans, whose turns are known; count it another way"
            )
        else:
            outs = [max(ins, default=0) + (name == "dot_general")] * len(eqn.outvars)
        depth |= dict(zip(eqn.outvars, outs, strict=True))
    return [at(var) for var in jaxpr.outvars]


def _scan(eqn: core.JaxprEqn, ins: list[int]) -> list[int]:
    """Depth of a loop: each iteration waits for the carry of the one before.

    Which operands are carried is read off their shapes, since versions of jax name it differently: what is scanned over
    has an axis more outside of the body, what is carried has none.
    """
    body = eqn.params["jaxpr"].jaxpr
    carries = sum(a.aval.shape == b.aval.shape for a, b in zip(eqn.outvars, body.outvars, strict=True))
    consts = sum(a.aval.shape == b.aval.shape for a, b in zip(eqn.invars, body.invars, strict=True)) - carries
    carry, outs = ins[consts : consts + carries], []
    for _ in range(eqn.params["length"]):
        outs = chain(body, [*ins[:consts], *carry, *ins[consts + carries :]])
        carry = outs[:carries]
    return outs


def run(scale: str) -> Result:
    rows = []
    for seed in range(SEEDS[scale]):
        rng = np.random.default_rng(seed)
        width, heads, sequences = (int(rng.choice(each)) for each in (WIDTHS[scale], HEADS, ROWS))
        for layer in LAYERS:
            for length in LENGTHS[scale]:
                made = program(layer, length, width, heads, sequences).jaxpr
                row = {"layer": layer, "length": length, "seed": seed, "flops": count_flops(made) / sequences}
                rows.append(row | {"chain": max(chain(made, [0] * len(made.invars))), "width": width})
    return judge(rows)


def exponent(result: Result, measure: str, layer: str, seed: int, lengths: tuple[int, ...]) -> float:
    """The slope of a straight line through the logarithms of `measure` and length."""
    values = [result.values(measure, layer=layer, seed=seed, length=length)[0] for length in lengths]
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("layer", "length"), tuple(rows), "unclear", "")
    seeds, lengths = result.levels("seed"), sorted(result.levels("length"))
    recurrent = [layer for layer in result.levels("layer") if layer != ATTENTION]

    def exponents(measure: str, layers: list[str], where: list[int]) -> np.ndarray:
        return np.array([exponent(result, measure, layer, seed, tuple(where)) for layer in layers for seed in seeds])

    squares, lines = (exponents("flops", layers, lengths[-2:]) for layers in ([ATTENTION], recurrent))
    flat, steps = (exponents("chain", layers, lengths) for layers in ([ATTENTION], recurrent))
    supported = (
        squares.min() > 1.9 and np.abs(lines - 1).max() < 0.02 and np.abs(flat).max() < 1e-6 and steps.min() > 0.95
    )
    refuted = squares.min() < 1.5 or flat.max() > 1e-6 or steps.min() < 0.5
    chains = result.values("chain", layer=ATTENTION)
    reason = (
        f"From {lengths[-2]} to {lengths[-1]} slots the FLOPs grow with an exponent of {squares.min():.3f} or more in "
        f"self-attention and of {lines.max():.3f} or less in recurrent layers ({len(seeds)} shapes). The "
        f"chain of products in self-attention is at most {max(chains)} long, whatever the length; in recurrent layers "
        f"it grows with an exponent of {steps.min():.3f} or more, to {max(result.values('chain'))}."
    )
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("FLOPs of a layer, a sequence", "products that wait for each other")
    for panel, measure, label in zip(panels, ("flops", "chain"), ("FLOPs (forward)", "longest chain")):
        experiment.curves(panel, result, "length", measure, by="layer")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("length"), map(str, result.levels("length")))
        panel.set_yscale("log")
        panel.set_xlabel("slots T")
        panel.set_ylabel(label)
    for line, style in zip(panels[1].lines[1:], ("-", "--", ":")):
        line.set_linestyle(style)  # the three recurrent layers have the same chain
    experiment.legend(made, panels[0], "range: over shapes")
    return made
