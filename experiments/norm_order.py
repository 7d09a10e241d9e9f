"""Pre-norm and post-norm: training of deep transformers without warm-up (Xiong et al. 2020).

Post-norm, norm(x + f(x)), is the order of Vaswani et al. (2017); its gradients at initialisation are large near the
output, which is why it is trained with a learning rate that starts near 0. Pre-norm, x + f(norm(x)), leaves a path
from input to output that no norm interrupts. The task is to say, at every slot, how often its token occurs in the
sequence; a model that has learnt nothing names the commonest count.

    jaxformer experiment norm_order --scale=full --workdir=runs/norm_order
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import (
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch

CLAIM = (
    "At a learning rate at which a deep pre-norm transformer trains without warm-up, a post-norm one does not; with "
    "warm-up it does."
)
RULE = (
    "At the greatest depth, in accuracy: supported if at some learning rate the worst seed of pre-norm without warm-up "
    "is more than 0.3 above the best of post-norm without, and the worst of post-norm with warm-up more than 0.3 above "
    "it too. Not supported if at no learning rate the mean of pre-norm without warm-up is 0.1 above that of post-norm."
)
PLAIN, WARM = "no warm-up", "warm-up"
TOKENS, LENGTH = 8, 12
COUNTS = 8  # classes: a token occurs 1 to 7 times, or more


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences, the first `warmup` of them with less."""

    depths: tuple[int, ...]
    rates: tuple[float, ...]
    warmups: tuple[str, ...]
    seeds: int
    steps: int
    warmup: int
    width: int
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale((1,), (3e-3,), (PLAIN,), seeds=2, steps=20, warmup=10, width=16),
    "full": Scale((2, 6, 12), (1e-3, 3e-3), (PLAIN, WARM), seeds=3, steps=300, warmup=100, width=32),
}


def draw(rng: np.random.Generator, rows: int) -> Batch:
    """`rows` random sequences, each slot labelled with how often its token occurs, less 1."""
    tokens = rng.integers(0, TOKENS, (rows, LENGTH)).astype(np.int32)
    counts = (tokens[:, :, None] == tokens[:, None, :]).sum(axis=-1)
    labels = np.minimum(counts - 1, COUNTS - 1).astype(np.int32)
    return Batch(stream(tokens), None, labels, np.ones(labels.shape, np.float32))


def trainer_of(order: str, depth: int, rate: float, warmup: int, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=depth,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS),
        encoding=EncodingConfig(kind="none"),  # a count does not depend on the order
        norm=NormConfig(order=order),
    )
    optimizer = OptimizerConfig(name="adam", clip=None)  # clipping would help the one that fails
    schedule = ScheduleConfig(kind="constant", peak=rate, warmup=warmup)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(kind="slots", classes=COUNTS))
    return Trainer(small_config(model_config, "tagging", scale.steps, schedule, optimizer))


def trial(trainer: Trainer, seed: int, scale: Scale) -> dict[str, float]:
    """Trains from one seed; loss and accuracy on unseen sequences."""

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, seed])
        return (draw(rng, rows) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    found = trainer.measure(state, batches(1, scale.tests // 64, 64))
    return {"accuracy": found["accuracy"], "loss": found["loss"]}


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for rate, depth, order, warmup in itertools.product(size.rates, size.depths, ("pre", "post"), size.warmups):
        trainer = trainer_of(order, depth, rate, size.warmup if warmup == WARM else 0, size)
        for seed in range(size.seeds):
            row = {"model": f"{order}-norm, {warmup}", "rate": rate, "depth": depth, "seed": seed}
            rows.append(row | trial(trainer, seed, size))
            progress(f"rate {rate:g}, {depth} layers, {order}, {warmup}, seed {seed}: {rows[-1]['accuracy']:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`. Without conditions with warm-up, as at smoke scale, nothing can be supported."""
    result = Result(("model", "rate", "depth"), tuple(rows), "unclear", "")
    deepest = max(result.levels("depth"))

    def at(name: str, rate: float) -> list[float]:
        return result.values("accuracy", model=name, rate=rate, depth=deepest)

    found = []
    for rate in result.levels("rate"):
        pre, post = (at(f"{order}-norm, {PLAIN}", rate) for order in ("pre", "post"))
        warm = at(f"post-norm, {WARM}", rate)
        gap = min(pre) - max(post)
        rescued = min(warm) - max(post) if warm else float("-inf")
        found.append((min(gap, rescued), float(np.mean(pre) - np.mean(post)), rate, pre, post, warm))
    clearest = max(found, key=lambda each: each[:2])
    _, _, rate, pre, post, warm = clearest
    reason = (
        f"With {deepest} layers at a rate of {rate:g} the accuracy without warm-up is {np.mean(pre):.2f} for pre-norm "
        f"and {np.mean(post):.2f} for post-norm"
        + (f", which has {np.mean(warm):.2f} with warm-up" if warm else "")
        + f" (mean of {len(pre)} seeds)."
    )
    supported, refuted = clearest[0] > 0.3, all(each[1] < 0.1 for each in found)
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    rates, depths = result.levels("rate"), result.levels("depth")
    made, panels = experiment.figure(*(f"learning rate {rate:g}" for rate in rates))
    for panel, rate in zip(panels, rates):
        rows = tuple(row for row in result.rows if row["rate"] == rate)
        experiment.curves(panel, dataclasses.replace(result, rows=rows), "depth", "accuracy", by="model")
        panel.set_xticks(depths)
        panel.set_ylim(0.0, 1.03)
        panel.set_xlabel("layers")
        panel.set_ylabel("tokens counted right")
    experiment.legend(made, panels[0])
    return made
