"""Secrets stay out of what is written or printed for people: one function for text, one for commands, one for JSON.

Recognised are values under a name that sounds secret (HF_TOKEN, GITHUB_PAT, --config.x.password=), passwords in
addresses, tokens whose form gives them away (ghp_..., hf_..., AKIA...), and whatever a variable of the environment with
such a name holds.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import ConfigError

HIDDEN = "***"

SHORTEST = 6
"""Characters of a variable's value from which on it is looked for in text: shorter ones occur by chance."""

_NOT_SECRET = r"(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!mask_)(?<!sep_)(?<!cls_)(?<!start_)(?<!end_)"
_WORDS = (
    rf"{_NOT_SECRET}token|secret|passw(?:or)?d|passphrase|(?<=[._-])(?:pwd|pass)|credentials?|private|authorization"
    r"|webhook(?:_url)?|(?:\b|[._-])pat"
)
NAME = re.compile(rf"(?:{_WORDS}|(?:^|[._-])(?:api|access)?key|apikey|key[._-]id)$", re.IGNORECASE)
"""Names whose values are nobody's business: of variables, flags and fields."""

ADDRESS = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
"""User and password in an address."""

FORM = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|sk-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
"""Tokens of well-known services."""

# In running text a name needs more than "key" to be one: --config.data.columns.KEY=VALUE is help, not a secret.
ASSIGNMENT = re.compile(
    rf"(?P<name>\b[\w.-]*(?:{_WORDS}|[._-]pat|api[._-]?key|access[._-]?key|secret[._-]?key|[A-Z0-9]_KEY|key_id))"
    r"(?P<equals>[\"']?\s?[=:]\s?)(?P<quote>[\"']?)(?P<value>[^\s\"'&,;<>]+)",
    re.IGNORECASE,
)


def text(text: str, variables: Mapping[str, str] | None = None) -> str:
    """`text` without its secrets.

    Args:
      variables: of the environment; None: this process's.
    """
    for secret in _values(os.environ if variables is None else variables):
        text = text.replace(secret, HIDDEN)
    text = FORM.sub(HIDDEN, ADDRESS.sub(f"{HIDDEN}@", text))
    return ASSIGNMENT.sub(rf"\g<name>\g<equals>\g<quote>{HIDDEN}", text)


def command(words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """A command line without its secrets."""
    out: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if out and out[-1].startswith("--") and "=" not in out[-1] and NAME.search(out[-1]):
            word = HIDDEN
        elif equals and NAME.search(flag):
            word = f"{flag}={HIDDEN}"
        out.append(text(word, variables))
    return out


def tree(value: Any, name: str = "") -> Any:
    """A JSON value without its secrets, in its strings and under names that sound like one."""
    if isinstance(value, dict):
        return {key: tree(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and NAME.search(name) else text(value)
    return value


def refuse(value: Any, path: str) -> None:
    """Refuses a config with a secret in it: `config.json` is kept, copied and shared.

    Raises:
      ConfigError: a string has a password in an address, the form of a token, or what a secret variable of the
        environment holds. The message does not repeat it.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            refuse(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            refuse(item, path)
    elif isinstance(value, str):
        found = "a password or token" if ADDRESS.search(value) or FORM.search(value) else _variable_in(value)
        if found:
            raise ConfigError(
                f"{path}: got {text(value)!a}, which holds {found}, expected none: config.json would keep it; mount or "
                "download what it opens, and name the folder"
            )


def _variable_in(value: str) -> str:
    """The secret variable of the environment whose value is in `value`, as words; empty if there is none."""
    held = set(_values(os.environ))
    names = (name for name, secret in os.environ.items() if secret in held and NAME.search(name) and secret in value)
    return next((f"what the variable {name} holds" for name in names), "")


def _values(variables: Mapping[str, str]) -> list[str]:
    return _secrets(tuple(sorted(variables.items())))


@functools.lru_cache(maxsize=4)
def _secrets(variables: tuple[tuple[str, str], ...]) -> list[str]:
    """The values of secret variables, and passwords in addresses that any variable holds; the longest first."""
    found = {value for name, value in variables if NAME.search(name)}
    for _, value in variables:
        found.update(match[0][:-1].partition(":")[2] for match in ADDRESS.finditer(value))
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)
