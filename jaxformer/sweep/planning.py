"""The plan of a sweep: every run with its checked config, its directory and its command.

The directory of a run is named after its edits and the fingerprint of its config. So a sweep that grows keeps its
finished runs, and a changed recipe (or more steps) starts new runs beside them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import secrets
from jaxformer.sweep.adaptive import Search
from jaxformer.sweep.space import Edits
from jaxformer.train import results

MAX_NAME = 150
"""Characters of a run's name; longer ones are cut and end in a hash."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      edits: its values by config path.
      config: checked, with the edits.
      workdir: its directory.
      command: starts or resumes it.
    """

    edits: Edits
    config: Config
    workdir: Path
    command: tuple[str, ...]

    @property
    def result(self) -> dict[str, Any] | None:
        """Content of its `result.json`; None until it has reached its last step with this config."""
        return results.finished_result(self.workdir, self.config)

    @property
    def is_finished(self) -> bool:
        """True if the run has reached its last step with this config."""
        return self.result is not None


@dataclass(frozen=True)
class Plan:
    """A sweep all of whose configs have been checked."""

    workdir: Path
    runs: tuple[Run, ...]

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """Runs that have not reached their last step."""
        return tuple(run for run in self.runs if not run.is_finished)


def make_plan(sweep_file: str, arguments: Sequence[str], workdir: Path, rows: Sequence[Edits] | None = None) -> Plan:
    """Plans a run for each item of `SWEEP` in `sweep_file`, over the recipe and edits in `arguments`.

    Args:
      rows: the list, if the file has been read.

    Raises:
      ConfigError: the file or the config of a run is wrong, or two runs have the same config.
    """
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir: got {str(workdir)!a} (a file), expected a folder")
    runs: dict[str, Run] = {}
    names: dict[str, str] = {}  # by config
    if rows is None:
        read = read_sweep(sweep_file)
        if isinstance(read, Search):
            raise ConfigError(f"{sweep_file}: got a search, expected a list of edits; its runs are not known before")
        rows = read
    for edits in rows:
        name = run_name(edits)
        run_arguments = [*arguments, *edit_arguments(edits)]
        try:
            config = overrides.parse(run_arguments)
        except ConfigError as error:
            words = " ".join(f"{path}={value}" for path, value in secrets.redact_json(edits).items())
            raise ConfigError(f"{sweep_file}: run {words}: {error}") from None
        if name in runs:
            raise ConfigError(f"{sweep_file}: got run {name} twice, expected each once; remove one")
        twin = names.setdefault(overrides.to_json(config), name)
        if twin != name:
            raise ConfigError(
                f"{sweep_file}: got runs {twin} and {name} with the same config, expected one; remove one"
            )
        directory = run_directory(workdir, name, config)
        command = (sys.executable, "-m", "jaxformer", "train", *run_arguments, f"--workdir={directory}")
        runs[name] = Run(edits, config, directory, command)
    return Plan(workdir, tuple(runs.values()))


def read_sweep(path: str) -> list[Edits] | Search:
    """The `SWEEP` of a sweep file: a list of edits, or a search.

    Raises:
      ConfigError: the file is wrong, or defines something else.
    """
    sweep = overrides.read_variable(path, "SWEEP", "a list of dicts from config paths to values")
    if isinstance(sweep, Search):
        return sweep
    is_list = isinstance(sweep, (list, tuple)) and len(sweep) > 0
    if not is_list or not all(isinstance(row, dict) and all(isinstance(k, str) for k in row) for row in sweep):
        raise ConfigError(f"{path}: got SWEEP of another form, expected a list of dicts from config paths to values")
    return list(sweep)


def edit_arguments(edits: Edits) -> list[str]:
    """Edits as the command line takes them."""
    return [f"--config.{path}={format_value(value)}" for path, value in edits.items()]


def run_directory(workdir: Path, name: str, config: Config) -> Path:
    """Directory of a run: `name` and the config's fingerprint.

    An existing directory `name` without a fingerprint is used if it holds a run of this config. If it holds another
    run, a line on stderr says so.
    """
    directory, old = workdir / f"{name}-{overrides.fingerprint(config)[:8]}", workdir / name
    if directory.exists() or not (old / "config.json").exists():
        return directory
    try:
        differing = overrides.result_conflicts(config, overrides.read(old))
    except ConfigError as error:
        differing = [str(error)]
    if not differing:
        return old
    print(f"not used: {old}, a run of another config ({', '.join(differing)})", file=sys.stderr, flush=True)
    return directory


def format_value(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(format_value(item) for item in value)
    return str(value)


def run_name(edits: Edits) -> str:
    """A run's edits as a name that every file system takes, such as "schedule.peak=0.001,train.seed=0"."""
    text = ",".join(f"{path}={format_value(value)}" for path, value in edits.items()) or "base"
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if name != text or len(name) > MAX_NAME:
        # The hash distinguishes runs whose names differ in replaced or cut characters only.
        name = f"{name[: MAX_NAME - 10]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name
