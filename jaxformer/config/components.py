"""The components of a mixture, each as the config of a run on it alone."""

from __future__ import annotations

import dataclasses
import hashlib
import os

from jaxformer.config.schema import ComponentConfig, Config, SourceConfig

SOURCE_FIELDS = tuple(field.name for field in dataclasses.fields(SourceConfig))
"""Fields of `data` that each component has of its own."""


def views(config: Config) -> dict[str, Config]:
    """Name -> config of a run on this component alone, in the order of the names; `{"": config}` without a mixture.

    A view has the source, the task and the classes of its component, and all else of `config`. Its seed is derived from
    the run's and from its name, so that neither its order nor its noise depends on the other components.
    """
    if config.data.mixture is None:
        return {"": config}
    return {name: _view(config, name, config.data.mixture.components[name]) for name in names(config)}


def _view(config: Config, name: str, component: ComponentConfig) -> Config:
    source = {field: getattr(component, field) for field in SOURCE_FIELDS}
    source["dir"] = os.path.join(config.data.dir, component.dir) if component.dir else config.data.dir
    task = config.task if component.task is None else component.task
    task = dataclasses.replace(task, vocab=config.task.vocab, classes=component.classes or task.classes)
    digest = hashlib.sha256(f"{config.train.seed} {name}".encode()).digest()
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, mixture=None, **source),
        task=task,
        train=dataclasses.replace(config.train, seed=int.from_bytes(digest[:4])),
    )


def names(config: Config) -> tuple[str, ...]:
    """Names of the components, sorted: a saved config has lost their order. () without a mixture."""
    return () if config.data.mixture is None else tuple(sorted(config.data.mixture.components))


def trained(config: Config) -> tuple[str, ...]:
    """Names of the components that are trained on; ("",) without a mixture."""
    mixture = config.data.mixture
    if mixture is None:
        return ("",)
    return tuple(name for name in names(config) if mixture.components[name].weight > 0)


def measure(name: str, component: str) -> str:
    """Name of a measure of a component: `loss/NAME`; the plain name without a mixture."""
    return f"{name}/{component}" if component else name
