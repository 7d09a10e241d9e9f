"""Checks of a config whose types are right: allowed values, and fields that must agree.

Paths in messages are those that `--config.PATH=VALUE` takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from jaxformer.config.checks import fields, mesh, mixture, model, sections, size, stack
from jaxformer.config.schema import Config, RecurrentConfig, StackConfig


def check(config: Config) -> None:
    """Raises a one-line ConfigError at the first value that is not allowed, or that contradicts another."""
    for path, part in _walk_sections(config, "config"):
        fields.check_fields(part, path)
    for path, part in _walk_sections(config, "config"):  # after the names, which the checks of a stack look up
        if isinstance(part, StackConfig):
            stack.check_stack(part, path, config)
        elif isinstance(part, RecurrentConfig):
            stack.check_recurrent(part, path)
    if not (config.model.is_empty and config.init.directory):  # else the directory's model is checked when it is read
        model.check_model(config.model)
        sections.check_task(config)
    sections.check_data(config)
    sections.check_shard_copies(config)
    sections.check_template(config)
    sections.check_distillation(config)
    if config.data.mixture is not None:
        mixture.check_mixture(config)
    sections.check_train(config)
    sections.check_evaluate(config)
    mesh.check_mesh(config)
    sections.check_decode(config.decode, config.model)
    size.check_limits(config)


def _walk_sections(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of a section and of all sections in it."""
    yield path, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk_sections(value, f"{path}.{field.name}")
        elif isinstance(value, dict):
            for key, entry in value.items():
                if dataclasses.is_dataclass(entry):
                    yield from _walk_sections(entry, f"{path}.{field.name}.{key}")
