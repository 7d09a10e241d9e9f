"""Ablation: the output of a model without some of its heads and feed-forward layers.

Source: Michel et al. 2019 ("Are sixteen heads really better than one?").
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxformer import display
from jaxformer.analysis import layers, sentences
from jaxformer.analysis.attention import output_name
from jaxformer.analysis.layers import Edits, Reader, Side, SideInputs, Visit
from jaxformer.analysis.lens import by_position, predicts_next
from jaxformer.analysis.results import Results
from jaxformer.analysis.sentences import Sentence
from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor
from jaxformer.types import Array, Batch

MAX_ROWS = 8
"""Variants of a sentence that are read together: few enough for the memory of large models, one shape for all."""

HeadChoice = tuple[int, int] | tuple[str, int, int]
"""A head: (layer, head) of a model with one kind of attention, or (kind, layer, head)."""
MlpChoice = int | tuple[str, int]
"""A feed-forward layer: its layer in a model with one side, or (side, layer)."""


@dataclass(frozen=True, eq=False)
class Ablation:
    """A model without some of its parts, for one line.

    Attributes:
      text: the line.
      removed: names of the parts, as "decoder layer 0 head 1".
      tokens: names of the T positions; of a classifier of texts one.
      references: names of the output that is measured at each position: the token that follows in the text; at its end,
        and in models that do not predict the next token, the complete model's best output.
      before, after: float32 `[T, V]`, log-probabilities (natural logarithm) of all outputs with and without the parts.
      reference_ids: int32 `[T]`.
    """

    text: str
    removed: tuple[str, ...]
    tokens: tuple[str, ...]
    references: tuple[str, ...]
    before: np.ndarray
    after: np.ndarray
    reference_ids: np.ndarray

    @property
    def change(self) -> Float32[np.ndarray, " T"]:
        """Log-probability of the references without the parts minus with them: negative where the parts helped."""
        index = np.arange(len(self.reference_ids)), self.reference_ids
        return self.after[index] - self.before[index]

    def _repr_html_(self) -> str:
        index = np.arange(len(self.reference_ids)), self.reference_ids
        rows = zip(self.tokens, self.references, self.before[index], self.after[index], self.change, strict=True)
        head = ("token", "output", "log-probability", "without", "change")
        return display.box(f"{self.text} without {', '.join(self.removed) or 'nothing'}", display.table(head, rows))


@dataclass(frozen=True, eq=False)
class AblationScan:
    """Every head and feed-forward layer removed, one at a time, for one line.

    Attributes:
      text, tokens, references: as in `Ablation`.
      before: float32 `[T]`, log-probabilities of the references in the complete model.
      heads: float32 `[L, H, T]` by kind of attention, the changes without a head; see `Ablation.change`.
      mlps: float32 `[L, T]` by side.
    """

    text: str
    tokens: tuple[str, ...]
    references: tuple[str, ...]
    before: np.ndarray
    heads: Mapping[str, np.ndarray]
    mlps: Mapping[str, np.ndarray]

    def _repr_html_(self) -> str:
        changes = [*(abs(array.mean(-1)).max() for array in (*self.heads.values(), *self.mlps.values()))]
        limit, parts = max(changes), []
        for kind, array in self.heads.items():
            rows, columns = [f"layer {i}" for i in range(len(array))], [f"head {i}" for i in range(array.shape[1])]
            parts.append(display.box(f"{kind} heads", display.heat_map(array.mean(-1), rows, columns, limit=limit)))
        for side, array in self.mlps.items():
            columns = [f"layer {i}" for i in range(len(array))]
            parts.append(
                display.box(f"{side} mlp", display.heat_map(array.mean(-1)[None], ["mlp"], columns, limit=limit))
            )
        note = "Mean change of the log-probability of the text's tokens when a part is removed: red where it helped."
        return display.box(f"Ablations of {self.text}", *parts, note=note)


def ablate(
    predictor: Predictor,
    lines: Sequence[str],
    heads: Sequence[HeadChoice] | None = None,
    mlps: Sequence[MlpChoice] | None = None,
    targets: Sequence[str] | None = None,
) -> Results[Ablation] | Results[AblationScan]:
    """Each line with the parts removed, or with every part removed in turn; see `jaxformer.Model.ablate`."""
    reader = open_reader(predictor, "ablate")
    edits = edits_of(reader, heads or (), mlps or ())
    found = sentences.read(predictor, lines, targets)
    if heads is None and mlps is None:
        return Results(scan(predictor, reader, one) for one in found)
    removed = (*(head_name(*full_head(reader, head)) for head in heads or ()), *(_mlp_names(reader, mlps or ())))
    return Results(ablation(predictor, reader, one, edits, removed) for one in found)


def open_reader(predictor: Predictor, method: str) -> Reader:
    """The reader of a transformer.

    Raises:
      ConfigError: the model is another, or has no logits.
    """
    model = predictor.config.model
    sentences.check(model, method)
    if model.encoder is None and model.decoder is None:
        raise ConfigError(
            f"{method}: got a recurrent model, expected a transformer: it has no heads and layers to change"
        )
    reader = Reader(predictor.runner.module, predictor.runner.variables)
    reader.check_logits(method)
    reader.check_heads(method)
    return reader


def full_head(reader: Reader, head: HeadChoice) -> tuple[str, int, int]:
    """(kind, layer, head) of a choice.

    Raises:
      ConfigError: the model has no such head.
    """
    kinds = kinds_of(reader.config)
    expected = " or ".join(
        f"({kind!r}, 0..{reader.layers(side) - 1}, 0..{reader.heads(side) - 1})" for kind, side in kinds.items()
    )
    if not isinstance(head, (tuple, list)) or len(head) not in (2, 3) or (len(head) == 2 and len(kinds) > 1):
        raise ConfigError(f"heads: got {head!r}, expected {expected}")
    kind, layer, number = head if len(head) == 3 else (next(iter(kinds)), *head)
    side = kinds.get(str(kind))
    if side is None or not 0 <= int(layer) < reader.layers(side) or not 0 <= int(number) < reader.heads(side):
        raise ConfigError(f"heads: got {head!r}, expected {expected}")
    return str(kind), int(layer), int(number)


def full_mlp(reader: Reader, mlp: MlpChoice) -> tuple[Side, int]:
    """(side, layer) of a choice.

    Raises:
      ConfigError: the model has no such feed-forward layer.
    """
    sides = [side for side in reader.sides if getattr(reader.config, side).ffn is not None]
    choice = (sides[0], mlp) if isinstance(mlp, int) and len(sides) == 1 else mlp
    if isinstance(choice, tuple) and len(choice) == 2:
        side, layer = choice
        if side in sides and 0 <= int(layer) < reader.layers(side):
            return side, int(layer)
    expected = " or ".join(f"({side!r}, 0..{reader.layers(side) - 1})" for side in sides) or "none: there are none"
    raise ConfigError(f"mlps: got {mlp!r}, expected {expected}")


def kinds_of(model: ModelConfig) -> dict[str, Side]:
    """Kinds of attention of a transformer, and the side that each belongs to."""
    sides: tuple[Side, ...] = ("encoder", "decoder")
    kinds: dict[str, Side] = {side: side for side in sides if getattr(model, side) is not None}
    if model.is_seq2seq:
        kinds["cross"] = "decoder"
    return kinds


def head_name(kind: str, layer: int, head: int) -> str:
    """A head in words."""
    return f"{kind} layer {layer} head {head}"


def _mlp_names(reader: Reader, mlps: Sequence[MlpChoice]) -> list[str]:
    return [f"{side} layer {layer} feed-forward" for side, layer in (full_mlp(reader, mlp) for mlp in mlps)]


def edits_of(reader: Reader, heads: Sequence[HeadChoice], mlps: Sequence[MlpChoice]) -> dict[tuple[Side, int], Edits]:
    """Edits of one row that remove these parts."""
    edits: dict[tuple[Side, int], Edits] = {}
    for kind, layer, head in (full_head(reader, choice) for choice in heads):
        side = kinds_of(reader.config)[kind]
        edit = edits.get((side, layer)) or reader.no_edits(side, 1)
        field = "cross" if kind == "cross" else "attention"
        edits[side, layer] = edit._replace(**{field: getattr(edit, field).at[:, head].set(0.0)})
    for side, layer in (full_mlp(reader, choice) for choice in mlps):
        edit = edits.get((side, layer)) or reader.no_edits(side, 1)
        edits[side, layer] = edit._replace(mlp=jnp.zeros_like(edit.mlp))
    return edits


def ablation(
    predictor: Predictor,
    reader: Reader,
    sentence: Sentence,
    edits: Mapping[tuple[Side, int], Edits],
    removed: tuple[str, ...],
) -> Ablation:
    """A sentence read with and without the edited parts."""
    before, after = (log_probs(predictor, reader, sentence, given) for given in ({}, edits))
    ids = references(predictor, sentence, before)
    return Ablation(
        text=sentence.text,
        removed=removed,
        tokens=position_names(predictor, sentence),
        references=tuple(output_name(predictor, int(index)) for index in ids),
        before=before,
        after=after,
        reference_ids=ids,
    )


def position_names(predictor: Predictor, sentence: Sentence) -> tuple[str, ...]:
    """Names of the positions that have outputs."""
    return ("[text]",) if predictor.config.model.head.kind == "classes" else sentence.tokens[sentence.last]


def log_probs(
    predictor: Predictor, reader: Reader, sentence: Sentence, edits: Mapping[tuple[Side, int], Edits]
) -> Float32[np.ndarray, "T V"]:
    """Log-probabilities of all outputs at each position."""
    *_, last = reader.walk(sentence.batch, edits)
    logits = reader.logits(last.output.x, last.inputs.slots)
    length, vocab = len(sentence.ids[sentence.last]), predictor.runner.vocabulary.size
    return np.asarray(log_softmax(by_position(logits, length, vocab)))


def references(predictor: Predictor, sentence: Sentence, before: Float32[np.ndarray, "T V"]) -> np.ndarray:
    """The output that is measured at each position; see `Ablation`."""
    best = np.argmax(before, axis=-1).astype(np.int32)
    if predicts_next(predictor):
        best[:-1] = sentence.ids[sentence.last][1:]
    return best


def scan(predictor: Predictor, reader: Reader, sentence: Sentence) -> AblationScan:
    """Removes every part in turn: all parts of a layer are the rows of one batch, which starts at that layer."""
    visits = list(reader.walk(sentence.batch))
    full = log_probs(predictor, reader, sentence, {})
    ids = references(predictor, sentence, full)
    before = full[np.arange(len(ids)), ids]
    heads: dict[str, list[np.ndarray]] = {}
    mlps: dict[str, list[np.ndarray]] = {}
    for previous, visit in itertools.pairwise(visits):
        if visit.layer < 0:
            continue
        rows, edit = layer_edits(reader, visit.side)
        values = measure_rows(predictor, reader, sentence, previous, visit, edit, ids) - before
        for (kind, _), change in zip(rows, values, strict=True):
            (mlps if kind == "mlp" else heads).setdefault(visit.side if kind == "mlp" else kind, []).append(change)
    shaped = {
        kind: np.stack(changes).reshape(reader.layers(side), reader.heads(side), -1)
        for kind, side in kinds_of(reader.config).items()
        for changes in [heads[kind]]
    }
    return AblationScan(
        text=sentence.text,
        tokens=position_names(predictor, sentence),
        references=tuple(output_name(predictor, int(index)) for index in ids),
        before=before,
        heads=shaped,
        mlps={side: np.stack(changes) for side, changes in mlps.items()},
    )


def layer_edits(reader: Reader, side: Side) -> tuple[list[tuple[str, int]], Edits]:
    """The parts of one layer, (kind, head) or ("mlp", 0), and edits whose row i removes part i."""
    heads = range(reader.heads(side))
    kinds = [kind for kind, owner in kinds_of(reader.config).items() if owner == side]
    rows = [(kind, head) for kind in kinds for head in heads]
    rows += [("mlp", 0)] if getattr(reader.config, side).ffn is not None else []
    factors = {name: np.ones((len(rows), len(heads)), np.float32) for name in ("attention", "cross")}
    mlp = np.ones(len(rows), np.float32)
    for row, (kind, head) in enumerate(rows):
        if kind == "mlp":
            mlp[row] = 0.0
        else:
            factors["cross" if kind == "cross" else "attention"][row, head] = 0.0
    return rows, Edits(jnp.asarray(factors["attention"]), jnp.asarray(factors["cross"]), jnp.asarray(mlp))


def measure_rows(
    predictor: Predictor,
    reader: Reader,
    sentence: Sentence,
    previous: Visit,
    visit: Visit,
    edit: Edits,
    ids: np.ndarray,
) -> Float32[np.ndarray, "R T"]:
    """Log-probabilities of the references with R edits of one layer, each a row, from that layer's input on."""
    found = []
    for rows in chunks(len(edit.mlp)):
        x, inputs = repeat_rows(previous.output.x, visit.inputs, MAX_ROWS)
        edits = {(visit.side, visit.layer): jax.tree.map(lambda factor: np.asarray(factor)[rows], edit)}  # noqa: B023
        *_, last = reader.resume(visit.side, visit.layer - 1, x, inputs, edits)
        found.append(read_rows(predictor, reader, sentence, last, ids))
    return np.concatenate(found)[: len(edit.mlp)]


def chunks(count: int) -> list[np.ndarray]:
    """The numbers below `count` in groups of `MAX_ROWS`, the last one filled up with the last number."""
    return [np.minimum(np.arange(begin, begin + MAX_ROWS), count - 1) for begin in range(0, count, MAX_ROWS)]


def read_rows(
    predictor: Predictor,
    reader: Reader,
    sentence: Sentence,
    last: Visit,
    ids: np.ndarray,
    keep: slice = slice(None),
) -> Float32[np.ndarray, "R T"]:
    """Log-probabilities of the references in all rows, from the end of any side on, one row's logits at a time.

    Args:
      keep: the positions that are read; all for a classifier of texts.
    """
    rows = last.output.x.shape[0]
    if last.side != reader.sides[-1]:  # the rest is the decoder's, which reads the rows as its memory
        last = finish_walk(reader, sentence.batch, last, rows)
    length, vocab, ids = len(sentence.ids[sentence.last]), predictor.runner.vocabulary.size, ids[keep]
    found = []
    for row in range(rows):
        one = layers.select_row((last.output.x, last.inputs.slots), row)
        if keep != slice(None):
            one, length = jax.tree.map(lambda x: x[:, keep], one), len(ids)
        scores = np.asarray(log_softmax(by_position(reader.logits(*one), length, vocab)))
        found.append(scores[np.arange(len(ids)), ids])
    return np.stack(found)


def finish_walk(reader: Reader, batch: Batch, last: Visit, rows: int) -> Visit:
    """The decoder's last visit, for an encoder that ended in R rows at `last`."""
    memory = reader.finish("encoder", last)
    x, stream = reader.decoder_input(batch, rows)
    inputs = stream._replace(memory=memory, memory_slots=last.inputs.slots)
    *_, end = reader.resume("decoder", -1, x, inputs)
    return end


def repeat_rows(x: Array, inputs: SideInputs, rows: int) -> tuple[Array, SideInputs]:
    """A residual stream and the inputs of a side, of one row, with that row `rows` times."""
    convolved = inputs.convolved
    if convolved is not None:  # its parameters have no rows
        output, visible = layers.repeat_rows((convolved.output, convolved.visible), rows)
        convolved = convolved.replace(output=output, visible=visible)
    x, inputs = layers.repeat_rows((x, inputs._replace(convolved=None)), rows)
    return x, inputs._replace(convolved=convolved)


log_softmax = jax.jit(jax.nn.log_softmax)
