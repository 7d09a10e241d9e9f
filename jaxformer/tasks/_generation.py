"""Shared by tasks that write text: decoding options, and prompts to hypotheses to text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import Config, DecodeConfig, overrides
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, text_lines

METHOD_OPTIONS = {
    "beam": ("beams", "length_norm", "length_penalty", "stopping"),
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed"),
}
"""Decoding method -> options that choose it, if `method` itself is not among the options."""


INCOMPLETE = "\ufffd"
"""Stands for bytes that are no character, or not yet: the next tokens may complete it."""
MAX_INCOMPLETE = 3
"""Bytes that an incomplete character of UTF-8 may have, each of which may be decoded as one `INCOMPLETE`."""


class Output(NamedTuple):
    """One decoded text, its new tokens int32 `[n]`, and its score (see `jaxformer.decode.generate.Hypothesis`)."""

    text: str
    score: float
    tokens: np.ndarray


def decode_options(config: Config, decode: DecodeConfig | None, options: Mapping[str, Any]) -> DecodeConfig:
    """The options of one call: fields of `DecodeConfig` that replace those of `decode`, validated as a recipe is.

    Args:
      decode: None: `config.decode`.

    Raises:
      ConfigError: an option is unknown or out of range, or options of two decoding methods are mixed.
    """
    if "method" not in options:
        implied = [method for method, names in METHOD_OPTIONS.items() if any(name in options for name in names)]
        if len(implied) > 1:
            got = ", ".join(options)
            raise ConfigError(f"decode options: got {got}, expected one method's; add method='beam' or 'sample'")
        options = {**options, **({"method": implied[0]} if implied else {})}
    base = dataclasses.asdict(config.decode if decode is None else decode)
    return overrides.freeze({**dataclasses.asdict(config), "decode": {**base, **options}}).decode


def outputs(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[list[Output]]:
    """Up to `options.hypotheses` outputs per line, best first.

    An encoder-decoder has none for an empty line. A decoder's outputs leave out the prompt.
    """
    lines, seq2seq = text_lines(lines), predictor.config.model.is_seq2seq
    row_indices = [i for i, line in enumerate(lines) if line.strip() or not seq2seq]
    prompts = predictor.prompts([lines[i] for i in row_indices])
    found = predictor.runner.generate(prompts, options, row_indices=np.asarray(row_indices, np.int32))
    tokenizer = predictor.framing.tokenizers.target
    results: list[list[Output]] = [[] for _ in lines]
    for index, prompt, hypotheses in zip(row_indices, prompts, found, strict=True):
        prompt_ids = [] if seq2seq else list(prompt.get("target", ()))
        results[index] = [
            Output(new_text(tokenizer, prompt_ids, h.tokens.tolist()), h.score, h.tokens) for h in hypotheses
        ]
    return results


def reply_texts(predictor: Predictor, prompts: Sequence[Features], options: DecodeConfig) -> list[str]:
    """The best answer to each chat prompt: the text of the new tokens alone, without the end token."""
    tokenizer, found = predictor.framing.tokenizers.target, predictor.runner.generate(prompts, options)
    return [new_text(tokenizer, [], outputs[0].tokens.tolist()) if outputs else "" for outputs in found]


def best_texts(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[str]:
    """The best output of each line; "" if it has none."""
    return [candidates[0].text if candidates else "" for candidates in outputs(predictor, lines, options)]


def stream(predictor: Predictor, line: str, options: DecodeConfig) -> Iterator[str]:
    """`best_texts` of one line, in pieces as tokens are chosen. Checks come before the first piece.

    Raises:
      ConfigError: as `best_texts`, or the options choose a beam search or several outputs.
    """
    (line,), seq2seq = text_lines([line]), predictor.config.model.is_seq2seq
    prompt = predictor.framing.prompt(line)
    pieces = predictor.runner.stream(prompt, options)
    if seq2seq and not line.strip():
        return iter(())
    return texts(predictor.framing.tokenizers.target, [] if seq2seq else list(prompt.get("target", ())), pieces)


def texts(tokenizer: Tokenizer, prompt_ids: Sequence[int], pieces: Iterable[np.ndarray]) -> Iterator[str]:
    """Pieces of text, none of them empty, that add up to `new_text` of all tokens. See `TextStream`."""
    stream = TextStream(tokenizer, prompt_ids)
    for piece in pieces:
        text = stream.push(piece.tolist())
        if text:
            yield text
    text = stream.end()
    if text:
        yield text


class TextStream:
    """The text of tokens that come in pieces.

    Text is kept back while its last character may be incomplete. All tokens so far are decoded for every piece, since
    a tokenizer may join tokens.

    Attributes:
      tokens: all tokens so far.
      given: the text that has been given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.prompt_ids = tokenizer, prompt_ids
        self.tokens: list[int] = []
        self.given = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Adds tokens; the text that is final because of them, perhaps none."""
        self.tokens += tokens
        return self._give(final_text(self.tokenizer, self.prompt_ids, self.tokens))

    def end(self) -> str:
        """The rest of the text, an incomplete character included.

        Raises:
          ConfigError: the tokenizer changes text before the last token, so that no beginning of it is final.
        """
        text = new_text(self.tokenizer, self.prompt_ids, self.tokens)
        if not text.startswith(self.given):
            raise ConfigError(
                f"stream: got a tokenizer that changes text which it has decoded ({self.given[-20:]!a} in "
                f"{text[-40:]!a}), expected one that only adds to it; call without streaming"
            )
        return self._give(text)

    def _give(self, text: str) -> str:
        if len(text) <= len(self.given) or not text.startswith(self.given):
            return ""
        new, self.given = text[len(self.given) :], text
        return new


def final_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
    """The beginning of `new_text` that stays the same whatever tokens follow."""
    settled = tokens[: tokenizer.settled_count(tokens)]
    if not settled:
        return ""
    text = new_text(tokenizer, prompt_ids, settled)
    unfinished = len(text) - len(text.rstrip(INCOMPLETE))
    return text[: len(text) - min(unfinished, MAX_INCOMPLETE)]


def new_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that new tokens add to the prompt's: a tokenizer may join characters across the border."""
    before, complete = tokenizer.decode(prompt_ids), tokenizer.decode([*prompt_ids, *tokens])
    return complete[len(before) :] if complete.startswith(before) else tokenizer.decode(tokens)
