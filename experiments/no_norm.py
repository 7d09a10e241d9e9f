"""Layer norm against no norm in a deep transformer (Ba et al. 2016; Zhang et al. 2019, Fixup).

Both models are the same decoder with residuals; one normalises the input of every sub-layer and the output of the
stack, the other nothing. The text is a Markov chain, whose entropy is the lowest loss that any model can have.

    jaxformer experiment no_norm --scale=full --workdir=runs/no_norm
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, HeadConfig, ModelConfig, NormConfig, OptimizerConfig, ScheduleConfig
from jaxformer.data.markov import Chain
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, continuation, small_config, small_stack
from jaxformer.types import Batch

CLAIM = (
    "A deep transformer without any norm does not train at the learning rate that is best with layer norm, and at its "
    "own best rate its loss is still higher."
)
RULE = (
    "In nats a token above the entropy of the text, the best rate of a model being that of the lowest mean over seeds: "
    "supported if at the best rate of layer norm the best seed without a norm is more than 0.1 above the worst seed "
    "with it, and the lowest mean of all rates without a norm is more than 0.005 above that with it. Not supported if "
    "at every rate the mean without a norm is less than 0.02 above that with it."
)
NORM, NONE = "layer norm", "no norm"
TOKENS, LENGTH = 8, 24
MOST = 10.0  # nats: a loss above, or none, counts as this


@dataclass(frozen=True)
class Scale:
    """Size of the trial: `steps` updates of `batch` texts, with a tenth of them as warm-up."""

    rates: tuple[float, ...]
    seeds: int
    steps: int
    layers: int
    width: int
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale((3e-3,), seeds=2, steps=20, layers=1, width=16, tests=64),
    "full": Scale((1e-3, 3e-3, 1e-2, 3e-2), seeds=3, steps=400, layers=8, width=32),
}


def trainer_of(model: str, rate: float, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=scale.layers,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS),
        norm=NormConfig(kind="layer" if model == NORM else "none"),
    )
    optimizer = OptimizerConfig(name="adam", clip=None)  # clipping would help the one that fails
    schedule = ScheduleConfig(kind="cosine", peak=rate, warmup=scale.steps // 10, floor=0.1)
    model_config = ModelConfig(decoder=stack, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "language_modelling", scale.steps, schedule, optimizer))


def trial(trainer: Trainer, seed: int, scale: Scale) -> dict[str, float]:
    """Trains from one seed, on a chain of its own; loss on unseen text, and by how much it is above the entropy."""
    chain = Chain(TOKENS, seed)

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, seed])
        return (continuation(chain.draw(rng, rows, LENGTH + 1)) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    loss = trainer.measure(state, batches(1, scale.tests // 64, 64))["loss"]
    loss = min(loss, MOST) if math.isfinite(loss) else MOST
    return {"excess": loss - chain.entropy_rate, "loss": loss, "guess": chain.entropy - chain.entropy_rate}


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for model in (NORM, NONE):
        for rate in size.rates:
            trainer = trainer_of(model, rate, size)
            for seed in range(size.seeds):
                rows.append({"model": model, "rate": rate, "seed": seed} | trial(trainer, seed, size))
                progress(f"{model}, rate {rate:g}, seed {seed}: {rows[-1]['excess']:.4f} nats above the entropy")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "rate"), tuple(rows), "unclear", "")
    rates = result.levels("rate")

    def at(model: str, rate: float) -> np.ndarray:
        return np.array(result.values("excess", model=model, rate=rate))

    best = {model: min(rates, key=lambda rate: at(model, rate).mean()) for model in (NORM, NONE)}
    held, lost, own = at(NORM, best[NORM]), at(NONE, best[NORM]), at(NONE, best[NONE])
    supported = bool(lost.min() - held.max() > 0.1 and own.mean() - held.mean() > 0.005)
    refuted = all(at(NONE, rate).mean() - at(NORM, rate).mean() < 0.02 for rate in rates)
    reason = (
        f"At {best[NORM]:g}, the best rate with layer norm, the loss is {held.mean():.3f} nats above the entropy with "
        f"it and {lost.mean():.3f} without; without a norm the best is {own.mean():.3f}, at {best[NONE]:g} "
        f"(mean of {len(held)} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(supported, refuted), reason=reason)


def plot(result: Result):
    made, (panel,) = experiment.figure("loss on unseen text")
    experiment.curves(panel, result, "rate", "excess", by="model")
    guess = float(np.mean(result.values("guess")))
    panel.axhline(guess, color="0.5", lw=0.8, ls="--")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("highest learning rate")
    panel.set_ylabel("nats a token above the entropy")
    experiment.legend(made, panel, "dashed: a guess from frequencies")
    return made
