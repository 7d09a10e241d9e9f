"""The state of this code: package version, git commit, and uncommitted changes."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jaxformer import __version__

PACKAGE = Path(__file__).parents[1]
"""Folder of the package, which may lie in a git repository."""

MAX_DIFF_BYTES = 16 << 20
"""A longer diff is not kept; its digest still distinguishes two states of the code."""

DIFF = (
    "diff",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--binary",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "HEAD",
)
"""Diff of tracked files that does not depend on the user's git settings."""


@dataclass(frozen=True)
class CodeVersion:
    """One state of the code.

    Attributes:
      version: of the package.
      commit: full hash of the commit; None without a repository or without `git`.
      diff: uncommitted changes of tracked files as a patch, secrets included; empty if it is over `MAX_DIFF_BYTES`.
      digest: 16 hexadecimal digits of the whole diff; "" without changes.
    """

    version: str
    commit: str | None
    diff: bytes = b""
    digest: str = ""


def current(folder: Path = PACKAGE) -> CodeVersion:
    """The state of the code in `folder`. Files that git does not track do not count."""
    commit = _git(folder, "rev-parse", "HEAD")
    diff = None if commit is None else _git(folder, *DIFF)
    if commit is None or diff is None:
        return CodeVersion(__version__, None)
    digest = hashlib.sha256(diff).hexdigest()[:16] if diff else ""
    return CodeVersion(__version__, commit.decode().strip(), diff if len(diff) <= MAX_DIFF_BYTES else b"", digest)


@functools.cache
def source_digest(*paths: Path) -> str:
    """A hash of source files and of those below folders, as they are at the first call."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def git_commit() -> str | None:
    """The commit of this code, with `-dirty` if it was edited; None without a repository or without `git`."""
    described = _git(PACKAGE, "describe", "--always", "--dirty", "--abbrev=12")
    return None if described is None else described.decode().strip() or None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command in `folder`; None if it fails, or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
