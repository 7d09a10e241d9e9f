"""Activation patching: the residual stream of one sentence put into another, one layer and position at a time.

Sources: Vig et al. 2020 ("Investigating gender bias in language models using causal mediation analysis"), Meng et al.
2022 ("Locating and editing factual associations in GPT").
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxformer import display
from jaxformer.analysis import ablate, sentences
from jaxformer.analysis.attention import output_name
from jaxformer.analysis.layers import Reader, Side, Visit
from jaxformer.analysis.lens import predicts_next, row_name
from jaxformer.analysis.sentences import Sentence
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor
from jaxformer.types import Array


@dataclass(frozen=True, eq=False)
class Patching:
    """Activations of one sentence put into another, one layer and position at a time.

    Attributes:
      clean, corrupted: the sentence that the activations come from, and the one that they are put into.
      clean_tokens, corrupted_tokens: names of the patched positions in both.
      answer: the clean sentence's best output at the position that is read (of an encoder-decoder its output's tokens).
      clean_log_prob, corrupted_log_prob: its log-probability (natural logarithm) in both, of several tokens their mean.
      log_probs: float32 `[L + 1, T]`, that of the corrupted sentence with the residual stream of the clean one at a
        position; row 0 patches the input of the first layer, row l + 1 the output of layer l.
    """

    clean: str
    corrupted: str
    clean_tokens: tuple[str, ...]
    corrupted_tokens: tuple[str, ...]
    answer: str
    clean_log_prob: float
    corrupted_log_prob: float
    log_probs: np.ndarray

    @property
    def restored(self) -> Float32[np.ndarray, "L T"]:
        """The part of the difference that a patch makes up: 0 none, 1 all of it (the indirect effect, normalised).

        NaN where the sentences do not differ in the answer's log-probability.
        """
        gap = self.clean_log_prob - self.corrupted_log_prob
        return (self.log_probs - self.corrupted_log_prob) / (gap if gap else np.nan)

    def _repr_html_(self) -> str:
        rows = [row_name(number) for number in range(len(self.log_probs))]
        names = [a if a == b else f"{b} ← {a}" for a, b in zip(self.clean_tokens, self.corrupted_tokens, strict=True)]
        note = (
            f"How much of the log-probability of {self.answer!r} comes back when the activations of {self.clean!r} are "
            f"put into {self.corrupted!r}: 1 is all of it."
        )
        return display.box("Activation patching", display.heat_map(self.restored, rows, names, limit=1.0), note=note)


def patch(
    predictor: Predictor, clean: str, corrupted: str, target: str | None = None, position: int | None = None
) -> Patching:
    """See `jaxformer.Model.patch`."""
    reader = ablate.open_reader(predictor, "patch")
    targets = None if target is None else [target]
    first = sentences.read(predictor, [clean], targets)[0]
    second = sentences.read(predictor, [corrupted], [""] if predictor.config.model.is_seq2seq else None)[0]
    if reader.config.is_seq2seq:  # both are measured by the same output
        second = with_target(second, first)
    patched: Side = reader.sides[0]
    stream = "source" if patched == "encoder" else "target"
    counts = [len(one.ids[stream]) for one in (first, second)]
    if counts[0] != counts[1]:
        names = " and ".join(" ".join(one.tokens[stream]) for one in (first, second))
        raise ConfigError(
            f"patch: got sentences of {counts[0]} and {counts[1]} tokens ({names}), expected equally many; change a "
            "word"
        )
    if np.array_equal(first.ids[stream], second.ids[stream]):
        raise ConfigError("patch: got sentences whose tokens are the same as far as they are read, expected others")
    ids, weights = patch_reference(predictor, reader, first, position)
    visits = [[visit for visit in reader.walk(one.batch) if visit.side == patched] for one in (first, second)]
    score = lambda rows: rows @ weights  # noqa: E731
    ends = [
        ablate.read_rows(predictor, reader, one, walked[-1], ids)
        for one, walked in zip((first, second), visits, strict=True)
    ]
    rows = [
        score(patch_layer(predictor, reader, second, source, goal, counts[0], ids))
        for source, goal in zip(*visits, strict=True)
    ]
    answer = " ".join(output_name(predictor, int(i)) for i in ids[weights > 0]) if weights.any() else ""
    return Patching(
        clean=clean,
        corrupted=corrupted,
        clean_tokens=first.tokens[stream],
        corrupted_tokens=second.tokens[stream],
        answer=answer,
        clean_log_prob=float(score(ends[0])[0]),
        corrupted_log_prob=float(score(ends[1])[0]),
        log_probs=np.stack(rows),
    )


def with_target(sentence: Sentence, other: Sentence) -> Sentence:
    """The sentence with the target of another."""
    return Sentence(
        sentence.text,
        sentence.batch._replace(target=other.batch.target),
        {**sentence.ids, "target": other.ids["target"]},
        {**sentence.tokens, "target": other.tokens["target"]},
        sentence.cut,
    )


def patch_reference(
    predictor: Predictor, reader: Reader, clean: Sentence, position: int | None
) -> tuple[np.ndarray, Float32[np.ndarray, " T"]]:
    """The output measured at each position, and the positions' weights, whose sum is 1.

    Of an encoder-decoder all tokens of its output count alike, and so do all slots of an encoder without `position`.
    Of others the best output at `position` alone counts, by default at the last one.

    Raises:
      ConfigError: there is no such position.
    """
    full = ablate.log_probs(predictor, reader, clean, {})
    ids, weights = ablate.references(predictor, clean, full), np.zeros(len(full), np.float32)
    if reader.config.is_seq2seq or (position is None and not predicts_next(predictor)):
        weights[:] = 1 / len(full)
        return ids, weights
    position = -1 if position is None else position
    if not -len(full) <= position < len(full):
        raise ConfigError(f"position: got {position}, expected one of the text's {len(full)} slots")
    ids[position] = int(np.argmax(full[position]))
    weights[position] = 1.0
    return ids, weights


def patch_layer(
    predictor: Predictor,
    reader: Reader,
    sentence: Sentence,
    source: Visit,
    goal: Visit,
    count: int,
    ids: np.ndarray,
) -> Float32[np.ndarray, "P T"]:
    """Log-probabilities of the references when position p after one layer is that of another sentence: row p."""
    found = []
    for positions in ablate.chunks(count):
        x, inputs = ablate.repeat_rows(goal.output.x, goal.inputs, ablate.MAX_ROWS)
        x = put_states(x, source.output.x, positions)
        *_, last = reader.resume(goal.side, goal.layer, x, inputs)
        found.append(ablate.read_rows(predictor, reader, sentence, last, ids))
    return np.concatenate(found)[:count]


@jax.jit
def put_states(x: Array, source: Array, positions: Array) -> Array:
    """`x` `[R, T, D]` with slot `positions[r]` of row r from the only row of `source`."""
    rows = jnp.arange(x.shape[0])
    return x.at[rows, positions].set(source[0, positions])
