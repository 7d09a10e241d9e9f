"""Position encodings trained on short sequences and tested on longer ones.

Press et al. (2022) find that sinusoids, learned positions and rotations do not, and that biases by distance (ALiBi,
T5's) do; Kazemnejad et al. (2023) that a causal model without any encoding does too. The task is to repeat the token
that stood a fixed number of slots back, the same rule at every slot. A learned table has rows for the longest test, of
which training reaches the first (with too few rows the model is refused, see `nn/encodings/learned.py`).

    jaxformer experiment length_extrapolation --scale=full --workdir=runs/length_extrapolation
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, EncodingConfig, HeadConfig, ModelConfig, ScheduleConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch

CLAIM = (
    "A causal transformer keeps its accuracy on sequences eight times longer than those of its training with ALiBi, "
    "T5's buckets or no encoding, and loses it with sinusoidal, learned or rotary positions."
)
RULE = (
    "Of the encodings with which every seed is right in more than 0.9 of the slots of the trained lengths: supported "
    "if with those that are to carry over every seed stays above 0.9 at four to eight times the length, and with the "
    "others none reaches 0.9 there. Not supported if with one that is to carry over the mean is below 0.7 there, or "
    "with one of the others above 0.9. Unclear, too, if an encoding is not learnt at the trained lengths."
)
CARRY, LOSE = ("alibi", "t5", "none"), ("sinusoidal", "learned", "rope")
TOKENS = 8
BACK = 2  # slots between a token and its repetition


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences of `length` slots, and tests of `longest`."""

    kinds: tuple[str, ...]
    seeds: int
    steps: int
    length: int
    longest: int
    layers: int
    width: int
    batch: int = 32
    tests: int = 128


SCALES = {
    "smoke": Scale(("alibi", "learned"), seeds=2, steps=20, length=8, longest=32, layers=1, width=16),
    "full": Scale((*CARRY, *LOSE), seeds=3, steps=1200, length=16, longest=128, layers=3, width=32),
}


def draw(rng: np.random.Generator, rows: int, length: int, first: int = 0) -> Batch:
    """`rows` random sequences, each slot from `first` on labelled with the token `BACK` slots before it.

    All begin with a token of their own: without any encoding it is what a slot can tell its position by, as the share
    of attention that falls on it.
    """
    tokens = rng.integers(0, TOKENS, (rows, length)).astype(np.int32)
    tokens[:, 0] = TOKENS
    judged = np.tile((np.arange(length) > max(first - 1, BACK)).astype(np.float32), (rows, 1))
    return Batch(None, stream(tokens), np.roll(tokens, BACK, axis=1), judged)


def ranges(scale: Scale) -> Iterator[tuple[int, int]]:
    """(first slot, one past the last): the trained lengths, and from each power of 2 of them to the next."""
    first, last = 0, scale.length
    while last <= scale.longest:
        yield first, last
        first, last = last, 2 * last


def trainer_of(kind: str, scale: Scale) -> Trainer:
    encoding = EncodingConfig(
        kind=kind,
        max_length=scale.longest,
        # In proportion to the length what T5 has; longer distances share the last bucket, which training has seen.
        buckets=scale.length // 2,
        max_distance=scale.length // 2,
    )
    stack = small_stack(
        layers=scale.layers,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS + 1, deviation=1.0),
        encoding=encoding,
    )
    schedule = ScheduleConfig(kind="cosine", peak=3e-3, warmup=scale.steps // 10, floor=0.01)
    model_config = ModelConfig(decoder=stack, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "language_modelling", scale.steps, schedule))


def trial(trainer: Trainer, seed: int, scale: Scale) -> dict[int, float]:
    """Trains from one seed. Accuracy in each of `ranges`, by the multiple of the trained length that it ends at.

    The mask is causal, so that the first slots of long test sequences are short ones.
    """
    rng = np.random.default_rng([0, seed])
    state = trainer.train(seed, (draw(rng, scale.batch, scale.length) for _ in range(scale.steps)))
    found = {}
    for first, last in ranges(scale):
        rng = np.random.default_rng([1, seed])
        batches = (draw(rng, 16, scale.longest, first) for _ in range(scale.tests // 16))
        judged = (batch._replace(weights=batch.weights * (np.arange(scale.longest) < last)) for batch in batches)
        found[last // scale.length] = trainer.measure(state, judged)["accuracy"]
    return found


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for kind in size.kinds:
        trainer = trainer_of(kind, size)
        for seed in range(size.seeds):
            found = trial(trainer, seed, size)
            rows += [{"positions": kind, "times": k, "seed": seed, "accuracy": v} for k, v in found.items()]
            progress(f"{kind}, seed {seed}: " + ", ".join(f"{times}x {value:.3f}" for times, value in found.items()))
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("positions", "times"), tuple(rows), "unclear", "")
    farthest = max(result.levels("times"))

    def at(times: int) -> dict[str, list[float]]:
        kinds = result.levels("positions")
        return {kind: result.values("accuracy", positions=kind, times=times) for kind in kinds}

    near, far = at(1), at(farthest)
    learnt = [kind for kind in near if min(near[kind]) > 0.9]
    carry, lose = ([far[kind] for kind in kinds if kind in learnt] for kinds in (CARRY, LOSE))
    supported = len(learnt) == len(near) and min(map(min, carry)) > 0.9 and max(map(max, lose)) < 0.9
    refuted = any(np.mean(values) < 0.7 for values in carry) or any(np.mean(values) > 0.9 for values in lose)
    each = ", ".join(f"{np.mean(near[kind]):.2f} to {np.mean(far[kind]):.2f} {kind}" for kind in near)
    reason = (
        f"From the trained lengths to the slots at {farthest // 2} to {farthest} times those, the mean accuracy over "
        f"{len(result.levels('seed'))} seeds goes from {each} (chance {1 / TOKENS:.3f})."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, (panel,) = experiment.figure(f"tokens repeated from {BACK} slots back")
    experiment.curves(panel, result, "times", "accuracy", by="positions")
    times = result.levels("times")
    panel.set_xscale("log", base=2)
    panel.set_xticks(times, ["trained" if n == 1 else f"{n // 2} to {n}" for n in times])
    panel.axhline(1 / TOKENS, color="0.5", lw=0.8, ls="--")
    panel.set_ylim(0.0, 1.03)
    panel.set_xlabel("where the slot is, in trained lengths")
    experiment.legend(made, panel)
    return made
