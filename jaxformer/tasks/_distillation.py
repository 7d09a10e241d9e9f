"""The objective of a distillation: the task's labels, and beside them the logits of a teacher."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxformer import losses
from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.tasks import Task, _tokens
from jaxformer.types import Batch, Sums


def objective(config: Config, task: Task) -> Task:
    """The task that a run trains on: `task`; with a teacher a task whose loss is `distillation_loss`."""
    if config.distillation is None:
        return task
    return dataclasses.replace(task, loss=functools.partial(distillation_loss, task.loss))


def distillation_loss(
    label_loss: Callable[[Config, Any, Batch], Sums], config: Config, logits: Any, batch: Batch
) -> Sums:
    """The loss of labels and teacher together, over the same weights.

    Args:
      label_loss: the task's loss.

    Returns:
      "loss": (1 - weight) * "label_loss" + weight * "distillation", the divergence from the teacher
      (`losses.distillation`).

    Raises:
      ConfigError: the batch has no logits of a teacher.
    """
    settings = config.distillation
    if settings is None or batch.teacher is None:
        raise ConfigError("batch: got no logits of a teacher, expected them with config.distillation; pass a teacher")
    sums = dict(label_loss(config, logits, batch))
    total, count = sums["loss"]
    _, weights = _tokens.labels_and_weights(batch)
    divergence, _ = losses.distillation(logits, batch.teacher, weights, settings.temperature)
    sums["loss"] = ((1.0 - settings.weight) * total + settings.weight * divergence, count)
    return {**sums, "label_loss": (total, count), "distillation": (divergence, count)}
