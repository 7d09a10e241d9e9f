"""`generate` with the other library's argument names, computed by our decoder. Its rules are those of version 5."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer import schema
from jaxformer.checks import tables
from jaxformer.config import ConfigError, DecodeConfig, ModelConfig
from jaxformer.decode import engine
from jaxformer.hf import files
from jaxformer.hf.calling import Outputs
from jaxformer.registry import nearest

if TYPE_CHECKING:
    from jaxformer.hf.pretrained import Pretrained

log = logging.getLogger("jaxformer")

MAX_TOKEN_ID = 2**31 - 1

NEW_TOKENS = 20
"""How many are generated where nobody sets a length."""

DEFAULTS: dict[str, Any] = {
    "max_length": None, "max_new_tokens": None, "min_length": None, "min_new_tokens": None, "num_beams": 1,
    "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False, "do_sample": False, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "bad_words_ids": None, "suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": None, "seed": 0,
    "return_dict_in_generate": False, "use_cache": True, "use_mems": None,
}  # fmt: skip
"""Every argument but the inputs, with the other library's default (`seed` is ours: it has a global generator)."""

OFF = {**DEFAULTS, "top_k": 0}
"""What None means in a call: the option does nothing, whatever generation_config.json says."""

INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")
STOPPING = {True: "first", False: "estimate", "never": "exact"}
NEUTRAL = (None, False, 0, 1.0, [])
"""Values with which an option of theirs that is not here does nothing."""

OTHERS = (
    "begin_suppress_tokens", "constraints", "diversity_penalty", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
    "force_words_ids", "guidance_scale", "max_time", "num_beam_groups", "penalty_alpha", "renormalize_logits",
    "sequence_bias", "stop_strings", "top_h", "typical_p", "watermarking_config",
)  # fmt: skip
"""Options of theirs that a config.json may hold and that are not here."""


class Lengths(NamedTuple):
    """How many new tokens there may be at most, and before an end token at least."""

    most: int
    least: int


def read_defaults(directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of generation_config.json; without that file, those that config.json (`settings`) holds.

    One of the two counts, never both: a generation_config.json replaces all options of an old config.json.
    """
    path = Path(directory) / "generation_config.json"
    if path.exists():
        found = files.read_config(directory, path.name)
        about = ("transformers_version", "_from_model_config")
        unknown = [name for name in found if name not in (*DEFAULTS, *about)]
    else:
        path, found = Path(directory) / "config.json", of_config(settings)
        unknown = [name for name in OTHERS if name in settings]
    unknown = [name for name in unknown if {**settings, **found}[name] not in NEUTRAL]
    if unknown:
        log.warning("%s: generation here knows no %s, and goes without", path, ", ".join(unknown))
    return found


def of_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate` that a config.json holds."""
    found = {name: settings[name] for name in DEFAULTS if name != "seed" and settings.get(name) is not None}
    if settings.get("force_bos_token_to_be_generated"):  # what BART's oldest files call it
        found["forced_bos_token_id"] = settings.get("bos_token_id")
    return found


def generate(model: Pretrained, options: Mapping[str, Any]) -> Any:
    """Token ids int32 `[B * num_return_sequences, T]`, filled up with the pad token: prompts and new tokens.

    Without a length there are up to 20 new tokens. `max_length` and `min_length` count a decoder's prompt, padding
    included, and a translator's start token; `max_new_tokens` and `min_new_tokens` do not, and win over them. Padding
    may stand anywhere: new tokens follow each prompt's last real one.

    Args:
      options: `input_ids` `[B, S]` (padded anywhere, with `attention_mask`), `decoder_input_ids` of an encoder-decoder,
        and any of `DEFAULTS`; what is not given comes from generation_config.json (where there is none, from
        config.json), then from `DEFAULTS`. None switches an option off.

    Returns:
      The array, or with `return_dict_in_generate` an `Outputs` of sequences and, for beams, sequences_scores. Where a
      prompt has fewer hypotheses than asked for, the missing ones are padding with score -inf.

    Raises:
      ConfigError: an argument is unknown, of a wrong kind, or cannot be honoured.
    """
    for name in options:
        if name not in DEFAULTS and name not in INPUTS:
            known = (*INPUTS, *DEFAULTS)
            raise ConfigError(f"generate: got {name}, expected some of {', '.join(known)}{nearest(name, known)}")
    settings, stack = _settings(model, options), model.config.model
    writes = stack.decoder is not None or stack.permutation is not None
    if not writes or stack.head.kind != "tokens":
        raise ConfigError("generate: got a model that writes no text, expected a decoder with a language-model head")
    if options.get("input_ids") is None:
        raise ConfigError("generate: got no input_ids, expected them [batch, length]")
    both = stack.decoder is not None and stack.encoder is not None
    own = model._vocabulary().size if model.family is None else None  # of ours rows may follow that are no tokens
    vocab = (stack.decoder or stack.encoder).embed.vocab if own is None else own
    pad, ends = special(settings)
    _in_vocabulary("eos_token_id", ends, vocab)
    ids = _ids("input_ids", options["input_ids"])
    real = _mask(options, ids, settings["pad_token_id"], ends, both)
    _in_vocabulary("input_ids", ids[real], stack.encoder.embed.vocab if both else vocab)
    rows = [row[keep] for row, keep in zip(ids, real, strict=True)]
    if both:
        begin = _decoder_prompts(options, settings, len(ids), vocab)
        prompts = [
            {"source": row, "position": np.flatnonzero(keep), "target": start}
            for row, keep, start in zip(rows, real, begin, strict=True)
        ]
    elif options.get("decoder_input_ids") is not None:
        raise ConfigError("generate: got decoder_input_ids, expected none: this model has no encoder; use input_ids")
    else:
        prompts, begin = [{"target": row} for row in rows], ids
    config = _decoding(settings, lengths(settings, begin.shape[1], _positions(stack)), begin.shape[1], ends, vocab)
    found = _run(model, prompts, config, pad, ends, vocab)
    # Their beam search fills with `pad or eos`, so a padding token 0 gives way to the end token.
    fill = ends[0] if config.method == "beam" and pad == 0 and ends else pad
    return _returned(settings, config, begin, found, fill)


def _run(
    model: Pretrained, prompts: list[dict[str, Any]], config: DecodeConfig, pad: int, ends: tuple[int, ...], vocab: int
) -> list[list[engine.Hypothesis]]:
    """The hypotheses of each prompt."""
    room, encoder = model._room(), model.config.model.encoder
    longest = max(len(prompt["target"]) for prompt in prompts)
    if room is not None and longest + config.max_length > room + 1:
        log.warning("generate: no more than %d new tokens, since the model has %d positions", room + 1 - longest, room)
    fill = pad if 0 <= pad < vocab else 0  # a padding token that is not in the vocabulary only fills outputs
    return engine.run(
        model.module,
        model._variables,
        prompts,
        config,
        engine.Vocabulary(eos=ends, pad=fill, size=vocab),
        source_pad=fill if encoder is None or fill < encoder.embed.vocab else 0,
        room=room,
        source_room=engine.positions(encoder),
    )


def _returned(
    settings: Mapping[str, Any],
    config: DecodeConfig,
    begin: np.ndarray,
    found: list[list[engine.Hypothesis]],
    fill: int,
) -> Any:
    """The call's outputs, filled up with `fill`."""
    count = settings["num_return_sequences"]
    missing = engine.Hypothesis(np.zeros(0, np.int32), -np.inf)
    flat = [hypothesis for row in found for hypothesis in (row + [missing] * count)[:count]]
    sequences = _joined(begin, [h.tokens for h in flat], count, fill)
    if not settings["return_dict_in_generate"]:
        return sequences
    outputs = Outputs(sequences=sequences)
    if config.method == "beam":
        outputs["sequences_scores"] = np.asarray([h.score for h in flat], np.float32)
    return outputs


def _settings(model: Pretrained, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option's value: the call's, the model's, or the default."""
    found = dict(DEFAULTS)
    found |= {name: value for name, value in model.defaults.items() if name in DEFAULTS and value is not None}
    found |= {name: OFF[name] if options[name] is None else options[name] for name in DEFAULTS if name in options}
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in found.items()}
    for name in ("num_beams", "num_return_sequences"):
        if _whole(found, name) < 1:
            raise ConfigError(f"generate: got {name} {found[name]}, expected at least 1")
    if found["use_mems"]:
        raise ConfigError("generate: got use_mems True, expected False: each step reads the whole text, not memories")
    if found["do_sample"] and found["num_beams"] > 1:
        raise ConfigError(
            "generate: got do_sample with num_beams > 1, expected one of them; beams are not sampled here"
        )
    if not found["do_sample"] and found["num_return_sequences"] > found["num_beams"]:
        got = f"num_return_sequences {found['num_return_sequences']} with num_beams {found['num_beams']}"
        raise ConfigError(f"generate: got {got}, expected at most as many; raise num_beams or set do_sample")
    return found


def _whole(settings: Mapping[str, Any], name: str) -> int:
    """An option that is a whole number."""
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"generate: got {name} {value!r}, expected a whole number")
    return value


def lengths(settings: Mapping[str, Any], prompt: int, positions: int | None) -> Lengths:
    """The bounds on new tokens after a prompt of so many slots; `positions`: that the model was made for, if any.

    Raises:
      ConfigError: a length is no whole number, or leaves no room for a token.
    """
    names = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
    given = {name: _whole(settings, name) for name in names if settings[name] is not None}
    for name, value in given.items():
        if value < 0:
            raise ConfigError(f"generate: got {name} {value}, expected at least 0")
    for end in ("max", "min"):
        if {f"{end}_length", f"{end}_new_tokens"} <= set(given):
            log.warning("generate: both %s_length and %s_new_tokens are set; %s_new_tokens counts", end, end, end)
    most = NEW_TOKENS if positions is None else min(NEW_TOKENS, positions - prompt)
    if "max_new_tokens" in given:
        most = given["max_new_tokens"]
    elif "max_length" in given:
        most = given["max_length"] - prompt
    if most < 1:
        name = next((name for name in ("max_new_tokens", "max_length") if name in given), None)
        got = f"a prompt of {prompt} tokens" + ("" if name is None else f" with {name} {given[name]}")
        expected = f"fewer than the model's {positions}" if name is None else "room for a token"
        raise ConfigError(f"generate: got {got}, expected {expected}; shorten it or set max_new_tokens")
    least = given["min_new_tokens"] if "min_new_tokens" in given else max(given.get("min_length", 0) - prompt, 0)
    if least > most:
        log.warning("generate: at least %d new tokens asked for, and at most %d: no end token is chosen", least, most)
    return Lengths(most, min(least, most))


def _positions(model: ModelConfig) -> int | None:
    """How many positions the writing side was made for, where its encoding says."""
    stack = model.decoder or model.encoder
    stated = stack.encoding.kind in ("learned", "sinusoidal", "rope")
    return stack.encoding.max_length - stack.encoding.offset if stated else None


def special(settings: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The padding token and the tokens that end a text."""
    pad, ends = settings.get("pad_token_id"), _tokens("eos_token_id", settings.get("eos_token_id"))
    if pad is None:
        return ends[0] if ends else 0, ends
    tokens = _tokens("pad_token_id", pad)
    if len(tokens) != 1 or abs(tokens[0]) > MAX_TOKEN_ID:
        raise ConfigError(f"generate: got pad_token_id {pad!r}, expected one token id of 32 bits")
    return tokens[0], ends


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    """A token id, or a list of them, as a tuple; None is none.

    Raises:
      ConfigError: it is something else.
    """
    if value is None:
        return ()
    array = np.asarray(value)
    if array.size == 0:
        return ()
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise ConfigError(f"generate: got {name} {value!r}, expected a token id or a list of them")
    return tuple(int(token) for token in array.reshape(-1))


def _in_vocabulary(name: str, tokens: Any, vocab: int) -> Any:
    """`tokens`, if the vocabulary has them all."""
    outside = [int(token) for token in np.asarray(tokens).reshape(-1) if not 0 <= token < vocab]
    if outside:
        raise ConfigError(f"generate: got {name} {outside[0]}, expected token ids from 0 to {vocab - 1}")
    return tokens


def _ids(name: str, value: Any) -> np.ndarray:
    """Token ids `[B, S]`, not judged yet: what padding holds is nobody's concern."""
    ids = np.asarray(value)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
        got = f"{name} of shape {list(ids.shape)} and type {ids.dtype}"
        raise ConfigError(f"generate: got {got}, expected whole numbers [batch, length]; add an axis")
    return ids


def _mask(
    options: Mapping[str, Any], ids: np.ndarray, pad: int | None, ends: tuple[int, ...], both: bool
) -> np.ndarray:
    """Which input tokens are real, bool `[B, S]`: the mask's, if there is one.

    Without one a decoder's are all but padding (unless padding is also an end token), and an encoder's are all, as in a
    call of the model.
    """
    if options.get("attention_mask") is not None:
        real = np.asarray(options["attention_mask"]) != 0
        if real.shape != ids.shape:
            raise ConfigError(f"generate: got attention_mask {list(real.shape)}, expected {list(ids.shape)}")
    elif both or pad is None or pad in ends:
        real = np.ones(ids.shape, bool)
        if both and pad is not None and pad not in ends and (ids == pad).any():
            log.warning("generate: input_ids hold the padding token %d, which is read: give an attention_mask", pad)
    else:
        real = ids != pad
    if not real.any(axis=1).all():
        row = int(np.argmin(real.any(axis=1)))
        raise ConfigError(f"generate: got row {row} of input_ids without a real token, expected one in each")
    return real


def decoder_start(settings: Mapping[str, Any], rows: int) -> np.ndarray:
    """int32 `[B, 1]`: the token that a decoder's input begins with, one for all rows or one for each."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        start = _tokens(name, settings.get(name))
        if len(start) not in (0, 1, rows):
            raise ConfigError(f"generate: got {len(start)} of {name}, expected one, or one for each of {rows} rows")
        if start:
            if not all(0 <= token <= MAX_TOKEN_ID for token in start):
                raise ConfigError(f"generate: got {name} {list(start)}, expected token ids of the vocabulary")
            return np.broadcast_to(np.asarray(start, np.int32)[:, None], (rows, 1)).copy()
    raise ConfigError(
        "generate: got no decoder_start_token_id, expected one in generation_config.json or as an argument"
    )


def _decoder_prompts(options: Mapping[str, Any], settings: Mapping[str, Any], rows: int, vocab: int) -> np.ndarray:
    """int32 `[B, T]`: `decoder_input_ids` behind the start token, which is added where no row begins with it."""
    start = _in_vocabulary("decoder_start_token_id", decoder_start(settings, rows), vocab)
    if options.get("decoder_input_ids") is None:
        return start
    begin = _in_vocabulary("decoder_input_ids", _ids("decoder_input_ids", options["decoder_input_ids"]), vocab)
    if len(begin) != rows:
        raise ConfigError(f"generate: got {len(begin)} rows of decoder_input_ids, expected {rows} as of input_ids")
    begin = begin.astype(np.int32)
    return np.concatenate([start, begin], axis=1) if (begin[:, :1] != start).all() else begin


def _decoding(
    settings: Mapping[str, Any], bounds: Lengths, prompt: int, ends: tuple[int, ...], vocab: int
) -> DecodeConfig:
    """Our decoding options after a prompt of so many slots."""
    first, last, suppress = (
        _in_vocabulary(name, _tokens(name, settings[name]), vocab)
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
        "stopping": _stopping(settings["early_stopping"]),
        "hypotheses": settings["num_return_sequences"],
        "max_length": bounds.most,
        "min_length": bounds.least,
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
    }
    config = schema.typed(values, DecodeConfig, "generate")
    tables.fields(config, "generate")
    return config


def _bad_words(words: Any, ends: tuple[int, ...], vocab: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban. An end token alone is never bad."""
    if not isinstance(words, (list, tuple, np.ndarray, type(None))):
        raise ConfigError(f"generate: got bad_words_ids {words!r}, expected a list of lists of token ids")
    found = []
    for word in () if words is None else words:
        if not isinstance(word, (list, tuple, np.ndarray)) or len(word) == 0:
            raise ConfigError(f"generate: got {word!r} in bad_words_ids, expected a list of at least one token id")
        found.append(_in_vocabulary("bad_words_ids", _tokens("bad_words_ids", word), vocab))
    return tuple(word for word in found if word not in {(end,) for end in ends})


def _stopping(early: Any) -> str:
    if not isinstance(early, (bool, str)) or early not in STOPPING:
        raise ConfigError(f"generate: got early_stopping {early!r}, expected True, False or 'never'")
    return STOPPING[early]


def _joined(begin: np.ndarray, new: list[np.ndarray], count: int, pad: int) -> np.ndarray:
    """Prompts as they were given, each followed by its new tokens and padding."""
    longest = max((len(tokens) for tokens in new), default=0)
    sequences = np.full((len(new), begin.shape[1] + longest), pad, np.int32)
    sequences[:, : begin.shape[1]] = np.repeat(begin, count, axis=0)
    for row, tokens in zip(sequences, new, strict=True):
        row[begin.shape[1] : begin.shape[1] + len(tokens)] = tokens
    return sequences
