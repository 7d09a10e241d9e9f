"""The data set of a run as its task reads it; of a mixture, those of all components."""

from __future__ import annotations

import dataclasses

from jaxformer import tasks
from jaxformer.config import Config, components
from jaxformer.data import sources
from jaxformer.data.sources import Dataset, Examples, FirstExamples, JoinedExamples
from jaxformer.errors import ConfigError


def build(config: Config, split: str | None = None) -> Dataset:
    """The data set that a run of `config` reads; of a mixture one with `parts`.

    The splits of a mixture hold the examples of the components that are trained on, one component after the other: what
    a vocabulary is learned from. Those of components of weight 0 are in `parts` alone.

    Args:
      split: the only split to read, of a trained run, whose classes its labels then are; components without it are left
        out. None reads all splits, and components that are trained on must have "train".

    Raises:
      ConfigError: see `sources.build`; in a mixture the message names the component. No component has the split.
    """
    if config.data.mixture is None:
        return _component(config, split, True)
    parts: dict[str, Dataset] = {}
    absent: list[ConfigError] = []
    trained = components.trained(config)
    for name, view in components.views(config).items():
        named = sources.named_splits(view.data)
        if split is not None and named and split not in named:
            absent.append(sources.unknown_split(split, named))
            continue
        try:
            parts[name] = _component(view, split, name in trained)
        except ConfigError as error:
            raise ConfigError(f"data.mixture.components.{name}: {error}") from None
    if not parts:
        raise absent[0]
    splits: dict[str, list[Examples]] = {}
    for name in filter(parts.__contains__, trained):
        view, dataset = components.views(config)[name], parts[name]
        for each, examples in dataset.splits.items():
            limited = each == "train" and view.data.examples is not None
            count = min(view.data.examples or 0, len(examples)) if limited else len(examples)
            splits.setdefault(each, []).append(FirstExamples(examples, count))
    joined = {each: JoinedExamples(tuple(examples)) for each, examples in splits.items()}
    key = " ".join(f"{name}:{part.key}" for name, part in parts.items())
    classes = {part.classes for part in parts.values()}
    return Dataset(joined, key, classes.pop() if len(classes) == 1 else None, parts=parts)


def _component(config: Config, split: str | None, trains: bool) -> Dataset:
    task = tasks.get(config.task.name)
    dataset = sources.build(config.data, () if task.prepare else task.roles, split, trains)
    if split is not None:
        dataset = sources.with_classes(dataset, config.task.classes)
    return dataset if task.prepare is None else task.prepare(config, dataset)


def roles(config: Config) -> tuple[str, ...]:
    """Fields that the examples of a run have; of a mixture, those of any component that is trained on."""
    views = components.views(config)
    read = [tasks.get(views[name].task.name).roles for name in components.trained(config)]
    return tuple(dict.fromkeys(role for each in read for role in each))


def with_classes(config: Config, dataset: Dataset) -> Config:
    """`config` with the names of the classes of every component that has some.

    Raises:
      ConfigError: components that share a head of classes have different ones.
    """
    mixture = config.data.mixture
    if mixture is None:
        return config
    views = components.views(config)
    found = {name: tasks.get(views[name].task.name).classes or part.classes for name, part in dataset.parts.items()}
    if config.model.head.kind in ("classes", "slots"):
        first = next(iter(found))
        for name, classes in found.items():
            if classes != found[first]:
                got = f"data.mixture.components.{name}: got the classes {', '.join(classes or ('none',))}"
                expected = f"expected those of {first}, with which it shares a head: {', '.join(found[first] or ())}"
                raise ConfigError(f"{got}, {expected}; the task text_to_text needs no common classes")
    named = {
        name: dataclasses.replace(component, classes=found.get(name) or component.classes)
        for name, component in mixture.components.items()
    }
    data = dataclasses.replace(config.data, mixture=dataclasses.replace(mixture, components=named))
    return dataclasses.replace(config, data=data)
