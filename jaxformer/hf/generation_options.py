"""Options of `generate` under the other library's names, turned into a `DecodeConfig`. The rules are of version 5."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DecodeConfig, ModelConfig, hints
from jaxformer.config.checks import fields
from jaxformer.errors import ConfigError
from jaxformer.hf import reading

log = logging.getLogger("jaxformer")

MAX_TOKEN_ID = 2**31 - 1

DEFAULT_NEW_TOKENS = 20
"""Greatest number of new tokens if no length is set."""

DEFAULTS: dict[str, Any] = {
    "max_length": None, "max_new_tokens": None, "min_length": None, "min_new_tokens": None, "num_beams": 1,
    "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False, "do_sample": False, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "bad_words_ids": None, "suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": None, "seed": 0,
    "return_dict_in_generate": False, "use_cache": True, "use_mems": None, "prompt_lookup_num_tokens": None,
}  # fmt: skip
"""Every argument but the inputs, with the other library's default. `seed` exists here only: there it is global."""

OFF = {**DEFAULTS, "top_k": 0}
"""Values for options that a call sets to None: switched off, whatever generation_config.json says."""

STOPPING = {True: "first", False: "estimate", "never": "exact"}
UNSUPPORTED: dict[str, Any] = {
    "begin_suppress_tokens": None, "constraints": None, "diversity_penalty": 0.0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "guidance_scale": 1.0, "max_time": None,
    "num_beam_groups": 1, "penalty_alpha": 0.0, "renormalize_logits": False, "sequence_bias": None,
    "stop_strings": None, "top_h": None, "typical_p": 1.0, "watermarking_config": None,
}  # fmt: skip
"""Options of the other library that are not supported here, with the values that ask for nothing."""


class TokenLimits(NamedTuple):
    """The greatest number of new tokens, and the number before which no end token is chosen."""

    max_new: int
    min_new: int


def read_defaults(directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options from generation_config.json; without that file, from config.json (`settings`).

    Only one of the two counts: a generation_config.json replaces all options of an old config.json.
    """
    path = Path(directory) / "generation_config.json"
    if path.exists():
        found = reading.read_config(directory, path.name)
        metadata = ("transformers_version", "_from_model_config")
        unknown = [name for name in found if name not in (*DEFAULTS, *metadata)]
    else:
        path, found = Path(directory) / "config.json", config_defaults(settings)
        unknown = [name for name in UNSUPPORTED if name in settings]
    unknown = [name for name in unknown if _asks(name, {**settings, **found}[name])]
    if unknown:
        log.warning("%s: generation here knows no %s, and goes without", path, ", ".join(unknown))
    return found


def _asks(name: str, value: Any) -> bool:
    """True if the value of an option that is not supported asks for something."""
    return value is not None and value is not False and value != [] and value != UNSUPPORTED.get(name)


def config_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate` that a config.json holds."""
    found = {name: settings[name] for name in DEFAULTS if name != "seed" and settings.get(name) is not None}
    if settings.get("force_bos_token_to_be_generated"):  # what BART's oldest files call it
        found["forced_bos_token_id"] = settings.get("bos_token_id")
    return found


def resolve_options(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option's value: of the call, else of the model (`defaults`), else of `DEFAULTS`.

    Raises:
      ConfigError: options contradict each other, or are not supported.
    """
    values = dict(DEFAULTS)
    values |= {name: value for name, value in defaults.items() if name in DEFAULTS and value is not None}
    values |= {name: OFF[name] if options[name] is None else options[name] for name in DEFAULTS if name in options}
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    for name in ("num_beams", "num_return_sequences"):
        if _integer(values, name) < 1:
            raise ConfigError(f"generate: got {name} {values[name]}, expected at least 1")
    if values["use_mems"]:
        raise ConfigError("generate: got use_mems True, expected False: each step reads the whole text, not memories")
    if values["do_sample"] and values["num_beams"] > 1:
        raise ConfigError(
            "generate: got do_sample with num_beams > 1, expected one of them; beams are not sampled here"
        )
    if values["prompt_lookup_num_tokens"] and values["num_beams"] > 1:
        raise ConfigError("generate: got prompt_lookup_num_tokens with num_beams > 1, expected one of them")
    if not values["do_sample"] and values["num_return_sequences"] > values["num_beams"]:
        got = f"num_return_sequences {values['num_return_sequences']} with num_beams {values['num_beams']}"
        raise ConfigError(f"generate: got {got}, expected at most as many; raise num_beams or set do_sample")
    return values


def _integer(settings: Mapping[str, Any], name: str) -> int:
    """The value of an integer option.

    Raises:
      ConfigError: it is no integer.
    """
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"generate: got {name} {value!r}, expected a whole number")
    return value


def new_token_limits(settings: Mapping[str, Any], prompt: int, positions: int | None) -> TokenLimits:
    """The limits on new tokens after a prompt.

    Args:
      prompt: number of slots of the prompt.
      positions: number of positions that the model was made for; None: not stated.

    Raises:
      ConfigError: a length is no whole number, or allows no new token.
    """
    names = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
    limits = {name: _integer(settings, name) for name in names if settings[name] is not None}
    for name, value in limits.items():
        if value < 0:
            raise ConfigError(f"generate: got {name} {value}, expected at least 0")
    for end in ("max", "min"):
        if {f"{end}_length", f"{end}_new_tokens"} <= set(limits):
            log.warning("generate: both %s_length and %s_new_tokens are set; %s_new_tokens counts", end, end, end)
    max_new = DEFAULT_NEW_TOKENS if positions is None else min(DEFAULT_NEW_TOKENS, positions - prompt)
    if "max_new_tokens" in limits:
        max_new = limits["max_new_tokens"]
    elif "max_length" in limits:
        max_new = limits["max_length"] - prompt
    if max_new < 1:
        name = next((name for name in ("max_new_tokens", "max_length") if name in limits), None)
        got = f"a prompt of {prompt} tokens" + ("" if name is None else f" with {name} {limits[name]}")
        expected = f"fewer than the model's {positions}" if name is None else "room for a token"
        raise ConfigError(f"generate: got {got}, expected {expected}; shorten it or set max_new_tokens")
    min_new = limits["min_new_tokens"] if "min_new_tokens" in limits else max(limits.get("min_length", 0) - prompt, 0)
    if min_new > max_new:
        log.warning(
            "generate: at least %d new tokens asked for, and at most %d: no end token is chosen", min_new, max_new
        )
    return TokenLimits(max_new, min(min_new, max_new))


def stated_positions(model: ModelConfig) -> int | None:
    """Number of positions that the generating side was made for; None if its encoding states none."""
    stack = model.decoder or model.encoder
    stated = stack is not None and stack.encoding.kind in ("learned", "sinusoidal", "rope")
    return stack.encoding.max_length - stack.encoding.offset if stack is not None and stated else None


def padding_and_ends(settings: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The padding token and the tokens that end a text."""
    pad, ends = settings.get("pad_token_id"), token_ids("eos_token_id", settings.get("eos_token_id"))
    if pad is None:
        return ends[0] if ends else 0, ends
    tokens = token_ids("pad_token_id", pad)
    if len(tokens) != 1 or abs(tokens[0]) > MAX_TOKEN_ID:
        raise ConfigError(f"generate: got pad_token_id {pad!r}, expected one token id of 32 bits")
    return tokens[0], ends


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A token id or a list of them as a tuple; () for None.

    Raises:
      ConfigError: the value is something else.
    """
    if value is None:
        return ()
    array = np.asarray(value)
    if array.size == 0:
        return ()
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise ConfigError(f"generate: got {name} {value!r}, expected a token id or a list of them")
    return tuple(int(token) for token in array.reshape(-1))


def check_tokens(name: str, tokens: Any, vocab: int) -> Any:
    """Returns `tokens`.

    Raises:
      ConfigError: one is not in the vocabulary.
    """
    outside = [int(token) for token in np.asarray(tokens).reshape(-1) if not 0 <= token < vocab]
    if outside:
        raise ConfigError(f"generate: got {name} {outside[0]}, expected token ids from 0 to {vocab - 1}")
    return tokens


def decoder_start(settings: Mapping[str, Any], rows: int) -> np.ndarray:
    """int32 `[B, 1]`: the first token of a decoder's input, one for all rows or one for each.

    Raises:
      ConfigError: there is none, or their number fits neither.
    """
    for name in ("decoder_start_token_id", "bos_token_id"):
        start = token_ids(name, settings.get(name))
        if len(start) not in (0, 1, rows):
            raise ConfigError(f"generate: got {len(start)} of {name}, expected one, or one for each of {rows} rows")
        if start:
            if not all(0 <= token <= MAX_TOKEN_ID for token in start):
                raise ConfigError(f"generate: got {name} {list(start)}, expected token ids of the vocabulary")
            return np.broadcast_to(np.asarray(start, np.int32)[:, None], (rows, 1)).copy()
    raise ConfigError(
        "generate: got no decoder_start_token_id, expected one in generation_config.json or as an argument"
    )


def start_of_text(settings: Mapping[str, Any]) -> int | None:
    """The token that begins an empty prompt; None if the settings name none."""
    tokens = token_ids("bos_token_id", settings.get("bos_token_id"))
    return tokens[0] if tokens else None


def decode_config(
    settings: Mapping[str, Any], limits: TokenLimits, prompt: int, ends: tuple[int, ...], vocab: int
) -> DecodeConfig:
    """Our decoding options.

    Args:
      prompt: number of slots of the prompt.
      ends: tokens that end a text.
      vocab: number of tokens.
    """
    first, last, suppress = (
        check_tokens(name, token_ids(name, settings[name]), vocab)
        for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")
    )
    for name, forced in (("forced_bos_token_id", first), ("forced_eos_token_id", last)):
        if forced and set(forced) <= set(suppress):
            raise ConfigError(f"generate: got {name} {list(forced)}, expected a token that suppress_tokens lacks")
    if len(first) > 1:
        raise ConfigError(f"generate: got forced_bos_token_id {list(first)}, expected one token")
    sampled, beams = settings["do_sample"], settings["num_beams"]
    values = {
        "method": "sample" if sampled else "beam" if beams > 1 else "greedy",
        "beams": beams,
        "length_norm": "power",
        "length_penalty": settings["length_penalty"],
        "stopping": _stopping_rule(settings["early_stopping"]),
        "hypotheses": settings["num_return_sequences"],
        "max_length": limits.max_new,
        "past_positions": "stop",
        "min_length": limits.min_new,
        "temperature": settings["temperature"],
        "top_k": settings["top_k"],
        "top_p": settings["top_p"],
        "min_p": 0.0 if settings["min_p"] is None else settings["min_p"],
        "repetition_penalty": settings["repetition_penalty"],
        "no_repeat_ngram": settings["no_repeat_ngram_size"],
        "bad_words": _bad_words(settings["bad_words_ids"], ends, vocab),
        "suppress": suppress,
        "forced_first": first[0] if first and prompt == 1 else None,
        "forced_last": last,
        "seed": settings["seed"],
        "speculate": settings["prompt_lookup_num_tokens"] or 0,
    }
    config = hints.convert(values, DecodeConfig, "generate")
    fields.check_fields(config, "generate")
    return config


def _bad_words(words: Any, ends: tuple[int, ...], vocab: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban. An end token alone is never bad."""
    if not isinstance(words, (list, tuple, np.ndarray, type(None))):
        raise ConfigError(f"generate: got bad_words_ids {words!r}, expected a list of lists of token ids")
    found = []
    for word in () if words is None else words:
        if not isinstance(word, (list, tuple, np.ndarray)) or len(word) == 0:
            raise ConfigError(f"generate: got {word!r} in bad_words_ids, expected a list of at least one token id")
        found.append(check_tokens("bad_words_ids", token_ids("bad_words_ids", word), vocab))
    return tuple(word for word in found if word not in {(end,) for end in ends})


def _stopping_rule(early: Any) -> str:
    """`DecodeConfig.stopping` for a value of `early_stopping`."""
    if not isinstance(early, (bool, str)) or early not in STOPPING:
        raise ConfigError(f"generate: got early_stopping {early!r}, expected True, False or 'never'")
    return STOPPING[early]
