"""Searches of a random configuration: options of `generate` that `hugging_face_random.py` compares."""

from __future__ import annotations

from typing import Any

import hugging_face_calls as calls
import numpy as np

OPTION_RATE = 0.25
"""The share of searches that have each option."""
COUNTS_PADDING = ("no_repeat_ngram_size", "bad_words_ids")
"""Options that count a prompt's padding in the other library and not here (docs/hugging-face.md)."""


def options_of(is_pair: bool, vocab: int, likely: np.ndarray, prompt: int, rng: np.random.Generator) -> dict[str, Any]:
    """Options of a search.

    Args:
      likely: tokens that a search without options writes, so that ends, bans and forced tokens change something.
      prompt: number of slots of the prompt.
    """
    pick = lambda: int(rng.choice(likely)) if rng.random() < 0.7 else int(rng.integers(3, vocab))  # noqa: E731
    beams = int(rng.choice([1, 2, 3, 4]))
    new = int(rng.choice([1, 5, 8]))
    found: dict[str, Any] = {"max_new_tokens": new, "num_beams": beams, "do_sample": False}
    may = lambda rate=OPTION_RATE: rng.random() < rate  # noqa: E731
    if may(0.6):
        found["eos_token_id"] = pick() if may(0.6) else [pick(), pick()]
    if may(0.4):
        found["pad_token_id"] = int(rng.integers(0, vocab))
    if may():
        found["repetition_penalty"] = float(rng.choice([1.3, 0.7, 2.5]))
    if may():
        found["no_repeat_ngram_size"] = int(rng.choice([1, 2, 3]))
    if may():
        found["bad_words_ids"] = [[pick()], [pick(), pick()], [pick(), pick(), pick()]][: int(rng.integers(1, 4))]
    if may():
        found["suppress_tokens"] = [pick() for _ in range(int(rng.integers(1, 3)))]
    if may():
        found["forced_eos_token_id"] = pick() if may(0.5) else [pick(), pick()]
    if is_pair and may():
        found["forced_bos_token_id"] = pick()
    if is_pair and may():
        found["decoder_start_token_id"] = pick()
    if may():
        found["min_new_tokens"] = int(rng.integers(1, new + 1))
    elif may():
        found["min_length"] = prompt + int(rng.integers(0, new + 1))
    if may():
        del found["max_new_tokens"]
        found["max_length"] = prompt + new
    if beams > 1:
        found["num_return_sequences"] = int(rng.integers(1, beams + 1))
        if may(0.5):
            found["length_penalty"] = float(rng.choice([0.6, 2.0, 0.0, -1.0]))
        if may(0.6):
            found["early_stopping"] = [True, False, "never"][int(rng.integers(3))]
    return found


def search_inputs(
    config: Any, texts: dict[str, dict[str, Any]], rng: np.random.Generator
) -> tuple[str, dict[str, Any]]:
    """The prompts: of which call, and the arguments."""
    which = str(rng.choice([name for name in ("right", "left", "whole", "one token") if name in texts]))
    if which == "right" and not config.is_encoder_decoder:
        which = "left"  # theirs goes on behind the padding
    given = {key: texts[which][key] for key in ("input_ids", "attention_mask") if key in texts[which]}
    given.setdefault("attention_mask", np.ones_like(given["input_ids"]))
    if config.is_encoder_decoder and rng.random() < 0.25:
        plain = calls.plain_tokens(calls.sides(config)[1])
        given["decoder_input_ids"] = plain[rng.integers(0, len(plain), (len(given["input_ids"]), 3))]
    return which, given


def drop_counting(options: dict[str, Any], given: dict[str, Any], is_pair: bool) -> dict[str, Any]:
    """The options without those that see a prompt's padding, if there is some."""
    if is_pair or given["attention_mask"].all():
        return options
    return {name: value for name, value in options.items() if name not in COUNTS_PADDING}
