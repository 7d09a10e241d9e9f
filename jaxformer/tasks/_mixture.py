"""The objective of a mixture: every entry of a batch has the loss of its component's task."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import metrics, tasks
from jaxformer.config import Config, components
from jaxformer.errors import ConfigError
from jaxformer.tasks import Task, _tokens
from jaxformer.types import Array, Batch, Sums


def objective(config: Config) -> Task:
    """What a run trains on: its task; of a mixture a task with the loss of all components, `mixture_loss`.

    Raises:
      ConfigError: a component's task needs another head than config.task's, reads a prefix, or compares rows.
    """
    task = tasks.get(config.task.name)
    if config.data.mixture is None:
        return task
    for name, view in components.views(config).items():
        own, path = tasks.get(view.task.name), f"config.data.mixture.components.{name}.task.name"
        if own.head != task.head:
            expected = f"a task with the head of {config.task.name}, {task.head}"
            raise ConfigError(f"{path}: got {view.task.name}, which needs a head of {own.head}, expected {expected}")
        if own.has_prefix:
            raise ConfigError(f"{path}: got {view.task.name}, expected a task whose examples have no prefix")
        if own.couples_rows(view):
            raise ConfigError(f"{path}: got {view.task.name}, expected a task whose loss does not compare rows")
    return dataclasses.replace(task, loss=mixture_loss)


def mixture_loss(config: Config, logits: Any, batch: Batch) -> Sums:
    """The sum of the components' losses, and each of them.

    Returns:
      "loss": the sum over all entries, whatever their component; "loss/NAME": the sum over a component's entries;
      "share/NAME": a component's part of the weights.
    """
    names = components.names(config)
    parts: dict[str, tuple[Any, Any]] = {}
    totals = []
    for view, members in same_functions(config, components.trained(config)):
        loss = functools.partial(_loss_of, view)
        numbers = np.array([names.index(name) for name in members], np.int32)
        total = loss(logits, batch, numbers)
        totals.append(total)
        if len(members) == 1:
            parts[members[0]] = total
            continue
        # Values alone: all components together go through one gradient. The logits are the same for each, so that the
        # forward pass of the loss is not repeated for each.
        frozen = jax.tree.map(jax.lax.stop_gradient, logits)
        numerators, weights = jax.vmap(functools.partial(loss, frozen, batch))(jnp.asarray(numbers)[:, None])
        parts |= {name: (numerators[index], weights[index]) for index, name in enumerate(members)}
    total = jax.tree.map(lambda *each: sum(each), *totals)
    losses = {components.measure("loss", name): part for name, part in parts.items()}
    shares = {components.measure("share", name): (weight, total[1]) for name, (_, weight) in parts.items()}
    return {"loss": total, **losses, **shares}


def _loss_of(view: Config, logits: Any, batch: Batch, numbers: Array | np.ndarray) -> tuple[Array, Array]:
    """The summed loss, and the weights, of the components `numbers`, whose loss is that of `view`."""
    numerator, weight = tasks.get(view.task.name).loss(view, logits, only(batch, numbers))["loss"]
    return jnp.asarray(numerator), jnp.asarray(weight)


def same_functions(config: Config, names: Sequence[str]) -> list[tuple[Config, list[str]]]:
    """Components in groups whose losses and metrics are the same functions: a view of each group, and its names.

    Templates, class names and scores do not enter these functions.
    """
    views = components.views(config)
    groups: list[tuple[Config, list[str]]] = []
    for name in names:
        view = views[name]
        same = next((members for first, members in groups if _key(first) == _key(view)), None)
        if same is None:
            groups.append((view, [name]))
        else:
            same.append(name)
    return groups


def _key(view: Config) -> Any:
    return dataclasses.replace(view.task, template=None, classes=())


def only(batch: Batch, numbers: Array | np.ndarray) -> Batch:
    """`batch` with the labels and weights of some components; other entries become as those of padding."""
    labels, weights = _tokens.labels_and_weights(batch)
    if batch.component is None:
        raise ConfigError("batch: got no components, expected the batches of a mixture; use data.mixture.Mixture")
    kept = jnp.isin(batch.component, numbers)
    return batch._replace(labels=jnp.where(kept, labels, 0), weights=jnp.where(kept, weights, 0.0), component=None)


def whole(config: Config, sums: Mapping[str, Sums], sizes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Measures of all components that are trained on together: those that each of them has as one number.

    Args:
      sums: of the evaluation of each component.
      sizes: size of the text of each component.
    """
    chosen = [name for name in components.trained(config) if name in sums]
    if not chosen:
        return {}
    common = [
        measure
        for measure in sums[chosen[0]]
        if all(measure in sums[name] and np.ndim(sums[name][measure][0]) == 0 for name in chosen)
    ]
    total: Sums = {measure: sums[chosen[0]][measure] for measure in common}
    for name in chosen[1:]:
        total = metrics.add(total, {measure: sums[name][measure] for measure in common})
    values, views = metrics.divide(total), components.views(config)
    if len({views[name].task.name for name in chosen}) > 1:
        return values
    size = {key: sum(sizes[name][key] for name in chosen) for key in sizes[chosen[0]]}
    labels = {"labels": float(np.asarray(total["loss"][1]))}
    return tasks.get(views[chosen[0]].task.name).derived_metrics(config, values, {**size, **labels})


def score_names(config: Config) -> Sequence[str]:
    """Names of the scores of decoded text that a run may have."""
    return [
        components.measure(score, name)
        for name, view in components.views(config).items()
        for score in tasks.get(view.task.name).score_names
    ]
