"""`generate` with the other library's argument names, computed by our decoder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer import tasks
from jaxformer.config import DecodeConfig, StackConfig
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.generate import Hypothesis
from jaxformer.decode.runner import Runner, max_positions
from jaxformer.errors import ConfigError
from jaxformer.hf import generation_options
from jaxformer.hf.generation_options import DEFAULTS, check_tokens
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.hf.outputs import Outputs
from jaxformer.model import Model
from jaxformer.registry import nearest

log = logging.getLogger("jaxformer")

INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")


def generate(model: Model, origin: HuggingFaceOrigin, options: Mapping[str, Any]) -> Any:
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
    settings, config = generation_options.resolve_options(origin.defaults, options), model.config.model
    generates = config.decoder is not None or config.permutation is not None
    if not generates or config.head.kind != "tokens":
        raise ConfigError("generate: got a model that writes no text, expected a decoder with a language-model head")
    if options.get("input_ids") is None:
        raise ConfigError("generate: got no input_ids, expected them [batch, length]")
    vocab = _vocabulary_size(model, origin)
    pad, ends = generation_options.padding_and_ends(settings)
    check_tokens("eos_token_id", ends, vocab)
    ids = _input_array("input_ids", options["input_ids"])
    real = _real_tokens(options, ids, settings["pad_token_id"], ends, config.is_seq2seq)
    encoder = config.encoder if config.is_seq2seq else None
    check_tokens("input_ids", ids[real], vocab if encoder is None else encoder.embed.vocab or 0)
    rows = [row[keep] for row, keep in zip(ids, real, strict=True)]
    if config.is_seq2seq:
        begin = _decoder_prompts(options, settings, len(ids), vocab)
        _check_positions_of(begin, config.decoder, origin)
        counted = _source_positions(model, origin, ids)
        prompts = [
            {"source": row, "position": position[keep], "target": start}
            for row, position, keep, start in zip(rows, counted, real, begin, strict=True)
        ]
    elif options.get("decoder_input_ids") is not None:
        raise ConfigError("generate: got decoder_input_ids, expected none: this model has no encoder; use input_ids")
    else:
        has_prefix = model.config.task.name != "none" and tasks.get(model.config.task.name).has_prefix
        prompts = [{"target": row, **({"prefix": len(row)} if has_prefix else {})} for row in rows]
        begin = ids
    prompt_length = begin.shape[1]
    positions = generation_options.stated_positions(config)
    limits = generation_options.new_token_limits(settings, prompt_length, positions)
    decode = generation_options.decode_config(settings, limits, prompt_length, ends, vocab)
    if model.draft is not None:
        decode = _with_draft(decode, model.config.decode.speculate)
    hypotheses = _decode(model, prompts, decode, pad, ends, vocab)
    # The other library's beam search fills with `pad or eos`, so a padding token 0 gives way to the end token.
    fill = ends[0] if decode.method == "beam" and pad == 0 and ends else pad
    return _named_results(settings, decode, begin, hypotheses, fill)


def _with_draft(decode: DecodeConfig, speculate: int) -> DecodeConfig:
    """The options of a model with a draft, which proposes `speculate` tokens.

    Raises:
      ConfigError: the call asks for beams, or for proposals that are looked up.
    """
    if decode.method == "beam" or decode.speculate:
        got = "num_beams > 1" if decode.method == "beam" else "prompt_lookup_num_tokens"
        raise ConfigError(f"generate: got {got} with a draft, expected one of them; generate without the draft")
    return dataclasses.replace(decode, speculate=speculate)


def _check_positions_of(begin: np.ndarray, decoder: StackConfig | None, origin: HuggingFaceOrigin) -> None:
    """Refuses padding tokens in a decoder's prompt `[B, T]` where these have no position (RoBERTa).

    Raises:
      ConfigError: there are some.
    """
    pad = None if decoder is None else decoder.embed.pad
    if origin.convention.of_decoder.positions == "ids" and pad is not None and (begin == pad).any():
        raise ConfigError(
            f"generate: got padding ({pad}) as decoder_start_token_id or in decoder_input_ids, expected tokens: "
            "padding has no position in this decoder; give others"
        )


def _source_positions(model: Model, origin: HuggingFaceOrigin, ids: np.ndarray) -> np.ndarray:
    """Positions `[B, S]` of an encoder's input: numbers of the slots, or of the tokens that are not padding."""
    encoder = model.config.model.encoder
    if origin.convention.positions != "ids" or encoder is None:
        return np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    text = ids != encoder.embed.pad
    return np.cumsum(text, axis=1) * text - 1


def _vocabulary_size(model: Model, origin: HuggingFaceOrigin) -> int:
    """The number of tokens; a table that was trained here may have rows beyond them."""
    if origin.family is None and model.tokenizers is not None:
        return model.tokenizers.target.size
    part = model.config.model.decoder_part or model.config.model.encoder_part
    if part is None or part.embed.vocab is None:
        raise ConfigError("generate: got a model without token embeddings, expected some; use another model")
    return part.embed.vocab


def _decode(
    model: Model, prompts: list[dict[str, Any]], config: DecodeConfig, pad: int, ends: tuple[int, ...], vocab: int
) -> list[list[Hypothesis]]:
    """The hypotheses of each prompt."""
    encoder, max_length = model.config.model.encoder, max_positions(model.config.model.decoder)
    longest = max(len(prompt["target"]) for prompt in prompts)
    if max_length is not None and longest + config.max_length > max_length + 1:
        left = max_length + 1 - longest
        log.warning("generate: no more than %d new tokens, since the model has %d positions", left, max_length)
    fill = pad if 0 <= pad < vocab else 0  # a padding token that is not in the vocabulary only fills outputs
    runner = Runner(
        model.module,
        model.inference_variables(),
        Vocabulary(eos=ends, pad=fill, size=vocab),
        source_pad=fill if encoder is None or fill < (encoder.embed.vocab or 0) else 0,
        max_source_length=max_positions(encoder),
        max_target_length=max_length,
        draft=None if model.draft is None else model.draft.bundle(),
    )
    return runner.generate(prompts, config)


def _named_results(
    settings: Mapping[str, Any],
    config: DecodeConfig,
    begin: np.ndarray,
    hypotheses: list[list[Hypothesis]],
    fill: int,
) -> Any:
    """The call's outputs: `sequences`, filled up with `fill`, and for beams their scores."""
    count = settings["num_return_sequences"]
    missing = Hypothesis(np.zeros(0, np.int32), -np.inf)
    flat = [hypothesis for row in hypotheses for hypothesis in (row + [missing] * count)[:count]]
    sequences = _concatenate(begin, [h.tokens for h in flat], count, fill)
    if not settings["return_dict_in_generate"]:
        return sequences
    outputs = Outputs(sequences=sequences)
    if config.method == "beam":
        outputs["sequences_scores"] = np.asarray([h.score for h in flat], np.float32)
    return outputs


def _input_array(name: str, value: Any) -> np.ndarray:
    """Token ids `[B, S]` as an array. Their values are checked later, without padding.

    Raises:
      ConfigError: they are no integers, or not two-dimensional.
    """
    ids = np.asarray(value)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
        got = f"{name} of shape {list(ids.shape)} and type {ids.dtype}"
        raise ConfigError(f"generate: got {got}, expected whole numbers [batch, length]; add an axis")
    return ids


def _real_tokens(
    options: Mapping[str, Any], ids: np.ndarray, pad: int | None, ends: tuple[int, ...], seq2seq: bool
) -> np.ndarray:
    """True for input tokens that are not padding, `[B, S]`: as the attention mask says, if there is one.

    Without a mask a decoder's padding tokens are padding (unless they also end a text). An encoder's are text, as in a
    call of the model.

    Raises:
      ConfigError: the mask has another shape, or a row has no token.
    """
    if options.get("attention_mask") is not None:
        real = np.asarray(options["attention_mask"]) != 0
        if real.shape != ids.shape:
            raise ConfigError(f"generate: got attention_mask {list(real.shape)}, expected {list(ids.shape)}")
    elif seq2seq or pad is None or pad in ends:
        real = np.ones(ids.shape, bool)
        if seq2seq and pad is not None and pad not in ends and (ids == pad).any():
            log.warning("generate: input_ids hold the padding token %d, which is read: give an attention_mask", pad)
    else:
        real = ids != pad
    if not real.any(axis=1).all():
        row = int(np.argmin(real.any(axis=1)))
        raise ConfigError(f"generate: got row {row} of input_ids without a real token, expected one in each")
    return real


def _decoder_prompts(options: Mapping[str, Any], settings: Mapping[str, Any], rows: int, vocab: int) -> np.ndarray:
    """int32 `[B, T]`: `decoder_input_ids` behind the start token, which is added where no row begins with it."""
    start = check_tokens("decoder_start_token_id", generation_options.decoder_start(settings, rows), vocab)
    if options.get("decoder_input_ids") is None:
        return start
    begin = check_tokens("decoder_input_ids", _input_array("decoder_input_ids", options["decoder_input_ids"]), vocab)
    if len(begin) != rows:
        raise ConfigError(f"generate: got {len(begin)} rows of decoder_input_ids, expected {rows} as of input_ids")
    begin = begin.astype(np.int32)
    return np.concatenate([start, begin], axis=1) if (begin[:, :1] != start).all() else begin


def _concatenate(begin: np.ndarray, new: list[np.ndarray], count: int, pad: int) -> np.ndarray:
    """Each prompt, `count` times, followed by its new tokens and padding: int32 `[B * count, T]`."""
    longest = max((len(tokens) for tokens in new), default=0)
    sequences = np.full((len(new), begin.shape[1] + longest), pad, np.int32)
    sequences[:, : begin.shape[1]] = np.repeat(begin, count, axis=0)
    for row, tokens in zip(sequences, new, strict=True):
        row[begin.shape[1] : begin.shape[1] + len(tokens)] = tokens
    return sequences
