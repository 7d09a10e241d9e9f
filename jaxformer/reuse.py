"""Edits of the config of a trained run: what `evaluate` and `decode` may change without changing the model."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from jaxformer import overrides
from jaxformer.config import Config, ConfigError

EVALUATION = (
    "data.source", "data.name", "data.dir", "data.cache", "data.splits", "data.columns", "data.score_range",
    "data.format", "data.document", "data.length", "data.buckets", "data.packing", "evaluate.batch", "decode",
)  # fmt: skip
"""Fields that say which data is measured, how it becomes batches, and how output is decoded."""

DECODING = ("data.length", "data.buckets", "decode")
"""Fields that decide how lines become batches and how output is decoded."""

REASONS = {
    "data.tokenizer": "the model was trained on the ids of its own tokenizer",
    "data.batch": "it is of training; give --config.evaluate.batch or --config.decode.batch",
    "data.tokens": "it is of training; give --config.evaluate.batch or --config.decode.batch",
    "data.shuffle": "it is of training",
    "data.examples": "it is of training; cut the split, as --config.data.splits.test=FILE[:100]",
    "data.skip_long": "it is of training",
    "evaluate": "it is of validation during training; evaluate measures the whole split",
    "data": "decode reads lines and no data",
}
"""Why a field is refused where it is not allowed, by the longest path that matches."""


def edited(config: Config, edits: Sequence[str], allowed: Sequence[str], command: str) -> tuple[Config, dict[str, Any]]:
    """The config with `edits` applied, and what that changed: path -> {"run": value, "here": value}.

    Raises:
      ConfigError: an edit concerns a field that is not `allowed`, or gives it a wrong value.
    """
    refuse_others(edits, allowed, command)
    new = overrides.edit(config, edits)
    return new, dict(_changed(overrides.changes(config, new)))


def _changed(found: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, (was, now) in found.items():
        if not isinstance(now, Mapping):
            yield path, {"run": was, "here": now}
            continue
        for key in [*was, *(key for key in now if key not in was)]:
            if was.get(key) != now.get(key):
                yield f"{path}.{key}", {"run": was.get(key), "here": now.get(key)}


def refuse_others(edits: Sequence[str], allowed: Sequence[str], command: str) -> None:
    """Raises ConfigError if an edit concerns a field that is not `allowed`."""
    for edit in edits:
        path = edit.removeprefix("--config.").partition("=")[0]
        if not any(_below(path, each) for each in allowed):
            why = next((REASONS[each] for each in REASONS if _below(path, each)), "it comes with the run")
            expected = ", ".join(f"{each}.FIELD" if "." not in each else each for each in allowed)
            got = f"got --config.{ascii(path)[1:-1]}, which cannot change ({why})"
            raise ConfigError(f"{command}: {got}, expected {expected}")


def _below(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")
