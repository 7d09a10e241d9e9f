"""The logit lens: what the head makes of each layer's residual stream (nostalgebraist 2020, "interpreting GPT")."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, Int32

from jaxformer import display
from jaxformer.analysis import recurrent, sentences
from jaxformer.analysis.attention import output_name
from jaxformer.analysis.layers import Reader
from jaxformer.analysis.results import Results
from jaxformer.analysis.sentences import Sentence
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor
from jaxformer.types import Array

MAX_POSITIONS = 64
"""Positions whose logits exist at the same time: of a vocabulary of 128,000 they are 33 MB."""

WHOLE_TEXT = "[text]"
"""Name of the only position of a classifier of texts."""


class Readings(NamedTuple):
    """Summary of the distributions over V outputs at T positions.

    Attributes:
      ids: int32 `[T, k]`, the likeliest outputs, best first.
      log_probs: float32 `[T, k]`, their log-probabilities (natural logarithm).
      entropy: float32 `[T]`, in nats.
      reference: float32 `[T]`, log-probability of a reference output.
    """

    ids: Array
    log_probs: Array
    entropy: Array
    reference: Array


@functools.partial(jax.jit, static_argnames="top")
def read_logits(logits: Float32[Array, "T V"], reference: Int[Array, " T"], top: int) -> Readings:
    """The `top` likeliest outputs at each position, and the log-probability of each position's `reference`."""
    log_probs = jax.nn.log_softmax(logits)
    best, ids = jax.lax.top_k(log_probs, top)
    entropy = -jnp.sum(jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0), axis=-1)
    return Readings(ids, best, entropy, jnp.take_along_axis(log_probs, reference[:, None], axis=1)[:, 0])


@dataclass(frozen=True, eq=False)
class Lens:
    """Predictions of each layer for one line.

    Row 0 is the input of the first layer, row l + 1 the output of layer l; the last row is the model's prediction.

    Attributes:
      text: the line.
      tokens: names of the T positions; of a classifier of texts one, "[text]".
      next_tokens: names of what follows each position in the text, "" where nothing does or the model does not predict
        the next token.
      outputs: names of the k likeliest outputs, best first: `outputs[row][position][rank]`.
      ids: int32 `[L + 1, T, k]`.
      probs: float32 `[L + 1, T, k]`, their probabilities.
      entropy: float32 `[L + 1, T]`, in nats, of the whole distribution.
      final_probs: float32 `[L + 1, T]`, the probability that each row gives to the model's best output.
    """

    text: str
    tokens: tuple[str, ...]
    next_tokens: tuple[str, ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]
    ids: Int32[np.ndarray, "R T k"]
    probs: Float32[np.ndarray, "R T k"]
    entropy: Float32[np.ndarray, "R T"]
    final_probs: Float32[np.ndarray, "R T"]

    def _repr_html_(self) -> str:
        rows = [row_name(number) for number in range(len(self.probs))]
        best = [[names[0] for names in row] for row in self.outputs]
        heat = display.heat_map(self.probs[:, :, 0], rows, self.tokens, best, limit=1.0)
        note = "Each layer's likeliest output at each token, darker the likelier. The last row is the model's own."
        return display.box(f"Logit lens of {self.text}", heat, note=note)


def row_name(number: int) -> str:
    """Name of a row of `Lens` and `Patching`."""
    return "input" if number == 0 else f"layer {number - 1}"


def lens(
    predictor: Predictor, lines: Sequence[str], targets: Sequence[str] | None = None, top: int = 5
) -> Results[Lens]:
    """The lens of each line; see `jaxformer.Model.lens`."""
    model = predictor.config.model
    sentences.check(model, "lens")
    if top < 1:
        raise ConfigError(f"top: got {top}, expected at least 1")
    if model.recurrent_encoder is not None and model.recurrent_decoder is None:
        raise ConfigError(
            "lens: got a recurrent classifier, expected a decoder: its head reads the last states of all directions, "
            "and not one layer"
        )
    found = sentences.read(predictor, lines, targets)
    return Results(lens_of(predictor, one, top) for one in found)


def lens_of(predictor: Predictor, sentence: Sentence, top: int) -> Lens:
    """The lens of one sentence. The logits of one layer at `MAX_POSITIONS` positions exist at a time."""
    runner, model, length = predictor.runner, predictor.config.model, len(sentence.ids[sentence.last])
    if model.recurrent_decoder is not None:
        states = list(recurrent.layer_outputs(runner.module, runner.variables, sentence.batch))
        slots = sentence.batch.side("target").slots
        read = functools.partial(recurrent.read_out, runner.module, runner.variables)
    else:
        reader = Reader(runner.module, runner.variables)
        reader.check_logits("lens")
        visits = [visit for visit in reader.walk(sentence.batch) if visit.side == reader.sides[-1]]
        states, slots, read = [visit.output.x for visit in visits], visits[-1].inputs.slots, reader.logits
    width = states[-1].shape[1] if model.head.kind == "classes" else MAX_POSITIONS
    found: list[list[Readings]] = []
    for begin in range(0, length, width):
        part = [jax.tree.map(lambda x: x[:, begin : begin + width], (x, slots)) for x in states]  # noqa: B023
        count = min(width, length - begin)
        final = by_position(read(*part[-1]), count, runner.vocabulary.size)
        reference, best = jnp.argmax(final, axis=-1), min(top, final.shape[-1])
        logits = (by_position(read(*one), count, runner.vocabulary.size) for one in part)
        found.append([Readings(*map(np.asarray, read_logits(one, reference, best))) for one in logits])
    rows = [Readings(*map(np.concatenate, zip(*parts, strict=True))) for parts in zip(*found, strict=True)]
    return make_lens(predictor, sentence, rows)


def by_position(logits: Float32[Array, "1 ..."], length: int, vocab: int | None) -> Float32[Array, "T V"]:
    """The logits of the only row, one position for a classifier of texts, without padding of text and vocabulary."""
    if logits.ndim == 2:
        return logits
    return logits[0, :length, :vocab] if vocab is not None and vocab > 0 else logits[0, :length]


def make_lens(predictor: Predictor, sentence: Sentence, rows: Sequence[Readings]) -> Lens:
    """The rows with their names."""
    ids = np.stack([row.ids for row in rows]).astype(np.int32)
    names: Mapping[int, str] = {int(index): output_name(predictor, int(index)) for index in np.unique(ids)}
    of_text = predictor.config.model.head.kind == "classes"
    tokens = (WHOLE_TEXT,) if of_text else sentence.tokens[sentence.last]
    follows = predicts_next(predictor) and not of_text
    return Lens(
        text=sentence.text,
        tokens=tokens,
        next_tokens=(*tokens[1:], "") if follows else ("",) * len(tokens),
        outputs=tuple(tuple(tuple(names[int(i)] for i in best) for best in row) for row in ids),
        ids=ids,
        probs=np.exp(np.stack([row.log_probs for row in rows])),
        entropy=np.stack([row.entropy for row in rows]),
        final_probs=np.exp(np.stack([row.reference for row in rows])),
    )


def predicts_next(predictor: Predictor) -> bool:
    """True if the outputs at a position are about the token after it."""
    return predictor.config.model.has_decoder and predictor.config.model.head.kind == "tokens"
