"""Scores divided by the square root of the head width (Vaswani et al. 2017, section 3.2.1 and its footnote 4).

For q and k with independent entries of mean 0 and variance 1, q . k = sum_i q_i k_i has mean 0 and variance K, the head
width. A softmax over scores of large variance is nearly one-hot, and its Jacobian diag(p) - p p^T nearly 0.

    jaxformer experiment score_scaling --scale=full --workdir=runs/score_scaling
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import experiment
from jaxformer.config import AttentionConfig
from jaxformer.experiment import Result, verdict
from jaxformer.nn.kernels import AttentionBias, dense
from jaxformer.nn.masks import Mask
from jaxformer.types import Slots

CLAIM = (
    "Dividing attention scores by the square root of the head width keeps the softmax equally far from saturation at "
    "every head width; no division, or one by the root of the sequence length or of the model width, does not."
)
RULE = (
    "Supported if, for every seed, scores divided by the root of the head width have a variance between 0.8 and 1.25 "
    "and an entropy within 0.05 of the same share of ln T at all head widths, every other scaling misses that variance "
    "by more than a factor of 2 somewhere, and without scaling the median gradient falls more than tenfold from the "
    "narrowest to the widest head. Not supported if for some seed the scaled entropy varies more than the unscaled."
)
SEEDS = {"smoke": 2, "full": 10}
HEAD_WIDTHS = (8, 16, 32, 64, 128, 256, 512)
LENGTH = 64
WIDTH = 512  # of the model: 64 heads of 8 channels, or one of 512
ROWS = 8  # sequences

DIVISORS = {
    "head width": lambda head_width: math.sqrt(head_width),
    "none": lambda head_width: 1.0,
    "sequence length": lambda head_width: math.sqrt(LENGTH),
    "model width": lambda head_width: math.sqrt(WIDTH),
}


def attend(q: jax.Array, k: jax.Array, extra: jax.Array) -> jax.Array:
    """The project's own attention probabilities `[B, 1, T, T]`, with `extra` `[B, 1, T, T]` added to the scores."""
    here = Slots(*(jnp.broadcast_to(x, q.shape[:2]) for x in (jnp.arange(LENGTH), jnp.ones((), jnp.int32))))
    score = AttentionBias(lambda args, *_: args, extra)
    return dense.probabilities(q, k, Mask(here, here), score, None, AttentionConfig(heads=1))


@jax.jit
def measure(q: jax.Array, k: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statistics of scaled queries and keys `[B, T, 1, K]`: the variance of the scores, the mean entropy of a row of
    probabilities in nats, and the median row's norm of the gradient of sum(probabilities * cotangent) by the scores."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    probs, pull = jax.vjp(lambda extra: attend(q, k, extra), jnp.zeros_like(scores))
    entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1)
    gradient = jnp.linalg.norm(pull(cotangent)[0], axis=-1)
    return jnp.var(scores), jnp.mean(entropy), jnp.median(gradient)


def run(scale: str) -> Result:
    rows = []
    for seed in range(SEEDS[scale]):
        for head_width in HEAD_WIDTHS:
            rng = np.random.default_rng([seed, head_width])
            q, k = (rng.standard_normal((ROWS, LENGTH, 1, head_width), np.float32) for _ in range(2))
            cotangent = rng.standard_normal((ROWS, 1, LENGTH, LENGTH), np.float32)
            for scaling, divisor in DIVISORS.items():
                variance, entropy, gradient = map(float, measure(q / np.float32(divisor(head_width)), k, cotangent))
                share = entropy / math.log(LENGTH)
                row = {"scaling": scaling, "head_width": head_width, "seed": seed}
                rows.append(row | {"variance": variance, "entropy_share": share, "gradient": gradient})
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("scaling", "head_width"), tuple(rows), "unclear", "")
    seeds = result.levels("seed")

    def over(measure: str, scaling: str, seed: int) -> np.ndarray:
        return np.array(result.values(measure, scaling=scaling, seed=seed))

    def swing(scaling: str, seed: int) -> float:
        return float(np.ptp(over("entropy_share", scaling, seed)))

    def misses(scaling: str, seed: int) -> float:
        return float(np.exp(np.abs(np.log(over("variance", scaling, seed)))).max())

    falls = [over("gradient", "none", seed) for seed in seeds]
    falls = [float(values[0] / max(values[-1], 1e-30)) for values in falls]
    variances = np.concatenate([over("variance", "head width", seed) for seed in seeds])
    wrong = [scaling for scaling in DIVISORS if scaling != "head width"]
    least = min(misses(scaling, seed) for scaling in wrong for seed in seeds)
    scaled, unscaled = ([swing(scaling, seed) for seed in seeds] for scaling in ("head width", "none"))
    supported = (
        variances.min() > 0.8 and variances.max() < 1.25 and max(scaled) < 0.05 and least > 2.0 and min(falls) > 10.0
    )
    refuted = any(one > other for one, other in zip(scaled, unscaled))
    reason = (
        f"With the root of the head width the variance of the scores stays in {variances.min():.2f} to "
        f"{variances.max():.2f} and the entropy within {max(scaled):.3f} of the same share of ln {LENGTH}; without, "
        f"that share moves by {min(unscaled):.2f} or more and the median gradient falls {min(falls):.3g}-fold or more; "
        f"every wrong scaling misses the variance by a factor of {least:.3g} or more somewhere ({len(seeds)} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("variance of the scores", "entropy / ln T", "median gradient through the softmax")
    for panel, measure in zip(panels, result.measures):
        experiment.curves(panel, result, "head_width", measure, by="scaling")
        panel.set_xscale("log", base=2)
        panel.set_xticks(HEAD_WIDTHS, map(str, HEAD_WIDTHS))
    for panel in (panels[0], panels[2]):
        panel.set_yscale("log")
    panels[0].axhline(1.0, color="0.5", lw=0.8, ls="--")
    experiment.legend(made, panels[0], "divided by the root of")
    return made
