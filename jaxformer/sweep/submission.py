"""The frozen state of a sweep at submission: every run's config, the space, the code.

A sweep's folder keeps each submission as `submissions/0001`, `submissions/0002` and so on. Such a folder is renamed
into place when it is complete, and never changes after:

    submission.json   package version, commit, digest of the diff, the space, the runs, and checksums of the other files
    <run>.json        resolved config of a run
    recipe.py         a recipe whose variants are the runs; they train from it, not from the recipe that was submitted
    code.diff         uncommitted changes of tracked files, without secrets; missing if there are none

Untracked files, and modules beside the recipe, are not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer import registry
from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import code_version, files, secrets
from jaxformer.runtime.code_version import CodeVersion
from jaxformer.sweep.planning import Plan, Run, run_name

FOLDER = "submissions"
RECORD = "submission.json"
RECIPE = "recipe.py"
DIFF = "code.diff"
LOCK = "sweep.lock"
TEMPORARY = ".incomplete-"
"""Begins the name of a submission that is being written, or whose writer was killed."""

MAX_NAMES = 3
"""Config keys and runs that a refusal names; it counts the others."""

RECIPE_TEXT = '''"""The runs of a sweep as they were submitted, one variant for each. Written by jaxformer sweep."""

import os

from jaxformer.sweep import submission


def get_config(variant):
    return submission.frozen_recipe(os.path.dirname(__file__), variant)
'''


@dataclass(frozen=True)
class Submission:
    """A submission that has been read and whose checksums are right.

    Attributes:
      folder: its folder.
      record: content of `submission.json`.
      configs: of its runs, by the name of the run's folder, in the order of the sweep.
    """

    folder: Path
    record: dict[str, Any]
    configs: dict[str, Config]


@contextlib.contextmanager
def lock(workdir: Path) -> Generator[None]:
    """Keeps other sweeps out of `workdir` while this process submits or executes one. The kernel frees a dead one's.

    Raises:
      ConfigError: another process holds the lock.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    handle = os.open(workdir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"workdir {workdir}: got a sweep that another process runs or submits there, expected none; wait for it or "
            "stop it, or use another --workdir"
        ) from None
    except OSError:  # a file system without locks: the lock of each run's workdir remains
        pass
    try:
        yield
    finally:
        os.close(handle)


def freeze(plan: Plan, arguments: Sequence[str], changed: bool = False, search: dict[str, Any] | None = None) -> Plan:
    """Keeps what is submitted, and returns the plan as it was kept: its runs train from the frozen configs.

    The same sweep again uses the submission that is there. One with more runs and the same code is kept beside it.

    Args:
      arguments: the config arguments of the command line.
      changed: also accepts configs, runs and code that differ from the newest submission; a line on stderr says so.
      search: settings of a search, whose only run here is the config that its trials edit; None: a list of runs.

    Raises:
      ConfigError: something differs and `changed` is False, a frozen file is damaged, or the folder is that of another
        search.
    """
    code = code_version.current()
    for incomplete in (plan.workdir / FOLDER).glob(f"{TEMPORARY}*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    newest = read_newest(plan.workdir)
    if newest is not None:
        check_same_search(newest, plan, search)
        differences = [*_code_differences(newest, code), *_plan_differences(newest, plan)]
        if search is not None and newest.record["search"]["optuna"] != search["optuna"]:
            differences.append(f"optuna {newest.record['search']['optuna']} there, {search['optuna']} here")
        if differences and not changed:
            raise ConfigError(
                f"workdir {plan.workdir}: got a sweep that differs from {newest.folder} ({'; '.join(differences)}), "
                "expected the same runs or more; give --changed to go on with what is given now, or another --workdir"
            )
        if differences:
            print(f"changed since {newest.folder}: {'; '.join(differences)}", file=sys.stderr, flush=True)
        elif len(newest.configs) == len(plan.runs):
            return _frozen_plan(plan, newest)
    number = 1 if newest is None else int(newest.folder.name) + 1
    folder = plan.workdir / FOLDER / f"{number:04d}"
    _write(folder, plan, arguments, code, search)
    return _frozen_plan(plan, _read(folder))


def submitted(plan: Plan, search: dict[str, Any] | None = None) -> Plan:
    """The newest submission in the plan's folder, for a report or a table; `plan` itself if there is none.

    A line on stderr says in what the runs of `plan` differ from it.

    Raises:
      ConfigError: a frozen file is damaged, or the folder is that of another search.
    """
    newest = read_newest(plan.workdir)
    if newest is None:
        return plan
    check_same_search(newest, plan, search)
    differences = _plan_differences(newest, plan)
    more = len({run.workdir.name for run in plan.runs} - set(newest.configs))
    if not differences and more:
        differences = [f"{more} runs more"]
    if differences:
        print(
            f"shown: the runs in {newest.folder}; what is given now differs ({'; '.join(differences)})",
            file=sys.stderr,
            flush=True,
        )
    return _frozen_plan(plan, newest)


def read_newest(workdir: Path) -> Submission | None:
    """The newest submission of the sweep in `workdir`; None if there is none.

    Raises:
      ConfigError: one of its files is missing or damaged.
    """
    folders = [path for path in (workdir / FOLDER).glob("[0-9]*") if path.name.isdecimal() and path.is_dir()]
    return _read(max(folders, key=lambda path: int(path.name))) if folders else None


def frozen_recipe(folder: str, name: str) -> Any:
    """The frozen config of the run `name` in the form that a recipe returns.

    A line on stderr says if the code has changed since the submission: a run may wait in a queue for days.

    Raises:
      ConfigError: there is no such run, or a file is damaged.
    """
    record = _read_record(Path(folder))
    known = [run["folder"] for run in record["runs"]]
    if name not in known:
        raise ConfigError(f"got run {name!a}, expected one of the {len(known)} in {RECORD}")
    if record["modules"] is not None:
        registry.add_search_directory(record["modules"])
    kept = Submission(Path(folder), record, {name: _read_config(Path(folder), name, record)})
    differences = _code_differences(kept, code_version.current())
    if differences:
        print(f"code: changed since {folder}: {'; '.join(differences)}", file=sys.stderr, flush=True)
    return overrides.editable(kept.configs[name])


# --- files ------------------------------------------------------------------------------------------------------------


def _write(
    folder: Path, plan: Plan, arguments: Sequence[str], code: CodeVersion, search: dict[str, Any] | None
) -> None:
    """Writes a submission, all of it or nothing.

    Raises:
      ConfigError: another process has written one with this number meanwhile.
    """
    contents: dict[str, bytes] = {RECIPE: RECIPE_TEXT.encode()}
    for run in plan.runs:
        contents[f"{run.workdir.name}.json"] = overrides.to_json(run.config).encode()
    if code.diff:
        # Bytes that are no UTF-8 survive, so that the patch applies.
        contents[DIFF] = secrets.redact(code.diff.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    recipe = next((word.partition("=")[2] for word in arguments if word.startswith("--config=")), None)
    record: dict[str, Any] = {
        "version": code.version,
        "commit": code.commit,
        "diff": code.digest,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": secrets.redact_command(arguments),
        "modules": None if recipe is None else os.path.abspath(os.path.dirname(recipe)),
        "runs": [
            {"name": run_name(run.edits), "folder": run.workdir.name, "edits": _edits_as_json(run)} for run in plan.runs
        ],
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    if search is not None:
        record["search"] = search
    temporary = folder.parent / f"{TEMPORARY}{os.getpid()}-{os.urandom(4).hex()}"
    temporary.mkdir(parents=True)
    try:
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        files.write_json(temporary / RECORD, {**record, "sha256": _digest(record)})
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():
                raise
            raise ConfigError(
                f"{folder}: got a submission that another process wrote at the same time, expected none; give the "
                "command again"
            ) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _edits_as_json(run: Run) -> Any:
    # Values may be of any type that the command line takes as text, such as numpy's integers.
    return secrets.redact_json(json.loads(json.dumps(run.edits, default=str)))


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> Submission:
    record = _read_record(folder)
    for name in (RECIPE, DIFF):
        if name in record["files"]:
            _read_file(folder, name, record)
    configs = {run["folder"]: _read_config(folder, run["folder"], record) for run in record["runs"]}
    return Submission(folder, record, configs)


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = files.read_json(path)
    except FileNotFoundError:
        raise _damaged(path, "no such file") from None
    if record.pop("sha256", None) != _digest(record):
        raise _damaged(path, "another checksum")
    return record


def _read_file(folder: Path, name: str, record: dict[str, Any]) -> bytes:
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    if hashlib.sha256(content).hexdigest() != record["files"][name]:
        raise _damaged(path, "another checksum")
    return content


def _read_config(folder: Path, name: str, record: dict[str, Any]) -> Config:
    content = _read_file(folder, f"{name}.json", record)
    try:
        return overrides.from_json(content.decode())
    except ConfigError as error:  # of another version of the package
        raise ConfigError(f"{folder / name}.json: {error}") from None


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: got a damaged file ({reason}), expected what the sweep wrote at submission; restore it, or delete "
        f"{path.parent} and submit again"
    )


# --- comparison -------------------------------------------------------------------------------------------------------


def _code_differences(newest: Submission, code: CodeVersion) -> list[str]:
    """Version, commit and uncommitted changes in which the code of now differs from the submission's."""
    record = newest.record
    found = []
    if record["version"] != code.version:
        found.append(f"version {record['version']} there, {code.version} here")
    if (record["commit"] is None) != (code.commit is None):
        where = "here" if code.commit is None else "there"
        print(
            f"code: no commit is known {where}, so only the version is compared with {newest.folder}", file=sys.stderr
        )
    elif record["commit"] != code.commit:
        found.append(f"commit {str(record['commit'])[:12]} there, {str(code.commit)[:12]} here")
    elif record["diff"] != code.digest:
        there, here = record["diff"] or "none", code.digest or "none"
        found.append(f"uncommitted changes {there[:8]} there, {here[:8]} here")
    return found


def check_same_search(newest: Submission, plan: Plan, search: dict[str, Any] | None) -> None:
    """Checks that the submission is of this search, or of no search if that is None.

    Results of another space, or over another config, would mislead its sampler: no flag accepts them.

    Raises:
      ConfigError: it is not.
    """
    kept = newest.record.get("search")
    if (kept is None) != (search is None):
        there, here = ("a list of runs", "a search") if kept is None else ("a search", "a list of runs")
        raise ConfigError(f"workdir {plan.workdir}: got {here}, expected {there} as it holds; use another --workdir")
    if kept is None or search is None:
        return
    keys = [key for key, value in search.items() if key != "optuna" and kept.get(key) != value]
    base = newest.configs[newest.record["runs"][0]["folder"]]
    if overrides.fingerprint(base) != overrides.fingerprint(plan.runs[0].config):
        keys += overrides.diff(base, plan.runs[0].config)
    if keys:
        raise ConfigError(
            f"workdir {plan.workdir}: got a search with other values of {_names(keys)} than {newest.folder}, expected "
            "the same search, or more trials; use another --workdir"
        )


def _plan_differences(newest: Submission, plan: Plan) -> list[str]:
    """Config keys that differ in the submission's runs, and its runs that `plan` lacks."""
    given = {run_name(run.edits): run.config for run in plan.runs}
    missing, keys = [], {}
    for run in newest.record["runs"]:
        config = given.get(run["name"])
        if config is None:
            missing.append(run["name"])
        else:
            keys |= overrides.diff(newest.configs[run["folder"]], config)
    found = []
    if keys:
        found.append(f"other values of {_names(list(keys))}")
    if missing:
        found.append(f"no run {_names(missing)}")
    return found


def _names(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _frozen_plan(plan: Plan, kept: Submission) -> Plan:
    """The runs of a submission. Edits are those of `plan` where it has the run."""
    edits = {run_name(run.edits): run.edits for run in plan.runs}
    runs = []
    for run in kept.record["runs"]:
        directory = plan.workdir / run["folder"]
        recipe = f"--config={kept.folder / RECIPE}:{run['folder']}"
        command = (sys.executable, "-m", "jaxformer", "train", recipe, f"--workdir={directory}")
        values = edits.get(run["name"], run["edits"])
        runs.append(Run(values, kept.configs[run["folder"]], directory, command))
    return Plan(plan.workdir, tuple(runs))
