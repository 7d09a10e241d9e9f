"""Dialogue: a language model of conversations that learns the assistant's turns alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data import chat
from jaxformer.data.chat import Message
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Task, _generation, _tokens, text_lines

NAME = "dialogue"
MAX_REPLY_FRACTION = 1 / 2
"""Fraction of the length that is kept free for a reply, if `decode.max_length` asks for more."""

LOG = logging.getLogger("jaxformer")


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """A conversation as one row: labels are the next tokens, with weight 1 in replies (their end token included).

    Of a conversation that is too long, the oldest turns are left out, each user's with its reply; the system's turn
    stays. If the last exchange alone is too long, its end is cut off. One that loses all of its replies has the feature
    "empty".
    """
    tokenizer, template, messages = tokenizers.target, template_of(tokenizers), example["messages"]
    _tokens.required_token(tokenizer, NAME, "eos")

    def size(turns: Sequence[Message]) -> int:
        return len(chat.encode_prompt(tokenizer, template, turns, opening=False)) - 1  # the last token is a label only

    complete = size(messages)
    fits = complete <= config.data.length
    drop = 0 if fits else chat.exchanges_to_drop(messages, size, config.data.length)
    ids, reply = chat.encode_dialogue(tokenizer, template, chat.without_oldest(messages, drop))
    learned = reply == reply.max() if config.task.replies == "last" else reply > 0
    tokens, weights = np.array(ids[: config.data.length + 1], np.int32), learned[1 : config.data.length + 1]
    features = {"target": tokens[:-1], "labels": tokens[1:], "weights": weights.astype(np.float32)}
    empty = {} if weights.any() else {"empty": np.asarray(1, np.int32)}
    return {**features, **empty, **_tokens.truncation(complete + 1 - len(tokens))}


def template_of(tokenizers: Tokenizers) -> str:
    """The chat template of the tokenizers.

    Raises:
      ConfigError: they have none.
    """
    if tokenizers.chat_template is None:
        raise ConfigError(
            "chat: got a model without a chat template, expected one; put chat_template.jinja into its directory, or "
            "train with task.name=dialogue"
        )
    return tokenizers.chat_template


class ChatPrompt(NamedTuple):
    """The prompt of a conversation whose last turn waits for its reply.

    Attributes:
      features: what the model reads; "cut" is the number of tokens that it does not read, absent if it reads all.
      dropped: number of turns that were left out, the oldest ones.
      cropped: number of tokens that are missing at the beginning, because the last turn alone is too long.
    """

    features: Features
    dropped: int
    cropped: int

    def note(self, limit: int | None) -> str:
        """One line about what the model does not read; "" if it reads all."""
        if not self.dropped and not self.cropped:
            return ""
        lost = [f"its {self.dropped} oldest turns"] if self.dropped else []
        lost += [f"the first {self.cropped} tokens of what is left"] if self.cropped else []
        return f"chat: the conversation is longer than the {limit} tokens that fit: {' and '.join(lost)} are not read"


def chat_prompt(tokenizers: Tokenizers, messages: Sequence[Message], limit: int | None, dated: bool) -> ChatPrompt:
    """The tokens of a conversation with the next reply opened, at most `limit` of them.

    The oldest turns are left out as in training. If the last turn alone is too long, its last tokens are read.

    Args:
      dated: see `chat.render`.
    """
    tokenizer, template = tokenizers.target, template_of(tokenizers)

    def ids_of(turns: Sequence[Message]) -> list[int]:
        return chat.encode_prompt(tokenizer, template, turns, dated=dated)

    ids, drop = ids_of(messages), 0
    complete = len(ids)
    if limit is not None and complete > limit:
        drop = chat.exchanges_to_drop(messages, lambda turns: len(ids_of(turns)), limit)
        ids = ids_of(chat.without_oldest(messages, drop))
    cropped = 0 if limit is None else max(len(ids) - limit, 0)
    features = {"target": np.array(ids[cropped:], np.int32), **_tokens.truncation(complete - len(ids) + cropped)}
    return ChatPrompt(features, 2 * drop, cropped)


def prompt_limit(length: int | None, max_new: int) -> int | None:
    """Number of tokens that a conversation may have, so that a reply of `max_new` tokens fits behind it.

    Args:
      length: tokens of conversation and reply together; None: there is no limit.
    """
    if length is None:
        return None
    return max(length - min(max_new, int(length * MAX_REPLY_FRACTION)), 1)


def parse_line(line: str) -> list[dict[str, str]]:
    """The conversation of an input line: an object as in the data, without the last reply; other text is one turn.

    Raises:
      ConfigError: its roles are out of order.
    """
    if line.lstrip().startswith("{"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and set(record) == {"messages"}:
            return chat.check_messages(record["messages"], "line", answered=False)
    return [{"role": "user", "content": line}]


def input_line(example: Example) -> str:
    """The conversation up to its last reply, as `parse_line` reads it."""
    return json.dumps({"messages": example["messages"][:-1]}, ensure_ascii=False)


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """The conversation of a line with the next reply opened."""
    limit = prompt_limit(config.data.length, config.decode.max_length)
    return chat_prompt(tokenizers, parse_line(line), limit, dated=False).features


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[str]:
    """The reply to each line's conversation."""
    return _generation.reply_texts(predictor, predictor.prompts(text_lines(lines)), options)


def history_prompt(predictor: Predictor, history: Any, options: DecodeConfig) -> ChatPrompt:
    """The prompt of a history `[{"role", "content"}, ...]` whose last turn is the user's. Says what is not read.

    Raises:
      ConfigError: the history is no list of turns, or its roles are out of order; the model has no chat template.
    """
    messages = chat.check_messages(history, "history", answered=False)
    limit = prompt_limit(predictor.framing.chat_length, options.max_length)
    found = chat_prompt(predictor.framing.tokenizers, messages, limit, dated=True)
    note = found.note(limit)
    if note:
        LOG.warning(note)
    return found


def reply(predictor: Predictor, history: Any, options: DecodeConfig) -> str:
    """The reply to a history. Errors are those of `history_prompt`."""
    features = history_prompt(predictor, history, options).features
    return _generation.reply_texts(predictor, [features], options)[0]


def stream_reply(predictor: Predictor, history: Any, options: DecodeConfig) -> Iterator[str]:
    """`reply` in pieces, as tokens are chosen. Errors come before the first piece."""
    return stream_prompt(predictor, history_prompt(predictor, history, options), options)


def stream_prompt(predictor: Predictor, prompt: ChatPrompt, options: DecodeConfig) -> Iterator[str]:
    """The reply to a chat prompt in pieces, as tokens are chosen."""
    pieces = predictor.runner.stream(prompt.features, options)
    return _generation.texts(predictor.framing.tokenizers.target, [], pieces)


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity per token of the replies."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def reference_line(config: Config, example: Example) -> str:
    """The last reply of a conversation."""
    return example["messages"][-1]["content"]


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """The fraction of last replies that are right, blanks at their ends aside."""
    references = [reference_line(config, example).strip() for example in examples]
    return {"exact_match": metrics.exact_match([result.strip() for result in results], references)}


def output_line(result: str) -> str:
    """The reply with its line ends written `\\n`, so that it stays one line."""
    return result.replace("\r", "\\r").replace("\n", "\\n")


TASK = Task(
    roles=("messages",),
    head="tokens",
    sides=("decoder",),
    method="chat",
    needs="a decoder with a head of tokens and a chat template",
    encode=encode,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=derived_metrics,
    input_line=input_line,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    score=score,
    score_names=("exact_match",),
)
