"""Options of a build, and the cleaning of documents."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from jaxformer import registry
from jaxformer.errors import ConfigError

MAX_DIGEST = 2**64


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxformer data build`.

    Attributes:
      filters: "module:function" of functions from a text to True (keep it) or False.
      min_length, max_length: documents of fewer or more characters are dropped; None: no upper limit.
      deduplicate: "exact": of equal texts the first is kept; "minhash": of similar ones, too.
      similarity: minhash: smallest Jaccard similarity, of sets of five consecutive words, of texts that count as
        duplicates.
      held_out: share of the training documents that become the split "validation", chosen by the hash of the text.
      sample_mb: megabytes of training text that a vocabulary is learned from.
      shard_mb: megabytes of input in a shard; None: by the size of the input (`pieces.shard_bytes`).
    """

    filters: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    deduplicate: Literal["none", "exact", "minhash"] = "none"
    similarity: float = 0.8
    held_out: float = 0.0
    sample_mb: int = 100
    shard_mb: int | None = None

    def check(self) -> None:
        """Raises a ConfigError if a value is out of range, or a filter is no function."""
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"--held-out: got {self.held_out:g}, expected a share from 0 to below 1, as 0.01")
        if not 0 < self.similarity <= 1:
            raise ConfigError(f"--similarity: got {self.similarity:g}, expected a number above 0 and up to 1")
        if self.similarity != Options.similarity and self.deduplicate != "minhash":
            raise ConfigError(
                f"--similarity: got {self.similarity:g} with --deduplicate={self.deduplicate}, expected minhash with it"
            )
        if self.max_length is not None and self.max_length < max(self.min_length, 1):
            raise ConfigError(f"--max-length: got {self.max_length}, expected at least --min-length and 1")
        for name in self.filters:
            load_filter(name)

    def identity(self) -> dict[str, Any]:
        """The options as JSON values, with a hash of the code of each filter."""
        return {**dataclasses.asdict(self), "filters": [[name, _code_hash(name)] for name in self.filters]}


def load_filter(name: str) -> Callable[[str], bool]:
    """The function that "module:function" names.

    Modules are searched on `sys.path`, beside the recipe and in the working directory.

    Raises:
      ConfigError: there is none.
    """
    module, _, function = name.partition(":")
    what = f"--filter: got {name!a}"
    if not module or not function:
        raise ConfigError(f"{what}, expected MODULE:FUNCTION, a function from a text to True or False")
    registry.extend_search_path()
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ConfigError(f"{what}, whose module cannot be imported ({error}), expected one on PYTHONPATH") from None
    except AttributeError:
        raise ConfigError(f"{what}, expected a function of that name in {module}; write it there") from None
    if not callable(found):
        raise ConfigError(f"{what}, a {type(found).__name__}, expected a function from a text to True or False")
    return found


def _code_hash(name: str) -> str:
    """Hash of the file that defines a filter: another version of it makes other shards."""
    module = inspect.getmodule(load_filter(name))
    try:
        with open(inspect.getsourcefile(module) or "", "rb") as file:  # ty: ignore[invalid-argument-type]
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


class Cleaner:
    """Decides which documents are kept, and in which split.

    Args:
      options: the options.
      split: the split that the input is of; only documents of "train" are held out.
    """

    def __init__(self, options: Options, split: str):
        self.options, self.split = options, split
        self._filters = [(name, load_filter(name)) for name in options.filters]
        self._limit = int(options.held_out * MAX_DIGEST) if split == "train" else 0

    def reason(self, text: str) -> str:
        """Why a document is dropped: "length", "filter", or "" if it is kept.

        Raises:
          ConfigError: a filter raised, or did not return True or False.
        """
        length, longest = len(text), self.options.max_length
        if length < self.options.min_length or (longest is not None and length > longest):
            return "length"
        for name, function in self._filters:
            try:
                kept = function(text)
            except Exception as error:
                what = f"--filter: got {type(error).__name__} ({error}) from {name} of the text {text[:40]!a}"
                raise ConfigError(f"{what}, expected True or False; mend the function") from None
            if not isinstance(kept, bool):
                got = f"--filter: got {kept!a} from {name} of the text {text[:40]!a}"
                raise ConfigError(f"{got}, expected True (keep it) or False")
            if not kept:
                return "filter"
        return ""

    def output_split(self, text: str) -> str:
        """The split of a document: "validation" for those that are held out."""
        if not self._limit:
            return self.split
        return "validation" if int.from_bytes(digest(text)[:8], "little") < self._limit else self.split


def digest(text: str) -> bytes:
    """Hash of a document, 16 bytes: equal texts are on the same side of a held-out split."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
