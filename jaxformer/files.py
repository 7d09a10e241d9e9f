"""Files that people and other programs have a hand in: written whole or not at all, read with one line of complaint."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxformer.config import ConfigError, StorageError

LARGEST = 2**64
"""Whole numbers beyond are no count, id or seed, and do not fit the types that these become."""

MAX_LINKS = 40
"""Links of links, as many as Linux follows."""

DESCRIPTORS = re.compile(r"/proc/[^/]+(/task/[^/]+)?/fd")
"""Folder of a process's open files: /dev/stdout and /dev/fd/1 lead there."""

REFUSALS = frozenset(
    getattr(errno, name)
    for name in ("EACCES", "EDQUOT", "EFBIG", "EIO", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOSPC", "ENOTDIR", "EPERM",
                 "EROFS", "ESTALE")
)  # fmt: skip
"""Errors by which a disk or a file system refuses."""


class ReaderLeft(Exception):
    """Whoever read the output has closed it."""


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file (UTF-8, "\n" ends lines) that takes the place of `path` when the block ends without an error.

    A link stays a link, and its target is replaced. A device, a pipe or an open descriptor is written through: a file
    cannot take its place, and whoever reads from it waits for the text.
    """
    with _replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        try:
            yield text
            text.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                text.close()
            raise


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[io.BufferedWriter]:
    through = is_special(path)
    target = os.fspath(path) if through else os.path.realpath(path)
    temporary = target
    if through:
        handle = _open_special(target)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.stat(target)  # a name that is too long, or of no folder, fails now and not when all is written
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name[:20]}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file = os.fdopen(handle, "wb")
    try:
        yield file
        file.close()
        if not through:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        if not through:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes all of `content` or nothing, as `replacing` does; text as UTF-8."""
    with _replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """`write` of a JSON value, in a folder that is made where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def _open_special(path: str) -> int:
    """A handle that writes to a device, a pipe or an open descriptor. Of an own descriptor it is a copy, which shares
    its place in the file: what the shell or this process writes there next follows, and does not overwrite it."""
    descriptor = _descriptor(path)
    if descriptor is not None and os.path.samefile(os.path.dirname(descriptor), "/proc/self/fd"):
        return os.dup(int(os.path.basename(descriptor)))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _descriptor(path: str | os.PathLike[str]) -> str | None:
    """The name `/proc/<process>/fd/<number>` that `path` leads to; None if it leads elsewhere."""
    name = os.path.abspath(path)
    for _ in range(MAX_LINKS):
        folder = os.path.realpath(os.path.dirname(name))
        if DESCRIPTORS.fullmatch(folder):
            return os.path.join(folder, os.path.basename(name))
        if not os.path.islink(name):
            break
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def is_special(path: str | os.PathLike[str]) -> bool:
    """True for what is there and cannot be replaced by a file: a device, a pipe, a socket, an open descriptor."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


# --- reading ----------------------------------------------------------------------------------------------------------


def parse(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON value of a text; `pairs` makes objects of their (key, value) pairs.

    Raises:
      ValueError: it is none, is nested too deep, or has a whole number of more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_whole, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _whole(digits: str) -> int:
    if len(digits) > 21 or abs(int(digits)) >= LARGEST:
        raise ValueError(f"a whole number of {len(digits.lstrip('-'))} digits, more than 64 bits hold")
    return int(digits)


def read_json(path: str | os.PathLike[str], kind: type = dict) -> Any:
    """The JSON value of type `kind` in a file.

    Raises:
      FileNotFoundError: there is none.
      ConfigError: it cannot be read, or holds something else.
    """
    expected = f"expected the JSON {'object' if kind is dict else kind.__name__} that a run wrote; restore the file"
    try:
        value = parse(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: got an unreadable file ({reason}), {expected}") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path}: got a {type(value).__name__}, {expected}")
    return value


def metrics_row(line: str) -> dict[str, Any] | None:
    """A row of `metrics.jsonl`; None if it is torn or edited so that its step, time or split is none."""
    try:
        row = parse(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("split"), str):
        return None
    step, time = row.get("step"), row.get("wall_time", 0.0)
    if type(step) is not int or not 0 <= step < 2**53:
        return None
    return row if type(time) in (int, float) and abs(time) < 2**53 else None


# --- paths on the command line ----------------------------------------------------------------------------------------


def check_folder(what: str, path: str, writable: bool = False, new: bool = False) -> None:
    """Refuses what cannot be a folder.

    Args:
      what: the flag, for the error.
      writable: files will be written into it, if it is there.
      new: it is made where it is missing, and with it the folders above.

    Raises:
      ConfigError: it, or what stands in its place, is a file; the name is too long; it cannot be reached or written.
    """
    try:
        is_folder, nearest = stat.S_ISDIR(os.stat(path).st_mode), path
    except FileNotFoundError:
        if not new:
            return
        nearest = next(str(each) for each in Path(path).absolute().parents if each.exists())
        if not os.path.isdir(nearest):
            raise ConfigError(f"{what}: got {path!a}, but {nearest} is a file, expected a folder") from None
        is_folder = True  # that will be made
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what}: got {path!a} ({reason}), expected a folder; name another one") from None
    if not is_folder:
        raise ConfigError(f"{what}: got {path!a} (a file), expected a folder; name another one")
    if (writable or new) and not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: got {path!a}, but {nearest} is not writable, expected a folder to write in")


def refusal(error: OSError) -> StorageError | None:
    """What to tell the user of an error by which the disk refused; None for other errors."""
    if error.errno not in REFUSALS:
        return None
    where = error.filename or "a file"
    return StorageError(f"{where}: got {error.strerror}, expected to read or write there; see to the disk")


def write_error(what: str, error: OSError) -> StorageError:
    """A write to a stream or file of the user's that failed."""
    return StorageError(f"{what}: got {error.strerror or error}, expected to write the output there; make room for it")
