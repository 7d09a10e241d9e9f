"""Edits of a trained run's config by `evaluate`, `decode` and `chat`, which may not change the model.

These commands accept every field of `data`, `evaluate` and `decode` except the tokenizer. A field that the command does
not read is checked, and reported as one without effect.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from jaxformer.config import overrides
from jaxformer.config.schema import Config
from jaxformer.errors import ConfigError

EDITABLE = ("data", "evaluate", "decode")
"""Sections with editable fields."""

TOKENIZER = "data.tokenizer"

EVALUATE_FIELDS = (
    "data.mixture", "data.source", "data.name", "data.dir", "data.cache", "data.splits", "data.columns",
    "data.score_range", "data.format", "data.document", "data.length", "data.buckets", "data.packing",
    "data.shard_copies_gb", "evaluate.batch", "evaluate.examples", "evaluate.decode_examples", "evaluate.samples",
    "evaluate.length_bins", "decode",
)  # fmt: skip
"""Fields and sections that `evaluate` reads: the data, its batches, and decoding."""

DECODE_FIELDS = ("data.length", "data.buckets", "decode")
"""Fields and sections that `decode` reads: batches of lines, and decoding."""

CHAT_FIELDS = ("decode",)
"""Section that `chat` reads."""

REASONS = {
    TOKENIZER: "the model was trained on the ids of its own tokenizer",
    "data.examples": "it is of training; give --config.evaluate.examples",
    "data.batch": "it is of training; give --config.evaluate.batch or --config.decode.batch",
    "data.workers": "it is of training",
    "data.tokens": "it is of training; give --config.evaluate.batch or --config.decode.batch",
}
"""Path -> why the field is refused or has no effect, for the message about it."""


class AppliedEdits(NamedTuple):
    """A run's config with the edits of a command.

    Attributes:
      config: the run's config with all edits applied.
      used: paths of the edits that the command reads.
      changed: path -> {"run": value, "here": value}, for used edits that differ from the run's value.
      unused: paths of the edits that the command does not read.
    """

    config: Config
    used: frozenset[str]
    changed: dict[str, dict[str, Any]]
    unused: tuple[str, ...]

    def warning(self, command: str) -> str:
        """One line about edits without effect; "" if there are none."""
        if not self.unused:
            return ""
        paths = (f"config.{path}" + (f" ({REASONS[path]})" if path in REASONS else "") for path in self.unused)
        return f"without effect on {command}: {', '.join(paths)}"


def apply_edits(config: Config, edits: Sequence[str], fields: Sequence[str], command: str) -> AppliedEdits:
    """Applies `edits` to a run's config for a command that reads only `fields`, paths of fields or sections.

    Raises:
      ConfigError: an edit would change the model, names no field, or has a wrong value.
    """
    refuse_uneditable(edits, command)
    # The token budget limits training batches only, and would refuse a `data.length` above it.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokens=None))
    edited = overrides.edit(config, edits)
    paths = dict.fromkeys(map(_path_of, edits))
    unused = tuple(path for path in paths if not any(_is_in(path, field) for field in fields))
    changed = dict(_changed_values(overrides.diff(config, edited)))
    return AppliedEdits(
        edited,
        frozenset(paths).difference(unused),
        {path: values for path, values in changed.items() if path not in unused},
        unused,
    )


def refuse_uneditable(edits: Sequence[str], command: str) -> None:
    """Raises ConfigError if an edit concerns a field that belongs to the trained model."""
    for path in map(_path_of, edits):
        if _is_in(path, TOKENIZER) or not any(_is_in(path, section) for section in EDITABLE):
            reason = REASONS[TOKENIZER] if _is_in(path, TOKENIZER) else "it comes with the run"
            expected = ", ".join(f"{section}.FIELD" for section in EDITABLE)
            got = f"got --config.{ascii(path)[1:-1]}, which cannot change ({reason})"
            raise ConfigError(f"{command}: {got}, expected {expected}")


def _changed_values(diff: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path -> both values, with one path for each entry of a dict."""
    for path, (old, new) in diff.items():
        if not isinstance(new, Mapping):
            yield path, {"run": old, "here": new}
            continue
        old, new = ({key: _plain(value) for key, value in entries.items()} for entries in (old, new))
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                yield f"{path}.{key}", {"run": old.get(key), "here": new.get(key)}


def _plain(value: Any) -> Any:
    """A section as a dict, so that JSON can hold it."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _path_of(edit: str) -> str:
    return edit.removeprefix("--config.").partition("=")[0]


def _is_in(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")
