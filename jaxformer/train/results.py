"""`result.json`: the measures of a run at its last step.

    {"step": 2000, "config": "1f0c2d...", "loss": 2.31, ...}

A run that `config.train.patience` ended before its last step has `"stopped_early": true` too, and is done as well.
`config` is `overrides.fingerprint` of the config that was measured. Files of earlier versions have no such entry; of
these only the step can be checked.
"""

from __future__ import annotations

import json
import os
from typing import Any

from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError

FILE_NAME = "result.json"


def to_record(step: int, config: Config, values: dict[str, float]) -> dict[str, Any]:
    """Content of `result.json` for a run of the resolved `config` that ended at `step`."""
    stopped = {"stopped_early": True} if step < config.train.steps else {}
    return {"step": step, "config": overrides.fingerprint(config), **stopped, **values}


def mismatch(result: Any, config: Config) -> str:
    """Reason why `result` is not the result of the resolved `config`; empty if it is."""
    if not isinstance(result, dict) or type(result.get("step")) is not int:
        return "it names no step"
    stopped_early = result.get("stopped_early") is True and config.train.patience is not None
    if result["step"] != config.train.steps and not (stopped_early and result["step"] < config.train.steps):
        return f"it is of step {result['step']:,}, and the run ends at step {config.train.steps:,}"
    if "config" in result and result["config"] != overrides.fingerprint(config):
        return "it was measured with another config"
    return ""


def read(workdir: str | os.PathLike[str]) -> Any:
    """Content of `result.json`; None if there is none or it is no JSON."""
    try:
        with open(os.path.join(workdir, FILE_NAME), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def finished_result(workdir: str | os.PathLike[str], config: Config | None = None) -> dict[str, Any] | None:
    """The result of the run in `workdir` if the run is done: at its last step, or stopped early. Else None.

    Args:
      config: the config that the run must have, as a recipe gives it (sizes unresolved); None: any.
    """
    result = read(workdir)
    if result is None:
        return None
    try:
        saved = overrides.read(workdir)
    except ConfigError:
        return None
    if mismatch(result, saved) or (config is not None and overrides.result_conflicts(config, saved)):
        return None
    return result
