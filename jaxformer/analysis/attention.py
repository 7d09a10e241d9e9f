"""Attention maps: probabilities of every head with the names of the tokens. `measures` has the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import display
from jaxformer.analysis import measures, recurrent, sentences
from jaxformer.analysis.layers import (
    LayerOutput,
    Reader,
    Side,
    Visit,
    finish_gradient,
    head_gradient,
    layer_gradient,
)
from jaxformer.analysis.measures import HEAD_SCORES, NAMED_SCORE, PATTERNS
from jaxformer.analysis.results import Results
from jaxformer.analysis.sentences import Sentence
from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor

SIDES: dict[str, tuple[str, str]] = {
    "encoder": ("source", "source"),
    "decoder": ("target", "target"),
    "cross": ("target", "source"),
    "alignment": ("target", "source"),
}
"""Kinds of attention, and the streams that its queries and keys belong to."""


@dataclass(frozen=True)
class HeadSummary:
    """One head, its scores (see `measures.head_scores`) and the patterns whose score is at least `NAMED_SCORE`."""

    kind: str
    layer: int
    head: int
    scores: Mapping[str, float]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The probabilities of one head, float32 `[T, S]`, with the names of its queries and keys."""

    name: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    probs: np.ndarray

    def _repr_html_(self) -> str:
        return display.box(self.name, display.heat_map(self.probs, self.queries, self.keys, limit=1.0))


def head_table(summaries: Sequence[HeadSummary]) -> str:
    """A table of heads for notebooks."""
    rows = [
        (one.layer, one.head, *(one.scores[name] for name in HEAD_SCORES), ", ".join(one.names)) for one in summaries
    ]
    return display.table(("layer", "head", *HEAD_SCORES, "pattern"), rows)


@dataclass(frozen=True, eq=False)
class Explained:
    """Gradients of one logit with respect to the probabilities.

    Attributes:
      position: slot of the logit; of a classifier that of the slot it pools, -1 if it pools all.
      index: its token or class.
      name: its name.
      gradients: float32 `[L, H, T, S]` by kind, all layers.
    """

    position: int
    index: int
    name: str
    gradients: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention of a model for one line.

    Attributes:
      text: the line.
      tokens: names of the tokens of "source" and "target".
      ids: their ids.
      maps: float32 `[L, H, T, S]` by kind: "encoder", "decoder", "cross", "alignment" (of a recurrent decoder, one
        layer and one head). Row t holds the probabilities of query t over the keys, and sums to 1.
      layers: the indices of the L layers, by kind.
      total_layers: how many layers the model has, by kind.
      explained: gradients of a logit, if they were asked for.
    """

    text: str
    tokens: Mapping[str, tuple[str, ...]]
    ids: Mapping[str, np.ndarray]
    maps: Mapping[str, np.ndarray]
    layers: Mapping[str, tuple[int, ...]]
    total_layers: Mapping[str, int]
    explained: Explained | None = None

    def __getitem__(self, kind: str) -> Float[np.ndarray, "L H T S"]:
        """The probabilities of a kind.

        Raises:
          ConfigError: the model has no such attention.
        """
        if kind not in self.maps:
            raise ConfigError(f"attention: got {kind!r}, expected one of {', '.join(self.maps)}")
        return self.maps[kind]

    def queries(self, kind: str) -> tuple[str, ...]:
        """Names of the queries, the rows of a map."""
        return self.tokens[SIDES[kind][0]]

    def keys(self, kind: str) -> tuple[str, ...]:
        """Names of the keys, the columns of a map."""
        return self.tokens[SIDES[kind][1]]

    def heads(self, kind: str | None = None) -> list[HeadSummary]:
        """A summary of every head (of a kind)."""
        found = []
        for name in self.maps if kind is None else (kind,):
            scores = measures.head_scores(
                self[name], self.ids[SIDES[name][0]] if name in ("encoder", "decoder") else None
            )
            for row, layer in enumerate(self.layers[name]):
                for head in range(self.maps[name].shape[1]):
                    values = {measure: float(scores[measure][row, head]) for measure in HEAD_SCORES}
                    names = tuple(pattern for pattern in PATTERNS if values[pattern] >= NAMED_SCORE)
                    found.append(HeadSummary(name, layer, head, values, names))
        return found

    def rollout(self, kind: str = "") -> Float[np.ndarray, "L T T"]:
        """Attention rollout after each layer of a self-attention (the only one, or `kind`); see `measures.rollout`.

        Raises:
          ConfigError: `kind` is no self-attention of the model, or not all of its layers are here.
        """
        choices = [name for name in ("encoder", "decoder") if name in self.maps]
        kind = kind or (choices[-1] if choices else "alignment")
        if kind not in choices:
            raise ConfigError(
                f"rollout: got {kind!r}, expected a self-attention: {' or '.join(choices) or 'none here'}"
            )
        self.require_all_layers("rollout", kind)
        return measures.rollout(self.maps[kind])

    def relevance(self) -> dict[str, Float[np.ndarray, " S"]]:
        """How relevant each token is for the logit of `explained`: by stream, numbers whose sum is not 1.

        Gradient times attention, propagated through the layers (Chefer et al. 2021, equations 5 to 11):
        with A' = mean over heads of max(gradient * A, 0), self-attention updates R <- R + A' R, and cross-attention
        adds (R_tt normalised)^T A' (R_ss normalised) to the relevance of the source. The row of the logit's position is
        returned; of a classifier that of the slot it pools, or the mean of all rows.

        Raises:
          ConfigError: there are no gradients, or not all layers are here.
        """
        if self.explained is None:
            raise ConfigError("relevance: got no gradients, expected some; call attention(..., gradient=True)")
        for kind in self.maps:
            self.require_all_layers("relevance", kind)
        return measures.relevance(self.maps, self.explained.gradients, self.explained.position)

    def require_all_layers(self, method: str, kind: str) -> None:
        """Raises a ConfigError if maps of some layers of a kind are missing."""
        if len(self.layers[kind]) != self.total_layers[kind]:
            got = f"{len(self.layers[kind])} of {self.total_layers[kind]} layers"
            expected = "all of them, with attention in each; call attention without layers="
            raise ConfigError(f"{method}: got {got}, expected {expected}")

    def show(self, layer: int, head: int, kind: str = "") -> HeadMap:
        """The map of one head, with the names of its tokens, as a notebook displays it.

        Raises:
          ConfigError: the layer, the head or the kind is not here.
        """
        kind = kind or next(iter(self.maps))
        heads = self[kind].shape[1]
        if layer not in self.layers[kind] or not 0 <= head < heads:
            layers = ", ".join(map(str, self.layers[kind]))
            raise ConfigError(
                f"attention: got layer {layer} head {head} of {kind}, expected a layer of {layers} and a head of 0 to "
                f"{heads - 1}"
            )
        probs = self.maps[kind][self.layers[kind].index(layer), head]
        return HeadMap(f"{kind} layer {layer} head {head}", self.queries(kind), self.keys(kind), probs)

    def _repr_html_(self) -> str:
        parts = []
        for kind, maps in self.maps.items():
            summaries = iter(self.heads(kind))
            lines = []
            for row, layer in enumerate(self.layers[kind]):
                pictures = []
                for probs in maps[row]:
                    summary = next(summaries)
                    words = ", ".join(summary.names) or f"entropy {summary.scores['entropy']:.2f}"
                    pictures.append(display.picture(probs, f"layer {layer} head {summary.head}: {words}", 72, 1.0))
                lines.append(f"<div>{''.join(pictures)}</div>")
            title = f"{kind}: a row a layer, a column a head"
            parts.append(display.box(title, *lines, display.details("Heads", head_table(self.heads(kind)))))
        names = " ".join(self.tokens[SIDES[next(iter(self.maps))][1]])
        return display.box(
            f"Attention of {self.text}", *parts, note=f"Tokens: {names}. See one: .show(layer, head, kind)"
        )


# --- of a model -------------------------------------------------------------------------------------------------------


def attention(
    predictor: Predictor,
    lines: Sequence[str],
    targets: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    gradient: bool = False,
    position: int = -1,
) -> Results[AttentionMaps]:
    """The attention of a model for each line; see `jaxformer.Model.attention`."""
    model = predictor.config.model
    check(model)
    is_recurrent = model.recurrent_decoder is not None
    if is_recurrent and (gradient or layers is not None):
        raise ConfigError("attention: got gradient or layers of a recurrent model, expected neither; leave them out")
    found = sentences.read(predictor, lines, targets)
    if is_recurrent:
        return Results(recurrent_maps(predictor, one) for one in found)
    reader = Reader(predictor.runner.module, predictor.runner.variables)
    if gradient:
        reader.check_heads("attention with gradient")
    return Results(maps_of(predictor, reader, one, layers, position if gradient else None) for one in found)


def check(model: ModelConfig) -> None:
    """Raises a ConfigError if a model has no attention over tokens."""
    sentences.check(model, "attention")
    recurrent_part = model.recurrent_decoder or model.recurrent_encoder
    if recurrent_part is not None and recurrent_part.attention == "none":
        raise ConfigError(
            "attention: got a recurrent model without attention, expected model.recurrent_decoder.attention additive "
            "or dot; model.lens shows what its layers predict"
        )
    if not reads_tokens_alone(model):
        raise ConfigError(
            "attention: got summaries of blocks among the keys (attention.summary), which are no tokens, expected one "
            "that attends to tokens alone; use model.lens, ablate or patch"
        )


def reads_tokens_alone(model: ModelConfig) -> bool:
    """True if every key is a token; LongT5's global attention has sums of blocks for keys, too."""
    return all(stack.attention.summary is None for stack in model.stacks.values())


def maps_of(
    predictor: Predictor,
    reader: Reader,
    sentence: Sentence,
    layers: Sequence[int] | None = None,
    explain: int | None = None,
) -> AttentionMaps:
    """The maps of a transformer for a sentence.

    Args:
      layers: indices of the layers to keep; None: all with attention.
      explain: slot of the logit whose gradients are taken, from the end if negative; None: no gradients.
    """
    chosen = {side: chosen_layers(reader, side, layers) for side in reader.sides}
    sizes = {side: len(ids) for side, ids in sentence.ids.items()}
    kept: dict[str, list[np.ndarray]] = {}
    visits: list[Visit] = []
    if explain is not None:
        reader.check_logits("gradient")
    for visit in reader.walk(sentence.batch, maps=lambda side, layer: layer in chosen[side]):
        for kind, probs in (("attention", visit.output.attention), ("cross", visit.output.cross)):
            name = visit.side if kind == "attention" else "cross"
            if probs is not None and visit.layer in chosen[visit.side]:
                queries, keys = (sizes[stream] for stream in SIDES[name])
                kept.setdefault(name, []).append(np.asarray(probs[0, :, :queries, :keys]))
        if explain is not None:  # what the backward pass reads: the residual streams alone
            visits.append(visit._replace(output=LayerOutput(visit.output.x)))
    explained = None if explain is None else explain_logit(predictor, reader, sentence, visits, explain)
    side_of: dict[str, Side] = {kind: "encoder" if kind == "encoder" else "decoder" for kind in kept}
    return AttentionMaps(
        text=sentence.text,
        tokens=sentence.tokens,
        ids=sentence.ids,
        maps={kind: np.stack(arrays) for kind, arrays in kept.items()},
        layers={kind: chosen[side] for kind, side in side_of.items()},
        total_layers={kind: reader.layers(side) for kind, side in side_of.items()},
        explained=explained,
    )


def chosen_layers(reader: Reader, side: Side, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers of a side among `layers`, in their order; without them all that have attention.

    Raises:
      ConfigError: one of them is not a layer of any side, or a layer without attention, or no layer has it.
    """
    attending = reader.attention_layers(side)
    if not attending:
        reader.check_heads("attention")
    if layers is None:
        return attending
    most = max(reader.layers(other) for other in reader.sides)
    wrong = [layer for layer in layers if not 0 <= layer < most]
    if wrong or not layers:
        raise ConfigError(f"layers: got {list(layers)}, expected some of 0 to {most - 1}")
    without = [layer for layer in layers if layer < reader.layers(side) and layer not in attending]
    if without:
        expected = f"layers of the {side} with attention ({', '.join(map(str, attending))})"
        raise ConfigError(f"layers: got {without[0]}, which has the gated delta rule, expected {expected}")
    return tuple(layer for layer in attending if layer in layers)


def explain_logit(
    predictor: Predictor, reader: Reader, sentence: Sentence, visits: Sequence[Visit], position: int
) -> Explained:
    """Gradients of the highest logit at `position`, by a backward pass over the layers, one at a time."""
    side, length = reader.sides[-1], len(sentence.ids[sentence.last])
    if not -length <= position < length:
        raise ConfigError(f"position: got {position}, expected one of the text's {length} slots")
    last = visits[-1]
    logits = np.asarray(reader.logits(last.output.x, last.inputs.slots))[0]
    of_text = logits.ndim == 1
    slot = position % length
    index = int(np.argmax(logits if of_text else logits[slot]))
    cotangent = head_gradient(
        reader.module, reader.rest, last.output.x, last.inputs.slots, jnp.int32(slot), jnp.int32(index), side
    )
    sizes = {name: len(ids) for name, ids in sentence.ids.items()}
    found: dict[str, list[np.ndarray]] = {}
    memory: Any = None
    for before, visit in reversed(list(itertools.pairwise(visits))):
        if visit.layer < 0:  # the decoder's input: below it lies the end of the encoder
            slots, encoded = before.inputs.slots, before.output.x
            cotangent = finish_gradient(reader.module, reader.rest, encoded, slots, memory, before.side)
            continue
        weights = reader.layer_variables(visit.side, visit.layer)
        gradient = layer_gradient(
            reader.module,
            reader.rest,
            weights,
            jnp.int32(visit.layer),
            before.output.x,
            visit.inputs,
            cotangent,
            visit.side,
        )
        cotangent = gradient.x
        if gradient.memory is not None:
            memory = gradient.memory if memory is None else memory + gradient.memory
        for name, array in ((visit.side, gradient.attention), ("cross", gradient.cross)):
            if array is not None:
                queries, keys = (sizes[stream] for stream in SIDES[name])
                found.setdefault(name, []).append(np.asarray(array[0, :, :queries, :keys]))
    gradients = {kind: np.stack(arrays[::-1]) for kind, arrays in found.items()}
    pooled = {"first": 0, "last": length - 1}.get(predictor.config.model.head.pooling, -1)
    return Explained(pooled if of_text else slot, index, output_name(predictor, index), gradients)


def output_name(predictor: Predictor, index: int) -> str:
    """Name of a logit: a token or a class."""
    if predictor.config.model.head.kind == "tokens":
        return sentences.token_names(predictor.framing.tokenizers.target, [index])[0]
    classes = predictor.config.task.classes
    return classes[index] if index < len(classes) else str(index)


def recurrent_maps(predictor: Predictor, sentence: Sentence) -> AttentionMaps:
    """The alignment of a recurrent decoder: one layer, one head (Bahdanau et al. 2015, figure 3)."""
    runner = predictor.runner
    probs = recurrent.alignment(runner.module, runner.variables, sentence.batch)
    queries, keys = len(sentence.ids["target"]), len(sentence.ids["source"])
    maps = np.asarray(probs)[None, :, :queries, :keys]
    return AttentionMaps(
        sentence.text, sentence.tokens, sentence.ids, {"alignment": maps}, {"alignment": (0,)}, {"alignment": 1}
    )


def induction_scores(predictor: Predictor, length: int = 24, seed: int = 0) -> dict[str, Float[np.ndarray, "L H"]]:
    """The induction score of each head of a decoder on random tokens, twice in a row (Olsson et al. 2022).

    The text has no other regularity, so a head that finds it matches prefixes. Scores by kind, as in
    `measures.head_scores`.

    Args:
      length: tokens before they repeat, fewer if the model has not so many positions.

    Raises:
      ConfigError: the model is no decoder of text alone.
    """
    model, runner = predictor.config.model, predictor.runner
    sentences.check(model, "induction")
    if model.decoder is None or model.encoder is not None:
        raise ConfigError("induction: got a model with an encoder or without layers, expected a decoder alone")
    limit = runner.max_target_length
    length = length if limit is None else min(length, limit // 2)
    vocab = model.decoder.embed.vocab or 0
    half = np.random.default_rng(seed).choice(vocab, length, replace=vocab < length).astype(np.int32)
    ids = np.concatenate([half, half])
    reader, size = Reader(runner.module, runner.variables), len(ids)
    reader.check_heads("induction")
    rows = []
    for visit in reader.walk(sentences.row_of_ids(ids, "target"), maps=lambda side, layer: True):
        if visit.output.attention is not None:
            maps = np.asarray(visit.output.attention[:, :, :size, :size])
            rows.append(measures.head_scores(maps, ids)["induction"][0])
    return {"decoder": np.stack(rows)}
