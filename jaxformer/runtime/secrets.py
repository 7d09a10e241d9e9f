"""Redaction of secrets in everything that is written or printed for people.

Four things count as secrets: values under a secret name (HF_TOKEN, GITHUB_PAT, --config.x.password=), passwords in
URLs, tokens of a known form (ghp_..., hf_..., AKIA...), and values of environment variables with a secret name.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.errors import ConfigError

REDACTED = "***"

MIN_SECRET_LENGTH = 6
"""Characters; shorter values of variables occur in text by chance and are not searched for."""

_NOT_SECRET = r"(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!mask_)(?<!sep_)(?<!cls_)(?<!start_)(?<!end_)(?<!multi_)"
_WORDS = (
    rf"{_NOT_SECRET}token|secret|passw(?:or)?d|passphrase|(?<=[._-])(?:pwd|pass)|credentials?|private|authorization"
    r"|webhook(?:_url)?|(?:\b|[._-])pat"
)
SECRET_NAME = re.compile(rf"(?:{_WORDS}|(?:^|[._-])(?:api|access)?key|apikey|key[._-]id)$", re.IGNORECASE)
"""Names of variables, flags and fields whose values are secret."""

URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
"""User and password in a URL."""

TOKEN_FORM = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|sk-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
"""Tokens of well-known services."""

# In running text the word "key" alone is no secret name: --config.data.columns.KEY=VALUE is help.
ASSIGNMENT = re.compile(
    rf"(?P<name>\b[\w.-]*(?:{_WORDS}|[._-]pat|api[._-]?key|access[._-]?key|secret[._-]?key|[A-Z0-9]_KEY|key_id))"
    r"(?P<equals>[\"']?\s?[=:]\s?)(?P<quote>[\"']?)(?P<value>[^\s\"'&,;<>]+)",
    re.IGNORECASE,
)


def redact(text: str, variables: Mapping[str, str] | None = None) -> str:
    """`text` with its secrets replaced by `REDACTED`.

    Args:
      variables: environment variables whose secret values are replaced; None: those of this process.
    """
    for secret in _secret_values(os.environ if variables is None else variables):
        text = text.replace(secret, REDACTED)
    text = TOKEN_FORM.sub(REDACTED, URL_CREDENTIALS.sub(f"{REDACTED}@", text))
    return ASSIGNMENT.sub(rf"\g<name>\g<equals>\g<quote>{REDACTED}", text)


def redact_command(words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """`redact` for the words of a command line, including values that follow their flag as a word of their own."""
    redacted: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        previous = redacted[-1] if redacted else ""
        if previous.startswith("--") and "=" not in previous and SECRET_NAME.search(previous):
            word = REDACTED
        elif equals and SECRET_NAME.search(flag):
            word = f"{flag}={REDACTED}"
        redacted.append(redact(word, variables))
    return redacted


def redact_json(value: Any, name: str = "") -> Any:
    """`redact` for a JSON value: its strings, and strings under secret names.

    Args:
      name: the key that holds `value`.
    """
    if isinstance(value, dict):
        return {key: redact_json(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_json(item, name) for item in value]
    if isinstance(value, str):
        return REDACTED if value and SECRET_NAME.search(name) else redact(value)
    return value


def reject(value: Any, path: str) -> None:
    """Refuses a config that holds a secret, since `config.json` is stored, copied and shared.

    Args:
      path: dotted path of `value` in the config, for the error.

    Raises:
      ConfigError: a string has a password in a URL, a token, or the value of a secret environment variable. The message
        does not repeat it.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            reject(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            reject(item, path)
    elif isinstance(value, str):
        has_secret = URL_CREDENTIALS.search(value) or TOKEN_FORM.search(value)
        description = "a password or token" if has_secret else _variable_in(value)
        if description:
            raise ConfigError(
                f"{path}: got {redact(value)!a}, which holds {description}, expected no secret: config.json would keep "
                "it; mount or download the data, and name the folder"
            )


def _variable_in(value: str) -> str:
    """Words that name the secret environment variable whose value is in `value`; empty if there is none."""
    values = set(_secret_values(os.environ))
    for name, secret in os.environ.items():
        if secret in values and SECRET_NAME.search(name) and secret in value:
            return f"what the variable {name} holds"
    return ""


def _secret_values(variables: Mapping[str, str]) -> list[str]:
    return _find_secret_values(tuple(sorted(variables.items())))


@functools.lru_cache(maxsize=4)
def _find_secret_values(variables: tuple[tuple[str, str], ...]) -> list[str]:
    """Values of secret variables, and passwords in URLs that any variable holds; longest first."""
    values = {value for name, value in variables if SECRET_NAME.search(name)}
    for _, value in variables:
        values.update(match[0][:-1].partition(":")[2] for match in URL_CREDENTIALS.finditer(value))
    return sorted((value for value in values if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True)
