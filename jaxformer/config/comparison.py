"""Comparison of configs: which fields differ, which of them make another run, and a fingerprint of results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Iterator, Sequence

from jaxformer.config.hints import describe_value
from jaxformer.config.schema import Config

RESUMABLE = (
    "train.steps", "train.log_every", "train.evaluate_every", "train.checkpoint_every", "train.skip_limit",
    "train.patience", "train.deadline", "train.watchdog", "train.trackers",
    "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.average", "checkpoint.average_of",
    "evaluate", "decode", "mesh", "data.cache", "data.workers", "data.shard_copies_gb",
)  # fmt: skip
"""Fields and sections that may change when a run is resumed: length, intervals, reports and devices."""

EXECUTION_ONLY = (
    "train.log_every", "train.skip_limit", "train.deadline", "train.watchdog", "train.trackers", "mesh", "data.cache",
    "data.workers", "data.shard_copies_gb",
)  # fmt: skip
"""Fields and sections without effect on a run's final numbers (`mesh` changes their rounding only)."""

FILLED_IN = ("vocab", "classes", "class_counts", "channels", "means", "deviations", "look_back", "horizon")
"""Names of fields that a run fills in where they are None or (): such a value agrees with any saved one."""


def _items(section: Any) -> dict[str, Any]:
    """The fields of a section, or the entries of a dict of sections, by name."""
    if dataclasses.is_dataclass(section):
        return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return dict(section)


def _has_sections(value: Any) -> bool:
    """True for a dict of sections that is not empty."""
    return isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values()))


def diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Path ("train.seed") -> the two values, for every field in which two configs differ, in schema order."""

    def walk(x: Any, y: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
        if (dataclasses.is_dataclass(x) and type(x) is type(y)) or (
            _has_sections(x) and _has_sections(y) and x.keys() == y.keys()
        ):
            others = _items(y)
            for name, value in _items(x).items():
                yield from walk(value, others[name], f"{path}.{name}" if path else name)
        elif x != y:
            yield path, (x, y)

    return dict(walk(a, b, ""))


def resume_conflicts(config: Config, saved: Config) -> list[str]:
    """Paths that keep `config` from resuming the run that wrote `saved`; empty if it may resume.

    Fields of `RESUMABLE`, and those that the run has filled in (`FILLED_IN`), do not count.
    """
    return [
        path
        for path, (value, _) in diff(config, saved).items()
        if not _is_filled_in(path, value) and not _is_in(path, RESUMABLE)
    ]


def describe_resume_conflicts(config: Config, saved: Config) -> list[str]:
    """The fields of `resume_conflicts` with both values: "train.seed: here 3, there 0"."""
    values = diff(config, saved)
    return [
        f"{path}: here {_describe(values[path][0])}, there {_describe(values[path][1])}"
        for path in resume_conflicts(config, saved)
    ]


def result_conflicts(config: Config, saved: Config) -> list[str]:
    """Paths in which `config` would give other final numbers than the resolved config `saved`."""
    return [
        path
        for path, (value, _) in diff(config, saved).items()
        if not _is_filled_in(path, value) and not _is_in(path, EXECUTION_ONLY)
    ]


def fingerprint(config: Config) -> str:
    """16 hexadecimal digits, different for configs that may give different final numbers.

    Only fields that differ from their default count, without those of `EXECUTION_ONLY`. A field that a later version
    adds leaves the fingerprints of configs that keep its default unchanged.
    """

    def walk(section: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, type(section).__name__
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), f"{path}.{field.name}" if path else field.name
            if dataclasses.is_dataclass(value):
                yield from walk(value, name)
            elif _has_sections(value):
                for key, entry in value.items():
                    yield from walk(entry, f"{name}.{key}")
            elif value != default_of(field) and not _is_in(name, EXECUTION_ONLY):
                yield name, value

    text = json.dumps(dict(walk(config, "")), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default value of a dataclass field that has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_filled_in(path: str, value: Any) -> bool:
    return value in (None, ()) and path.rpartition(".")[2] in FILLED_IN


def _is_in(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(section + ".") for section in sections)


def _describe(value: Any) -> str:
    if value is None or dataclasses.is_dataclass(value):
        return "None" if value is None else f"a {type(value).__name__}"
    return describe_value(value).rpartition(" (")[0]
