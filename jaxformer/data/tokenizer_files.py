"""Reading and writing the files of vocabularies."""

from __future__ import annotations

import stat
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runtime import files

MAX_FILE_BYTES = 64 << 20
"""Largest tokenizer file that is read. The largest published ones, of 2**18 tokens, have 35 MB."""


def read_file(path: Path) -> bytes:
    """The bytes of a vocabulary file.

    Raises:
      ConfigError: the file cannot be read, is not a regular file, or is larger than any vocabulary.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a device has no end, and a pipe waits for a writer
            raise ConfigError(f"tokenizer: got {path}, which is no file, expected a tokenizer.json or a .model file")
        if status.st_size > MAX_FILE_BYTES:
            size = f"{status.st_size / 2**20:,.0f} MiB"
            raise ConfigError(
                f"tokenizer: got {path} of {size}, expected at most {MAX_FILE_BYTES >> 20}; is it another file?"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer: got {path}, expected a readable file ({error.strerror}); check it") from error


def unreadable(path: Path, error: BaseException) -> ConfigError:
    """The error for a vocabulary file that its library cannot parse."""
    reason = " ".join(str(error).split())[:120]
    return ConfigError(f"tokenizer: got {path}, expected a tokenizer.json or a .model file ({reason}); check it")


def write(path: Path, text: str) -> None:
    """Writes `text` atomically: a reader sees the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, text)
