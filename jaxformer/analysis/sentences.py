"""Lines of text as the batches that an analysis reads, one line a batch, with the names of their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.decode.batching import bucket_length, buckets_within, pad_batch
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, text_lines
from jaxformer.types import Batch

REPLACEMENT = "\ufffd"
WORD_MARKS = ("Ġ", "▁")
"""Signs of two kinds of vocabularies for the blank before a word."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """A line as a model reads it.

    Attributes:
      text: the line.
      batch: one row, padded to the length of the longest of its call, and to a bucket, so that few shapes are
        compiled.
      ids: int32 `[n]` of the sides that the model reads, "source" and "target"; without padding.
      tokens: their names, as people read them.
      cut: number of tokens of the line that were not read.
      written: int32 `[m]`, the output of an encoder-decoder with its end, if it is the model's own; else None.
    """

    text: str
    batch: Batch
    ids: dict[str, np.ndarray]
    tokens: dict[str, tuple[str, ...]]
    cut: int = 0
    written: np.ndarray | None = None

    @property
    def last(self) -> str:
        """The side below the head."""
        return "target" if "target" in self.ids else "source"


def check(model: ModelConfig, method: str) -> None:
    """Raises a ConfigError, which begins with `method`, if the model reads no tokens or has no layers."""
    if not model.reads_tokens or model.series is not None or model.linear is not None:
        raise ConfigError(f"{method}: got a model of series, expected one that reads text; it has no tokens to name")
    recurrent = model.recurrent_encoder is not None or model.recurrent_decoder is not None
    if not recurrent and not any(stack.layers for stack in model.stacks.values()):
        raise ConfigError(f"{method}: got a model without layers (word vectors), expected some; use model.nearest")


def read(predictor: Predictor, lines: Sequence[str], targets: Sequence[str] | None = None) -> list[Sentence]:
    """Each line as the model's task frames it.

    The decoder of an encoder-decoder reads its start token and `targets[i]`, or without targets the model's best output
    for the line, without its end. Row t of what is computed then belongs to the step that chooses token t + 1.

    Raises:
      ConfigError: targets are given to another model or are not as many as lines, or a line has no tokens or too many.
    """
    lines, model = text_lines(lines), predictor.config.model
    if targets is not None and not model.is_seq2seq:
        raise ConfigError("targets: got some, expected none: only a model with encoder and decoder reads them")
    if targets is not None and len(text_lines(targets)) != len(lines):
        raise ConfigError(f"targets: got {len(targets)}, expected as many as lines, {len(lines)}")
    prompts = [plain(model, prompt) for prompt in predictor.prompts(lines)]
    for number, prompt in enumerate(prompts):
        if not len(prompt.get("source", prompt.get("target", ()))):
            raise ConfigError(f"line {number + 1}: got no tokens, expected some; write a text")
    written: list[np.ndarray | None] = [None] * len(lines)
    if model.is_seq2seq and targets is None:
        options = dataclasses.replace(predictor.config.decode, hypotheses=1)
        found = predictor.runner.generate(prompts, options)
        written = [outputs[0].tokens if outputs else np.zeros(0, np.int32) for outputs in found]
    if model.is_seq2seq:
        prompts = with_targets(predictor, prompts, targets, written)
    longest = [max(len(prompt.get(side, ())) for prompt in prompts) for side in ("source", "target")]
    parts = zip(lines, prompts, written, strict=True)
    return [sentence(predictor, line, prompt, tokens, longest) for line, prompt, tokens in parts]


def plain(model: ModelConfig, prompt: Features) -> Features:
    """The prompt without the order of a permutation; of an encoder alone its text is the source."""
    prompt = {name: value for name, value in prompt.items() if name not in ("order", "targets")}
    if not model.has_decoder and "source" not in prompt:
        prompt["source"] = prompt.pop("target")
    return prompt


def with_targets(
    predictor: Predictor,
    prompts: Sequence[Features],
    targets: Sequence[str] | None,
    written: Sequence[np.ndarray | None],
) -> list[Features]:
    """The prompts with a complete target each: the text that is given, or what the model wrote, without its end."""
    vocabulary, tokenizer = predictor.runner.vocabulary, predictor.framing.tokenizers.target
    start = [] if vocabulary.start is None else [vocabulary.start]
    complete = []
    for index, (prompt, own) in enumerate(zip(prompts, written, strict=True)):
        tokens = tokenizer.encode(targets[index]) if targets is not None else [] if own is None else own.tolist()
        if targets is None and tokens and tokens[-1] in vocabulary.eos:
            tokens = tokens[:-1]
        complete.append({**prompt, "target": np.asarray([*prompt.get("target", start), *tokens], np.int32)})
    return complete


def sentence(
    predictor: Predictor, line: str, prompt: Features, written: np.ndarray | None, longest: Sequence[int]
) -> Sentence:
    """The sentence of a prompt, padded like one of `longest` tokens in source and target.

    Raises:
      ConfigError: it has more tokens than the model has positions.
    """
    runner, tokenizers = predictor.runner, predictor.framing.tokenizers
    limits = {"source": runner.max_source_length, "target": runner.max_target_length}
    ids = {side: np.asarray(prompt[side], np.int32) for side in ("source", "target") if side in prompt}
    for side, tokens in ids.items():
        limit = limits[side]
        if limit is not None and len(tokens) > limit:
            raise ConfigError(
                f"line {line[:40]!a}: got {len(tokens)} tokens, expected at most the model's {limit} positions; "
                "shorten it"
            )
    buckets = buckets_within(runner.buckets, *limits.values())
    source, target = ((bucket_length(size, buckets),) for size in longest)
    batch = pad_batch([prompt], 1, (runner.source_pad, runner.vocabulary.pad), source, target)
    names = {side: token_names(getattr(tokenizers, side), tokens) for side, tokens in ids.items()}
    return Sentence(line, batch, ids, names, int(prompt.get("cut", 0)), written)


def row_of_ids(ids: np.ndarray, side: str) -> Batch:
    """A batch of one row of ids of one side, padded."""
    return pad_batch([{side: ids}], 1, (0, 0), (bucket_length(len(ids)),))


def token_names(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """The piece of each id, with "▁" for the blank before a word; pieces of bytes as the characters they stand for.

    Rows of the embedding beyond the vocabulary are named by their numbers.
    """
    return tuple(_token_name(tokenizer, int(token)) for token in ids)


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    if token >= tokenizer.size:
        return f"[{token}]"
    piece = str(tokenizer.vocabulary.pieces[token])
    text = tokenizer.decode([token])
    if not text.strip() or REPLACEMENT in text:
        return "▁" if piece in WORD_MARKS else piece
    starts_word = piece.startswith(WORD_MARKS) or (piece != text.strip() and text[0].isspace())
    return "▁" + text.strip() if starts_word else text.strip()
