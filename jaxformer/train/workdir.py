"""The description of a run in its workdir: its config, and the environment that it ran in."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxformer import checkpoint
from jaxformer.config import Config, overrides
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runtime import code_version, files, secrets
from jaxformer.train import metric_settings, optim


def check_same_config(config: Config, workdir: Path) -> list[str]:
    """Checks that a workdir without a run, or with a run of this config, is used.

    Returns:
      Lines about validation settings that changed without deciding which checkpoints are best.

    Raises:
      ConfigError: the config differs, or the run is further than `config.train.steps`.
    """
    path = workdir / "config.json"
    if not path.exists():
        return []
    old = overrides.read(workdir)
    differing = overrides.describe_resume_conflicts(config, old)
    if differing:
        raise ConfigError(
            f"workdir {workdir}: holds a run of a different config ({'; '.join(differing)}), expected the same one; "
            "use another --workdir"
        )
    reached = max(checkpoint.list_steps(workdir / "checkpoints" / "last"), default=0)
    if reached > config.train.steps:
        raise ConfigError(
            f"config.train.steps: got {config.train.steps:,}, expected at least {reached:,}, which the run in "
            f"{workdir} has reached; use another --workdir"
        )
    return metric_settings.check_unchanged(config, old, workdir)


def describe_changes(saved: Any, config: Config, updates: int, width: int) -> list[str]:
    """Log lines of a resumed run: settings that changed since its checkpoint, and the effect on the learning rate.

    Args:
      saved: the config in the checkpoint, as JSON values.
      updates: number of optimizer updates so far.
      width: model width; some schedules use it.
    """
    try:
        old = overrides.from_json(json.dumps(saved))
    except ConfigError:  # no config, or one of an old version: `check_same_config` has compared `config.json`
        return []
    changes = overrides.diff(old, config)
    if not changes:
        return []
    pairs = (f"{path} {before!r} -> {now!r}" for path, (before, now) in changes.items())
    lines = [f"changed since the checkpoint: {', '.join(pairs)}"]
    if "train.steps" in changes:
        before, now = (float(optim.schedule(c.schedule, c.train.steps, width)(updates)) for c in (old, config))
        kind = f"the {config.schedule.kind} schedule"
        if abs(before - now) > 1e-6 * max(before, now):
            lines.append(
                f"the learning rate jumps: {now:.3e} in the next step, {before:.3e} with train.steps="
                f"{old.train.steps:,}; {kind} ends at train.steps"
            )
        elif config.schedule.kind in optim.DECAY_TO_END:
            lines.append(f"the learning rate goes on at {now:.3e}; {kind} ends at train.steps, later than before")
    return lines


def write_run_files(config: Config, workdir: Path, tokenizers: Tokenizers | None) -> None:
    """Writes the description of a run. `config.json` comes last, since a workdir with it counts as a run."""
    if jax.process_index() != 0:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    if tokenizers is not None and not (workdir / "config.json").exists():
        tokenizers.save(workdir)
    files.write_json(workdir / "environment.json", environment())
    files.write_atomic(workdir / "config.json", overrides.to_json(config))


def environment() -> dict[str, Any]:
    """Everything but the config that results depend on: versions, devices, the commit and the command."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "jaxformer")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "commit": code_version.git_commit(),
        "command": secrets.redact_command(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
