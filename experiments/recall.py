"""Associative recall against the number of items, with states of fixed size (after Arora et al. 2023).

An encoder reads T items, each a random value under its own name. A decoder is given names and has to say their values.
What passes between the two is, without attention, the encoder's last state, whose size does not depend on T. With
attention it is one vector an item, from which the decoder picks by name. A name is a token type, so that an item is one
slot: x_t = value embedding + name embedding.

    jaxformer experiment recall --scale=full --workdir=runs/recall
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
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    RecurrentConfig,
    ScheduleConfig,
    StackConfig,
)
from jaxformer.experiment import Result, progress, verdict
from jaxformer.train.in_memory import Trainer, small_config
from jaxformer.types import Batch, Slots, Stream

CLAIM = (
    "The share of items that a recurrent network recalls falls with their number; with attention, at an equal number "
    "of parameters, it does not."
)
RULE = (
    "Supported if at the longest length the worst seed of LSTM + attention and of the transformer recalls a share of "
    "items that is more than 0.3 above the best seed of a network without attention. Not supported if there the mean "
    "over seeds of either is less than 0.1 above that of the best network without attention."
)
MODELS = ("RNN", "LSTM", "GRU", "LSTM + attention", "transformer")
ATTENTIVE = MODELS[3:]
VALUES = 8  # so chance is 1 in 8
ASK = VALUES  # the token that stands for a value in a question
QUESTIONS = 4  # a sequence


@dataclass(frozen=True)
class Scale:
    """Size of the trial.

    Attributes:
      steps: updates, of `batch` sequences each; `tests` is the number of unseen sequences.
      widths: of the models that are trained: those at which they have about as many parameters.
      pad: all lengths in one shape, so that a model is compiled once, which is most of what a small trial costs.
    """

    lengths: tuple[int, ...]
    seeds: int
    steps: int
    batch: int
    tests: int
    widths: dict[str, int]
    pad: bool


SCALES = {
    # The smoke scale has one model with attention and one without: compiling them is what takes its time.
    "smoke": Scale(
        (4, 8), seeds=2, steps=40, batch=16, tests=64, pad=True,
        widths={"LSTM": 14, "transformer": 12},
    ),
    "full": Scale(
        (8, 16, 32, 64), seeds=3, steps=800, batch=32, tests=512, pad=False,
        widths={"RNN": 90, "LSTM": 47, "GRU": 54, "LSTM + attention": 40, "transformer": 42},
    ),
}  # fmt: skip


def model(name: str, width: int, names: int) -> ModelConfig:
    """An encoder-decoder with one layer on each side; `names` is how many there are to choose from."""
    # Embeddings of variance 1: the recurrent networks have no norm that would make up for small ones.
    embed = EmbedConfig(vocab=VALUES + 1, kinds=names, deviation=1.0)
    head = HeadConfig(tied=False)
    if name == "transformer":
        attention, ffn = AttentionConfig(heads=2), FeedForwardConfig(width=2 * width)
        stack = StackConfig(layers=1, width=width, embed=embed, attention=attention, ffn=ffn)
        return ModelConfig(encoder=stack, decoder=stack, head=head, share_embeddings=True)
    cell = name.split(" ")[0].lower()
    reader = RecurrentConfig(cell=cell, width=width, embed=embed)
    # Luong's: its query has read the question, where Bahdanau's is the state before it.
    attention = "dot" if name in ATTENTIVE else "none"
    writer = RecurrentConfig(cell=cell, width=width, embed=embed, attention=attention)
    return ModelConfig(recurrent_encoder=reader, recurrent_decoder=writer, head=head, share_embeddings=True)


def stream(tokens: np.ndarray, kind: np.ndarray, slots: int) -> Stream:
    """A stream of `slots` slots, those after `tokens` empty."""
    pad = ((0, 0), (0, slots - tokens.shape[1]))
    segment = np.pad(np.ones_like(tokens), pad)
    position = np.arange(slots) * segment
    tokens, kind, position, segment = (
        x.astype(np.int32) for x in (np.pad(tokens, pad), np.pad(kind, pad), position, segment)
    )
    return Stream(tokens, Slots(position, segment), kind)


def draw(rng: np.random.Generator, rows: int, length: int, names: int, slots: int) -> Batch:
    """`rows` sequences of `length` items with distinct names, and questions about `QUESTIONS` different ones."""
    name = rng.permuted(np.tile(np.arange(names), (rows, 1)), axis=1)[:, :length]
    value = rng.integers(0, VALUES, (rows, length))
    asked = rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :QUESTIONS]
    labels = np.take_along_axis(value, asked, axis=1).astype(np.int32)
    questions = stream(np.full_like(asked, ASK), np.take_along_axis(name, asked, axis=1), QUESTIONS)
    return Batch(stream(value, name, slots), questions, labels, np.ones(labels.shape, np.float32))


def trainer_of(name: str, scale: Scale) -> Trainer:
    schedule = ScheduleConfig(kind="cosine", peak=5e-3, warmup=scale.steps // 20, floor=0.1)
    model_config = model(name, scale.widths[name], max(scale.lengths))
    return Trainer(small_config(model_config, "translation", scale.steps, schedule))


def trial(trainer: Trainer, length: int, seed: int, scale: Scale) -> float:
    """Trains on sequences of `length` items, from one seed; the share of items recalled in unseen sequences."""
    names = max(scale.lengths)

    def batches(purpose: int, count: int, rows: int) -> Iterator[Batch]:
        rng = np.random.default_rng([purpose, length, seed])
        return (draw(rng, rows, length, names, names if scale.pad else length) for _ in range(count))

    state = trainer.train(seed, batches(0, scale.steps, scale.batch))
    return trainer.measure(state, batches(1, scale.tests // 64, 64))["accuracy"]


def run(scale: str) -> Result:
    rows, size = [], SCALES[scale]
    for name in size.widths:
        trainer = trainer_of(name, size)
        for length in size.lengths:
            for seed in range(size.seeds):
                accuracy = trial(trainer, length, seed, size)
                row = {"model": name, "length": length, "seed": seed}
                rows.append(row | {"accuracy": accuracy, "parameters": trainer.parameters})
                progress(f"{name}, {length} items, seed {seed}: {accuracy:.3f}")
    return judge(rows)


def judge(rows: list[dict]) -> Result:
    """Applies `RULE`."""
    result = Result(("model", "length"), tuple(rows), "unclear", "")
    longest = max(result.levels("length"))
    names = [name for name in MODELS if name in result.levels("model")]
    at = {name: result.values("accuracy", model=name, length=longest) for name in names}
    mean = {name: float(np.mean(values)) for name, values in at.items()}
    without = [name for name in names if name not in ATTENTIVE]
    best = max(without, key=mean.__getitem__)
    attentive = [name for name in names if name in ATTENTIVE]
    gap = min(min(at[name]) for name in attentive) - max(max(at[name]) for name in without)
    least = min(mean[name] for name in attentive) - mean[best]
    reason = (
        f"At {longest} items the mean over {len(at[best])} seeds is "
        + ", ".join(f"{mean[name]:.2f} for {name}" for name in names)
        + f" (chance {1 / VALUES:.3f}); the worst seed with attention is {gap:+.2f} from the best without."
    )
    return dataclasses.replace(result, verdict=verdict(gap > 0.3, least < 0.1), reason=reason)


def plot(result: Result):
    made, (panel,) = experiment.figure("items recalled in unseen sequences")
    experiment.curves(panel, result, "length", "accuracy", by="model")
    lengths = result.levels("length")
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, map(str, lengths))
    panel.axhline(1 / VALUES, color="0.5", lw=0.8, ls="--")
    panel.set_ylim(0.0, 1.03)
    panel.set_xlabel("items")
    experiment.legend(made, panel)
    return made
