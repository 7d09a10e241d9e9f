"""How a model writes: the tokens of its output with their alternatives, and the tree of a beam search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from jaxformer.analysis import sentences
from jaxformer.analysis.layers import Reader
from jaxformer.analysis.lens import by_position, read_logits
from jaxformer.config import DecodeConfig
from jaxformer.decode.batching import buckets_within, pad_batch
from jaxformer.decode.compiled import CompiledDecoder, forward
from jaxformer.decode.generate import check_rotations, compiled_options, max_new_tokens
from jaxformer.decode.search.base import RowSettings
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor
from jaxformer.types import Array, Batch


@dataclass(frozen=True, eq=False)
class Steps:
    """The output of a model, token by token.

    Attributes:
      prompt: names of the tokens before the first step, those of the target side.
      ids, tokens: int32 `[n]` chosen tokens and their names.
      alternative_ids: int32 `[n, k]`, the likeliest tokens at each step, best first, before any logits processor.
      alternatives: their names.
      probs: float32 `[n, k]`, their probabilities.
      chosen_probs: float32 `[n]`, the probability of the chosen token.
    """

    prompt: tuple[str, ...]
    ids: np.ndarray
    tokens: tuple[str, ...]
    alternative_ids: np.ndarray
    alternatives: tuple[tuple[str, ...], ...]
    probs: Float32[np.ndarray, "n k"]
    chosen_probs: Float32[np.ndarray, " n"]


@dataclass(frozen=True)
class Node:
    """A hypothesis of a beam search: its parent's tokens and one more.

    Attributes:
      parent: index of the parent in the tree; -1: the prompt.
      step: number of tokens.
      token: name of the last one, `id` its id.
      log_prob: log-probability (natural logarithm) of all of its tokens.
      score: what finished hypotheses compete by, the log-probability divided by the length penalty; None: not finished.
      is_best: True for the search's result and the hypotheses before it.
    """

    parent: int
    step: int
    token: str
    id: int
    log_prob: float
    score: float | None = None
    is_best: bool = False


def check(predictor: Predictor) -> None:
    """Raises a ConfigError if a model writes no text."""
    model = predictor.config.model
    if not model.has_decoder or model.head.kind != "tokens":
        raise ConfigError("generation: got a model that writes no text, expected a decoder with a head of tokens")


def prompt_of(predictor: Predictor, line: str, forced: Sequence[int] = ()) -> Features:
    """The prompt of a line, followed by `forced` tokens in the target.

    Raises:
      ConfigError: a forced token is not in the vocabulary, or there is no token to begin with.
    """
    prompt, vocabulary = predictor.framing.prompt(line), predictor.runner.vocabulary
    size = vocabulary.size or predictor.framing.tokenizers.target.size
    if any(not 0 <= token < size for token in forced):
        raise ConfigError(f"forced: got {list(forced)}, expected token ids of 0 to {size - 1}")
    start = prompt.get("target", [] if vocabulary.start is None else [vocabulary.start])
    target = np.asarray([*start, *forced], np.int32)
    if not len(target):
        raise ConfigError("generation: got no tokens, expected some; write a text")
    return {**prompt, "target": target}


def steps(
    predictor: Predictor,
    line: str,
    options: DecodeConfig,
    forced: Sequence[int] = (),
    top: int = 8,
    written: np.ndarray | None = None,
) -> Steps:
    """The best output of a line, with the alternatives of every token.

    Args:
      options: how to decode; an output ends at the model's last position.
      forced: tokens that the output begins with; they are steps, too.
      top: number of alternatives.
      written: the output, if it is known.
    """
    check(predictor)
    runner, tokenizer = predictor.runner, predictor.framing.tokenizers.target
    start = prompt_of(predictor, line)
    if written is None:
        has_ended = bool(forced) and forced[-1] in runner.vocabulary.eos
        prompts = [] if has_ended else [prompt_of(predictor, line, forced)]
        found = [output for outputs in runner.generate(prompts, _bounded(options)) for output in outputs]
        written = np.asarray([*forced, *(found[0].tokens if found else [])], np.int32)
    before, count = len(start["target"]), len(written)
    limit = runner.max_target_length
    if limit is not None and before + count - 1 > limit:
        got = f"{before + count} tokens"
        raise ConfigError(f"generation: got {got}, expected at most the model's {limit} positions; shorten the text")
    read = np.concatenate([start["target"], written])[: max(before + count - 1, before)]
    logits = final_logits(predictor, padded(predictor, {**start, "target": read}))
    scores = by_position(logits, len(read), runner.vocabulary.size)[before - 1 : before - 1 + count]
    readings = read_logits(scores, jnp.asarray(written), min(top, scores.shape[-1]))
    names = functools.partial(sentences.token_names, tokenizer)
    alternatives = np.asarray(readings.ids)
    return Steps(
        prompt=names(start["target"]),
        ids=written,
        tokens=names(written),
        alternative_ids=alternatives,
        alternatives=tuple(names(row) for row in alternatives),
        probs=np.exp(np.asarray(readings.log_probs)),
        chosen_probs=np.exp(np.asarray(readings.reference)),
    )


def _bounded(options: DecodeConfig) -> DecodeConfig:
    """The options for one output with the parameters as they are, which are also read for the alternatives."""
    return dataclasses.replace(options, hypotheses=1, past_positions="stop", weights="float")


def final_logits(predictor: Predictor, batch: Batch) -> Float32[Array, "B T V"]:
    """The model's logits of a batch; of a transformer a layer at a time."""
    runner, model = predictor.runner, predictor.config.model
    if model.decoder is None:
        return forward(runner.module, runner.variables, batch, None, None)
    reader = Reader(runner.module, runner.variables)
    *_, last = reader.walk(batch)
    return reader.logits(last.output.x, last.inputs.slots)


def padded(predictor: Predictor, prompt: Features) -> Batch:
    """The batch of one prompt."""
    runner = predictor.runner
    buckets = buckets_within(runner.buckets, runner.max_target_length, runner.max_source_length)
    return pad_batch([prompt], 1, (runner.source_pad, runner.vocabulary.pad), buckets)


# --- beam search ------------------------------------------------------------------------------------------------------


def beam_tree(predictor: Predictor, line: str, options: DecodeConfig) -> list[Node]:
    """All hypotheses that were live or finished in a beam search for a line, in the order of their steps.

    The search is that of decoding (`decode/search/beam.py`), one step at a time.

    Args:
      options: with method "beam".

    Raises:
      ConfigError: the model writes no text, or the options are not those of a beam search.
    """
    check(predictor)
    if options.method != "beam":
        raise ConfigError(f"beam_tree: got decode.method {options.method}, expected beam")
    runner, prompt = predictor.runner, prompt_of(predictor, line)
    options = _bounded(options)
    longest = max_new_tokens(prompt, options, runner.max_target_length)
    check_rotations(runner, [prompt], [longest])
    decoder = CompiledDecoder(runner.module, compiled_options(options, longest), runner.vocabulary)
    variables, batch = decoder.prepare_variables(runner.variables), padded(predictor, prompt)
    rows = RowSettings(np.asarray([longest], np.int32), np.zeros(1, np.int32), jax.random.key(0))
    state = decoder.prefill(variables, batch, rows)
    schedule = decoder.schedule_for(state.model, batch.side("target").tokens.shape[1])
    if len(schedule.capacities) > 1:
        state = state._replace(model=decoder.grow(state.model, schedule, schedule.capacities[-1]))
    tree = _Tree(predictor, decoder.search)
    while True:
        # Copies: the arrays of a state are given away with it.
        tree.add(jax.tree.map(np.array, state.search._replace(prompt=None)))
        if bool(np.all(decoder.search.is_finished(state.search))):
            return tree.finish(np.asarray(decoder.hypotheses(state.search).tokens[0, 0]))
        state, _ = decoder.decode_steps(variables, state, np.int32(1), np.int32(1))


class _Tree:
    """The nodes of a search in progress, found by their tokens."""

    def __init__(self, predictor: Predictor, search: Any) -> None:
        self.tokenizer, self.search = predictor.framing.tokenizers.target, search
        self.nodes: list[Node] = []
        self.index: dict[tuple[int, ...], int] = {}

    def add(self, state: Any) -> None:
        """The live hypotheses and the pool after a step."""
        size = int(state.step[0])
        for tokens, score in zip(state.tokens[0], state.scores[0], strict=True):
            if np.isfinite(score):
                self.insert(tuple(map(int, tokens[:size])), float(score), None)
        pool = state.pool
        for tokens, length, score in zip(pool.tokens[0], pool.lengths[0], pool.scores[0], strict=True):
            if length > 0:
                divisor = float(self.search.length_divisor(jnp.asarray(int(length))))
                self.insert(tuple(map(int, tokens[:length])), float(score) * divisor, float(score))

    def insert(self, tokens: tuple[int, ...], log_prob: float, score: float | None) -> None:
        """A hypothesis; one that was live before may now be finished."""
        if tokens in self.index:
            at = self.index[tokens]
            self.nodes[at] = dataclasses.replace(
                self.nodes[at], score=score if score is not None else self.nodes[at].score
            )
            return
        self.index[tokens] = len(self.nodes)
        name = sentences.token_names(self.tokenizer, tokens[-1:])[0]
        parent = self.index.get(tokens[:-1], -1)
        self.nodes.append(Node(parent, len(tokens), name, tokens[-1], log_prob, score))

    def finish(self, best: Int[np.ndarray, " T"]) -> list[Node]:
        """All nodes, those of the best hypothesis marked."""
        marked = [node for node in range(len(self.nodes)) if self.nodes[node].score is not None]
        key = tuple(map(int, best))
        ends = [at for tokens, at in self.index.items() if at in marked and tokens == key[: len(tokens)]]
        at = max(ends, key=lambda node: self.nodes[node].score or 0.0, default=-1)
        while at >= 0:
            self.nodes[at] = dataclasses.replace(self.nodes[at], is_best=True)
            at = self.nodes[at].parent
        return self.nodes
