"""The causal mask: without it a language model copies the next token from its input.

Trained on whole sequences with labels one slot later (Vaswani et al. 2017, section 3.1), a model whose slot t sees slot
t + 1 finds its label there. Its training loss says nothing then about what it knows when the future is not there, which
is how text is generated: every slot is judged again on its prefix alone. The text is a Markov chain, so that the best
possible loss, its entropy rate, is known, and so is that of a guess from the tokens' frequencies.

    jaxformer experiment causal_mask --scale=full --workdir=runs/causal_mask
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, HeadConfig, ModelConfig, ScheduleConfig
from jaxformer.data.markov import Chain
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config, small_stack, stream
from jaxformer.types import Batch, Slots, Stream

CLAIM = (
    "Without the causal mask the training loss falls below the entropy of the text, near 0, and the prediction of the "
    "next token from the past alone is no better than a guess from the tokens' frequencies; with it both losses are "
    "the entropy."
)
RULE = (
    "In nats a token, after the last step: supported if for every seed the loss without the mask is below 0.1 on whole "
    "sequences and above that of the frequencies on prefixes, and with the mask both are less than 0.1 from the "
    "entropy rate. Not supported if without the mask the mean loss on whole sequences is above half the entropy rate, "
    "or that on prefixes less than 0.1 above the entropy rate."
)
MASKED, OPEN = "causal mask", "no mask"
TOKENS, LENGTH = 8, 12


@dataclass(frozen=True)
class Scale:
    """Size of the trial: measured after each of `steps` updates of `batch` sequences."""

    steps: tuple[int, ...]
    seeds: int
    width: int
    layers: int = 2
    batch: int = 32
    tests: int = 64


SCALES = {
    "smoke": Scale((10, 20), seeds=2, width=16, layers=1),
    "full": Scale((0, 25, 50, 100, 200, 400, 800), seeds=3, width=32, tests=256),
}


def draw(chain: Chain, rng: np.random.Generator, rows: int) -> Batch:
    """`rows` texts with labels one slot later. The last slot, whose label is no input, is not judged."""
    text = chain.draw(rng, rows, LENGTH + 1)
    judged = np.tile((np.arange(LENGTH) < LENGTH - 1).astype(np.float32), (rows, 1))
    return Batch(None, stream(text[:, :-1]), text[:, 1:], judged)


def prefixes(batch: Batch) -> Batch:
    """Every text once for each of its judged slots, of which it is the last one: what comes after it is not there."""
    rows, slots = batch.labels.shape
    copies = Batch(*(None if x is None else np.repeat(x, slots - 1, axis=0) for x in (None, None, *batch[2:])))
    tokens, position = (np.repeat(x, slots - 1, axis=0) for x in (batch.target.tokens, batch.target.slots.position))
    last = np.tile(np.arange(slots - 1), rows)[:, None]
    here = position <= last
    begun = Stream(np.where(here, tokens, 0), Slots(np.where(here, position, 0), here.astype(np.int32)))
    return copies._replace(target=begun, weights=(position == last).astype(np.float32))


def trainer_of(model: str, scale: Scale) -> Trainer:
    stack = small_stack(
        layers=scale.layers,
        width=scale.width,
        embed=EmbedConfig(vocab=TOKENS),
        causal=model == MASKED,
    )
    schedule = ScheduleConfig(kind="constant", peak=3e-3, warmup=20)
    model_config = ModelConfig(decoder=stack, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "language_modelling", scale.steps[-1], schedule))


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for model in (MASKED, OPEN):
        trainer = trainer_of(model, size)
        for seed in range(size.seeds):
            chain = Chain(TOKENS, seed)
            rng = np.random.default_rng([0, seed])
            tests = draw(chain, np.random.default_rng([1, seed]), size.tests)
            # In batches of one shape, so that whole sequences and prefixes are measured by one program.
            parts = [prefixes(tests), tests]
            state, done = trainer.train(seed, ()), 0
            for steps in size.steps:
                more = (draw(chain, rng, size.batch) for _ in range(steps - done))
                state, done = trainer.train(seed, more, state), steps
                alone, whole = (trainer.measure(state, cut(part, size.tests))["loss"] for part in parts)
                row = {"model": model, "steps": steps, "seed": seed, "whole": whole, "prefix": alone}
                rows.append(row | {"entropy": chain.entropy_rate, "frequencies": chain.entropy})
            progress(f"{model}, seed {seed}: whole {whole:.3f}, prefix {alone:.3f}, entropy {chain.entropy_rate:.3f}")
    return judge(rows)


def cut(batch: Batch, rows: int) -> list[Batch]:
    """A batch as several of `rows` rows, which divide it."""
    count = batch.labels.shape[0] // rows

    def part(index: int) -> Batch:
        some = slice(index * rows, (index + 1) * rows)
        target = batch.target
        slots = Slots(target.slots.position[some], target.slots.segment[some])
        return Batch(None, Stream(target.tokens[some], slots), batch.labels[some], batch.weights[some])

    return [part(index) for index in range(count)]


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "steps"), tuple(rows), "unclear", "")
    last = max(result.levels("steps"))

    def at(measure: str, model: str) -> np.ndarray:
        return np.array(result.values(measure, model=model, steps=last))

    entropy, guess = at("entropy", OPEN), at("frequencies", OPEN)
    whole, alone = at("whole", OPEN), at("prefix", OPEN)
    off = max(np.abs(at(measure, MASKED) - at("entropy", MASKED)).max() for measure in ("whole", "prefix"))
    supported = whole.max() < 0.1 and (alone - guess).min() > 0 and off < 0.1
    refuted = whole.mean() > 0.5 * entropy.mean() or (alone - entropy).mean() < 0.1
    reason = (
        f"After {last} steps the loss without the mask is {whole.mean():.2g} nats on whole sequences and "
        f"{alone.mean():.2f} on prefixes, where the entropy rate is {entropy.mean():.2f} and the frequencies have "
        f"{guess.mean():.2f}; with the mask both losses are within {off:.3f} of the entropy rate ({len(whole)} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure("whole sequences, as in training", "the past alone, as in generation")
    for panel, measure in zip(panels, ("whole", "prefix")):
        experiment.curves(panel, result, "steps", measure, by="model")
        for name, style, label in (("entropy", "--", "entropy rate"), ("frequencies", ":", "tokens' frequencies")):
            panel.axhline(np.mean(result.values(name)), color="0.3", lw=1.0, ls=style, label=label)
        panel.set_xscale("symlog", base=2, linthresh=25)
        panel.set_xticks(result.levels("steps"), map(str, result.levels("steps")))
        panel.set_xlim(-3, 1.1 * max(result.levels("steps")))
        panel.set_ylim(0.0)
        panel.set_xlabel("steps of training")
        panel.set_ylabel("nats a token")
    experiment.legend(made, panels[0])
    return made
