"""Which settings decide what a validation measure is. Those that checkpoints are ranked by must not change in a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxformer import tasks
from jaxformer.config import Config, ConfigError

SHOWN = ("evaluate.samples", "evaluate.headline", "decode.batch")
"""Settings of these sections that change no measure."""


def refuse_unknown(config: Config) -> None:
    """Raises a ConfigError where `checkpoint.metric` is a measure of decoded text, and none is decoded."""
    metric, scores = config.checkpoint.metric, tasks.get(config.task.name).scores
    if config.checkpoint.keep_best and metric in scores and not config.evaluate.decode_examples:
        raise ConfigError(
            f"config.checkpoint.metric: got {metric!r}, a measure of decoded text, and config.evaluate.decode_examples "
            "0, expected more; set it, or choose another metric"
        )


def refuse_other(config: Config, old: Config, workdir: Path) -> list[str]:
    """Judges a resumed run's settings by those that it had.

    Returns:
      A line to print for every setting that changes a measure, but not the one that checkpoints are ranked by.

    Raises:
      ConfigError: a setting changed that decides what is ranked: the best would be chosen among unlike figures.
    """
    now, before = _settings(config), _settings(old)
    changed = [path for path in now if now[path] != before[path] and _measures(path, config)]
    ranked = [path for path in changed if _ranks(path, config)]
    if ranked and (config.checkpoint.keep_best or any(workdir.glob("checkpoints/best/*"))):
        what = "; ".join(f"config.{path}: {now[path]!r}, was {before[path]!r}" for path in ranked)
        raise ConfigError(
            f"workdir {workdir}: got other settings of the measure {config.checkpoint.metric!r} ({what}), expected "
            "those that its best checkpoints were chosen by; give these, or use another --workdir"
        )
    return [
        f"validation is measured otherwise from here on, config.{path}: {now[path]!r}, was {before[path]!r}"
        for path in changed
    ]


def _settings(config: Config) -> dict[str, Any]:
    """All settings of how is measured, by path."""
    return {
        f"{section}.{name}": value
        for section in ("evaluate", "decode")
        for name, value in dataclasses.asdict(getattr(config, section)).items()
    }


def _measures(path: str, config: Config) -> bool:
    """Whether a setting decides the value of any measure, beside the weights and the data."""
    if path == "evaluate.batch":  # how many rows there are decides a loss that compares them
        return tasks.get(config.task.name).couples(config)
    return path not in SHOWN


def _ranks(path: str, config: Config) -> bool:
    """Whether one that does decides the value of `checkpoint.metric`."""
    of_text = path == "evaluate.decode_examples" or path.startswith("decode.")
    return of_text == (config.checkpoint.metric in tasks.get(config.task.name).scores)
