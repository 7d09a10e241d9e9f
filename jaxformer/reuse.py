"""Edits of the config of a trained run: what `evaluate` and `decode` may change without changing the model.

Both take every field of `data`, `evaluate` and `decode` but the tokenizer. A field that the command does not read is
accepted, checked, and named as one without effect.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from jaxformer import overrides
from jaxformer.config import Config, ConfigError

EDITABLE = ("data", "evaluate", "decode")
TOKENIZER = "data.tokenizer"

EVALUATION = (
    "data.source", "data.name", "data.dir", "data.cache", "data.splits", "data.columns", "data.score_range",
    "data.format", "data.document", "data.length", "data.buckets", "data.packing", "evaluate.batch",
    "evaluate.examples", "evaluate.decode_examples", "evaluate.samples", "decode",
)  # fmt: skip
"""Fields that `evaluate` reads: which data is measured, how it becomes batches, and how output is decoded."""

DECODING = ("data.length", "data.buckets", "decode")
"""Fields that `decode` reads: how lines become batches, and how output is decoded."""

REASONS = {
    TOKENIZER: "the model was trained on the ids of its own tokenizer",
    "data.examples": "it is of training; give --config.evaluate.examples",
    "data.batch": "it is of training; give --config.evaluate.batch or --config.decode.batch",
    "data.tokens": "it is of training; give --config.evaluate.batch or --config.decode.batch",
}
"""Why a field is refused or not read, by path. All others are of training or, where decoded, of data or measures."""


class Edited(NamedTuple):
    """A run's config as a command uses it.

    Attributes:
      config: with the edits.
      given: the paths of those that the command reads.
      changed: path -> {"run": value, "here": value} of those that differ from the run's.
      unread: the paths of edits that the command does not read.
    """

    config: Config
    given: frozenset[str]
    changed: dict[str, dict[str, Any]]
    unread: tuple[str, ...]

    def complaint(self, command: str) -> str:
        """One line about edits without effect; "" where there is none."""
        if not self.unread:
            return ""
        paths = (f"config.{path}" + (f" ({REASONS[path]})" if path in REASONS else "") for path in self.unread)
        return f"without effect on {command}: {', '.join(paths)}"


def edited(config: Config, edits: Sequence[str], read: Sequence[str], command: str) -> Edited:
    """Applies `edits` to a run's config for a command that reads the fields `read` only.

    Raises:
      ConfigError: an edit would change the model, or names no field, or gives one a wrong value.
    """
    refuse_others(edits, command)
    # A token budget is of training; beside it rows could not be made longer than it.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokens=None))
    new = overrides.edit(config, edits)
    paths = dict.fromkeys(map(_path, edits))
    unread = tuple(path for path in paths if not any(_below(path, each) for each in read))
    changed = dict(_changed(overrides.changes(config, new)))
    return Edited(
        new,
        frozenset(paths).difference(unread),
        {path: both for path, both in changed.items() if path not in unread},
        unread,
    )


def _changed(found: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, (was, now) in found.items():
        if not isinstance(now, Mapping):
            yield path, {"run": was, "here": now}
            continue
        for key in [*was, *(key for key in now if key not in was)]:
            if was.get(key) != now.get(key):
                yield f"{path}.{key}", {"run": was.get(key), "here": now.get(key)}


def refuse_others(edits: Sequence[str], command: str) -> None:
    """Raises ConfigError if an edit concerns a field that comes with the model."""
    for path in map(_path, edits):
        if _below(path, TOKENIZER) or not any(_below(path, each) for each in EDITABLE):
            why = REASONS[TOKENIZER] if _below(path, TOKENIZER) else "it comes with the run"
            expected = ", ".join(f"{each}.FIELD" for each in EDITABLE)
            got = f"got --config.{ascii(path)[1:-1]}, which cannot change ({why})"
            raise ConfigError(f"{command}: {got}, expected {expected}")


def _path(edit: str) -> str:
    return edit.removeprefix("--config.").partition("=")[0]


def _below(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")
