"""Filling a gap from both sides or from the left one (Devlin et al. 2019), beside the exact optimum of each.

The text is a Markov chain, so that the best possible prediction is known: of a gap of g hidden tokens between a and b,
the i-th given both is P^i[a, x] P^(g+1-i)[x, b] / P^(g+1)[a, b], and given the left side alone P^i[a, x], P being the
chain's transitions. The mean of -log of it over the chain is a conditional entropy that no model can go below.

    jaxformer experiment bidirectional --scale=full --workdir=runs/bidirectional
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, EncodingConfig, HeadConfig, ModelConfig, ScheduleConfig
from jaxformer.data.markov import Chain
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch

CLAIM = (
    "An encoder that sees both sides of a gap fills it better than the best model that sees its left side alone can, "
    "and both kinds come near what is possible for them."
)
RULE = (
    "In nats a hidden token, for every seed and length of the gap: supported if the encoder's loss is below the "
    "optimum of the left side alone, and both models are within 0.05 of their own optimum. Not supported if for "
    "some length the encoder's mean loss is above the optimum of the left side, or a causal model's is below it by "
    "more than 0.05."
)
BOTH, LEFT = "both sides", "left side"
TOKENS = 6
GAP = TOKENS  # the token that stands for a hidden one


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` texts of `length` tokens, with gaps of all of `gaps`."""

    gaps: tuple[int, ...]
    seeds: int
    steps: int
    width: int
    layers: int = 2
    length: int = 12
    batch: int = 64
    tests: int = 2048


SCALES = {
    "smoke": Scale((1, 2), seeds=2, steps=20, width=16, layers=1, tests=128),
    "full": Scale((1, 2, 3, 4), seeds=3, steps=1500, width=32),
}


def optimum(chain: Chain, gap: int, sides: str) -> float:
    """The conditional entropy, in nats, of a hidden token of a gap of `gap`, the mean over its slots."""
    power = [np.linalg.matrix_power(chain.transitions, n) for n in range(gap + 2)]
    total = 0.0
    for i in range(1, gap + 1):
        joint = chain.stationary[:, None, None] * power[i][:, :, None] * power[gap + 1 - i][None]  # [a, x, b]
        joint = joint.sum(axis=2, keepdims=True) if sides == LEFT else joint
        total -= np.sum(joint * np.log(joint / joint.sum(axis=1, keepdims=True)))
    return float(total / gap)


def draw(chain: Chain, rng: np.random.Generator, rows: int, length: int, gap: int | np.ndarray) -> Batch:
    """`rows` texts, each with a gap of `gap` hidden tokens somewhere inside, whose labels are those tokens."""
    tokens = chain.draw(rng, rows, length)
    gap = np.broadcast_to(gap, (rows,))
    first = 1 + (rng.random(rows) * (length - 1 - gap)).astype(int)  # a token at least on either side
    at = np.arange(length)
    hidden = (at >= first[:, None]) & (at < (first + gap)[:, None])
    return Batch(stream(np.where(hidden, GAP, tokens)), None, tokens, hidden.astype(np.float32))


def trainer_of(sides: str, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=scale.layers,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS + 1, deviation=1.0),
        encoding=EncodingConfig(kind="t5", buckets=16, max_distance=12),
        causal=sides == LEFT,
    )
    schedule = ScheduleConfig(kind="cosine", peak=5e-3, warmup=scale.steps // 20, floor=0.01)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "masked_lm", scale.steps, schedule))


def trial(trainer: Trainer, chain: Chain, seed: int, scale: Scale) -> dict[int, float]:
    """Trains from one seed on gaps of all lengths; the loss on unseen texts, by the length of their gaps."""
    rng = np.random.default_rng([0, seed])

    def batches() -> Iterator[Batch]:
        for _ in range(scale.steps):
            yield draw(chain, rng, scale.batch, scale.length, rng.choice(scale.gaps, scale.batch))

    state, found = trainer.train(seed, batches()), {}
    for gap in scale.gaps:
        rng = np.random.default_rng([1, gap, seed])
        tests = (draw(chain, rng, 64, scale.length, gap) for _ in range(scale.tests // 64))
        found[gap] = trainer.measure(state, tests)["loss"]
    return found


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for sides in (BOTH, LEFT):
        trainer = trainer_of(sides, size)
        for seed in range(size.seeds):
            chain = Chain(TOKENS, seed)
            for gap, loss in trial(trainer, chain, seed, size).items():
                best = optimum(chain, gap, sides)
                row = {"sees": sides, "gap": gap, "seed": seed, "loss": loss, "optimum": best}
                rows.append(row | {"above": loss - best})
                progress(f"{sides}, gap {gap}, seed {seed}: {loss:.3f}, optimum {best:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("sees", "gap"), tuple(rows), "unclear", "")
    gaps = result.levels("gap")

    def at(measure: str, sides: str, gap: int) -> np.ndarray:
        return np.array(result.values(measure, sees=sides, gap=gap))

    ahead = {gap: at("optimum", LEFT, gap) - at("loss", BOTH, gap) for gap in gaps}
    above = {sides: result.values("above", sees=sides) for sides in (BOTH, LEFT)}
    least = min(ahead, key=lambda gap: ahead[gap].min())
    supported = ahead[least].min() > 0 and max(abs(value) for values in above.values() for value in values) < 0.05
    refuted = any(ahead[gap].mean() < 0 or at("above", LEFT, gap).mean() < -0.05 for gap in gaps)
    reason = (
        f"The encoder's loss is {ahead[least].min():.3f} nats or more below the optimum of the left side (least at a "
        f"gap of {least}); it is at most {max(above[BOTH]):.3f} above its own optimum and the causal model "
        f"{max(above[LEFT]):.3f} above its own ({len(result.levels('seed'))} chains)."
    )
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, (panel,) = experiment.figure("hidden tokens of a Markov chain")
    experiment.curves(panel, result, "gap", "loss", by="sees")
    gaps = result.levels("gap")
    for sides, line in zip((BOTH, LEFT), panel.lines[:2]):
        values = [np.mean(result.values("optimum", sees=sides, gap=gap)) for gap in gaps]
        panel.plot(gaps, values, "k--", lw=1.0, label="optimum" if sides == LEFT else None)
        line.set_label(f"model, {sides}")
    panel.set_xticks(gaps)
    panel.set_ylim(0.0)
    panel.set_xlabel("hidden tokens in a row")
    panel.set_ylabel("nats a hidden token")
    experiment.legend(made, panel)
    return made
