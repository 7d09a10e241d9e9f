"""What a type cannot say about a config: ranges, names, and fields that must agree.

Paths in messages are those that `--config.PATH=VALUE` takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from jaxformer.checks import mesh, model, sections, size, tables
from jaxformer.config import Config, RecurrentConfig, StackConfig


def check(config: Config) -> None:
    """Raises a one-line ConfigError at the first thing that makes no sense in a config whose types are right."""
    for path, part in _parts(config, "config"):
        tables.fields(part, path)
    for path, part in _parts(config, "config"):  # only now: a stack's checks rely on its names being known
        if isinstance(part, StackConfig):
            model.stack(part, path, config)
        elif isinstance(part, RecurrentConfig):
            model.recurrent(part, path)
    if config.model.parts or not config.init.directory:  # else the directory has the model, judged when it is read
        model.whole(config.model)
        sections.task(config)
    sections.data(config)
    sections.train(config)
    mesh.check(config)
    sections.decode(config.decode)
    size.check(config)


def _parts(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, part
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if dataclasses.is_dataclass(value):
            yield from _parts(value, f"{path}.{f.name}")
