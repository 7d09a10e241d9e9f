"""Checksums of a checkpoint: what is read is what was written, or it is said.

`manifest.json` is the last file of a checkpoint's directory to be written: size and SHA-256 of every other file, and
the SHA-256 of this list itself, so that an edited list is noticed too. Arrays that changed on the disk without
becoming unreadable (a flipped bit) are found by nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from jaxformer.config import ConfigError

NAME = "manifest.json"
FORMAT = 2
"""1: no manifest (versions before there was one). 2: with it."""

Listed = dict[str, dict[str, Any]]


class Damaged(Exception):
    """A checkpoint that cannot be read, or is not what was written. The message is one line."""


def write(directory: Path) -> None:
    """Lists every file below `directory`, on the disk before the list appears."""
    files = {}
    for path in sorted(each for each in directory.rglob("*") if each.is_file() and each.name != NAME):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    content = {"format": FORMAT, "files": files}
    temporary = directory / (NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content | {"sha256": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / NAME)
    sync(directory)


def listed(directory: Path) -> Listed | None:
    """The files that should be in `directory`; None where there is no manifest.

    Raises:
      Damaged: the manifest is not what was written.
      ConfigError: a newer version wrote it.
    """
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
        own = content.pop("sha256")
        if own != _digest(content):
            raise Damaged(f"{NAME} differs from its own checksum")
        if content["format"] > FORMAT:
            raise ConfigError(
                f"checkpoint {directory}: got format {content['format']}, expected at most {FORMAT}; a newer version "
                "of jaxformer wrote it: use that version"
            )
        files = {
            str(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for name, f in content["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise Damaged(f"{NAME} is no list of files ({type(error).__name__})") from None
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Damaged(f"{NAME} names {name!a}, which is not in the checkpoint")
    return files


def compare(directory: Path, files: Listed) -> None:
    """Reads every listed file.

    Raises:
      Damaged: one is missing, or is not what was written.
    """
    for name, each in files.items():
        try:
            with (directory / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != each["bytes"]:
                    raise Damaged(f"{name} has {size} bytes, not the {each['bytes']} that were written")
                if hashlib.file_digest(file, "sha256").hexdigest() != each["sha256"]:
                    raise Damaged(f"{name} differs from its checksum")
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None


def sync(directory: Path) -> None:
    """Makes the names in `directory` durable: a file system may keep a rename in memory only."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
