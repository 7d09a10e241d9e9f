"""What a workdir says about its run: which config, made where and how."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxformer import files, overrides, redaction
from jaxformer.config import Config, ConfigError
from jaxformer.data.tokenizers import Tokenizers


def refuse_other_config(config: Config, workdir: Path) -> None:
    """A workdir belongs to one config; resuming it with another would mix two runs.

    Raises:
      ConfigError: what differs.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    old = overrides.read(workdir)
    differing = overrides.differences(config, old)
    if differing:
        raise ConfigError(
            f"workdir {workdir}: holds a run of a different config ({'; '.join(differing)}), expected the same one; "
            "use another --workdir"
        )


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
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "commit": git.stdout.strip() or None,
        "command": redaction.command(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
