"""Residual connections: without them the slots of a deep transformer become alike, and it does not train.

Attention takes means over slots, and means of means are ever more alike: the output of a stack without residuals tends
to a matrix of rank 1, all slots the same (Dong et al. 2021, "Attention is not all you need"). The task is to name, at
every slot, the token at the mirrored one, which no stack can whose slots have become one.

    jaxformer experiment residuals --scale=full --workdir=runs/residuals
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, HeadConfig, ModelConfig, ScheduleConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Array, Batch, PyTree

CLAIM = (
    "Without residual connections the slots of a deep transformer are nearly the same vector before training, and "
    "training does not succeed; with them neither is so."
)
RULE = (
    "At the greatest depth, in the mean of 1 - cosine of the outputs of two slots: supported if for every seed it is "
    "below 0.1 without residuals and more than 10 times as much with them, and the worst accuracy with residuals is "
    "more than 0.3 above the best without. Not supported if its mean without is not below the one with, or the mean "
    "accuracy without is less than 0.1 below."
)
WITH, WITHOUT = "with residuals", "without"
TOKENS, LENGTH = 8, 12


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` sequences."""

    depths: tuple[int, ...]
    seeds: int
    steps: int
    width: int
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale((1,), seeds=2, steps=20, width=16),
    "full": Scale((1, 2, 4, 8), seeds=3, steps=400, width=32),
}


def draw(rng: np.random.Generator, rows: int) -> Batch:
    """`rows` random sequences, each slot labelled with the token at the mirrored slot."""
    tokens = rng.integers(0, TOKENS, (rows, LENGTH)).astype(np.int32)
    labels = np.ascontiguousarray(tokens[:, ::-1])
    return Batch(stream(tokens), None, labels, np.ones(labels.shape, np.float32))


def trainer_of(residual: bool, depth: int, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=depth,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS),
        residual_attention=residual,
        residual_ffn=residual,
    )
    schedule = ScheduleConfig(kind="cosine", peak=1e-3, warmup=scale.steps // 10, floor=0.1)
    model_config = ModelConfig(encoder=stack, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "masked_lm", scale.steps, schedule))


def apartness(x: Array) -> Array:
    """The mean of 1 - cosine of the vectors of two different slots, of hidden states `[B, T, D]`."""
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    # |x - y|^2 / 2 is 1 - x . y, without the rounding of a difference of near ones.
    apart = jnp.sum(jnp.square(x[:, :, None] - x[:, None, :]), axis=-1) / 2
    return jnp.sum(apart) / (x.shape[0] * x.shape[1] * (x.shape[1] - 1))


def trials(trainer: Trainer, scale: Scale) -> Iterator[dict[str, float]]:
    """Per seed: distance of slots before training, accuracy and loss on unseen sequences after it."""

    @jax.jit
    def apart(params: PyTree, batch: Batch) -> Array:
        return apartness(trainer.module.apply({"params": params}, batch, method="hidden"))

    for seed in range(scale.seeds):

        def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
            rng = np.random.default_rng([purpose, seed])  # noqa: B023
            return (draw(rng, rows) for _ in range(count))

        state = trainer.train(seed, ())
        unlike = float(apart(state.params, next(batches(2, 1, 64))))
        state = trainer.train(seed, batches(0, scale.steps, scale.batch), state)
        found = trainer.measure(state, batches(1, scale.tests // 64, 64))
        yield {"unlike": unlike, "accuracy": found["accuracy"], "loss": found["loss"]}


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for depth in size.depths:
        for model in (WITH, WITHOUT):
            trainer = trainer_of(model == WITH, depth, size)
            for seed, found in enumerate(trials(trainer, size)):
                rows.append({"model": model, "depth": depth, "seed": seed} | found)
                progress(
                    f"{depth} layers, {model}, seed {seed}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items())
                )
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "depth"), tuple(rows), "unclear", "")
    deepest = max(result.levels("depth"))

    def at(measure: str, model: str) -> np.ndarray:
        return np.array(result.values(measure, model=model, depth=deepest))

    held, lost = at("unlike", WITH), at("unlike", WITHOUT)
    learnt, failed = at("accuracy", WITH), at("accuracy", WITHOUT)
    collapsed = lost.max() < 0.1 and lost.max() < 0.1 * held.min()
    supported = bool(collapsed and learnt.min() - failed.max() > 0.3)
    refuted = bool(lost.mean() >= held.mean() or learnt.mean() - failed.mean() < 0.1)
    reason = (
        f"In {deepest} layers the mean of 1 - cosine of two slots before training is {lost.max():.1e} or less without "
        f"residuals and {held.min():.1e} or more with; after it the accuracy is {failed.mean():.2f} and "
        f"{learnt.mean():.2f} (mean of {len(held)} seeds, chance {1 / TOKENS:.3f})."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("before training: how unlike two slots are", "after: mirrored tokens named")
    for panel, measure, label in zip(panels, ("unlike", "accuracy"), ("mean of 1 - cosine", "accuracy")):
        experiment.curves(panel, result, "depth", measure, by="model")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("depth"), map(str, result.levels("depth")))
        panel.set_xlabel("layers")
        panel.set_ylabel(label)
    panels[0].set_yscale("log")
    panels[1].set_ylim(0.0, 1.03)
    panels[1].axhline(1 / TOKENS, color="0.5", lw=0.8, ls="--")
    experiment.legend(made, panels[0])
    return made
