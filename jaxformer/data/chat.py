"""Conversations as tokens: chat templates, the order of turns, which tokens are replies, and what is cut.

A chat template is a Jinja text that writes a conversation with the special tokens around its turns. It is rendered as
the Hugging Face library does, in a sandbox: with `trim_blocks` and `lstrip_blocks`, loop controls, `tojson`,
`raise_exception`, `strftime_now`, and blocks `{% generation %}` around replies. Its variables are `messages`,
`add_generation_prompt`, and the special tokens by name (`bos_token`, `eos_token`, `sep_token`, ...).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data.tokenizer_files import read_file
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest

Message = Mapping[str, Any]
"""A turn: "role" and "content"."""

ROLES = ("system", "user", "assistant")

DEFAULT_TEMPLATE = """\
{%- set begin = bos_token or eos_token -%}
{%- set middle = sep_token if sep_token and sep_token != eos_token else '\\n' -%}
{%- for message in messages -%}
{{ begin }}{{ message['role'] }}{{ middle }}{{ message['content'] | trim }}{{ eos_token }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ begin }}assistant{{ middle }}
{%- endif -%}
"""
"""A turn is `<s>role<sep>content</s>`; without a token <sep>, a line end stands for it."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks of a reply in rendered text: characters that Unicode keeps out of texts."""

CUTTING = "the oldest turns are left out, each user's with its reply; the system's turn stays"
"""The rule for conversations that are too long, in words."""


# --- turns ------------------------------------------------------------------------------------------------------------


def check_messages(messages: Any, where: str, answered: bool) -> list[dict[str, str]]:
    """The turns of a conversation: perhaps the system's, then the user's and the assistant's in turns.

    Args:
      messages: a list of {"role", "content"}.
      where: place of the conversation, for errors.
      answered: True if the last turn must be a reply, as in data; False if it must be the user's, as in a question.

    Raises:
      ConfigError: the list is something else, a role is unknown or out of order, or a text is not one.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        got = type(messages).__name__ if not isinstance(messages, (list, tuple)) else "no turn"
        raise ConfigError(f'{where}: got {got}, expected a list of turns, as [{{"role": "user", "content": "Hi"}}]')
    turns = [_check_message(message, f"{where}, turn {number}") for number, message in enumerate(messages, 1)]
    begin = int(turns[0]["role"] == "system")
    for index, turn in enumerate(turns[begin:]):
        expected = ("user", "assistant")[index % 2]
        if turn["role"] != expected:
            order = "perhaps one of the system, then user and assistant in turns"
            number = begin + index + 1
            raise ConfigError(f"{where}, turn {number}: got role {turn['role']}, expected {expected}: {order}")
    last = "assistant" if answered else "user"
    if turns[-1]["role"] != last:
        got = f"got role {turns[-1]['role']} in the last turn"
        raise ConfigError(f"{where}: {got}, expected {last}; " + ("remove it" if len(turns) > 1 else "add a turn"))
    return turns


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        got = f"keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        raise ConfigError(f"{where}: got {got}, expected role and content")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise ConfigError(f"{where}: got role {role!a}, expected one of {', '.join(ROLES)}{hint}")
    if not isinstance(content, str):
        raise ConfigError(f"{where}: got content of type {type(content).__name__}, expected a string")
    wrong = next((mark for mark in (BEGIN, END) if mark in content), None)
    if wrong is None and not content.isascii():
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON's escapes can name half a surrogate pair
            wrong = content[error.start]
    if wrong is not None:
        raise ConfigError(f"{where}: got {wrong!a} in the content, expected text that UTF-8 can hold")
    return {"role": role, "content": content}


def without_oldest(messages: Sequence[Message], exchanges: int) -> list[Message]:
    """The conversation without its first `exchanges` turns of the user and their replies; the system's turn stays."""
    begin = int(messages[0]["role"] == "system")
    return [*messages[:begin], *messages[begin + 2 * exchanges :]]


def exchanges_to_drop(messages: Sequence[Message], size: Callable[[Sequence[Message]], int], limit: int) -> int:
    """The smallest number of oldest exchanges without which `size` is at most `limit`, but never the last one.

    `size` must not grow when turns are left out: this is a bisection.
    """
    begin = int(messages[0]["role"] == "system")
    low, high = 0, (len(messages) - begin - 1) // 2
    while low < high:
        middle = (low + high) // 2
        if size(without_oldest(messages, middle)) <= limit:
            high = middle
        else:
            low = middle + 1
    return low


# --- templates --------------------------------------------------------------------------------------------------------


def read_template(path: str) -> str:
    """The text of a template's file.

    Raises:
      ConfigError: it cannot be read, or is no template.
    """
    try:
        text = read_file(Path(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template: got {path}, expected UTF-8 text ({error.reason}); convert it") from error
    from jaxformer.data import chat_templates

    chat_templates.compile_template(text)
    return text


def render(
    template: str, tokens: Mapping[str, str], messages: Sequence[Message], opening: bool, dated: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters (first, one past the last) of its generation blocks.

    Args:
      tokens: special tokens by the names that templates have for them.
      opening: True to open the next reply at the end (`add_generation_prompt`).
      dated: True to give the template `strftime_now`, which makes its text depend on the day.

    Raises:
      ConfigError: the template is wrong, or rejects the conversation.
    """
    from jaxformer.data import chat_templates

    now = {"strftime_now": lambda form: datetime.datetime.now().strftime(form)} if dated else {}
    turns = [dict(message) for message in messages]
    variables: dict[str, Any] = {"messages": turns, "add_generation_prompt": opening, "tools": None, "documents": None}
    marked = chat_templates.render(template, {**variables, **tokens, **now})
    text, spans, begin = "", [], 0
    for number, part in enumerate(marked.replace(END, BEGIN).split(BEGIN)):
        begin, text = len(text), text + part
        if number % 2:
            spans.append((begin, len(text)))
    return text, spans


def template_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens of a tokenizer by the names that templates have for them."""
    return {f"{role}_token": piece for role, piece in tokenizer.names.items()}


# --- tokens -----------------------------------------------------------------------------------------------------------


class Dialogue(NamedTuple):
    """A conversation as tokens.

    Attributes:
      ids: its tokens.
      reply: int32 `[n]`, for each token the number of the reply that it belongs to, from 1; 0: none.
    """

    ids: list[int]
    reply: np.ndarray


def encode_prompt(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], opening: bool = True, dated: bool = False
) -> list[int]:
    """Tokens of a conversation, with the beginning of the next reply if `opening`. Special tokens are the template's.

    Raises:
      ConfigError: the template rejects the conversation, or a turn holds the name of a special token.
    """
    _check_contents(tokenizer, messages)
    return tokenizer.parse(render(template, template_tokens(tokenizer), messages, opening, dated)[0])


def encode_dialogue(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> Dialogue:
    """Tokens of an answered conversation, and which of them are replies, each with its end token.

    Replies are what stands in the template's generation blocks. Without them, the conversation before a reply, with the
    reply opened, must be the beginning of the conversation after it.

    Raises:
      ConfigError: the template rejects the conversation; it does not say which text is a reply; a reply does not end
        with the end token, or shares a token with the text before it; or a turn holds the name of a special token.
    """
    _check_contents(tokenizer, messages)
    text, spans = _find_replies(template, template_tokens(tokenizer), messages)
    ids = tokenizer.parse(text)
    reply = np.zeros(len(ids), np.int32)
    for number, (begin, end) in enumerate(spans, 1):
        first, last = (_token_boundary(tokenizer, ids, text, character) for character in (begin, end))
        reply[first : _end_of_reply(tokenizer, ids, first, last)] = number
    return Dialogue(ids, reply)


def _find_replies(
    template: str, tokens: Mapping[str, str], messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters of every reply."""
    text, spans = render(template, tokens, messages, opening=False)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spans:
        for index in replies:
            before = render(template, tokens, messages[:index], opening=True)[0]
            after = render(template, tokens, messages[: index + 1], opening=False)[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise ConfigError(
                    "chat template: got one that writes earlier turns anew when a reply follows, expected blocks "
                    "{% generation %} ... {% endgeneration %} that say what a reply is; add them to the template"
                )
            spans.append((len(before), len(after)))
    if len(spans) != len(replies):
        raise ConfigError(
            f"chat template: got {len(spans)} generation blocks for {len(replies)} replies, expected one for each; "
            "mend the template"
        )
    return text, spans


def _token_boundary(tokenizer: Tokenizer, ids: Sequence[int], text: str, character: int) -> int:
    """The number of tokens of `text[:character]`, where one of the tokens `ids` of the text must begin."""
    before = tokenizer.parse(text[:character])
    if list(ids[: len(before)]) != before:
        shown = text[max(character - 20, 0) : character + 20]
        raise ConfigError(
            f"chat template: got a reply whose border lies inside a token (in {shown!a}), expected a special token or "
            "a line end beside replies; change the template"
        )
    return len(before)


def _end_of_reply(tokenizer: Tokenizer, ids: Sequence[int], first: int, last: int) -> int:
    """The end of the reply `ids[first:last]`: after its end token, which may stand right behind it."""
    if tokenizer.eos in ids[first:last]:
        end = last - ids[first:last][::-1].index(tokenizer.eos)
        if not tokenizer.decode(ids[end:last]).strip():
            return end
    elif last < len(ids) and ids[last] == tokenizer.eos:
        return last + 1
    raise ConfigError(
        f"chat template: got a reply that does not end with {tokenizer.names.get('eos', 'an end token')}, the token "
        "that ends decoding, expected one that does; change the template or the tokenizer's end token"
    )


def _check_contents(tokenizer: Tokenizer, messages: Iterable[Message]) -> None:
    """Raises a ConfigError if a turn holds the name of a special token, which would become that token."""
    for message in messages:
        name = next((name for name in tokenizer.special_names if name in message["content"]), None)
        if name is not None:
            raise ConfigError(
                f"messages: got {name!a} in a turn of the {message['role']}, which the tokenizer reads as a special "
                "token, expected text; remove it"
            )
