"""Searches of a random configuration: options of `generate` that `hugging_face_random.py` compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hugging_face_calls as calls
import numpy as np

Hypotheses = tuple[np.ndarray, np.ndarray, int]
"""Of a beam search: tokens `[rows * n, length]`, scores `[rows * n]`, rows."""

OPTION_RATE = 0.25
"""The share of searches that have each option."""
COUNTS_PADDING = ("no_repeat_ngram_size", "bad_words_ids", "repetition_penalty")
"""Options that count a prompt's padding in the other library and not here (docs/hugging-face.md)."""


ONE_TOKEN = ({"top_k": 1}, {"top_k": 1, "temperature": 1.7}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-5},
    {"top_k": 2, "top_p": 1e-6, "temperature": 0.5})  # fmt: skip
"""Options of sampling that leave the likeliest token alone, so that its ids can be compared."""
IN_FILE = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id",
    "forced_bos_token_id", "min_length", "length_penalty", "early_stopping", "max_length", "max_new_tokens",
    "eos_token_id", "pad_token_id", "num_beams", "bad_words_ids", "decoder_start_token_id")  # fmt: skip
"""Options that generation_config.json may hold. A call sets them to another value, to None, or leaves them."""
TO_NONE = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id",
    "forced_bos_token_id", "bad_words_ids", "eos_token_id")  # fmt: skip
"""Options that the other library's calls may set to None."""


def file_options(is_pair: bool, vocab: int, rng: np.random.Generator) -> dict[str, Any]:
    """Options of a generation_config.json: {} half of the time."""
    if rng.random() < 0.5:
        return {}
    found = options_of(is_pair, vocab, np.arange(3, vocab), int(rng.integers(1, 12)), rng)
    return {name: value for name, value in found.items() if name in IN_FILE}


def beside_file(options: dict[str, Any], in_file: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A call's options beside those of the file: some of the file's are left as they are, or set to None."""
    lengths = {"max_length", "max_new_tokens"}
    kept = {name: x for name, x in options.items() if name not in in_file or name in lengths or rng.random() < 0.5}
    off = {name: None for name in in_file if name in TO_NONE and name not in kept and rng.random() < 0.4}
    return kept | off


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
    if beams == 1 and may(0.4):
        found |= {"do_sample": True, "num_return_sequences": int(rng.choice([1, 3]))}
        found |= ONE_TOKEN[int(rng.integers(len(ONE_TOKEN)))]
    elif beams == 1 and may(0.2):
        found["prompt_lookup_num_tokens"] = int(rng.integers(1, 4))
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


def first_of(tokens: np.ndarray, alike: Sequence[int]) -> np.ndarray:
    """The tokens, with the first of `alike` in place of the others."""
    return np.where(np.isin(tokens, alike), alike[0], tokens)


def same_hypotheses(ours: Hypotheses, theirs: Hypotheses, alike: Sequence[int] = ()) -> bool:
    """True if each row has the same texts with the same scores. Texts of equal scores may have any order.

    Args:
      alike: tokens that count as one: several forced ends have equal scores, and which of them ends a text is chance.
    """
    is_missing = ~np.isfinite(ours[1])  # theirs fills such a place with tokens, and with a score of nearly -1e9
    if ours[0].shape != theirs[0].shape or (is_missing != ~(theirs[1] > -1e8)).any():
        return False
    found = []
    for sequences, scores, rows in (ours, theirs):
        row = np.arange(len(scores)) * rows // len(scores)
        texts = [tuple(np.where(np.isin(text, alike), -1, text).tolist()) for text in sequences]
        found.append(
            sorted(x for x, gone in zip(zip(row, texts, scores, strict=True), is_missing, strict=True) if not gone)
        )
    size = np.abs(theirs[1][~is_missing]).max(initial=1e-9)
    return all(a[:2] == b[:2] and abs(a[2] - b[2]) <= 2e-5 * size for a, b in zip(*found, strict=True))
