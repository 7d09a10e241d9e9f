"""Sinusoidal positions: a shift is one linear map, the same everywhere (Vaswani et al. 2017, section 3.5).

A pair (sin(w p), cos(w p)) is turned by the angle w n when p grows by n, so PE(p + n) = PE(p) R_n for every p, R_n made
of 2 x 2 rotations. Rotations keep lengths, so PE(p) . PE(q) = sum_i cos(w_i (p - q)). Both need the sine and the cosine
of a pair to share their frequency. The map is not built from the formula here but fitted to some positions and tried on
the others, so that other codes can fail the same test.

    jaxformer experiment sinusoid_shift --scale=full --workdir=runs/sinusoid_shift
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxformer import experiment
from jaxformer.experiment import Result, verdict
from jaxformer.nn.encodings.sinusoidal import sinusoids

CLAIM = (
    "A shift of position is one rotation of the sinusoidal code, the same at all positions, and the product of two "
    "codes depends on their distance only; without the shared frequency of a sine and its cosine neither holds."
)
RULE = (
    "Supported if for every seed and distance, in either order of channels, the fitted map's relative error at new "
    "positions, its change of a code's length and the products' relative spread are below 1e-4 (float32 angles), and "
    "with frequencies of their own and with a random table all three are above 1e-2. Not supported if one of the first "
    "is above 1e-2 or one of the last below 1e-4."
)
SEEDS = {"smoke": 2, "full": 10}
DISTANCES = (1, 4, 16, 64)
WIDTH, LENGTH = 32, 256
ROUNDING, MATTERS = 1e-4, 1e-2
TRUE, WRONG = ("sinusoidal", "concatenated"), ("own frequencies", "random table")


def codes(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Codes `[T, D]` of all positions, in float64."""
    position = np.arange(LENGTH)
    if kind == "random table":
        return rng.standard_normal((LENGTH, WIDTH))
    if kind == "own frequencies":  # cos(p / base^((2i + 1) / D)) beside sin(p / base^(2i / D))
        angle = position[:, None] * 10000.0 ** (-np.arange(WIDTH) / WIDTH)
        return np.where(np.arange(WIDTH) % 2 == 0, np.sin(angle), np.cos(angle))
    return np.asarray(sinusoids(position, WIDTH, concatenated=kind == "concatenated"), np.float64)


def measure(code: np.ndarray, distance: int, rng: np.random.Generator) -> dict[str, float]:
    """Error, at other positions, of a linear map fitted to the shift of some positions by `distance`.

    Returns:
      error: of the map at positions it was not fitted to, relative to the codes' norm. stretch: the largest relative
      change of a code's length, 0 for a rotation. spread: the standard deviation, over positions, of the product of two
      codes at this distance, relative to the mean square of a code's length.
    """
    before, after = code[:-distance], code[distance:]
    order = rng.permutation(len(before))
    fitted, others = order[::2], order[1::2]
    # Slow pairs hardly move over so few positions: what float32 does not resolve is left out of the fit.
    shift = np.linalg.lstsq(before[fitted], after[fitted], rcond=1e-6)[0]
    error = np.linalg.norm(before[others] @ shift - after[others]) / np.linalg.norm(after[others])
    moved, kept = np.linalg.norm(before @ shift, axis=1), np.linalg.norm(before, axis=1)
    spread = np.std(np.sum(before * after, axis=1)) / np.mean(kept**2)
    return {"error": float(error), "stretch": float(np.abs(moved / kept - 1.0).max()), "spread": float(spread)}


def run(scale: str) -> Result:
    rows = []
    for kind in (*TRUE, *WRONG):
        for distance in DISTANCES:
            for seed in range(SEEDS[scale]):
                rng = np.random.default_rng([seed, distance])
                row = {"code": kind, "distance": distance, "seed": seed}
                rows.append(row | measure(codes(kind, rng), distance, rng))
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("code", "distance"), tuple(rows), "unclear", "")
    every = {kind: [value for m in result.measures for value in result.values(m, code=kind)] for kind in TRUE + WRONG}
    most, least = max(max(every[kind]) for kind in TRUE), min(min(every[kind]) for kind in WRONG)
    supported = most < ROUNDING and least > MATTERS
    refuted = most > MATTERS or least < ROUNDING
    reason = (
        f"Over {len(result.levels('seed'))} seeds and distances up to {max(result.levels('distance'))} the largest "
        f"error, stretch or spread of the sinusoidal code is {most:.1e}; the smallest of the others is {least:.1e}."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    titles = ("error of the fitted shift", "its change of a code's length", "spread of the products")
    made, panels = experiment.figure(*titles)
    for panel, measure in zip(panels, result.measures):
        experiment.curves(panel, result, "distance", measure, by="code")
        panel.lines[1].set_linestyle("--")  # the same numbers in another order of channels: both are to be seen
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("distance"), map(str, result.levels("distance")))
        panel.set_yscale("log")
        panel.set_ylim(1e-8, 10.0)
        panel.axhline(ROUNDING, color="0.5", lw=0.8, ls="--")
        panel.set_xlabel("distance of the two positions")
        panel.set_ylabel("relative")
    experiment.legend(made, panels[0])
    return made
