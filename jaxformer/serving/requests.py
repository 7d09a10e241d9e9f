"""Requests in OpenAI's public schema, read into values. What is not supported is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from jaxformer.config import DecodeConfig
from jaxformer.decode.engine import Sampling
from jaxformer.serving.fields import Fields, wrong
from jaxformer.serving.limits import MAX_LINES, Limits
from jaxformer.serving.refusal import Refusal

MAX_STOPS = 4
"""Stop sequences of one request, as in OpenAI's interface."""
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**32 - 1
TRUNCATIONS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Fields that leave tokens out of the draws, with the values that leave none out."""


@dataclass(frozen=True)
class Generation:
    """A request for generated text.

    Attributes:
      prompts: texts to go on from; () in a chat.
      messages: turns of a chat; () otherwise.
      max_tokens: new tokens of an output; None: as the run's config says.
      sampling: how tokens are chosen.
      stops: texts that end an output, and are no part of it.
      stream: True if pieces are sent as they come.
      usage: True if the last piece of a stream has the numbers of tokens.
    """

    prompts: tuple[str, ...]
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool

    @property
    def is_chat(self) -> bool:
        """True for a request for the reply in a chat."""
        return bool(self.messages)


def completion(body: Mapping[str, Any], model: str, decode: DecodeConfig, limits: Limits) -> Generation:
    """A request of /v1/completions."""
    fields = Fields(body)
    prompts = fields.texts("prompt", MAX_LINES)
    if not prompts:
        raise Refusal('prompt: got none, expected a text or a list of them, as "prompt": "Once"', param="prompt")
    for name, values in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1,)), ("logprobs", ())):
        fields.neutral(name, *values)
    max_tokens = fields.integer("max_tokens", None, 1, limits.max_tokens)
    return _generation(fields, model, decode, max_tokens, prompts=tuple(prompts))


def chat(body: Mapping[str, Any], model: str, decode: DecodeConfig, limits: Limits) -> Generation:
    """A request of /v1/chat/completions."""
    fields = Fields(body)
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, 'a list of turns, as [{"role": "user", "content": "Hi"}]')
    neutral = {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none",),
        "modalities": (["text"],),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "store": (False,),
        "metadata": ({},),
    }
    for name, values in neutral.items():
        fields.neutral(name, *values)
    old = fields.integer("max_tokens", None, 1, limits.max_tokens)
    new = fields.integer("max_completion_tokens", None, 1, limits.max_tokens)
    if old is not None and new is not None:
        got = "max_tokens: got it beside max_completion_tokens, expected one of the two"
        raise Refusal(got, param="max_tokens", code="invalid_value")
    turns = tuple(map(_turn, messages))
    return _generation(fields, model, decode, new if old is None else old, messages=turns)


def lines(body: Mapping[str, Any], model: str) -> list[str]:
    """The lines of a request of /v1/translate or /v1/classify: its field "input", a text or a list of them."""
    fields = Fields(body)
    check_model(fields, model)
    found = fields.texts("input", MAX_LINES)
    fields.end()
    if not found:
        raise Refusal('input: got none, expected a text or a list of them, as "input": ["Hi"]', param="input")
    return found


def check_model(fields: Fields, model: str) -> None:
    """Refuses another model than the one that is served."""
    value = fields.raw("model")
    if value is not None and value != model:
        got = f"model: got {ascii(value)[:60]}, expected {model}"
        raise Refusal(got, HTTPStatus.NOT_FOUND, "model", "model_not_found")


def _turn(message: Any) -> Mapping[str, Any]:
    """A turn whose content is one text; parts of type "text" are joined."""
    if not isinstance(message, dict):
        raise wrong("messages", message, 'turns, as {"role": "user", "content": "Hi"}')
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise wrong("messages", content, "content of text alone")
        content = "".join(parts)
    return {**message, "content": content}


def _generation(
    fields: Fields,
    model: str,
    decode: DecodeConfig,
    max_tokens: int | None,
    prompts: tuple[str, ...] = (),
    messages: tuple[Mapping[str, Any], ...] = (),
) -> Generation:
    """The fields that completions and chats share."""
    check_model(fields, model)
    sampling = _sampling(fields, decode)
    stops = fields.texts("stop", MAX_STOPS)
    if not all(stops):
        raise wrong("stop", stops, "texts that are not empty")
    fields.neutral("n", 1)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.neutral(name, 0, 0.0)
    fields.neutral("logit_bias", {})
    fields.neutral("user")
    stream, usage = fields.boolean("stream"), _stream_usage(fields)
    if usage and not stream:
        raise Refusal("stream_options: got it without stream, expected both", param="stream_options")
    fields.end()
    return Generation(prompts, messages, max_tokens, sampling, tuple(stops), stream, usage)


def _sampling(fields: Fields, decode: DecodeConfig) -> Sampling:
    """Settings by which tokens are chosen. Absent fields are as in the run's config; temperature 0 is greedy search."""
    given = fields.number("temperature", None, 0.0, MAX_TEMPERATURE)
    if given is None and decode.method == "beam":
        got = "temperature: got none, and this run's decode.method is beam, whose output is known at the end only"
        raise Refusal(f"{got}, expected a number; 0 is greedy search", param="temperature")
    temperature = (decode.temperature if decode.method == "sample" else 0.0) if given is None else given
    top_k = fields.integer("top_k", None, 0, 2**31 - 1)
    top_p = fields.number("top_p", None, 0.0, 1.0)
    min_p = fields.number("min_p", None, 0.0, 1.0)
    seed = fields.integer("seed", None, 0, MAX_SEED)
    values = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in values.items():
        if given is None and temperature == 0.0 and value not in (None, TRUNCATIONS[name]):
            got = f"{name}: got {value} without temperature, and this run decodes greedily"
            raise Refusal(f"{got}, expected a temperature above 0 beside it", param=name, code="invalid_value")
    if top_p == 0.0:  # OpenAI's interface allows it: the smallest set is one token
        values |= {"top_k": 1, "top_p": 1.0}
    chosen = {name: getattr(decode, name) if value is None else value for name, value in values.items()}
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    return Sampling(temperature, chosen["top_k"], chosen["top_p"], chosen["min_p"], drawn)


def _stream_usage(fields: Fields) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise wrong("stream_options", options, '{"include_usage": true}')
    return Fields(options).boolean("include_usage")
