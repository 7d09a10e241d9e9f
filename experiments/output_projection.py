"""Effect of the output projection W_O on concatenated heads (Vaswani et al. 2017, section 3.2.2).

concat(head_1 .. head_H) W_O is the sum of head_h W_O,h: with it every head writes to all channels of the residual
stream, without it each to its own K. With one head of the full width, W_V W_O is one matrix, so that a value projection
alone can do the same. The task is to name the tokens at several given distances at once, in two layers; the models
without W_O get its parameters back in their feed-forward layers.

    jaxformer experiment output_projection --scale=full --workdir=runs/output_projection
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    ScheduleConfig,
)
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch

CLAIM = (
    "At an equal number of parameters a transformer with several narrow heads learns worse without the output "
    "projection, and one with a single head of the full width learns as well."
)
RULE = (
    "In accuracy: supported if for the most heads the worst seed with the projection is more than 0.02 above the best "
    "without, and for one head the means differ by less than 0.02. Not supported if for every number of heads above "
    "one the mean with it is less than 0.01 above that without."
)
WITH, WITHOUT = "with W_O", "without W_O"
TOKENS = 3
DISTANCES = (1, 3, 4, 6)  # a slot is asked for the tokens so far to its left


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences, of which `length` slots are asked."""

    heads: tuple[int, ...]
    seeds: int
    steps: int
    width: int
    layers: int = 2
    length: int = 12
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale((4,), seeds=2, steps=10, width=16, layers=1, tests=64),
    "full": Scale((1, 4, 8), seeds=5, steps=300, width=32),
}


def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
    """`rows` random sequences; a slot's label is the number in base `TOKENS` of the tokens at `DISTANCES`.

    The first slots, which have no token so far back, are not asked.
    """
    edge = max(DISTANCES)
    tokens = rng.integers(0, TOKENS, (rows, length + edge)).astype(np.int32)
    labels = sum(np.roll(tokens, distance, axis=1) * TOKENS**i for i, distance in enumerate(DISTANCES))
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, edge:] = 1.0
    return Batch(stream(tokens), None, labels.astype(np.int32), weights)


def trainer_of(model: str, heads: int, scale: Scale) -> Trainer:
    width = scale.width
    # W_O has width ** 2 weights, and each unit of the feed-forward layer two times the width.
    units = 2 * width + (width // 2 if model == WITHOUT else 0)
    stack = small_stack(
        layers=scale.layers,
        width=width,
        embed=EmbedConfig(vocab=TOKENS, deviation=1.0),
        encoding=EncodingConfig(kind="t5", buckets=20, max_distance=11),
        attention=AttentionConfig(heads=heads, output=model == WITH),
        ffn=FeedForwardConfig(width=units),
    )
    schedule = ScheduleConfig(kind="cosine", peak=5e-3, warmup=scale.steps // 10, floor=0.01)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(kind="slots", classes=TOKENS ** len(DISTANCES)))
    return Trainer(small_config(model_config, "tagging", scale.steps, schedule))


def trial(trainer: Trainer, seed: int, scale: Scale) -> dict[str, float]:
    """Trains from one seed; loss, and the share of slots of unseen sequences at which all tokens are right."""

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, seed])
        return (draw(rng, rows, scale.length) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    found = trainer.measure(state, batches(1, scale.tests // 64, 64))
    return {"accuracy": found["accuracy"], "loss": found["loss"], "parameters": trainer.parameters}


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for heads in size.heads:
        for model in (WITH, WITHOUT):
            trainer = trainer_of(model, heads, size)
            for seed in range(size.seeds):
                rows.append({"model": model, "heads": heads, "seed": seed} | trial(trainer, seed, size))
                progress(f"{heads} heads, {model}, seed {seed}: {rows[-1]['accuracy']:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`. Without a single head, as at smoke scale, nothing can be supported."""
    result = Result(("model", "heads"), tuple(rows), "unclear", "")
    heads = sorted(result.levels("heads"))
    most = heads[-1]

    def at(model: str, number: int) -> np.ndarray:
        return np.array(result.values("accuracy", model=model, heads=number))

    gain = {number: float(at(WITH, number).mean() - at(WITHOUT, number).mean()) for number in heads}
    needed = at(WITH, most).min() - at(WITHOUT, most).max() > 0.02
    supported = bool(needed and 1 in gain and abs(gain[1]) < 0.02)
    refuted = all(gain[number] < 0.01 for number in heads if number > 1)
    words = ", ".join(f"{at(WITH, n).mean():.3f} and {at(WITHOUT, n).mean():.3f} with {n}" for n in heads)
    reason = f"Accuracy with and without the projection: {words} heads (mean of {len(at(WITH, most))} seeds)."
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("slots with all tokens right", "loss")
    for panel, measure in zip(panels, ("accuracy", "loss")):
        experiment.curves(panel, result, "heads", measure, by="model")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("heads"), map(str, result.levels("heads")))
        panel.set_xlabel("heads, of width / heads channels each")
    experiment.legend(made, panels[0])
    return made
