"""One long text for language modelling: all documents of a split in a row, cut into rows without padding.

    stream = <bos> document 1 <eos> document 2 <eos> ... <eos>

Row r reads `stream[rT : (r + 1)T]` and predicts `stream[rT + 1 : (r + 1)T + 1]`, so every token but <bos> is predicted
exactly once, and a row's first token is not lost to a boundary.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.packing import Features
from jaxformer.data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

DIGEST = hashlib.sha256().digest_size
"""Bytes of the checksum at the end of a file of tokens."""

CHUNK = 1024
"""Documents that are read at a time."""


class Rows:
    """The rows of a stream, as encoded examples with "target" and "labels".

    Attributes:
      tokens: the whole stream, an array on disk.
      length: T, tokens of a row. The last row may be shorter.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        if len(tokens) < 2:
            raise ConfigError("data: got a split without text, expected at least one token; check the files")
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __call__(self, indices: Sequence[int], epoch: int) -> list[Features]:
        """Rows `indices`; the same in every `epoch`."""
        return [self._row(index * self.length) for index in indices]

    def _row(self, begin: int) -> Features:
        tokens = np.asarray(self.tokens[begin : begin + self.length + 1], np.int32)
        return {"target": tokens[:-1], "labels": tokens[1:]}


def stream(directory: Path, key: str, examples: Any, tokenizer: Tokenizer) -> np.ndarray:
    """The token stream of the texts of `examples`, read from `directory` or written there first.

    Args:
      directory: of the cache.
      key: changes when the texts do; the tokenizer's fingerprint is added here.
      examples: the split; each example's "text" is a document.
      tokenizer: needs an end-of-text token.

    Raises:
      ConfigError: the tokenizer has no end token, or the cache cannot be written.
    """
    if tokenizer.eos is None:
        raise ConfigError("data.packing: got concat and a tokenizer without end token, expected </s>; use packing none")
    # Two bytes a token where they suffice: a billion words are 2 GB instead of 4.
    dtype = np.dtype("<u2") if tokenizer.size <= 2**16 else np.dtype("<i4")
    name = hashlib.sha256(f"2 {key} {tokenizer.fingerprint}".encode()).hexdigest()[:24]
    path = directory / f"{name}.tokens"
    reason = _problem(path)
    if reason is not None:
        if reason:
            logger.warning("tokens %s are damaged (%s): made again", path, reason)
        try:
            _write(path, examples, tokenizer, dtype)
        except OSError as error:
            what = f"{path}: {error.strerror or error}, expected to write the tokens of the text there"
            raise ConfigError(f"{what}; set --config.data.cache or $JAXFORMER_CACHE to a writable folder") from error
    return np.memmap(path, dtype, mode="r", shape=((path.stat().st_size - DIGEST) // dtype.itemsize,))


def _problem(path: Path) -> str | None:
    """Why the file cannot be used: None nothing, "" it is not there. Reads every byte."""
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size - DIGEST
            digest = hashlib.sha256()
            while left > 0:
                block = file.read(min(left, 1 << 20))
                if not block:
                    break
                digest.update(block)
                left -= len(block)
            return None if file.read() == digest.digest() else "they differ from their checksum"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror


def _write(path: Path, examples: Any, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """The tokens, then their checksum. Written under another name and moved: readers, and a second writer, see no file
    or the whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:

        def add(tokens: Sequence[int]) -> None:
            content = np.array(tokens, dtype).tobytes()
            digest.update(content)
            file.write(content)

        try:
            add([tokenizer.eos if tokenizer.bos is None else tokenizer.bos])
            for example in _read(examples):
                add([*tokenizer.encode(example["text"]), tokenizer.eos])
            file.write(digest.digest())
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def _read(examples: Any) -> Iterator[Any]:
    for begin in range(0, len(examples), CHUNK):
        yield from examples_at(examples, range(begin, min(begin + CHUNK, len(examples))))


def examples_at(examples: Any, indices: Sequence[int]) -> Sequence[Any]:
    """Several examples, in one call where the split has one for it."""
    if hasattr(examples, "__getitems__"):
        return examples.__getitems__(list(indices))
    return [examples[index] for index in indices]
