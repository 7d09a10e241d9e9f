"""The code that is copied to other machines: the files that git knows; with --wheel, a wheel in place of the package.

What git does not know is never copied: no environment, no history, no runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import launch
from launch.programs import Programs

ARCHIVE = "jaxformer-code.tar.gz"
"""Name of the archive on the other machine, in the home folder."""

WHEEL_PATHS = ("configs", "requirements.lock", "pyproject.toml")
"""What the archive holds beside a wheel: a wheel has no recipes, and no list of what it was tested with."""


def git(programs: Programs, *arguments: str) -> str:
    """Output of a git command in the current directory, without the line's end; "" if it fails."""
    done = programs.call(["git", *arguments])
    return done.out.strip() if done.code == 0 else ""


def snapshot(programs: Programs) -> str:
    """The commit to archive: HEAD, or a commit object of the tracked files as they are, if they have been edited.

    The object belongs to no branch, and nothing in the working tree or the index changes.
    """
    return git(programs, "stash", "create") or git(programs, "rev-parse", "HEAD")


def archive_command(commit: str, target: str, wheel: str) -> list[str]:
    """The command that writes the archive of `commit` to the file `target`."""
    return ["git", "archive", "--format=tar.gz", f"--output={target}", commit, *(WHEEL_PATHS if wheel else ())]


def check(parser: argparse.ArgumentParser, flags: argparse.Namespace, programs: Programs) -> None:
    """Exits with code 2 if the archive could not be made, or would not hold the recipe of --config."""
    if git(programs, "rev-parse", "--show-prefix") or not git(programs, "rev-parse", "HEAD"):
        parser.error("code: got a folder that is not the top of a git repository, expected one; git archive copies it")
    if flags.wheel and not Path(flags.wheel).is_file():
        parser.error(f"--wheel: got {flags.wheel}, which is no file, expected a wheel; `make package` builds one")
    recipe = launch.train_argument(flags, "config").partition(":")[0]
    if not recipe or Path(recipe).is_absolute():
        return  # the doctor needs none; an absolute path is one of the other machine
    if not git(programs, "ls-files", "--", recipe):
        parser.error(f"--config: got {recipe}, which git does not know and so would not copy; git add it")
    if flags.wheel and not Path(recipe).is_relative_to("configs"):
        parser.error(f"--config: got {recipe}, expected a recipe below configs with --wheel; leave --wheel out")


def untracked(programs: Programs) -> Sequence[str]:
    """Files that git neither knows nor ignores: they are not copied."""
    return git(programs, "ls-files", "--others", "--exclude-standard").splitlines()
