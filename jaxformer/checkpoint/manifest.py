"""Checksums of a checkpoint, to detect files that differ from what was written.

`manifest.json` is the last file of a checkpoint to be written. It holds the size and SHA-256 of every other file, and
the SHA-256 of this list itself, so that an edited list is detected too. Nothing else detects arrays that changed on the
disk but can still be read, as by a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from jaxformer.errors import ConfigError

FILE_NAME = "manifest.json"
FORMAT = 2
"""Version of the checkpoint format. 1: without manifest. 2: with it."""

FileList = dict[str, dict[str, Any]]
"""Size (`bytes`) and checksum (`sha256`) of every file, by path relative to the checkpoint."""


class Damaged(Exception):
    """A checkpoint cannot be read, or differs from what was written. The message is one line."""


def write(directory: Path) -> None:
    """Writes the manifest of all files below `directory`, after making them durable."""
    write_list(directory, list_files(directory))


def list_files(directory: Path) -> FileList:
    """Size and checksum of all files below `directory`, after making them durable."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILE_NAME):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return files


def write_list(directory: Path, files: FileList) -> None:
    """Writes a manifest of these files, which need not all be in `directory`."""
    content = {"format": FORMAT, "files": files}
    temporary = directory / (FILE_NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content | {"sha256": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / FILE_NAME)
    sync_directory(directory)


def read(directory: Path) -> FileList | None:
    """The files that should be in `directory`; None if it has no manifest.

    Raises:
      Damaged: the manifest differs from what was written.
      ConfigError: a newer version wrote it.
    """
    try:
        text = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{FILE_NAME} is no list of files ({type(error).__name__})") from None
    return parse(text, directory)


def parse(text: bytes, where: object) -> FileList:
    """The files that the content of a manifest names.

    Args:
      where: the checkpoint, for the error.

    Raises:
      Damaged: it differs from what was written.
      ConfigError: a newer version wrote it.
    """
    try:
        content = json.loads(text.decode("utf-8"))
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise Damaged(f"{FILE_NAME} differs from its own checksum")
        if content["format"] > FORMAT:
            raise ConfigError(
                f"checkpoint {where}: got format {content['format']}, expected at most {FORMAT}; a newer version "
                "of jaxformer wrote it: use that version"
            )
        files = {
            str(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for name, f in content["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise Damaged(f"{FILE_NAME} is no list of files ({type(error).__name__})") from None
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Damaged(f"{FILE_NAME} names {name!a}, which is not in the checkpoint")
    return files


def check_files(directory: Path, files: FileList) -> None:
    """Reads every listed file and compares it with its size and checksum.

    Raises:
      Damaged: a file is missing or differs.
    """
    for name, entry in files.items():
        try:
            with (directory / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry["bytes"]:
                    raise Damaged(f"{name} has {size} bytes, not the {entry['bytes']} that were written")
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise Damaged(f"{name} differs from its checksum")
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable, since a file system may hold a rename in memory only."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
