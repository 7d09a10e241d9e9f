"""The learning rate of each step of a run, by the function that training uses."""

from __future__ import annotations

import numpy as np

from jaxformer.analysis.draw.panels import Curves, Picture
from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.train import optim

MAX_POINTS = 4000
"""Steps that are drawn of a longer run, evenly spaced, the first, the last and the end of the warm-up among them."""


def schedule(config: Config, title: str) -> Picture:
    """The learning rate against the step, from 1 to `train.steps`.

    Raises:
      ConfigError: the config is never trained, or is without the model whose width the schedule needs.
    """
    if config.task.name == "none":
        raise ConfigError("draw schedule: got task.name none, which is never trained, expected a task; set task.name")
    settings, steps = config.schedule, config.train.steps
    width = 1
    if settings.kind == "noam":
        if config.model.is_empty:
            raise ConfigError(
                "draw schedule: got schedule.kind noam without a model, expected one, whose width it needs; add one"
            )
        width = build.model_width(config.model)
    warmup = min(max(settings.warmup, 1), steps)
    step = np.unique(np.concatenate([np.linspace(1, steps, min(steps, MAX_POINTS)).round(), [warmup]])).astype(int)
    rate = np.asarray(optim.schedule(settings, steps, width)(step - 1), np.float64)  # counts completed updates
    highest = int(np.argmax(rate))
    summary = [
        f"{settings.kind}: highest rate {rate[highest]:.4g} at step {step[highest]:,}, "
        f"{rate[0]:.4g} at step 1, {rate[-1]:.4g} at step {steps:,}"
    ]
    marks = ((float(warmup), "end of the warm-up"),) if 1 < settings.warmup < steps else ()
    panel = Curves(f"{settings.kind} schedule", step, {"": rate}, "step", "learning rate", marks=marks)
    return Picture(f"Learning rate of {title}", [[panel]], summary)
