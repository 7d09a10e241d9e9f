"""Checks of a mixture: its components, their weights, and what goes with several data sets."""

from __future__ import annotations

import dataclasses

from jaxformer.config import components
from jaxformer.config.checks import sections
from jaxformer.config.checks.fields import invalid
from jaxformer.config.comparison import default_of
from jaxformer.config.schema import Config, SourceConfig
from jaxformer.errors import ConfigError

PATH = "config.data.mixture"

MIXED_TASKS = (
    "translation",
    "summarisation",
    "text_to_text",
    "language_modelling",
    "masked_lm",
    "span_corruption",
    "denoising",
    "classification",
    "tagging",
    "answering",
    "similarity",
)
"""Tasks of the project whose batches are tokens, labels and weights alone: those that may share a batch."""


def check_mixture(config: Config) -> None:
    """Checks every component as a run of its own, and what they share.

    Raises:
      ConfigError: there are no components, or none has a weight; a name cannot be part of a measure's; `data` itself
        names a source; a component does not fit the model; its batches have arrays that others lack; a loss compares
        rows; measures by length are asked for.
    """
    mixture = config.data.mixture
    if mixture is None:
        return
    if not mixture.components:
        raise invalid(f"{PATH}.components", "none", "at least one", "add some in the recipe, or set data.mixture=None")
    for name, component in mixture.components.items():
        if not name.replace("-", "").replace("_", "").isalnum():  # a part of measures' names and of override paths
            raise invalid(f"{PATH}.components", name, "names of letters, digits, - and _", "rename it")
        if component.task is not None and component.task.vocab is not None:
            where = f"{PATH}.components.{name}.task.vocab"
            raise invalid(where, component.task.vocab, "None: all components share config.task.vocab")
    if not components.trained(config):
        expected = "a sum above 0; a weight of 0 is a component that is evaluated, not trained on"
        raise invalid(f"{PATH}.components", "weights that sum to 0", expected)
    if mixture.limit is not None and mixture.temperature is None:
        raise invalid(f"{PATH}.limit", mixture.limit, "None without mixture.temperature, which reads sizes", "set both")
    for field in dataclasses.fields(SourceConfig):
        value = getattr(config.data, field.name)
        if field.name != "dir" and value != default_of(field):
            expected = "its default beside data.mixture, whose components have sources of their own"
            raise invalid(f"config.data.{field.name}", value, expected, f"set {PATH}.components.NAME.{field.name}")
    if config.evaluate.length_bins:
        raise invalid("config.evaluate.length_bins", config.evaluate.length_bins, "() with data.mixture")
    if config.model.series is not None:
        raise invalid("config.model.series", "a section", "None with data.mixture, whose components are text")
    _check_mixed_task(config)  # components without a task of their own have this one
    for name, view in components.views(config).items():
        try:
            _check_mixed_task(view)
            if config.model.parts or not config.init.directory:
                sections.check_task(view)
            sections.check_data(view)
            sections.check_template(view)
            if view.task.name == "similarity" and view.task.objective == "contrastive":
                expected = "regression: a contrastive loss compares the rows of a batch, which a mixture mixes"
                raise invalid("config.task.objective", "contrastive", expected)
        except ConfigError as error:
            raise ConfigError(f"{PATH}.components.{name}: {error}") from None


def _check_mixed_task(config: Config) -> None:
    """Raises ConfigError if examples of the task have arrays, or weights, that a batch of several tasks has not."""
    name, task = config.task.name, config.task
    if name in sections.TASK_MODELS and name not in MIXED_TASKS:
        raise invalid("config.task.name", name, f"with data.mixture one of {', '.join(MIXED_TASKS)}")
    if task.relation != "none":
        raise invalid("config.task.relation", task.relation, "none with data.mixture, whose rows have one label")
    if task.class_weights == (sections.BALANCED,):
        expected = "CLASS=WEIGHT with data.mixture, whose classes are not counted"
        raise invalid("config.task.class_weights", sections.BALANCED, expected)
