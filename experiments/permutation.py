"""Permutation equivariance: a transformer encoder without positions reads a set.

Attention is a sum over keys, which has no order, and everything else acts on each slot alone. So f(x P) = f(x) P for
every permutation P, and the mean over slots does not change at all. Whatever tells the model positions must break that:
every encoding in `jaxformer/nn/encodings/`, and also a causal mask without any encoding.

    jaxformer experiment permutation --scale=full --workdir=runs/permutation
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import linen as nn

from jaxformer import experiment, registry
from jaxformer.config import AttentionConfig, EmbedConfig, EncodingConfig, HeadConfig, ModelConfig, StackConfig
from jaxformer.experiment import Result, verdict
from jaxformer.models import build
from jaxformer.types import Array, Batch, PyTree, Slots, Stream

CLAIM = (
    "A transformer encoder without positions is permutation-equivariant, and a mean-pooled classifier on it is "
    "invariant; with any position encoding, or with a causal mask alone, neither holds."
)
RULE = (
    "Supported if, for every seed, both relative errors are below 1e-5 (float32 rounding) without positions, and above "
    "1e-3 with every encoding and with the causal mask. Not supported if for some seed an error without positions is "
    "above 1e-3, or one with positions below 1e-5."
)
SEEDS = {"smoke": 2, "full": 10}
LAYERS = {"smoke": 1, "full": 2}
ROUNDING, MATTERS = 1e-5, 1e-3
PLAIN, CAUSAL = "none", "none, causal mask"
VOCAB, LENGTH, ROWS = 50, 12, 4


def model(positions: str, layers: int) -> ModelConfig:
    """A mean-pooled classifier on a pre-norm encoder, with what tells it positions."""
    kind = PLAIN if positions == CAUSAL else positions
    stack = StackConfig(
        layers=layers,
        width=32,
        embed=EmbedConfig(vocab=VOCAB),
        encoding=EncodingConfig(kind=kind),
        attention=AttentionConfig(heads=4),
        causal=positions == CAUSAL,
        unroll=1,
    )
    return ModelConfig(encoder=stack, head=HeadConfig(kind="classes", classes=8, pooling="mean"))


def relative(change: Array, base: Array) -> float:
    """Norm of a change over the norm of what changed."""
    return float(np.linalg.norm(np.ravel(change)) / np.linalg.norm(np.ravel(base)))


def trial(positions: str, layers: int, seeds: int) -> list[dict]:
    """The two errors for every seed; parameters, sentences and permutation are drawn anew."""
    module = build.build(model(positions, layers))
    here = Slots(np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), np.ones((ROWS, LENGTH), np.int32))

    def read(module: nn.Module, batch: Batch) -> tuple[Array, Array]:
        hidden = module.hidden(batch)
        return hidden, module.head(hidden, here)

    @jax.jit
    def begin(seed: Array) -> PyTree:
        return nn.meta.unbox(build.init_variables(module, jax.random.key(seed)))

    @jax.jit
    def outputs(variables: PyTree, tokens: Array) -> tuple[Array, Array]:
        """Hidden states `[B, T, D]` and the classifier's logits `[B, C]`."""
        return module.apply(variables, Batch(Stream(tokens, here), None), method=read)

    rows = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        # A cycle through all slots, so that none keeps its place.
        circle = rng.permutation(LENGTH)
        order = np.empty(LENGTH, int)
        order[circle] = np.roll(circle, 1)
        variables = begin(np.uint32(seed))
        hidden, logits = outputs(variables, tokens)
        moved_hidden, moved_logits = outputs(variables, tokens[:, order])
        rows.append(
            {
                "positions": positions,
                "seed": seed,
                "equivariance_error": relative(moved_hidden - hidden[:, order], hidden),
                "invariance_error": relative(moved_logits - logits, logits),
            }
        )
    return rows


def run(scale: str) -> Result:
    encodings = [name for name in registry.names("jaxformer.nn.encodings") if name != PLAIN]
    conditions = (PLAIN, CAUSAL, *encodings)
    return judge([row for positions in conditions for row in trial(positions, LAYERS[scale], SEEDS[scale])])


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("positions",), tuple(rows), "unclear", "")
    errors = {name: [] for name in result.levels("positions")}
    for row in rows:
        errors[row["positions"]] += [row[measure] for measure in result.measures]
    plain = max(errors[PLAIN])
    least = {name: min(values) for name, values in errors.items() if name != PLAIN}
    weakest = min(least, key=least.__getitem__)
    supported = plain < ROUNDING and least[weakest] > MATTERS
    refuted = plain > MATTERS or least[weakest] < ROUNDING
    reason = (
        f"Without positions the largest error of {len(result.levels('seed'))} seeds is {plain:.1e}; with them the "
        f"smallest, that of {weakest}, is {least[weakest]:.1e}."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("hidden states: f(xP) against f(x)P", "mean-pooled classifier: f(xP) against f(x)")
    names = result.levels("positions")
    for panel, measure in zip(panels, result.measures):
        for at, name in enumerate(names):
            values = result.values(measure, positions=name)
            panel.plot(values, [at] * len(values), "o", color=experiment.COLOURS[0], ms=5, alpha=0.6)
        panel.set_xscale("log")
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.axvline(ROUNDING, color="0.5", lw=0.8, ls="--")
        panel.axvline(MATTERS, color="0.5", lw=0.8, ls=":")
        panel.set_xlabel("relative error")
    panels[1].tick_params(labelleft=False)
    return made
