"""Files that people and other programs also touch: atomic writes, and reads that fail with a one-line error."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

from jaxformer.errors import ConfigError, StorageError

MAX_INTEGER = 2**64
"""Whole numbers of this size or more are rejected: they are no count, id or seed, and fit no integer type."""

MAX_LINKS = 40
"""Symbolic links followed one after another, as many as Linux follows."""

DESCRIPTOR_DIRECTORY = re.compile(r"/proc/[^/]+(/task/[^/]+)?/fd")
"""Directory of a process's open files: /dev/stdout and /dev/fd/1 lead there."""

STORAGE_ERRNOS = frozenset(
    getattr(errno, name)
    for name in ("EACCES", "EDQUOT", "EFBIG", "EIO", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOSPC", "ENOTDIR", "EPERM",
                 "EROFS", "ESTALE")
)  # fmt: skip
"""Errors by which a disk or a file system refuses to read or write."""


class OutputClosed(Exception):
    """The reader of the output has closed it, as `head` does."""


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Generator[TextIO]:
    """Text file (UTF-8, newlines unchanged) that replaces `path` when the block ends without an error.

    A symbolic link stays, and its target is replaced. A device, a pipe or an open descriptor is written to directly,
    since a file cannot replace it.
    """
    with _open_atomic_bytes(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        try:
            yield text
            text.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                text.close()
            raise


@contextlib.contextmanager
def _open_atomic_bytes(path: str | os.PathLike[str]) -> Generator[io.BufferedWriter]:
    is_direct = is_special(path)
    target = os.fspath(path) if is_direct else os.path.realpath(path)
    temporary = target
    if is_direct:
        handle = _open_special(target)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.stat(target)  # a name that is too long, or below a file, fails now and not after all is written
        directory, name = os.path.split(target)
        temporary = os.path.join(directory, f".{name[:20]}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file = os.fdopen(handle, "wb")
    try:
        yield file
        file.close()
        if not is_direct:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        if not is_direct:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes all of `content` or nothing, as `open_atomic` does; text as UTF-8."""
    with _open_atomic_bytes(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Writes a JSON value atomically, and creates the directory of `path` if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_text(value, indent))


def json_text(value: Any, indent: int | None = 1) -> str:
    """A JSON value as `write_json` writes it."""
    return json.dumps(value, indent=indent, ensure_ascii=False) + "\n"


def _open_special(path: str) -> int:
    """Descriptor for writing to a device, a pipe or an open descriptor.

    A descriptor of this process is duplicated. The copy shares the file offset, so later writes of the shell or of this
    process append and do not overwrite.
    """
    descriptor = _descriptor(path)
    if descriptor is not None and os.path.samefile(os.path.dirname(descriptor), "/proc/self/fd"):
        return os.dup(int(os.path.basename(descriptor)))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _descriptor(path: str | os.PathLike[str]) -> str | None:
    """The name `/proc/<process>/fd/<number>` that `path` leads to; None if it leads elsewhere."""
    name = os.path.abspath(path)
    for _ in range(MAX_LINKS):
        directory = os.path.realpath(os.path.dirname(name))
        if DESCRIPTOR_DIRECTORY.fullmatch(directory):
            return os.path.join(directory, os.path.basename(name))
        if not os.path.islink(name):
            break
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def is_special(path: str | os.PathLike[str]) -> bool:
    """True if `path` exists and no file can replace it: a device, a pipe, a socket or an open descriptor."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_json(text: str, object_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON value of a text.

    Args:
      object_hook: makes an object from its (key, value) pairs; a dict without it.

    Raises:
      ValueError: the text is no JSON, is nested too deep, or has a whole number of more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_parse_integer, object_pairs_hook=object_hook)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _parse_integer(digits: str) -> int:
    # The length comes first: converting a number of a million digits takes seconds.
    if len(digits) > 21 or abs(int(digits)) >= MAX_INTEGER:
        raise ValueError(f"a whole number of {len(digits.lstrip('-'))} digits, more than 64 bits hold")
    return int(digits)


def read_json(path: str | os.PathLike[str], value_type: type = dict) -> Any:
    """The JSON value in a file, which must be of type `value_type`.

    Raises:
      FileNotFoundError: the file does not exist.
      ConfigError: it cannot be read, or holds a value of another type.
    """
    type_name = "object" if value_type is dict else value_type.__name__
    expected = f"expected the JSON {type_name} that a run wrote; restore the file"
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: got an unreadable file ({reason}), {expected}") from None
    if not isinstance(value, value_type):
        raise ConfigError(f"{path}: got a {type(value).__name__}, {expected}")
    return value


def parse_metrics_row(line: str) -> dict[str, Any] | None:
    """A row of `metrics.jsonl`; None if it is incomplete or its step, time or split is invalid."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("split"), str):
        return None
    step, time = row.get("step"), row.get("wall_time", 0.0)
    if type(step) is not int or not 0 <= step < 2**53:
        return None
    return row if type(time) in (int, float) and abs(time) < 2**53 else None


# --- paths on the command line ----------------------------------------------------------------------------------------


def check_directory(what: str, path: str, writable: bool = False, new: bool = False) -> None:
    """Checks that `path` is, or can become, a directory.

    Args:
      what: the flag, for the error.
      writable: files will be written into the directory, if it exists.
      new: the directory and its parents are created if they are missing.

    Raises:
      ConfigError: `path` or a parent is a file, has too long a name, or cannot be reached or written.
    """
    try:
        is_directory, existing = stat.S_ISDIR(os.stat(path).st_mode), path
    except FileNotFoundError:
        if not new:
            return
        existing = next(str(parent) for parent in Path(path).absolute().parents if parent.exists())
        if not os.path.isdir(existing):
            raise ConfigError(f"{what}: got {path!a}, but {existing} is a file, expected a folder") from None
        is_directory = True  # it will be created
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what}: got {path!a} ({reason}), expected a folder; name another one") from None
    if not is_directory:
        raise ConfigError(f"{what}: got {path!a} (a file), expected a folder; name another one")
    if (writable or new) and not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: got {path!a}, but {existing} is not writable, expected a folder to write in")


def storage_error(error: OSError) -> StorageError | None:
    """The one-line error for an `OSError` by which a disk refuses; None for other errors."""
    if error.errno not in STORAGE_ERRNOS:
        return None
    path = error.filename or "a file"
    return StorageError(f"{path}: got {error.strerror}, expected to read or write there; check the disk")


def write_error(what: str, error: OSError) -> StorageError:
    """The one-line error for a failed write to the stream or file `what`."""
    return StorageError(f"{what}: got {error.strerror or error}, expected to write the output there; make room for it")
