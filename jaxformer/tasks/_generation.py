"""Shared by tasks that write text: decoding options, and prompts to hypotheses to text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import Config, DecodeConfig, overrides
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.tasks import Predictor, text_lines

METHOD_OPTIONS = {
    "beam": ("beams", "length_norm", "length_penalty", "stopping"),
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed"),
}
"""Decoding method -> options that choose it, if `method` itself is not among the options."""


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
        results[index] = [Output(_new_text(tokenizer, prompt_ids, h.tokens), h.score, h.tokens) for h in hypotheses]
    return results


def best_texts(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[str]:
    """The best output of each line; "" if it has none."""
    return [candidates[0].text if candidates else "" for candidates in outputs(predictor, lines, options)]


def _new_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: np.ndarray) -> str:
    """The text that new tokens add to the prompt's: a tokenizer may join characters across the border."""
    before, complete = tokenizer.decode(list(prompt_ids)), tokenizer.decode([*prompt_ids, *tokens.tolist()])
    return complete[len(before) :] if complete.startswith(before) else tokenizer.decode(tokens.tolist())
