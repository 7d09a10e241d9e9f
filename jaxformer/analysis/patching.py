"""Activation patching: activations of one sentence put into another, one layer and position or head at a time.

Sources: Vig et al. 2020 ("Investigating gender bias in language models using causal mediation analysis"), Meng et al.
2022 ("Locating and editing factual associations in GPT").
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxformer import display
from jaxformer.analysis import ablate, sentences
from jaxformer.analysis.attention import output_name
from jaxformer.analysis.layers import PartOutputs, Reader, Replacement, Visit
from jaxformer.analysis.lens import predicts_next, row_name
from jaxformer.analysis.sentences import Sentence
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor
from jaxformer.types import Array

PARTS = ("residual", "attention", "mlp", "heads")
"""Activations for the other sentence: the residual stream after a layer, or outputs of one of its parts."""


@dataclass(frozen=True, eq=False)
class Patching:
    """Activations of one sentence put into another, one layer and position (or head) at a time.

    Attributes:
      clean, corrupted: the sentence that the activations come from, and the one that they are put into.
      clean_tokens, corrupted_tokens: names of the patched positions in both.
      answer: the clean sentence's best output at the position that is read (of an encoder-decoder its output's tokens).
      clean_log_prob, corrupted_log_prob: its log-probability (natural logarithm) in both, of several tokens their mean.
      log_probs: float32, that of the corrupted sentence with an activation of the clean one. Of part "residual"
        `[L + 1, T]`: row 0 patches the input of the first layer at each position, row l + 1 the output of layer l. Of
        "attention" and "mlp" `[L, T]`, that part's output in layer l at each position. Of "heads" `[L, H]`, the output
        of a head in layer l at all positions.
      part: one of `PARTS`.
    """

    clean: str
    corrupted: str
    clean_tokens: tuple[str, ...]
    corrupted_tokens: tuple[str, ...]
    answer: str
    clean_log_prob: float
    corrupted_log_prob: float
    log_probs: np.ndarray
    part: str = "residual"

    @property
    def restored(self) -> Float32[np.ndarray, "L P"]:
        """The part of the difference that a patch makes up: 0 none, 1 all of it (the indirect effect, normalised).

        NaN where the sentences do not differ in the answer's log-probability.
        """
        gap = self.clean_log_prob - self.corrupted_log_prob
        return (self.log_probs - self.corrupted_log_prob) / (gap if gap else np.nan)

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows of `log_probs`."""
        first = 0 if self.part == "residual" else 1
        return tuple(row_name(number + first) for number in range(len(self.log_probs)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of `log_probs`."""
        if self.part == "heads":
            return tuple(f"head {head}" for head in range(self.log_probs.shape[1]))
        pairs = zip(self.clean_tokens, self.corrupted_tokens, strict=True)
        return tuple(clean if clean == corrupted else f"{corrupted} ← {clean}" for clean, corrupted in pairs)

    def _repr_html_(self) -> str:
        what = "activations" if self.part == "residual" else f"outputs of {self.part}"
        note = (
            f"How much of the log-probability of {self.answer!r} comes back when the {what} of {self.clean!r} are "
            f"put into {self.corrupted!r}: 1 is all of it."
        )
        title = f"Activation patching: {self.part}"
        return display.box(title, display.heat_map(self.restored, self.rows, self.columns, limit=1.0), note=note)


def patch(
    predictor: Predictor,
    clean: str,
    corrupted: str,
    target: str | None = None,
    position: int | None = None,
    part: str = "residual",
) -> Patching:
    """See `jaxformer.Model.patch`."""
    (found,) = patch_parts(predictor, clean, corrupted, (part,), target, position)
    return found


def patch_parts(
    predictor: Predictor,
    clean: str,
    corrupted: str,
    parts: Sequence[str],
    target: str | None = None,
    position: int | None = None,
) -> list[Patching]:
    """`patch` for several parts, which read the two sentences once."""
    reader = ablate.open_reader(predictor, "patch")
    check_parts(reader, parts)
    first, second, stream = read_pair(predictor, reader, clean, corrupted, target)
    ids, weights = patch_reference(predictor, reader, first, position)
    visits = [[visit for visit in reader.walk(one.batch) if visit.side == reader.sides[0]] for one in (first, second)]
    # Of one position that counts, only its logits are computed: of a large vocabulary they take longer than the layers.
    chosen = np.flatnonzero(weights)
    of_text = reader.config.head.kind == "classes"
    keep = slice(chosen[0], chosen[0] + 1) if len(chosen) == 1 and not of_text else slice(None)

    def score(sentence: Sentence, last: Visit) -> Float32[np.ndarray, " R"]:
        return ablate.read_rows(predictor, reader, sentence, last, ids, keep) @ weights[keep]

    ends = [float(score(one, walked[-1])[0]) for one, walked in zip((first, second), visits, strict=True)]
    count, measure = len(first.ids[stream]), functools.partial(score, second)
    answer = " ".join(output_name(predictor, int(i)) for i in ids[weights > 0]) if weights.any() else ""
    found = []
    for part in parts:
        if part == "residual":
            rows = [patch_layer(reader, *pair, count, ends[1], measure) for pair in zip(*visits, strict=True)]
        else:
            layers = zip(*map(itertools.pairwise, visits), strict=True)
            rows = [patch_part(reader, part, *pair, count, ends[1], measure) for pair in layers]
        tokens = first.tokens[stream], second.tokens[stream]
        found.append(Patching(clean, corrupted, *tokens, answer, *ends, np.stack(rows), part))
    return found


def check_parts(reader: Reader, parts: Sequence[str]) -> None:
    """Raises a ConfigError if one of `parts` is none, or the model has none of it."""
    has_mlps = getattr(reader.config, reader.sides[0]).ffn is not None
    known = [part for part in PARTS if part != "mlp" or has_mlps]
    for part in parts:
        if part not in known:
            raise ConfigError(f"part: got {part!r}, expected one of {', '.join(known)}")


def read_pair(
    predictor: Predictor, reader: Reader, clean: str, corrupted: str, target: str | None
) -> tuple[Sentence, Sentence, str]:
    """The two sentences, and the stream in which they differ.

    Raises:
      ConfigError: they have unlike numbers of tokens, or the same tokens.
    """
    first = sentences.read(predictor, [clean], None if target is None else [target])[0]
    second = sentences.read(predictor, [corrupted], [""] if predictor.config.model.is_seq2seq else None)[0]
    if reader.config.is_seq2seq:  # both are measured by the same output
        second = with_target(second, first)
    stream = "source" if reader.sides[0] == "encoder" else "target"
    counts = [len(one.ids[stream]) for one in (first, second)]
    if counts[0] != counts[1]:
        names = " and ".join(" ".join(one.tokens[stream]) for one in (first, second))
        raise ConfigError(
            f"patch: got sentences of {counts[0]} and {counts[1]} tokens ({names}), expected equally many; change a "
            "word"
        )
    if np.array_equal(first.ids[stream], second.ids[stream]):
        raise ConfigError("patch: got sentences whose tokens are the same as far as they are read, expected others")
    return first, second, stream


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


Measure = Callable[[Visit], Float32[np.ndarray, " R"]]
"""Log-probability of the answer in each row of a side's last visit."""


def changed(source: Array, goal: Array, axis: int, count: int) -> np.ndarray:
    """Indices below `count` of an axis at which two activations of one row differ: only these patches do anything."""
    differs = np.moveaxis(np.asarray(source[0] != goal[0]), axis, 0)[:count]
    return np.flatnonzero(differs.reshape(len(differs), -1).any(axis=1))


def patch_layer(
    reader: Reader, source: Visit, goal: Visit, count: int, unchanged: float, measure: Measure
) -> Float32[np.ndarray, " T"]:
    """The answer's log-probability when one of `count` positions after a layer is that of another sentence."""
    found = np.full(count, unchanged, np.float32)
    positions = changed(source.output.x, goal.output.x, 0, count)
    for chunk in ablate.chunks(len(positions)):
        x, inputs = ablate.repeat_rows(goal.output.x, goal.inputs, ablate.MAX_ROWS)
        x = put_states(x, source.output.x, positions[chunk])
        *_, last = reader.resume(goal.side, goal.layer, x, inputs)
        found[positions[chunk]] = measure(last)
    return found


def patch_part(
    reader: Reader,
    part: str,
    source: tuple[Visit, Visit],
    goal: tuple[Visit, Visit],
    count: int,
    unchanged: float,
    measure: Measure,
) -> Float32[np.ndarray, " P"]:
    """The answer's log-probability when a part of one layer puts out what it does for another sentence.

    Args:
      source, goal: visits of the layer before and of the layer, in the sentence that is patched from and into.
      count: positions; of part "heads" each head is patched instead, at all positions.
    """
    outputs = [reader.part_outputs(*pair) for pair in (source, goal)]
    side, layer = goal[1].side, goal[1].layer
    count = reader.heads(side) if part == "heads" else count
    found = np.full(count, unchanged, np.float32)
    own = [getattr(one, part) for one in outputs]
    places = changed(*own, 1 if part == "heads" else 0, count)
    for chunk in ablate.chunks(len(places)):
        x, inputs = ablate.repeat_rows(goal[0].output.x, goal[1].inputs, ablate.MAX_ROWS)
        edit = reader.no_edits(side, ablate.MAX_ROWS)
        edit = edit._replace(replacement=replacement(outputs[0], part, places[chunk]))
        *_, last = reader.resume(side, layer - 1, x, inputs, {(side, layer): edit})
        found[places[chunk]] = measure(last)
    return found


def replacement(source: PartOutputs, part: str, places: np.ndarray) -> Replacement:
    """The replacement whose row r has the source's output of a part at position, or of head, `places[r]`."""
    length, heads = source.heads.shape[1:3]
    masks = {name: np.zeros((len(places), heads if name == "heads" else length), bool) for name in PARTS[1:]}
    masks[part][np.arange(len(places)), places] = True
    return Replacement(source, **jax.tree.map(jnp.asarray, masks))


@jax.jit
def put_states(x: Array, source: Array, positions: Array) -> Array:
    """`x` `[R, T, D]` with slot `positions[r]` of row r from the only row of `source`."""
    rows = jnp.arange(x.shape[0])
    return x.at[rows, positions].set(source[0, positions])
