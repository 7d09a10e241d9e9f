"""Several heads: each has one distribution over slots, so several can attend to several slots at once.

"With a single attention head, averaging inhibits this" (Vaswani et al. 2017, section 3.2.2; table 3, rows A). One layer
of attention has to collect, at every slot, the tokens at several given distances; the answer is one class for each
combination. The heads share one width, so that the number of parameters is the same but for T5's table of biases.

    jaxformer experiment heads --scale=full --workdir=runs/heads
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, EncodingConfig, FeedForwardConfig, HeadConfig, ModelConfig, ScheduleConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch

CLAIM = (
    "At an equal number of parameters a layer with several narrow heads answers questions about several places at "
    "once that a layer with one wide head does not; about one place the one head suffices."
)
RULE = (
    "Supported if one head is right in more than 0.9 of the questions about one place for every seed, and in those "
    "about the most places the worst seed of some number of heads is more than 0.2 above the best of one head. Not "
    "supported if there no number of heads has a mean that is 0.05 above that of one head."
)
TOKENS = 3
OFFSETS = (-1, 2, -3, 4, -5)  # where the places are; questions about one place are about the first


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences, whose middle `length` slots are asked."""

    heads: tuple[int, ...]
    places: tuple[int, ...]
    seeds: int
    steps: int
    width: int
    length: int = 10
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale((1, 4), (5,), seeds=2, steps=20, width=16),
    "full": Scale((1, 2, 4, 8, 16), (1, 3, 5), seeds=3, steps=600, width=32),
}


def draw(rng: np.random.Generator, rows: int, length: int, places: int) -> Batch:
    """`rows` random sequences; a slot's label is its number in base `TOKENS` of the tokens at `OFFSETS[:places]`.

    So many slots at both ends that the offsets would leave the sequence are not asked.
    """
    edge = max(map(abs, OFFSETS))
    tokens = rng.integers(0, TOKENS, (rows, length + 2 * edge)).astype(np.int32)
    digits = [np.roll(tokens, -offset, axis=1) for offset in OFFSETS[:places]]
    labels = sum(digit * TOKENS**i for i, digit in enumerate(digits)).astype(np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, edge:-edge] = 1.0
    return Batch(stream(tokens), None, labels, weights)


def trainer_of(heads: int, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=1,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS, deviation=1.0),
        # Places are told by scores alone: in a mean over slots nothing says which token stood where.
        encoding=EncodingConfig(kind="t5", buckets=20, max_distance=8),
        heads=heads,
        ffn=FeedForwardConfig(width=4 * scale.width),
    )
    schedule = ScheduleConfig(kind="cosine", peak=1e-2, warmup=scale.steps // 20, floor=0.01)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(kind="slots", classes=TOKENS ** len(OFFSETS)))
    return Trainer(small_config(model_config, "tagging", scale.steps, schedule))


def trial(trainer: Trainer, places: int, seed: int, scale: Scale) -> float:
    """Trains from one seed; the share of slots of unseen sequences at which all places are right."""

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, places, seed])
        return (draw(rng, rows, scale.length, places) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    return trainer.measure(state, batches(1, scale.tests // 64, 64))["accuracy"]


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for heads in size.heads:
        trainer = trainer_of(heads, size)
        for places in size.places:
            for seed in range(size.seeds):
                accuracy = trial(trainer, places, seed, size)
                row = {"places": places, "heads": heads, "seed": seed}
                rows.append(row | {"accuracy": accuracy, "parameters": trainer.parameters})
                progress(f"{heads} heads, {places} places, seed {seed}: {accuracy:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`. Without questions about one place, as at smoke scale, nothing can be supported."""
    result = Result(("places", "heads"), tuple(rows), "unclear", "")
    most = max(result.levels("places"))
    at = {heads: result.values("accuracy", places=most, heads=heads) for heads in result.levels("heads")}
    one, several = at[1], {heads: values for heads, values in at.items() if heads > 1}
    best = max(several, key=lambda heads: min(several[heads]))
    gap = min(several[best]) - max(one)
    least = max(np.mean(values) for values in several.values()) - np.mean(one)
    alone = result.values("accuracy", places=1, heads=1)
    supported = bool(alone) and min(alone) > 0.9 and gap > 0.2
    parameters = result.values("parameters")
    reason = (
        f"Asked about {most} places, the mean accuracy over {len(one)} seeds is "
        + ", ".join(f"{np.mean(values):.2f}" for values in at.values())
        + f" with {', '.join(map(str, at))} heads; the worst seed of {best} heads is {gap:+.2f} from the best of one"
        + (f", which about one place is right in {np.mean(alone):.2f}" if alone else "")
        + f". The parameters are {min(parameters):,} to {max(parameters):,}."
    )
    return dataclasses.replace(result, verdict=verdict(supported, bool(least < 0.05)), reason=reason)


def plot(result: Result):
    made, (panel,) = experiment.figure("slots at which every place asked about is right")
    experiment.curves(panel, result, "heads", "accuracy", by="places")
    panel.lines[0].set(linestyle="--", zorder=3)  # where all is right, lines lie on each other
    heads = result.levels("heads")
    panel.set_xscale("log", base=2)
    panel.set_xticks(heads, map(str, heads))
    panel.set_ylim(0.0, 1.03)
    panel.set_xlabel("heads, of width / heads channels each")
    experiment.legend(made, panel, "places asked about")
    return made
