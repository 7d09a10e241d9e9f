"""Local data parsed once: files -> tfds array_record, in a cache keyed by content.

A cache entry is a folder `<cache>/sources/<name>-<key>` that a tfds builder wrote. Its key is a hash of the files'
bytes and of everything that decides how they are read, so changed data or a changed setting is another entry and an
entry never goes stale. It appears whole or not at all (written beside its place, then renamed), and a file lock makes
the second of two processes that start at once wait for the first and use its work. `entry.json` lists its files with
their checksums: an entry that is not what was written, or is of a version without the list, is named and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer import files, places
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.sources import Example

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Rows = Iterable[Mapping[str, Any]]
Parse = Callable[[], tuple[Mapping[str, Any], Mapping[str, Rows]]]
"""Reads the files: (tfds features by role, rows by split). Called only when the entry does not exist."""

MANIFEST = "entry.json"
"""Of an entry: the sizes and checksums of its files, and what its sources warned of when it was written."""

EARLIER = "an earlier version wrote it, without checksums"
"""What `problem` says of an entry without a manifest."""

KEPT = 32 << 20  # bytes; a data set up to this size stays in memory once read: 20,000 examples/s become a million

logger = logging.getLogger(__name__)


def root(config: DataConfig) -> Path:
    """Where derived data goes: `config.cache`, $JAXFORMER_CACHE or ~/.cache/jaxformer."""
    return places.expanded(config.cache, "data.cache") if config.cache else places.cache()


def content_key(paths: Iterable[Path], *settings: object) -> str:
    """A hash of the bytes of the files, in order, and of `settings`. Reads every byte: about a second a gigabyte."""
    key = hashlib.sha256(repr(settings).encode())
    for path in paths:
        with open(path, "rb") as file:
            key.update(hashlib.file_digest(file, "sha256").digest())
    return key.hexdigest()[:16]


def entry(config: DataConfig, name: str, key: str, parse: Parse) -> Path:
    """The folder of the entry `name`-`key`, written from `parse()` when nobody has written it yet.

    Raises:
      ConfigError: the data is malformed (from `parse`; nothing stays behind), or the cache cannot be written.
    """
    place = root(config) / "sources" / f"{name}-{key}"
    try:
        if problem(place) == "":
            _warn_again(place)
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f"{place.name}.lock")):
            reason = problem(place)  # another process may have built it while this one waited
            if reason != "":
                for leftover in place.parent.glob(f"{place.name}.partial-*"):  # its writer was killed: we hold the lock
                    shutil.rmtree(leftover, ignore_errors=True)
                if reason == EARLIER:
                    logger.warning("prepared data %s is made again: %s", place, EARLIER)
                elif reason is not None:
                    logger.warning("prepared data %s is damaged (%s): made again", place, reason)
                _write(place, parse)
    except OSError as error:
        what = f"{place}: {error.strerror or error}, expected to write prepared data there"
        raise ConfigError(f"{what}; set --config.data.cache or $JAXFORMER_CACHE to a writable folder") from error
    _warn_again(place)
    return place


def problem(place: Path) -> str | None:
    """What is wrong with an entry: "" nothing, None there is no entry. Reads every byte, as `content_key` does."""
    if not place.is_dir():
        return None if not place.exists() else "it is a file"
    try:
        manifest = files.read_json(place / MANIFEST)
        listed, _ = manifest["files"], manifest["warnings"]
        for name, each in listed.items():
            with open(place / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != each["bytes"]:
                    return f"{name} has {size:,} bytes, not {each['bytes']:,}"
                if hashlib.file_digest(file, "sha256").hexdigest() != each["sha256"]:
                    return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return EARLIER if name == MANIFEST else f"no {name}"
    except OSError as error:
        return f"{Path(error.filename or place).name}: {error.strerror}"
    except (ConfigError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is no list of files"
    return ""


def _write_manifest(folder: Path, warnings: list[str]) -> None:
    """Writes the sizes and checksums of a whole entry, and what its sources warned of."""
    listed = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listed[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    files.write_json(folder / MANIFEST, {"files": listed, "warnings": warnings})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the system drops it when the process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(place: Path, parse: Parse) -> None:
    """Runs a tfds builder over the parsed rows beside `place` and renames the result to it."""
    import tensorflow_datasets as tfds

    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}.partial-", dir=place.parent))
    try:
        with _warnings() as warned:
            features, splits = parse()
            tfds.disable_progress_bar()
            builder = _builder_class()(features, splits, data_dir=str(partial), file_format="array_record")
            with contextlib.redirect_stdout(io.StringIO()):  # tfds prints banners; our stdout may be a pipe of results
                builder.download_and_prepare()
        _write_manifest(Path(builder.data_path), warned)
        if place.exists():  # damaged; who reads it has its files open, and they stay until they are closed
            os.replace(place, partial / "damaged")
        os.replace(builder.data_path, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    counts = ", ".join(f"{name} {split.num_examples:,}" for name, split in builder.info.splits.items())
    logger.info("prepared %s: %s", place, counts)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The texts of what the modules of `data` warn of meanwhile, as of examples that a source leaves out. They go
    nowhere else: `_warn_again` says them."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    package = logging.getLogger(__package__)
    package.addHandler(handler)
    package.propagate = False
    try:
        yield texts
    finally:
        package.propagate = True
        package.removeHandler(handler)


def _warn_again(place: Path) -> None:
    """Warns of what was left out when the entry was written: whoever uses it has to know, not only its writer."""
    for text in files.read_json(place / MANIFEST)["warnings"]:
        logger.warning("%s", text)


@functools.cache
def _builder_class() -> type[tfds.core.GeneratorBasedBuilder]:
    """The builder of local files. Made at first use, so that importing the library does not import tfds."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # it has no name under which tfds could find it

        class LocalFiles(tfds.core.GeneratorBasedBuilder):
            """Rows by split, kept in the order in which they are given."""

            VERSION = tfds.core.Version("1.0.0")

            def __init__(self, features: Mapping[str, Any], splits: Mapping[str, Rows], **kwargs: Any):
                self._features, self._splits = features, splits
                super().__init__(**kwargs)

            def _info(self) -> tfds.core.DatasetInfo:
                features = tfds.features.FeaturesDict(dict(self._features))
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                return {split: self._generate_examples(split, rows) for split, rows in self._splits.items()}

            def _generate_examples(self, split: str, rows: Rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
                index = -1
                for index, row in enumerate(rows):
                    yield index, row
                if index < 0:
                    raise ConfigError(f"data.splits.{split}: got files without a usable example, expected one at least")

    return LocalFiles


@dataclass
class Records:
    """One split of a prepared tfds data set, as roles: str for text, int for labels, a tuple for tags and answers,
    a score as a float from 0 to 1.

    Small to pickle: loader processes get the folder's name and open it themselves.

    Attributes:
      directory: the data set's folder, as tfds wrote it.
      split: a tfds split expression: "train", "train[:90%]".
      columns: role -> feature; "a/b" is feature b of feature a.
      length: examples in the split.
      score_range: the stored scores that become 0 and 1.
    """

    directory: str
    split: str
    columns: Mapping[str, str]
    length: int
    score_range: tuple[float, ...] = (0.0, 1.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        if self._kept is not None:
            return self._kept[index]
        return self._roles(self._source[index])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Example]:
        """Several examples at once: twice as fast as one by one when they come from disk."""
        if self._kept is not None:
            return [self._kept[index] for index in indices]
        return [self._roles(row) for row in self._source.__getitems__(list(indices))]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @functools.cached_property
    def _builder(self) -> tfds.core.DatasetBuilder:
        import tensorflow_datasets as tfds

        return tfds.builder_from_directory(self.directory)

    @functools.cached_property
    def _source(self) -> Any:
        return self._builder.as_data_source(self.split)

    @functools.cached_property
    def _kept(self) -> list[Example] | None:
        if self._builder.info.dataset_size > KEPT:
            return None
        return [self._roles(row) for row in self._source.__getitems__(list(range(self.length)))]

    def _roles(self, row: Mapping[str, Any]) -> Example:
        values = {role: _field(row, column) for role, column in self.columns.items()}
        score = values.pop("score", None)
        plain = {role: _plain(value, role != "answers") for role, value in values.items()}
        return plain if score is None else {**plain, "score": scaled(score, self.score_range, self.directory)}


def scaled(score: float, score_range: Sequence[float], where: str) -> float:
    """A score between 0 and 1.

    Raises:
      ConfigError: it is outside of the range.
    """
    low, high = score_range
    if not low <= score <= high:
        expected = f"expected a number from {low:g} to {high:g}; mend the data or set data.score_range"
        raise ConfigError(f"{where}: got score {score:g}, {expected}")
    return float((score - low) / (high - low))


def _field(row: Mapping[str, Any], column: str) -> Any:
    for name in column.split("/"):
        row = row[name]
    return row


def _plain(value: Any, joined: bool = True) -> str | int | tuple[str, ...] | tuple[int, ...]:
    """`joined`: of words in a sequence the text with blanks between them."""
    if isinstance(value, (list, np.ndarray)):
        parts = [_plain(part) for part in value]
        return " ".join(parts) if joined and parts and isinstance(parts[0], str) else tuple(parts)
    return value.decode("utf-8") if isinstance(value, bytes) else int(value)


def classes(features: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the feature "label", or of those in the sequence "tags"; None: there is neither."""
    if "tags" in features:
        return tuple(features["tags"].feature.names)
    return tuple(features["label"].names) if "label" in features else None


def size(examples: Iterable[Example], roles: Sequence[str] = ("text",), document: str = "line") -> dict[str, int]:
    """What a split holds, for measures per byte and per word.

    Args:
      examples: the split.
      roles: the texts that count.
      document: "line" (a text is a line whose newline was taken off: it counts as one byte and one line end) or "file"
        (a text holds its own newlines).

    Returns:
      examples; lines: line ends; bytes: of UTF-8, line ends included; words: runs without white space. The WikiText
      convention of one end token a line counts words + lines.
    """
    total = {"examples": 0, "lines": 0, "bytes": 0, "words": 0}
    for index in range(len(examples)):
        example = examples[index]
        total["examples"] += 1
        for role in roles:
            text = example[role]
            ends = 1 if document == "line" else 0
            total["lines"] += text.count("\n") + ends
            total["bytes"] += len(text.encode("utf-8")) + ends
            total["words"] += len(text.split())
    return total
