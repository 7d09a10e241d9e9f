"""Settings of evaluation and decoding that determine the metric by which checkpoints are ranked.

They must not change within a run, or the best checkpoint would be chosen among values that cannot be compared.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxformer import tasks
from jaxformer.config import Config, components
from jaxformer.errors import ConfigError
from jaxformer.tasks import _mixture

NEUTRAL_SETTINGS = ("evaluate.samples", "evaluate.headline", "evaluate.length_bins", "decode.batch")
"""Settings of evaluation and decoding that change no measure."""


def check_metric_is_measured(config: Config) -> None:
    """Raises a ConfigError if `checkpoint.metric` is a measure of decoded text and none is decoded."""
    metric, scores = config.checkpoint.metric, _mixture.score_names(config)
    is_used = config.checkpoint.keep_best or config.train.patience is not None
    if is_used and metric in scores and not config.evaluate.decode_examples:
        raise ConfigError(
            f"config.checkpoint.metric: got {metric!r}, a measure of decoded text, and config.evaluate.decode_examples "
            "0, expected more; set it, or choose another metric"
        )


def check_samples_exist(config: Config) -> None:
    """Raises a ConfigError if examples are to be decoded and no task has anything to show of them."""
    names = dict.fromkeys(view.task.name for view in components.views(config).values())
    if config.evaluate.decode_examples and not any(tasks.get(name).has_samples for name in names):
        raise ConfigError(
            f"config.evaluate.decode_examples: got {config.evaluate.decode_examples}, expected 0 for the task "
            f"{', '.join(names)}, which has no scores and no samples of decoded text"
        )


def check_unchanged(config: Config, old: Config, workdir: Path) -> list[str]:
    """Compares a resumed run's settings with those that it had.

    Returns:
      A line to log for every changed setting that affects a measure, but not the metric that ranks checkpoints.

    Raises:
      ConfigError: a setting changed that affects the metric that ranks checkpoints.
    """
    new_settings, old_settings = _settings(config), _settings(old)
    changed = [
        path for path in new_settings if new_settings[path] != old_settings[path] and _affects_metrics(path, config)
    ]
    ranked = [path for path in changed if _affects_ranking(path, config)]
    if ranked and (config.checkpoint.keep_best or any(workdir.glob("checkpoints/best/*"))):
        what = "; ".join(f"config.{path}: {new_settings[path]!r}, was {old_settings[path]!r}" for path in ranked)
        raise ConfigError(
            f"workdir {workdir}: got other settings of the measure {config.checkpoint.metric!r} ({what}), expected "
            "those that its best checkpoints were chosen by; restore these, or use another --workdir"
        )
    return [
        f"validation changes from here on, config.{path}: {new_settings[path]!r}, was {old_settings[path]!r}"
        for path in changed
    ]


def _settings(config: Config) -> dict[str, Any]:
    """All settings of evaluation and decoding, by path."""
    return {
        f"{section}.{name}": value
        for section in ("evaluate", "decode")
        for name, value in dataclasses.asdict(getattr(config, section)).items()
    }


def _affects_metrics(path: str, config: Config) -> bool:
    """True if the setting at `path` affects the value of any measure."""
    if path == "evaluate.batch":  # the number of rows affects a loss that compares rows
        return tasks.get(config.task.name).couples_rows(config)
    return path not in NEUTRAL_SETTINGS


def _affects_ranking(path: str, config: Config) -> bool:
    """True if a setting that affects measures affects `checkpoint.metric`."""
    is_of_text = path == "evaluate.decode_examples" or path.startswith("decode.")
    return is_of_text == (config.checkpoint.metric in _mixture.score_names(config))
