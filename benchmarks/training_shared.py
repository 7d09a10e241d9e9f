"""What the two sides of `training.py` share: the shapes of the models, their batches, and how a child is asked to work.

Imports neither jax nor torch. A batch is a dict of arrays of numpy; rows end where the mask does, and padding is 0.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """One model and its batch.

    Attributes:
      family: decoder, encoder (masked language model), seq2seq, rnn (LSTM with additive attention).
      ffn: width of the feed-forward layers; None: four times the model's.
      length: slots of a row; of both sides in translation.
      dropout: everywhere the family has it.
    """

    family: str
    layers: int
    width: int
    heads: int
    length: int
    rows: int
    vocab: int
    dropout: float
    ffn: int | None = None

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.width


SHAPES = {
    "gpt": Shape("decoder", 6, 384, 6, 256, 16, 65, 0.0),
    "gpt_dropout": Shape("decoder", 6, 384, 6, 256, 16, 65, 0.2),
    "bert": Shape("encoder", 6, 384, 6, 128, 16, 4000, 0.1),
    "seq2seq": Shape("seq2seq", 4, 128, 4, 26, 157, 6000, 0.3, 256),
    "lstm": Shape("rnn", 1, 256, 1, 24, 85, 6000, 0.2),
}
TOYS = {
    name: Shape(shape.family, 1, 16, 2, 16, 4, 32, shape.dropout, shape.ffn and 32) for name, shape in SHAPES.items()
}

BATCHES = 4
"""Different batches, taken in turn."""


def batch(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """int32 `target` and (but for decoders) `source`, `labels`, float32 `weights`, bool `source_real`, `target_real`.

    Decoders get full rows, as a packed text; the others rows of between half and all of the length.
    """
    rng = np.random.default_rng(seed)
    size = (shape.rows, shape.length)
    draw = lambda columns: rng.integers(1, shape.vocab, (shape.rows, columns), dtype=np.int32)  # noqa: E731
    ragged = lambda: np.arange(shape.length) < rng.integers(shape.length // 2, shape.length + 1, (shape.rows, 1))  # noqa: E731
    if shape.family == "decoder":
        text = draw(shape.length + 1)
        whole = np.ones(size, bool)
        return {"target": text[:, :-1], "target_real": whole, "labels": text[:, 1:], "weights": whole.astype("f4")}
    real = ragged()
    source = draw(shape.length) * real
    if shape.family == "encoder":
        weights = (real & (rng.random(size) < 0.15)).astype("f4")
        return {"source": source, "source_real": real, "labels": draw(shape.length) * real, "weights": weights}
    reads, text = ragged(), draw(shape.length + 1)
    return {
        "source": source, "source_real": real, "target": text[:, :-1] * reads, "target_real": reads,
        "labels": text[:, 1:] * reads, "weights": reads.astype("f4"),
    }  # fmt: skip


def positions(shape: Shape) -> int:
    """Tokens a step counts as: slots of the batch, padding included, of both sides in translation."""
    return shape.rows * shape.length * (2 if shape.family in ("seq2seq", "rnn") else 1)


def age() -> float:
    """Seconds since this process was started."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def task() -> dict:
    """What the parent asks for, with the shape made one."""
    given = json.loads(sys.argv[1])
    return given | {"shape": Shape(**given["shape"])}


def request(shape: Shape, **more: object) -> str:
    return json.dumps({"shape": asdict(shape), **more})


def say(row: dict) -> None:
    print("ROW " + json.dumps(row), flush=True)


def serve(step: Callable[[], float], about: dict, last: Callable[[], dict] = dict) -> None:
    """Does the first step, then as many as each line of standard input says, and says the seconds of each.

    `step` returns the loss when it is there; `last` what there is to say at the end of the input. The kernel's part of
    the processor time is mostly that of pages which are cleared, and fetched from the host, to be used again.
    """
    first = step()
    say(about | {"first_loss": first, "first_step_seconds": age()})
    for line in sys.stdin:
        seconds, before = [], resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(int(line)):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_SELF)
        user, kernel = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        say({"seconds": seconds, "processor_seconds": user + kernel, "kernel_seconds": kernel})
    say(last() | {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})


def products(shape: Shape) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of every dense layer that sees all slots at once: what a step cannot do without.

    Those inside a recurrent network's loop over time are left out.
    """
    n, d = shape.rows * shape.length, shape.width
    top = [(n, d, shape.vocab)]
    if shape.family == "rnn":
        return [(n, d, 2 * d), (n, d, 2 * d), (n, d, d), (n, d, 4 * d), (n, 2 * d, d), *top]
    attention, ffn = [(n, d, d)] * 4, [(n, d, shape.inner), (n, shape.inner, d)]
    sides = [attention + ffn, 2 * attention + ffn] if shape.family == "seq2seq" else [attention + ffn]
    return [size for side in sides for size in side * shape.layers] + top
