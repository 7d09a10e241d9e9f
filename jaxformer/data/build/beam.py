"""Runs the units of a build as an Apache Beam pipeline: on this machine, or on many.

The work on a unit is the same function as of local processes (`units.make`), so the shards have the same bytes. Workers
read the input and write shards and manifests in a bucket, or in folders that all machines see under the same path. The
pipeline brings nothing back: this process reads the manifests when it has ended.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from jaxformer import registry
from jaxformer.data.build import targets, workers
from jaxformer.data.build.targets import WORK
from jaxformer.data.build.units import Unit
from jaxformer.errors import ConfigError, StorageError

ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "StorageError": StorageError}
"""Errors of one line that a worker leaves in a file beside the manifest it could not write."""


def check(flags: str) -> None:
    """Raises a ConfigError if Apache Beam is not installed, or does not know one of its options."""
    _options(flags)


def _options(flags: str) -> Any:
    try:
        options_module: Any = importlib.import_module("apache_beam.options.pipeline_options")
        create_runner: Any = importlib.import_module("apache_beam.runners").create_runner
    except ImportError:
        what = f"--beam: got {flags!a}, which needs apache_beam, expected it to be installed"
        raise ConfigError(f"{what}; pip install 'jaxformer[beam]'") from None
    try:
        words = shlex.split(flags)
        options = options_module.PipelineOptions(words)
        known = options.get_all_options()
        name = options.view_as(options_module.StandardOptions).runner
    except (ValueError, SystemExit) as error:  # argparse ends the process
        raise ConfigError(f"--beam: got {flags!a} ({error}), expected options as '--runner=DirectRunner'") from None
    for word in words:
        option = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or (option not in known and option.removeprefix("no_") not in known):
            expected = f"expected --OPTION=VALUE of Apache Beam{registry.nearest(option, list(known))}"
            raise ConfigError(f"--beam: got {word!a}, {expected}")
    if not name:
        raise ConfigError(f"--beam: got {flags!a} without --runner, expected one, as '--runner=DirectRunner'")
    try:
        create_runner(name)
    except Exception as error:  # ValueError, or an ImportError of the runner's own packages
        raise ConfigError(
            f"--beam: got the runner {name!a} ({error}), expected DirectRunner, FlinkRunner or "
            "another one of Apache Beam"
        ) from None
    return options


def run(work: Callable[..., Any], calls: Sequence[tuple[Any, ...]], flags: str) -> None:
    """Makes all calls by a pipeline.

    Args:
      work: a function of a module whose first argument is a unit.
      flags: options of Beam, as on a command line.

    Raises:
      ConfigError: of a call.
      StorageError: of a call; or the pipeline failed.
    """
    if not calls:
        return
    options, apache_beam = _options(flags), importlib.import_module("apache_beam")
    made = [unit for unit, *_ in calls]
    targets.for_each(made[0].target, lambda unit: unit.target.delete(_error_file(unit)), made)
    try:
        with apache_beam.Pipeline(options=options) as pipeline:
            # Without a reshuffle a runner may make all units in one worker, fused with their creation.
            units: Any = pipeline | apache_beam.Create(calls, reshuffle=False) | apache_beam.Reshuffle()
            _ = units | apache_beam.Map(_call, work)
    except (ConfigError, StorageError):
        raise
    except Exception as error:
        _raise_first(made)
        reason = " ".join(str(error).split())[:200]
        raise StorageError(
            f"--beam: got {type(error).__name__} ({reason}) from the pipeline, expected it to finish; see its log, "
            "then run the same command: finished shards are kept"
        ) from error
    _raise_first(made)


def not_written(unit: Unit, key: str) -> StorageError:
    """The error for a file that no worker of the pipeline has written."""
    return StorageError(
        f"--beam: got no {unit.target}/{key} after the pipeline, expected its workers to write it; give a --target and "
        "a data.dir in a bucket, or folders that all machines share under the same path"
    )


def _call(call: tuple[Any, ...], work: Callable[..., Any]) -> None:
    unit: Unit = call[0]
    try:
        with workers.one_thread():
            work(*call)
    except tuple(ERRORS.values()) as error:  # a runner would try it again, and show its traceback alone
        targets.write_json(unit.target, _error_file(unit), {"type": type(error).__name__, "message": str(error)})


def _error_file(unit: Unit) -> str:
    return f"{WORK}/{unit.name}.error.json"


def _raise_first(units: Sequence[Unit]) -> None:
    """Raises the error that a worker left for the first of these units that has one."""
    left = targets.for_each(units[0].target, lambda unit: targets.read_json(unit.target, _error_file(unit)), units)
    for found in filter(None, left):
        raise ERRORS[found["type"]](found["message"])
