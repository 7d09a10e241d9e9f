"""Packing "concat" for language models: all documents of a split as one token stream, split into rows without padding.

    stream = <bos> document 1 <eos> document 2 <eos> ... <eos>

Row r reads `stream[rT : (r + 1)T]` and predicts `stream[rT + 1 : (r + 1)T + 1]`. So every token but <bos> is predicted
exactly once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data.encoding import Generators
from jaxformer.data.packing import Features
from jaxformer.data.sources import Example, Examples, examples_at
from jaxformer.data.token_shards import TokenStream
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError

logger = logging.getLogger(__name__)

DIGEST_BYTES = hashlib.sha256().digest_size
"""Bytes of the checksum (SHA-256) at the end of a token file."""

CHUNK_EXAMPLES = 1024
"""Documents read at a time."""

Tokens = np.ndarray | TokenStream
"""A token stream: an array on disk, or token shards."""

EncodeRow = Callable[[np.ndarray, np.random.Generator], Features]


class ConcatenatedRows:
    """The rows of a token stream, as encoded examples with "target" and "labels".

    Attributes:
      tokens: the complete stream, of which slices are read.
      length: T, tokens per row. The last row may be shorter.
      encode: `(ids, rng) -> features` makes other features of a row's T tokens, `stream[rT + 1 : (r + 1)T + 1]`; None:
        "target" and "labels" as above.
      seed: of the generators that `encode` gets, which depend on it, the epoch and the row only.

    Raises:
      ConfigError: the stream has no text.
    """

    def __init__(self, tokens: Tokens, length: int, encode: EncodeRow | None = None, seed: int = 0):
        if len(tokens) < 2:
            raise ConfigError("data: got a split without text, expected at least one token; check the files")
        self.tokens = tokens
        self.length = length
        self.encode = encode
        self.seed = seed

    def __getstate__(self) -> dict[str, Any]:
        """A file is opened again where this is unpickled: a copy of an array on disk would be in memory."""
        tokens = self.tokens
        if isinstance(tokens, np.memmap):
            tokens = _File(str(tokens.filename), tokens.dtype, len(tokens))
        return {**self.__dict__, "tokens": tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, _File):
            self.tokens = _open(self.tokens)

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __call__(self, indices: Sequence[int], epoch: int) -> list[Features]:
        """The rows at `indices`. Every `epoch` has the same tokens; what `encode` draws differs."""
        if isinstance(self.tokens, TokenStream):
            self.tokens.fetch((index * self.length, (index + 1) * self.length + 1) for index in indices)
        if self.encode is None:
            return [{"target": tokens[:-1], "labels": tokens[1:]} for tokens in map(self._tokens, indices)]
        generators = Generators(self.seed, epoch)
        return [self.encode(self._tokens(index)[1:], generators(index)) for index in indices]

    def _tokens(self, index: int) -> np.ndarray:
        """The T + 1 tokens of row `index`, the one before it included."""
        begin = index * self.length
        return np.asarray(self.tokens[begin : begin + self.length + 1], np.int32)


def token_stream(directory: Path, key: str, examples: Examples, tokenizer: Tokenizer) -> np.ndarray:
    """The token stream of `examples` as an array on disk, written into `directory` if it is not there yet.

    Args:
      directory: directory of the cache.
      key: key of the texts; the tokenizer's fingerprint is added to it.
      examples: the split; the "text" of each example is a document.
      tokenizer: a tokenizer with an end-of-text token.

    Raises:
      ConfigError: the tokenizer has no end token, or the cache cannot be written.
    """
    if tokenizer.eos is None:
        raise ConfigError("data.packing: got concat and a tokenizer without end token, expected </s>; use packing none")
    # Two bytes per token if they suffice: a billion tokens are 2 GB instead of 4.
    dtype = np.dtype("<u2") if tokenizer.size <= 2**16 else np.dtype("<i4")
    name = hashlib.sha256(f"2 {key} {tokenizer.fingerprint}".encode()).hexdigest()[:24]
    path = directory / f"{name}.tokens"
    reason = _file_problem(path)
    if reason is not None:
        if reason:
            logger.warning("tokens %s are damaged (%s): made again", path, reason)
        try:
            _write(path, examples, tokenizer, tokenizer.eos, dtype)
        except OSError as error:
            what = f"{path}: {error.strerror or error}, expected to write the tokens of the text there"
            raise ConfigError(f"{what}; set --config.data.cache or $JAXFORMER_CACHE to a writable folder") from error
    return _open(_File(str(path), dtype, (path.stat().st_size - DIGEST_BYTES) // dtype.itemsize))


class _File(NamedTuple):
    path: str
    dtype: np.dtype
    length: int


def _open(file: _File) -> np.ndarray:
    return np.memmap(file.path, file.dtype, mode="r", shape=(file.length,))


def _file_problem(path: Path) -> str | None:
    """Reason why the token file cannot be used: None if it can, "" if there is no file. Reads every byte."""
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
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


def _write(path: Path, examples: Examples, tokenizer: Tokenizer, eos: int, dtype: np.dtype) -> None:
    """Writes the tokens and their checksum to a temporary file and renames it, so that readers never see a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:

        def add(tokens: Sequence[int]) -> None:
            content = np.array(tokens, dtype).tobytes()
            digest.update(content)
            file.write(content)

        try:
            add([eos if tokenizer.bos is None else tokenizer.bos])
            for example in _iterate(examples):
                add([*tokenizer.encode(example["text"]), eos])
            file.write(digest.digest())
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def _iterate(examples: Examples) -> Iterator[Example]:
    """All examples in order, read in chunks."""
    for begin in range(0, len(examples), CHUNK_EXAMPLES):
        yield from examples_at(examples, range(begin, min(begin + CHUNK_EXAMPLES, len(examples))))
