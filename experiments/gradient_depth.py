"""Gradients at the first layer of a deep stack, before training (He et al. 2016; Xiong et al. 2020).

The gradient of a language model's loss is taken at its random start, and the norms of its parts for the first and the
last layer are compared: with residuals in either order of the norm, without a norm, and without residuals.

    jaxformer experiment gradient_depth --scale=full --workdir=runs/gradient_depth
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import experiment, tasks
from jaxformer.config import Config, EmbedConfig, HeadConfig, ModelConfig, NormConfig, TaskConfig
from jaxformer.data.markov import Chain
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, continuation, small_stack
from jaxformer.types import Array, Batch, PyTree

CLAIM = (
    "At the start the gradient of a deep transformer's first layer is about as large as that of its last one with "
    "residuals and pre-norm, and a vanishing part of it without residuals."
)
RULE = (
    "At the greatest depth, in the norm of the first layer's gradient over that of the last: supported if for every "
    "seed it is between 0.1 and 10 with pre-norm and residuals, and below 0.01 without residuals. Not supported if its "
    "geometric mean over seeds is outside of 0.01 to 100 with them, or above 0.1 without residuals."
)
PRE, POST, PLAIN, BARE = "pre-norm", "post-norm", "residuals, no norm", "pre-norm, no residuals"
MODELS = {
    PRE: dict(norm=NormConfig(order="pre")),
    POST: dict(norm=NormConfig(order="post")),
    PLAIN: dict(norm=NormConfig(kind="none")),
    BARE: dict(norm=NormConfig(order="pre"), residual_attention=False, residual_ffn=False),
}
TOKENS = 8


@dataclass(frozen=True)
class Scale:
    """Size of the trial: the gradient of one batch of `rows` texts."""

    depths: tuple[int, ...]
    models: tuple[str, ...]
    seeds: int
    width: int
    length: int = 24
    rows: int = 32


SCALES = {
    "smoke": Scale((6,), (PRE, BARE), seeds=2, width=16, length=8, rows=4),
    "full": Scale((2, 4, 8, 16, 32), tuple(MODELS), seeds=5, width=64),
}


def trainer_of(model: str, depth: int, width: int) -> Trainer:
    stack = small_stack(
        layers=depth,
        width=width,
        embed=EmbedConfig(vocab=TOKENS),
        **MODELS[model],
    )
    config = ModelConfig(decoder=stack, head=HeadConfig(tied=False))
    return Trainer(Config(model=config, task=TaskConfig(name="language_modelling")))


def norms_of(trainer: Trainer) -> Callable[[PyTree, Batch], Array]:
    """A function of parameters and batch: the norm of the gradient of each layer's matrices, `[L]`."""
    config = trainer.config
    task = tasks.get(config.task.name)

    def loss(params: PyTree, batch: Batch) -> Array:
        total, weight = task.loss(config, trainer.module.apply({"params": params}, batch), batch)["loss"]
        return total / weight

    @jax.jit
    def norms(params: PyTree, batch: Batch) -> Array:
        blocks = jax.grad(loss)(params, batch)["decoder"]["blocks"]
        matrices = [leaf for path, leaf in jax.tree.leaves_with_path(blocks) if path[-1].key == "kernel"]
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf), axis=range(1, leaf.ndim)) for leaf in matrices))

    return norms


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for depth in size.depths:
        for model in size.models:
            trainer = trainer_of(model, depth, size.width)
            norms = norms_of(trainer)
            for seed in range(size.seeds):
                text = Chain(TOKENS, seed).draw(np.random.default_rng(seed), size.rows, size.length + 1)
                found = np.asarray(norms(trainer.train(seed, ()).params, continuation(text)), np.float64)
                measures = {"ratio": found[0] / found[-1], "first": found[0], "last": found[-1]}
                rows.append({"model": model, "depth": depth, "seed": seed} | {k: float(v) for k, v in measures.items()})
            progress(f"{depth} layers, {model}: first over last {rows[-1]['ratio']:.3g}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "depth"), tuple(rows), "unclear", "")
    deepest = max(result.levels("depth"))

    def at(model: str) -> np.ndarray:
        return np.array(result.values("ratio", model=model, depth=deepest))

    held, lost = at(PRE), at(BARE)
    mean = {model: float(np.exp(np.mean(np.log(at(model))))) for model in result.levels("model")}
    supported = bool(held.min() > 0.1 and held.max() < 10.0 and lost.max() < 0.01)
    refuted = not 0.01 < mean[PRE] < 100.0 or mean[BARE] > 0.1
    words = ", ".join(f"{value:.2g} with {model}" for model, value in mean.items())
    reason = (
        f"Over {deepest} layers the first layer's gradient is, in parts of the last one's, {words} (geometric mean of "
        f"{len(held)} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(supported, bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("first layer over last", "norm of the first layer's gradient")
    for panel, measure in zip(panels, ("ratio", "first")):
        experiment.curves(panel, result, "depth", measure, by="model")
        panel.set_xscale("log", base=2)
        panel.set_xticks(result.levels("depth"), map(str, result.levels("depth")))
        panel.set_yscale("log")
        panel.set_xlabel("layers")
    experiment.legend(made, panels[0])
    return made
