"""Requests in OpenAI's public schema, read into values. What is not supported is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from jaxformer.config import DecodeConfig
from jaxformer.decode.engine import Sampling
from jaxformer.serving.fields import Fields, check_text, wrong
from jaxformer.serving.limits import MAX_CHOICES, MAX_LINES, Limits
from jaxformer.serving.refusal import Refusal

MAX_STOPS = 4
"""Stop sequences of one request, as in OpenAI's interface."""
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Generation:
    """A request for generated text.

    Attributes:
      prompts: texts to go on from; () in a chat.
      messages: turns of a chat; () otherwise.
      n: outputs for each prompt.
      max_tokens: new tokens of an output; None: as the run's config says.
      sampling: how tokens are chosen, without `draw`.
      is_sampling_given: True if the request says whether to sample.
      stops: texts that end an output, and are no part of it.
      stream: True if pieces are sent as they come.
      usage: True if the last piece of a stream has the numbers of tokens.
      log_probs: True if the answer has the log-probabilities of the chosen tokens.
      is_chat: True if the request is a chat.
    """

    prompts: tuple[str, ...]
    messages: tuple[Mapping[str, Any], ...]
    n: int
    max_tokens: int | None
    sampling: Sampling
    is_sampling_given: bool
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    log_probs: bool = False
    is_chat: bool = False


@dataclass(frozen=True)
class TaskLines:
    """A request to a task's route: its lines, and fields of `DecodeConfig` that it sets."""

    lines: list[str]
    options: dict[str, Any] = field(default_factory=dict)


def completion(body: Mapping[str, Any], model: str, decode: DecodeConfig, limits: Limits) -> Generation:
    """A request of /v1/completions."""
    fields = Fields(body)
    prompts = fields.texts("prompt", MAX_CHOICES)
    if not prompts:
        raise Refusal('prompt: got none, expected a text or a list of them, as "prompt": "Once"', param="prompt")
    for name, values in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1,)), ("logprobs", (0,))):
        fields.neutral(name, *values)
    log_probs = "logprobs" in fields.values
    return _generation(fields, model, decode, limits, prompts=tuple(prompts), messages=(), log_probs=log_probs)


def chat(body: Mapping[str, Any], model: str, decode: DecodeConfig, limits: Limits) -> Generation:
    """A request of /v1/chat/completions."""
    fields = Fields(body)
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, 'a list of turns, as [{"role": "user", "content": "Hi"}]')
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("tools", [])
    fields.neutral("functions", [])
    fields.neutral("tool_choice", "none")
    fields.neutral("modalities", ["text"])
    fields.neutral("top_logprobs", 0)
    turns, log_probs = tuple(_turn(message) for message in messages), fields.boolean("logprobs")
    return _generation(fields, model, decode, limits, prompts=(), messages=turns, log_probs=log_probs)


def _turn(message: Any) -> Mapping[str, Any]:
    """A turn whose content is one text; parts of type "text" are joined."""
    if not isinstance(message, dict):
        raise wrong("messages", message, 'turns, as {"role": "user", "content": "Hi"}')
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text" for part in content):
        raise wrong("messages", content, "content of text alone")
    if not all(isinstance(part["text"], str) for part in content):
        raise wrong("messages", content, "content of text alone")
    return {**message, "content": "".join(part["text"] for part in content)}


def _generation(
    fields: Fields, model: str, decode: DecodeConfig, limits: Limits, messages: tuple[Any, ...], **known: Any
) -> Generation:
    """The fields that completions and chats share."""
    check_model(fields, model)
    sampling, given = _sampling(fields, decode)
    max_tokens = fields.integer("max_tokens", None, 1, limits.max_tokens)
    if messages:
        max_tokens = fields.integer("max_completion_tokens", max_tokens, 1, limits.max_tokens)
    stops = fields.texts("stop", MAX_STOPS)
    if not all(stops):
        raise wrong("stop", stops, "texts that are not empty")
    for name in ("presence_penalty", "frequency_penalty"):
        fields.neutral(name, 0, 0.0)
    fields.neutral("logit_bias", {})
    fields.ignored("user", "store", "metadata")
    stream, usage = fields.boolean("stream"), _stream_usage(fields)
    if usage and not stream:
        raise Refusal("stream_options: got it without stream, expected both", param="stream_options")
    if stream and known["log_probs"]:
        raise Refusal("logprobs: got it with stream, expected one of the two", param="logprobs")
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    fields.end()
    return Generation(
        messages=messages,
        n=n,
        max_tokens=max_tokens,
        sampling=sampling,
        is_sampling_given=given,
        stops=tuple(stops),
        stream=stream,
        usage=usage,
        is_chat=bool(messages),
        **known,
    )


def _sampling(fields: Fields, decode: DecodeConfig) -> tuple[Sampling, bool]:
    """How tokens are chosen, and whether the request says so. Absent fields are as in the run's config."""
    sampled = decode.method == "sample"
    temperature = fields.number("temperature", None, 0.0, MAX_TEMPERATURE)
    seed = fields.integer("seed", None, 0, MAX_SEED)
    sampling = Sampling(
        temperature=(decode.temperature if sampled else 0.0) if temperature is None else temperature,
        top_k=fields.integer("top_k", decode.top_k, 0, 2**31 - 1),
        top_p=fields.number("top_p", decode.top_p, 0.0, 1.0),
        min_p=fields.number("min_p", decode.min_p, 0.0, 1.0),
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
    )
    if sampling.top_p == 0.0:  # OpenAI's interface allows it: the smallest set is one token
        sampling = sampling._replace(top_p=1.0, top_k=1)
    return sampling, temperature is not None


def _stream_usage(fields: Fields) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise wrong("stream_options", options, '{"include_usage": true}')
    return Fields(options).boolean("include_usage")


def check_model(fields: Fields, model: str) -> None:
    """Refuses another model than the one that is served."""
    value = fields.raw("model")
    if value is not None and value != model:
        raise Refusal(
            f"model: got {ascii(value)[:60]}, expected {model}", HTTPStatus.NOT_FOUND, "model", "model_not_found"
        )


def embedding(body: Mapping[str, Any], model: str) -> TaskLines:
    """A request of /v1/embeddings."""
    fields = Fields(body)
    check_model(fields, model)
    lines = fields.texts("input", MAX_LINES)
    fields.neutral("encoding_format", "float")
    fields.neutral("dimensions")
    fields.ignored("user")
    fields.end()
    if not lines:
        raise Refusal("input: got none, expected a text or a list of them", param="input")
    return TaskLines(lines)


def task_lines(body: Mapping[str, Any], model: str, has_search: bool) -> TaskLines:
    """A request of a task's route: "text" or "lines"; of a task that generates also "method" and "beams"."""
    fields = Fields(body)
    check_model(fields, model)
    lines, text = fields.texts("lines", MAX_LINES), fields.raw("text")
    if text is not None and (not isinstance(text, str) or lines):
        raise wrong("text", text, "one text, or lines")
    if text is not None:
        check_text("text", text)
        lines = [text]
    if not lines:
        raise Refusal('lines: got none, expected "lines": ["..."] or "text": "..."', param="lines")
    options = {}
    if has_search:
        method, beams = fields.raw("method"), fields.integer("beams", None, 1, 16)
        if method not in (None, "greedy", "beam"):
            raise wrong("method", method, "greedy or beam")
        if method == "greedy" and beams is not None:
            raise Refusal("beams: got it with method greedy, expected method beam", param="beams")
        options = {"method": method or (beams and "beam"), "beams": beams}
    fields.end()
    return TaskLines(lines, {name: value for name, value in options.items() if value is not None})
