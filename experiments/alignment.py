"""Alignment by additive attention in a recurrent seq2seq model (Bahdanau et al. 2015).

Nobody tells the model the alignment; the paper's figure 3 shows that it looks right. Here it is known: the target is
the source copied, reversed, or with neighbours swapped. At target slot i, where token i is predicted, the slot with the
greatest weight is compared with that which token i was taken from, and with that which token i - 1 was, the last one
that the decoder has predicted. Tokens repeat, so that they do not give it away.

    jaxformer experiment alignment --scale=full --workdir=runs/alignment
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import experiment
from jaxformer.config import EmbedConfig, HeadConfig, ModelConfig, RecurrentConfig, ScheduleConfig
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config
from jaxformer.types import Array, Batch, PyTree, Slots, Stream

CLAIM = (
    "A recurrent seq2seq model with additive attention that has learnt a reordering puts its greatest attention weight "
    "on the source slot that the predicted token comes from, though training never says which that is."
)
RULE = (
    "Of the target slots of unseen sequences: supported if for every order and seed more than 0.9 of the tokens are "
    "predicted right and at more than 0.9 the greatest weight is on the true slot. Not supported if for some order "
    "that every seed has learnt (0.9 right) the mean share of slots aligned is below 0.5."
)
TOKENS = 8
BEGIN = TOKENS  # first token of the decoder
LENGTHS = (4, 10)  # minimum and maximum
ORDERS = ("copy", "swap", "reverse")


@dataclass(frozen=True)
class Scale:
    """Size of the trial: measured after each of `steps` updates of `batch` sequences."""

    orders: tuple[str, ...]
    steps: tuple[int, ...]
    seeds: int
    width: int
    batch: int = 32
    tests: int = 256


SCALES = {
    "smoke": Scale(("copy", "reverse"), (0, 20), seeds=2, width=8, tests=64),
    "full": Scale(ORDERS, (0, 125, 250, 500, 1000), seeds=3, width=48),
}


def origin(order: str, length: np.ndarray) -> np.ndarray:
    """Source slot `[B, T]` of each target slot, for sequences of `length` `[B]`; -1 beyond the end."""
    at, length = np.arange(LENGTHS[1]), length[:, None]
    source = {
        "copy": at + 0 * length,
        "swap": np.minimum(at ^ 1, length - 1),  # the last of an odd number stays
        "reverse": length - 1 - at,
    }[order]
    return np.where(at < length, source, -1)


def draw(rng: np.random.Generator, rows: int, order: str) -> tuple[Batch, np.ndarray]:
    """`rows` random sequences and their reorderings, and the true alignment, see `origin`."""
    source = rng.integers(0, TOKENS, (rows, LENGTHS[1])).astype(np.int32)
    aligned = origin(order, rng.integers(LENGTHS[0], LENGTHS[1] + 1, rows))
    real = aligned >= 0
    labels = np.take_along_axis(source, np.maximum(aligned, 0), axis=1)
    slots = Slots(np.where(real, np.arange(LENGTHS[1]), 0).astype(np.int32), real.astype(np.int32))
    target = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)
    return Batch(Stream(source, slots), Stream(target, slots), labels, real.astype(np.float32)), aligned


def trainer_of(scale: Scale) -> Trainer:
    embed = EmbedConfig(vocab=TOKENS + 1, deviation=1.0)
    reader = RecurrentConfig(cell="gru", width=scale.width, embed=embed, bidirectional=True)
    writer = RecurrentConfig(cell="gru", width=scale.width, embed=embed, attention="additive")
    schedule = ScheduleConfig(kind="constant", peak=5e-3, warmup=50)
    model_config = ModelConfig(recurrent_encoder=reader, recurrent_decoder=writer, head=HeadConfig(tied=False))
    return Trainer(small_config(model_config, "translation", scale.steps[-1], schedule))


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    trainer = trainer_of(size)

    @jax.jit
    def weights(params: PyTree, batch: Batch) -> Array:
        """Attention weights `[B, T, S]`."""
        _, sown = trainer.module.apply({"params": params}, batch, mutable=["intermediates"])
        (found,) = (x for path, x in jax.tree.leaves_with_path(sown) if "attention" in jax.tree_util.keystr(path))
        return jnp.asarray(found)

    for order in size.orders:
        for seed in range(size.seeds):
            rng = np.random.default_rng([0, seed])
            tests, aligned = draw(np.random.default_rng([1, seed]), size.tests, order)
            state, done = trainer.train(seed, ()), 0
            for steps in size.steps:
                more = (draw(rng, size.batch, order)[0] for _ in range(steps - done))
                state, done = trainer.train(seed, more, state), steps
                looked = np.argmax(weights(state.params, tests), axis=-1)
                share = float(np.mean((looked == aligned)[aligned >= 0]))
                behind = float(np.mean((looked[:, 1:] == aligned[:, :-1])[aligned[:, 1:] >= 0]))
                accuracy = trainer.measure(state, [tests])["accuracy"]
                row = {"order": order, "steps": steps, "seed": seed, "aligned": share, "behind": behind}
                rows.append(row | {"accuracy": accuracy})
            progress(f"{order}, seed {seed}: aligned {share:.3f}, behind {behind:.3f}, accuracy {accuracy:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("order", "steps"), tuple(rows), "unclear", "")
    last = max(result.levels("steps"))
    at = {
        order: [result.values(measure, order=order, steps=last) for measure in ("aligned", "behind", "accuracy")]
        for order in result.levels("order")
    }
    supported = all(min(*aligned, *accuracy) > 0.9 for aligned, _, accuracy in at.values())
    refuted = any(min(accuracy) > 0.9 and np.mean(aligned) < 0.5 for aligned, _, accuracy in at.values())
    reason = (
        f"After {last} steps the greatest weight is on the true slot, on that of the token before, and the token "
        + "right, in "
        + ", ".join(f"{' / '.join(f'{np.mean(x):.2f}' for x in each)} ({order})" for order, each in at.items())
        + f" of the target slots (mean of {len(result.levels('seed'))} seeds)."
    )
    return dataclasses.replace(result, verdict=verdict(bool(supported), bool(refuted)), reason=reason)


def plot(result: Result):
    made, panels = experiment.figure(
        "greatest weight on the true slot", "on the slot of the token before", "tokens right"
    )
    for panel, measure in zip(panels, result.measures):
        experiment.curves(panel, result, "steps", measure, by="order")
        panel.set_ylim(0.0, 1.03)
        panel.set_xlabel("steps of training")
        panel.set_ylabel("share of target slots")
    experiment.legend(made, panels[0])
    return made
