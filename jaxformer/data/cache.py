"""Cache of local data, parsed once: files -> tfds array_record, keyed by content.

A cache entry is a directory `<cache>/sources/<name>-<key>` that a tfds builder wrote. Its key hashes the bytes of the
files and every setting that decides how they are read. So changed data or settings make another entry, and entries
never go stale. An entry is written to a temporary directory and renamed, so it is never partial. A file lock makes a
second process wait for the first and use its entry. `entry.json` lists the files with checksums; a damaged entry, or
one without that list, is logged and rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.sources import Example, Examples
from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

ParsedRows = Iterable[Mapping[str, Any]]
ParseFiles = Callable[[], tuple[Mapping[str, Any], Mapping[str, ParsedRows]]]
"""Reads the files: returns (tfds features by role, rows by split). Called only if the entry does not exist."""

MANIFEST = "entry.json"
"""File of an entry with the sizes and checksums of its files, the warnings logged while it was written, and a summary:
number of examples by split, roles and names of classes. Entries of earlier versions have no summary."""

EXAMPLES = "examples-{}.json"
"""File of an entry with the examples of a split, where the entry is small: importing tfds to read it takes longer."""

NO_MANIFEST = "an earlier version wrote it, without checksums"
"""Result of `entry_problem` for an entry without a manifest."""

MAX_IN_MEMORY_BYTES = 32 << 20
"""Data sets up to this size stay in memory once read: a million examples/s instead of 20,000."""

logger = logging.getLogger(__name__)


def cache_directory(config: DataConfig) -> Path:
    """Directory of derived data: `config.cache`, $JAXFORMER_CACHE or ~/.cache/jaxformer."""
    return directories.expand_user(config.cache, "data.cache") if config.cache else directories.cache()


def content_key(paths: Iterable[Path], *settings: object) -> str:
    """Hash of the bytes of the files, in order, and of `settings`. Reads every byte: about a second per gigabyte."""
    key = hashlib.sha256(repr(settings).encode())
    for path in paths:
        with open(path, "rb") as file:
            key.update(hashlib.file_digest(file, "sha256").digest())
    return key.hexdigest()[:16]


def ensure_entry(config: DataConfig, name: str, key: str, parse: ParseFiles) -> Path:
    """Directory of the entry `name`-`key`; written from `parse()` if it does not exist.

    Raises:
      ConfigError: the data is malformed (from `parse`; nothing is left behind), or the cache cannot be written.
    """
    directory = cache_directory(config) / "sources" / f"{name}-{key}"
    try:
        if entry_problem(directory) == "":
            _repeat_warnings(directory)
            return directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(directory.with_name(f"{directory.name}.lock")):
            reason = entry_problem(directory)  # another process may have built it in the meantime
            if reason != "":
                for leftover in directory.parent.glob(f"{directory.name}.partial-*"):  # of a killed process
                    shutil.rmtree(leftover, ignore_errors=True)
                if reason == NO_MANIFEST:
                    logger.warning("prepared data %s is made again: %s", directory, NO_MANIFEST)
                elif reason is not None:
                    logger.warning("prepared data %s is damaged (%s): made again", directory, reason)
                _write(directory, parse)
    except OSError as error:
        what = f"{directory}: {error.strerror or error}, expected to write prepared data there"
        raise ConfigError(f"{what}; set --config.data.cache or $JAXFORMER_CACHE to a writable folder") from error
    _repeat_warnings(directory)
    return directory


def entry_problem(directory: Path) -> str | None:
    """Damage of an entry: "" if there is none, None if there is no entry. Reads every byte, as `content_key` does."""
    if not directory.is_dir():
        return None if not directory.exists() else "it is a file"
    try:
        manifest = files.read_json(directory / MANIFEST)
        listed, _ = manifest["files"], manifest["warnings"]
        for name, expected in listed.items():
            with open(directory / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["bytes"]:
                    return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return NO_MANIFEST if name == MANIFEST else f"no {name}"
    except OSError as error:
        return f"{Path(error.filename or directory).name}: {error.strerror}"
    except (ConfigError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is no list of files"
    return ""


def _write_manifest(folder: Path, warnings: list[str], summary: Mapping[str, Any]) -> None:
    """Writes the sizes and checksums of all files of an entry, its warnings and its summary (see `MANIFEST`)."""
    listed = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listed[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    files.write_json(folder / MANIFEST, {"files": listed, "warnings": warnings, "summary": summary})


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Generator[None, None, None]:
    """Holds an exclusive lock on `path`. The operating system releases it if the process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(directory: Path, parse: ParseFiles) -> None:
    """Runs a tfds builder over the parsed rows in a temporary directory, then renames it to `directory`."""
    import tensorflow_datasets as tfds

    partial = Path(tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=directory.parent))
    try:
        with _collect_warnings() as warned:
            features, splits = parse()
            tfds.disable_progress_bar()
            builder = _builder_class()(features, splits, data_dir=str(partial), file_format="array_record")
            with contextlib.redirect_stdout(io.StringIO()):  # tfds prints banners; our stdout may be a pipe of results
                builder.download_and_prepare()
        info, folder = builder.info, Path(builder.data_path)
        summary = {
            "splits": {name: split.num_examples for name, split in info.splits.items()},
            "roles": sorted(info.features),
            "classes": class_names(info.features),
        }
        if info.dataset_size <= MAX_IN_MEMORY_BYTES:
            for name, split in _splits(folder, summary).items():
                files.write_json(folder / EXAMPLES.format(name), list(split[i] for i in range(len(split))), indent=None)
        _write_manifest(folder, warned, summary)
        if directory.exists():  # damaged; processes that read it keep their open files
            os.replace(directory, partial / "damaged")
        os.replace(builder.data_path, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    counts = ", ".join(f"{name} {split.num_examples:,}" for name, split in builder.info.splits.items())
    logger.info("prepared %s: %s", directory, counts)


@contextlib.contextmanager
def _collect_warnings() -> Generator[list[str], None, None]:
    """Collects the warnings that modules of `data` log inside the context, such as dropped examples.

    They are not shown: `_repeat_warnings` shows them.
    """
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


def read_entry(directory: Path) -> tuple[dict[str, PreparedSplit], tuple[str, ...] | None]:
    """The splits of an entry of local files, and the names of its classes."""
    summary = files.read_json(directory / MANIFEST).get("summary")
    if summary is None:  # of an earlier version
        import tensorflow_datasets as tfds

        info = tfds.builder_from_directory(directory).info
        counts = {name: split.num_examples for name, split in info.splits.items()}
        summary = {"splits": counts, "roles": sorted(info.features), "classes": class_names(info.features)}
    return _splits(directory, summary), None if summary["classes"] is None else tuple(summary["classes"])


def _splits(directory: Path, summary: Mapping[str, Any]) -> dict[str, PreparedSplit]:
    columns = {role: role for role in summary["roles"]}
    return {name: PreparedSplit(str(directory), name, columns, count) for name, count in summary["splits"].items()}


def _repeat_warnings(directory: Path) -> None:
    """Logs the warnings of an entry's writing again, so that every user of the entry sees them."""
    for text in files.read_json(directory / MANIFEST)["warnings"]:
        logger.warning("%s", text)


@functools.cache
def _builder_class() -> type[tfds.core.GeneratorBasedBuilder]:
    """The tfds builder class of local files. Defined at first use, so that this module does not import tfds."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # not to be found by name

        class LocalFiles(tfds.core.GeneratorBasedBuilder):
            """Rows by split, in the order of the input."""

            VERSION = tfds.core.Version("1.0.0")

            def __init__(self, features: Mapping[str, Any], splits: Mapping[str, ParsedRows], **kwargs: Any):
                self._features, self._splits = features, splits
                super().__init__(**kwargs)

            def _info(self) -> tfds.core.DatasetInfo:
                features = tfds.features.FeaturesDict(dict(self._features))
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                return {split: self._generate_examples(split, rows) for split, rows in self._splits.items()}

            def _generate_examples(self, split: str, rows: ParsedRows) -> Iterator[tuple[int, Mapping[str, Any]]]:
                index = -1
                for index, row in enumerate(rows):
                    yield index, row
                if index < 0:
                    raise ConfigError(f"data.splits.{split}: got files without a usable example, expected one at least")

    return LocalFiles


@dataclass
class PreparedSplit:
    """One split of a prepared tfds data set, as examples by role.

    Texts are str, labels int, tags, answers and messages tuples, scores floats from 0 to 1. Pickling stores only the
    attributes: loader processes open the files themselves.

    Attributes:
      directory: directory that tfds wrote.
      split: a tfds split expression: "train", "train[:90%]".
      columns: role -> feature; "a/b" is feature b of feature a.
      length: number of examples.
      score_range: stored scores that become 0 and 1.
    """

    directory: str
    split: str
    columns: Mapping[str, str]
    length: int
    score_range: tuple[float, ...] = (0.0, 1.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        if self._in_memory is not None:
            return self._in_memory[index]
        return self._roles(self._source[index])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Example]:
        """Several examples in one call: twice as fast as one by one when they come from disk."""
        if self._in_memory is not None:
            return [self._in_memory[index] for index in indices]
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
    def _in_memory(self) -> list[Example] | None:
        kept = Path(self.directory) / EXAMPLES.format(self.split)
        if kept.exists():
            return [{role: _from_json(value) for role, value in row.items()} for row in files.read_json(kept, list)]
        if self._builder.info.dataset_size > MAX_IN_MEMORY_BYTES:
            return None
        return [self._roles(row) for row in self._source.__getitems__(list(range(self.length)))]

    def _roles(self, row: Mapping[str, Any]) -> Example:
        values = {role: _feature_at(row, column) for role, column in self.columns.items()}
        score, messages = values.pop("score", None), values.pop("messages", None)
        plain = {role: _to_python(value, role != "answers") for role, value in values.items()}
        if messages is not None:  # stored as JSON
            plain["messages"] = tuple(json.loads(messages))
        return plain if score is None else {**plain, "score": scale_score(score, self.score_range, self.directory)}


def _from_json(value: Any) -> Any:
    """A value of an example, in which JSON has lists for tuples."""
    return tuple(value) if isinstance(value, list) else value


def scale_score(score: float, score_range: Sequence[float], where: str) -> float:
    """A score scaled from `score_range` to the range from 0 to 1.

    Raises:
      ConfigError: the score is outside of `score_range`.
    """
    low, high = score_range
    if not low <= score <= high:
        expected = f"expected a number from {low:g} to {high:g}; mend the data or set data.score_range"
        raise ConfigError(f"{where}: got score {score:g}, {expected}")
    return float((score - low) / (high - low))


def _feature_at(row: Mapping[str, Any], column: str) -> Any:
    for name in column.split("/"):
        row = row[name]
    return row


def _to_python(value: Any, join: bool = True) -> Any:
    """A str, int or tuple from a tfds value. With `join`, a sequence of words becomes a text with blanks between."""
    if isinstance(value, (list, np.ndarray)):
        parts = [_to_python(part) for part in value]
        return " ".join(parts) if join and parts and isinstance(parts[0], str) else tuple(parts)
    return value.decode("utf-8") if isinstance(value, bytes) else int(value)


def class_names(features: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Class names of the feature "label", or of the sequence "tags" or "labels"; None if there is none of them."""
    for role in ("tags", "labels"):
        if role in features:
            return tuple(features[role].feature.names)
    return tuple(features["label"].names) if "label" in features else None


def text_size(examples: Examples, roles: Sequence[str] = ("text",), document: str = "line") -> dict[str, int]:
    """Counts examples, line ends, bytes and words of a split, for measures per byte and per word.

    Args:
      examples: the split.
      roles: the texts to count.
      document: "line" (each text is a line without its newline, which is counted as one byte and one line end) or
        "file" (texts contain their newlines).

    Returns:
      "examples"; "lines": line ends; "bytes": of UTF-8 with line ends; "words": runs without white space. WikiText's
      convention, one end token per line, counts words + lines.
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
