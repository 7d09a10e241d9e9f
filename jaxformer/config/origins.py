"""Where each value of a config comes from: the command line, the recipe's variant, the recipe, or the default.

Recipes are Python, so values are compared rather than watched: a value that a recipe sets to its default counts as the
default. Of fields that are None, the value that other fields imply is said, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxformer.config import overrides
from jaxformer.config.hints import field_types, section_type
from jaxformer.config.recipes import load
from jaxformer.config.schema import Config, EmbedConfig, HeadConfig, RecurrentConfig, StackConfig
from jaxformer.errors import ConfigError

DEFAULT, RECIPE, COMMAND_LINE = "default", "recipe", "command line"

LEARNED_TOKENIZERS = ("word", "bpe", "unigram")
"""Kinds of tokenizer whose size the config sets."""


@dataclasses.dataclass(frozen=True)
class Value:
    """One value of a config.

    Attributes:
      path: "model.encoder.layers".
      value: the value; a section that the run does not have is None.
      origin: "default", "recipe", "variant NAME" or "command line".
      derived: what None stands for, as "512 (4 * width)"; "" if it stands for itself.
    """

    path: str
    value: Any
    origin: str
    derived: str = ""


def trace(argv: Sequence[str]) -> list[Value]:
    """Every value of the config that `overrides.parse(argv)` returns, in the order of the schema.

    Raises:
      ConfigError: as `overrides.parse`.
    """
    config = overrides.parse(argv)
    recipe = next(word.removeprefix("--config=") for word in argv if word.startswith("--config="))
    edited = {word.removeprefix("--config.").partition("=")[0] for word in argv if word.startswith("--config.")}
    written, variant = dict(_leaves(load(recipe))), ""
    plain = _without_variant(recipe)
    if plain is not None:
        variant = recipe.rpartition(":")[2]
    found = []
    hidden = object()
    for path, value, default in _values(config, Config(), Config, ""):
        if any(path == edit or path.startswith(f"{edit}.") for edit in edited):
            origin = COMMAND_LINE
        elif _equal(value, default):
            origin = DEFAULT
        elif plain is not None and not _equal(plain.get(path, hidden), written.get(path, hidden)):
            origin = f"variant {variant}"
        else:
            origin = RECIPE
        derived = _derived(config, path) if value is None else ""
        found.append(Value(path, value, origin, derived))
    return found


def to_text(values: Sequence[Value]) -> str:
    """A line for each value: `model.encoder.layers = 6  # recipe`, with the origins in one column where they fit."""
    lines = [f"{value.path} = {format_value(value.value)}" for value in values]
    width = min(max(map(len, lines), default=0), 60)
    ends = [f"{value.origin}{f'; derived: {value.derived}' if value.derived else ''}" for value in values]
    return "\n".join(f"{line:<{width}}  # {end}" for line, end in zip(lines, ends, strict=True))


def format_value(value: Any) -> str:
    """A value as an edit on the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "none"
    if isinstance(value, tuple) and all(isinstance(item, (str, int, float)) for item in value):
        return ",".join(map(str, value)) or "()"
    return str(value) if isinstance(value, (int, float, tuple)) else repr(value)


def _without_variant(recipe: str) -> dict[str, Any] | None:
    """The values of a recipe without its variant; None if the variant is not given, or the recipe needs one."""
    path, _, variant = recipe.rpartition(":")
    if not path or not path.endswith(".py") or not variant:
        return None
    try:
        return dict(_leaves(load(path)))
    except ConfigError:
        return None


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of an editable config by their path."""
    for name, value in node.items():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{name}.")
        yield f"{prefix}{name}", value


def _values(section: Any, default: Any, kind: type, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, default) of every field of a section; of one that only the recipe adds, those of its class."""
    for name, hint in field_types(kind).items():
        value, usual, path = getattr(section, name), getattr(default, name), f"{prefix}{name}"
        part = section_type(hint)
        if part is not None and value is not None:
            yield from _values(value, part() if usual is None else usual, part, f"{path}.")
        elif isinstance(value, Mapping) and any(map(dataclasses.is_dataclass, value.values())):
            for key, item in value.items():
                yield from _values(item, type(item)(), type(item), f"{path}.{key}.")
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield f"{path}.{key}", item, None
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # options of a task
            yield from _values(value, type(value)(), type(value), f"{path}.")
        else:
            yield path, value, usual


def _equal(a: Any, b: Any) -> bool:
    """Equality of values, with lists as tuples."""
    return (tuple(a) if isinstance(a, list) else a) == (tuple(b) if isinstance(b, list) else b)


# --- what None stands for ---------------------------------------------------------------------------------------------


def _derived(config: Config, path: str) -> str:
    """The value that other fields imply for a field that is None, and how."""
    words = path.split(".")
    owners: list[Any] = [config]
    for word in words[:-1]:
        owner = owners[-1]
        owners.append(owner[word] if isinstance(owner, Mapping) else getattr(owner, word))
    name, owner = words[-1], owners[-1]
    stack = next((part for part in reversed(owners) if isinstance(part, (StackConfig, RecurrentConfig))), None)
    if isinstance(stack, StackConfig):
        attention = stack.attention
        known = {
            "attention.kv_heads": (attention.heads, "heads"),
            "attention.head_width": (stack.width // attention.heads, "width // heads"),
            "ffn.width": (4 * stack.width, "4 * width"),
            "norm.final": (str(stack.norm.order != "post").lower(), "norm.order is not post"),
        }
        if ".".join(words[-2:]) in known and owner in (attention, stack.ffn, stack.norm):
            value, reason = known[".".join(words[-2:])]
            return f"{value} ({reason})"
        if owner is stack and name == "causal":
            return "true (a decoder)" if words[-2] == "decoder" else "false (an encoder)"
    if isinstance(owner, EmbedConfig) and stack is not None and name == "width":
        return f"{stack.width} (width)"
    if isinstance(owner, EmbedConfig) and name == "vocab":
        return _vocabulary(config, words[1] == "encoder")
    if isinstance(owner, HeadConfig) and owner.kind == "forecast" and name in ("look_back", "horizon"):
        value = config.data.length if name == "look_back" else config.data.horizon
        return f"{value} (data.{'length' if name == 'look_back' else 'horizon'})"
    if isinstance(owner, HeadConfig) and name == "classes" and owner.kind in ("classes", "slots"):
        return "what the data has"
    return ""


def _vocabulary(config: Config, reads_source: bool) -> str:
    """Rows of an embedding table."""
    tokenizer = config.data.tokenizer
    if config.model.series is not None and reads_source:
        return ""
    if tokenizer.kind not in LEARNED_TOKENIZERS:
        return "what the tokenizer has"
    rows = -(-(tokenizer.vocab + tokenizer.sentinels) // tokenizer.multiple) * tokenizer.multiple
    return f"{rows} (data.tokenizer.vocab; less if the data has fewer)"
