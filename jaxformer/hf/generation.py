"""`generate` with the other library's argument names, computed by our decoder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.checks import tables
from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode import engine
from jaxformer.hf import files
from jaxformer.hf.calling import Outputs
from jaxformer.registry import nearest

if TYPE_CHECKING:
    from jaxformer.hf.pretrained import Pretrained

log = logging.getLogger("jaxformer")

DEFAULTS: dict[str, Any] = {
    "max_length": 20, "max_new_tokens": None, "min_length": 0, "min_new_tokens": None, "num_beams": 1,
    "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False, "do_sample": False, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "bad_words_ids": None, "suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "bos_token_id": None, "decoder_start_token_id": None, "seed": 0,
    "return_dict_in_generate": False, "use_cache": True, "use_mems": None,
}  # fmt: skip
"""Every argument but the inputs, with the other library's default (`seed` is ours: it has a global generator)."""

INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")
STOPPING = {True: "first", False: "estimate", "never": "exact"}
LIMITS = ("max_length", "max_new_tokens")
NEUTRAL = (None, False, 0, 1.0, [])
"""Values with which an option of theirs that is not here does nothing."""


def read_defaults(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """generation_config.json, where there is one."""
    path = Path(directory) / "generation_config.json"
    found = files.read_config(directory, path.name) if path.exists() else {}
    about = ("transformers_version", "_from_model_config")
    unknown = [name for name, value in found.items() if name not in (*DEFAULTS, *about) and value not in NEUTRAL]
    if unknown:
        log.warning("%s: generation here knows no %s, and goes without", path, ", ".join(unknown))
    return found


def generate(model: Pretrained, options: Mapping[str, Any]) -> Any:
    """Token ids int32 `[B * num_return_sequences, T]`, filled up with the pad token: prompts and new tokens.

    Args:
      options: `input_ids` `[B, S]` (padded on either side, with `attention_mask`), and any of `DEFAULTS`; what is not
        given comes from generation_config.json, config.json and `DEFAULTS`, in this order.

    Returns:
      The array, or with `return_dict_in_generate` an `Outputs` of sequences and, for beams, sequences_scores.

    Raises:
      ConfigError: an argument is unknown, of a wrong kind, or cannot be honoured.
    """
    for name in options:
        if name not in DEFAULTS and name not in INPUTS:
            known = (*INPUTS, *DEFAULTS)
            raise ConfigError(f"generate: got {name}, expected some of {', '.join(known)}{nearest(name, known)}")
    settings = _settings(model, options)
    stack = model.config.model
    writes = stack.decoder is not None or stack.permutation is not None
    if not writes or stack.head.kind != "tokens":
        raise ConfigError("generate: got a model that writes no text, expected a decoder with a language-model head")
    if "input_ids" not in options:
        raise ConfigError("generate: got no input_ids, expected them [batch, length]")
    ids = np.asarray(options["input_ids"], np.int32)
    pad, ends = special(settings)
    real = _mask(options, ids, settings["pad_token_id"], ends)
    rows = [row[keep] for row, keep in zip(ids, real, strict=True)]
    if stack.decoder is None or stack.encoder is None:
        prompts, begin = [{"target": row} for row in rows], ids
    else:
        given = options.get("decoder_input_ids")
        begin = decoder_start(settings, len(ids)) if given is None else np.asarray(given, np.int32)
        prompts = [{"source": row, "target": start} for row, start in zip(rows, begin, strict=True)]
    config = _decoding(settings, begin.shape[1], ends)
    vocabulary = engine.Vocabulary(eos=ends, pad=pad)
    found = engine.run(model.module, model._variables, prompts, config, vocabulary, source_pad=pad, room=model._room())
    count = settings["num_return_sequences"]
    flat = [hypothesis for row in found for hypothesis in row[:count]]
    # Their beam search fills with `pad or eos`, so a padding token 0 gives way to the end token.
    fill = ends[0] if config.method == "beam" and pad == 0 and ends else pad
    sequences = _joined(begin, [h.tokens for h in flat], count, fill)
    if not settings["return_dict_in_generate"]:
        return sequences
    outputs = Outputs(sequences=sequences)
    if config.method == "beam":
        outputs["sequences_scores"] = np.asarray([h.score for h in flat], np.float32)
    return outputs


def _settings(model: Pretrained, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option's value: the call's, the generation config's, the model config's, the default."""
    found = dict(DEFAULTS)
    for layer in (model.settings.values, model.defaults, options):
        found |= {name: layer[name] for name in DEFAULTS if name in layer and layer[name] is not None}
    if options.keys() & set(LIMITS) and not options.keys() >= set(LIMITS):  # the one that is given counts
        other = "max_new_tokens" if "max_length" in options else "max_length"
        found[other] = None
    if found["num_beams"] < 1:
        raise ConfigError(f"generate: got num_beams {found['num_beams']}, expected at least 1")
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


def special(settings: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The padding token and the tokens that end a text."""
    ends, pad = settings.get("eos_token_id"), settings.get("pad_token_id")
    ends = () if ends is None else tuple(ends) if isinstance(ends, (list, tuple, np.ndarray)) else (int(ends),)
    return (ends[0] if ends else 0) if pad is None else int(pad), tuple(int(end) for end in ends)


def _mask(options: Mapping[str, Any], ids: np.ndarray, pad: int | None, ends: tuple[int, ...]) -> np.ndarray:
    """Which input tokens are real: the mask's, else all but padding (unless padding is also an end token)."""
    if ids.ndim != 2:
        raise ConfigError(f"generate: got input_ids of shape {list(ids.shape)}, expected [batch, length]; add an axis")
    if options.get("attention_mask") is not None:
        mask = np.asarray(options["attention_mask"]) != 0
        if mask.shape != ids.shape:
            raise ConfigError(f"generate: got attention_mask {list(mask.shape)}, expected {list(ids.shape)}")
        return mask
    return np.ones(ids.shape, bool) if pad is None or pad in ends else ids != pad


def decoder_start(settings: Mapping[str, Any], rows: int) -> np.ndarray:
    """int32 `[B, 1]`: the token that a decoder's input begins with."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        if settings.get(name) is not None:
            return np.full((rows, 1), settings[name], np.int32)
    raise ConfigError("generate: got no decoder_start_token_id, expected one in config.json or as an argument")


def _decoding(settings: Mapping[str, Any], prompt: int, ends: tuple[int, ...]) -> DecodeConfig:
    """Our decoding options. Lengths of theirs without "new" count the (padded) prompt."""
    new = settings["max_new_tokens"]
    least = settings["min_new_tokens"]
    sampled, beams = settings["do_sample"], settings["num_beams"]
    words = [tuple(int(token) for token in word) for word in settings["bad_words_ids"] or ()]
    config = DecodeConfig(
        method="sample" if sampled else "beam" if beams > 1 else "greedy",
        beams=beams,
        length_norm="power",
        length_penalty=float(settings["length_penalty"]),
        stopping=_stopping(settings["early_stopping"]),
        hypotheses=settings["num_return_sequences"],
        max_length=settings["max_length"] - prompt if new is None else new,
        min_length=max(settings["min_length"] - prompt, 0) if least is None else least,
        temperature=float(settings["temperature"]),
        top_k=settings["top_k"] or 0,
        top_p=float(settings["top_p"]),
        min_p=float(settings["min_p"] or 0.0),
        repetition_penalty=float(settings["repetition_penalty"]),
        no_repeat_ngram=settings["no_repeat_ngram_size"],
        bad_words=tuple(word for word in words if word not in {(end,) for end in ends}),  # an end token is never bad
        suppress=tuple(int(token) for token in settings["suppress_tokens"] or ()),
        forced_first=settings["forced_bos_token_id"] if prompt == 1 else None,
        forced_last=settings["forced_eos_token_id"],
        seed=settings["seed"],
    )
    tables.fields(config, "generate")
    return config


def _stopping(early: Any) -> str:
    if early not in STOPPING:
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
