"""`result.json`: the measures of a run at its last step, and whether they are still those of its config.

    {"step": 2000, "config": "1f0c2d...", "loss": 2.31, ...}

`config` is `overrides.fingerprint` of the config that was measured. Files of earlier versions have no such entry: of
these only the step can be compared.
"""

from __future__ import annotations

import json
import os
from typing import Any

from jaxformer import overrides
from jaxformer.config import Config, ConfigError

NAME = "result.json"


def content(step: int, config: Config, values: dict[str, float]) -> dict[str, Any]:
    """What `result.json` holds for a run of the resolved `config` that ended at `step`."""
    return {"step": step, "config": overrides.fingerprint(config), **values}


def problem(result: Any, config: Config) -> str:
    """Why `result` is not the result of the resolved `config`; empty if it is."""
    if not isinstance(result, dict) or type(result.get("step")) is not int:
        return "it names no step"
    if result["step"] != config.train.steps:
        return f"it is of step {result['step']:,}, and the run ends at step {config.train.steps:,}"
    if "config" in result and result["config"] != overrides.fingerprint(config):
        return "it was measured with another config"
    return ""


def read(workdir: str | os.PathLike[str]) -> Any:
    """The content of `result.json`; None where there is none or it is no JSON."""
    try:
        with open(os.path.join(workdir, NAME), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def finished(workdir: str | os.PathLike[str], config: Config | None = None) -> dict[str, Any] | None:
    """The result of the run in `workdir` if it has reached its last step, else None.

    Args:
      config: the run must be of this config (as a recipe gives it, sizes unresolved); None: of whichever
        `config.json` says.
    """
    result = read(workdir)
    if result is None:
        return None
    try:
        saved = overrides.read(workdir)
    except ConfigError:
        return None
    if problem(result, saved) or (config is not None and overrides.deciding(config, saved)):
        return None
    return result
