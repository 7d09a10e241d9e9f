"""What a workdir says about its run: which config, made where and how."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxformer import checkpoint, files, overrides, redaction
from jaxformer.config import Config, ConfigError
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.train import measuring, optim


def refuse_other_config(config: Config, workdir: Path) -> list[str]:
    """A workdir belongs to one config; resuming it with another would mix two runs.

    Returns:
      What is measured otherwise than before, a line each; it decides nothing.

    Raises:
      ConfigError: what differs, or the run is further than `config.train.steps`.
    """
    path = workdir / "config.json"
    if not path.exists():
        return []
    old = overrides.read(workdir)
    differing = overrides.differences(config, old)
    if differing:
        raise ConfigError(
            f"workdir {workdir}: holds a run of a different config ({'; '.join(differing)}), expected the same one; "
            "use another --workdir"
        )
    reached = max(checkpoint.steps(workdir / "checkpoints" / "last"), default=0)
    if reached > config.train.steps:
        raise ConfigError(
            f"config.train.steps: got {config.train.steps:,}, expected at least {reached:,}, which the run in "
            f"{workdir} has reached; use another --workdir"
        )
    return measuring.refuse_other(config, old, workdir)


def changes_since(saved: Any, config: Config, updates: int, width: int) -> list[str]:
    """Lines for the log of a resumed run: which settings differ from those of its checkpoint, and the learning rate
    where `train.steps` moves it.

    Args:
      saved: the config in the checkpoint, as JSON values.
      updates: how many the optimizer has seen.
      width: of the model; the schedule may ask for it.
    """
    try:
        old = overrides.from_json(json.dumps(saved))
    except ConfigError:  # of a version that is not read any more, or none: `refuse_other_config` has compared the rest
        return []
    found = overrides.changes(old, config)
    if not found:
        return []
    pairs = (f"{path} {before!r} -> {now!r}" for path, (before, now) in found.items())
    lines = [f"changed since the checkpoint: {', '.join(pairs)}"]
    if "train.steps" in found:
        before, now = (float(optim.schedule(c.schedule, c.train.steps, width)(updates)) for c in (old, config))
        kind = f"the {config.schedule.kind} schedule"
        if abs(before - now) > 1e-6 * max(before, now):
            lines.append(
                f"the learning rate jumps: {now:.3e} in the next step, {before:.3e} with train.steps="
                f"{old.train.steps:,}; {kind} ends at train.steps"
            )
        elif config.schedule.kind in optim.ENDING:
            lines.append(f"the learning rate goes on at {now:.3e}; {kind} ends at train.steps, later than before")
    return lines


def prepare(config: Config, workdir: Path, tokenizers: Tokenizers) -> None:
    """Writes what a workdir says about its run. `config.json` comes last: with it the workdir is a run."""
    if jax.process_index() != 0:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "config.json").exists():
        tokenizers.save(workdir)
    files.write_json(workdir / "environment.json", environment())
    files.write(workdir / "config.json", overrides.to_json(config))


def environment() -> dict[str, Any]:
    """What a figure depends on besides the config: versions, devices, the commit and the command."""
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
        "commit": commit(),
        "command": redaction.command(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def commit() -> str | None:
    """The commit of this code, `-dirty` if it was edited; None where it is no repository or `git` cannot be run."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return git.stdout.strip() or None
