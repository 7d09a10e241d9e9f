"""`jaxformer data build`: a corpus to token shards, once, by any number of processes, before anything trains on it.

    plan        pieces of the input, grouped into units, each of which becomes a shard (`pieces`)
    vocabulary  learned from a sample, or loaded; one for all components of a mixture
    duplicates  keys of all documents by the workers, then which documents survive (`deduplication`)
    shards      each read, cleaned, tokenized and written by one worker (`units`), of this machine (`workers`) or of an
                Apache Beam pipeline (`beam`)
    index       counts and checksums of all shards, written last

A build that was stopped goes on with the same command: finished shards are checked and kept. The files have the same
bytes whatever the number of workers. `jaxformer.data.token_shards` says how the shards are read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import Config, components
from jaxformer.data import token_shards, vocabularies
from jaxformer.data.build import beam as pipelines
from jaxformer.data.build import deduplication, pieces, units, workers
from jaxformer.data.build.options import Options
from jaxformer.data.build.units import WORK, Unit
from jaxformer.data.sources import shards as shards_source
from jaxformer.data.token_shards import COUNTS, INDEX
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files, object_store

LOG = logging.getLogger("jaxformer")
LOG_SECONDS = 10.0
PLAN = "plan.json"

__all__ = ["Options", "build"]


@dataclasses.dataclass(frozen=True)
class Component:
    """One data set of a build: the only one, named "", or a component of a mixture.

    Attributes:
      directory: of its shards.
      settings: how its text is read and tokenized, for the index.
      units: by split, in order.
    """

    directory: Path
    settings: dict[str, Any]
    units: Mapping[str, Sequence[Unit]]


def build(
    config: Config,
    target: str | Path,
    workers: int = 1,
    options: Options = Options(),  # noqa: B008
    beam: str = "",
) -> dict[str, Any]:
    """Builds token shards of the data of `config` in the folder `target`, or completes them.

    A mixture becomes a folder of shards for each component, with one tokenizer.

    Args:
      workers: processes; each uses one core.
      beam: options of Apache Beam, as "--runner=DirectRunner", whose pipeline makes the shards; "": processes do.

    Returns:
      The index, as written to `target/index.json`.

    Raises:
      ConfigError: the input is missing or damaged, a value is out of range, `target` holds other data or the shards of
        other input or settings, or another build writes there.
      StorageError: a shard could not be written. Finished ones are kept.
    """
    options.check()
    directory = directories.expand_user(str(target), "--target")
    if beam:
        _check_beam(config, beam, workers)
        # Workers may run in another folder, and open sources without pieces of their own themselves.
        paths = {name: _absolute(getattr(config.data, name)) for name in ("dir", "cache")}
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **paths))
    run = Runner(workers, beam)
    found, plan = _plan(config, directory, options)
    work = directory / WORK
    is_known = _check_target(directory, plan)
    work.mkdir(parents=True, exist_ok=True)
    with _lock(work):
        # Partial files are of a killed process. Where the plan was lost, arrays may be of another one.
        useless = ("*.partial",) if is_known else ("*.partial", "*.npy")
        for part, pattern in itertools.product(found.values(), useless):
            for leftover in part.directory.glob(f"{WORK}/{pattern}"):
                leftover.unlink(missing_ok=True)
        files.write_json(work / PLAN, {"plan": plan})
        tokenizer, sample = _tokenizer(config, directory, found, options)
        for part in found.values():
            if part.directory != directory:
                part.directory.mkdir(exist_ok=True)
                _save_tokenizer(tokenizer, part.directory)
        if options.deduplicate != "none":
            for part in found.values():
                _deduplicate(part.units.get("train", ()), options, run)
        return _make_shards(directory, found, tokenizer, sample, options, run)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Does the work on units, by processes of this machine or a Beam pipeline.

    Attributes:
      workers: processes.
      beam: options of Apache Beam; "": processes.
    """

    workers: int
    beam: str

    def keys(self, train: Sequence[Unit]) -> None:
        """Writes the keys of the documents of units."""
        calls = [(unit,) for unit in train]
        if self.beam:
            list(pipelines.run(units.write_keys, calls, self.beam, lambda unit: unit.keys))
        else:
            list(workers.run(units.write_keys, calls, self.workers))

    def shards(self, todo: Sequence[Unit], fingerprint: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, manifest) of each unit, in the order in which they finish."""
        calls = [(unit, fingerprint) for unit in todo]
        if not self.beam:
            yield from workers.run(units.make, calls, self.workers)
            return
        for unit in todo:  # one of a damaged shard would stand for what the pipeline makes elsewhere
            unit.manifest.unlink(missing_ok=True)
        for index in pipelines.run(units.make, calls, self.beam, lambda unit: unit.manifest):
            yield index, files.read_json(todo[index].manifest)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _check_beam(config: Config, beam: str, workers: int) -> None:
    if workers != 1:
        raise ConfigError(
            f"--workers: got {workers} beside --beam, expected one of them; the engine's own options say how many, as "
            "--direct_num_workers"
        )
    if object_store.is_url(config.data.dir):
        got = f"data.dir: got {config.data.dir!r} beside --beam"
        raise ConfigError(f"{got}, expected a folder that all machines share; copy it there")
    pipelines.check(beam)


# --- plan -------------------------------------------------------------------------------------------------------------


def _plan(config: Config, directory: Path, options: Options) -> tuple[dict[str, Component], str]:
    """The components with their units, and the hash of all that decides their content."""
    views = components.views(config)
    sources = {name: pieces.inputs(view.data) for name, view in views.items()}
    settings = {name: shards_source.read_settings(view.data) for name, view in views.items()}
    for name, each in sources.items():
        where = f"data.mixture.components.{name}" if name else "data.splits"
        if "train" not in each:
            raise ConfigError(
                f"{where}: got {', '.join(each)}, expected files for at least 'train'; say which part trains"
            )
        if options.held_out and "validation" in each:
            raise ConfigError(
                f"--held-out: got {options.held_out:g} beside a split 'validation' ({where}), expected one of them"
            )
    path = config.data.tokenizer.path
    content = {
        "format": token_shards.FORMAT,
        "settings": settings,
        "options": options.identity(),
        "tokenizer": _hash_file(path) if config.data.tokenizer.kind == "file" else "",
        "input": {n: {s: pieces.identity(source) for s, source in each.items()} for n, each in sources.items()},
    }
    plan = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    size = None if options.shard_mb is None else options.shard_mb << 20
    found = {}
    for name, each in sources.items():
        folder = directory / name
        found[name] = Component(
            folder,
            settings[name],
            {
                split: [
                    Unit(folder, source, number, tuple(part), options, plan)
                    for number, part in enumerate(pieces.shards(source, size))
                ]
                for split, source in each.items()
            },
        )
    return found, plan


def _hash_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""  # `Tokenizer.load` says what is wrong


def _check_target(directory: Path, plan: str) -> bool:
    """True if what is in the target is of this build; False if its plan cannot be read: then every shard says itself.

    Raises:
      ConfigError: the target is no folder for this build.
    """
    files.check_directory("--target", str(directory), new=True)
    if not directory.is_dir() or not any(directory.iterdir()):
        return True
    built = None
    try:
        with contextlib.suppress(ConfigError):
            built = files.read_json(directory / WORK / PLAN).get("plan")
    except FileNotFoundError:
        if {path.name for path in directory.iterdir()} == {WORK}:  # killed before the plan was written
            return True
        raise ConfigError(
            f"--target: got {str(directory)!r}, which holds other files, expected a new or empty folder"
        ) from None
    if built is None:
        LOG.warning("%s is damaged: made again, and what is without a checksum, too", directory / WORK / PLAN)
        return False
    if built != plan:
        raise ConfigError(
            f"--target: got {str(directory)!r}, which holds shards of other input, settings or options, expected the "
            "same or a new folder; name another, or remove it"
        )
    return True


@contextlib.contextmanager
def _lock(work: Path) -> Generator[None, None, None]:
    """Holds the target. The operating system releases it if the process dies."""
    with open(work / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--target: got {str(work.parent)!r}, where another process builds, expected one at a time; wait for it"
            ) from None
        yield


# --- vocabulary -------------------------------------------------------------------------------------------------------


def _tokenizer(
    config: Config, directory: Path, found: Mapping[str, Component], options: Options
) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer of all shards, and the size of the sample that it was learned from.

    An earlier start of the same build may have saved it; a damaged one is made again. The sample is the first documents
    of every training shard.
    """
    settings = config.data.tokenizer
    path, sizes = directory / Tokenizers.FILE, directory / WORK / "sample.json"
    sample = {"documents": 0, "bytes": 0}
    with contextlib.suppress(ConfigError, FileNotFoundError):
        saved = files.read_json(sizes)
        if saved.keys() == sample.keys() and path.exists():
            return Tokenizers.load(directory).target, saved
    if settings.kind == "file":
        tokenizer = Tokenizer.load(settings.path, settings.multiple)
    else:
        texts: list[str] = []
        if settings.kind != "byte":
            trained = [unit for name in components.trained(config) for unit in found[name].units["train"]]
            texts = _sample(trained, options.sample_mb << 20)
            sample = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
            LOG.info("learning a vocabulary from %s documents, %s bytes", *(f"{n:,}" for n in sample.values()))
        tokenizer = Tokenizer(vocabularies.learn(settings, texts), settings.multiple)
    _save_tokenizer(tokenizer, directory)
    files.write_json(sizes, sample)
    return tokenizer, sample


def _sample(trained: Sequence[Unit], size: int) -> list[str]:
    """The first documents of each unit, about as many bytes of each, `size` in all or less."""
    texts: list[str] = []
    for number, unit in enumerate(trained):
        left = size // (len(trained) - number)
        for index, text in enumerate(unit.texts({})):
            raw = text.encode()
            if len(raw) > left:
                if not index:  # a document of more than the unit's share: its beginning
                    texts.append(raw[:left].decode(errors="ignore"))
                break
            texts.append(text)
            left, size = left - len(raw), size - len(raw)
    return texts


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    Tokenizers(tokenizer, tokenizer).save(directory)


# --- duplicates, shards, index ----------------------------------------------------------------------------------------


def _deduplicate(train: Sequence[Unit], options: Options, run: Runner) -> None:
    """Writes which documents of each unit survive, unless it is known."""
    if all(units.is_whole_array(unit.survivors) for unit in train):
        return
    run.keys(train)
    keys = [unit.keys for unit in train]
    if options.deduplicate == "exact":
        survivors = deduplication.exact_survivors(keys)
    else:
        survivors = deduplication.near_survivors(keys, options.similarity)
    for unit, survives in zip(train, survivors, strict=True):
        units.save_array(unit.survivors, survives)
    for path in keys:
        path.unlink()
    total = sum(map(len, survivors))
    LOG.info("%s of %s documents are duplicates", f"{total - sum(map(np.sum, survivors)):,}", f"{total:,}")


def _make_shards(
    directory: Path,
    found: Mapping[str, Component],
    tokenizer: Tokenizer,
    sample: dict[str, int],
    options: Options,
    run: Runner,
) -> dict[str, Any]:
    """Makes the shards of all components, then the index of each, and returns that of the target."""
    every = [unit for part in found.values() for each in part.units.values() for unit in each]
    with concurrent.futures.ThreadPoolExecutor(run.workers) as pool:  # hashing leaves Python's lock
        finished = list(pool.map(lambda unit: units.finished_manifest(unit, tokenizer.fingerprint), every))
    manifests = {unit.manifest: found for unit, found in zip(every, finished, strict=True) if found is not None}
    if manifests:
        LOG.info("%d of %d shards are finished", len(manifests), len(every))
    todo = [unit for unit in every if unit.manifest not in manifests]
    start = logged = time.monotonic()
    for index, manifest in run.shards(todo, tokenizer.fingerprint):
        manifests[todo[index].manifest] = manifest
        if time.monotonic() - logged > LOG_SECONDS or len(manifests) == len(every):
            logged = time.monotonic()
            tokens = sum(shard["tokens"] for each in manifests.values() for shard in each["shards"].values() if shard)
            LOG.info("%d of %d shards, %s tokens, %.0f s", len(manifests), len(every), f"{tokens:,}", logged - start)
    indices = {name: _index(part, manifests, tokenizer, sample, options) for name, part in found.items()}
    for name, part in found.items():
        if not indices[name]["splits"].get("train", {}).get("documents"):
            raise ConfigError(
                f"{part.directory}: got no training document after cleaning, expected some; mend the filters"
            )
    if "" in indices:
        files.write_json(directory / INDEX, indices[""])
        return indices[""]
    for name, part in found.items():
        files.write_json(part.directory / INDEX, indices[name])
    whole = _mixture_index(indices, tokenizer, sample, options)
    files.write_json(directory / INDEX, whole)
    return whole


def _head(tokenizer: Tokenizer, sample: dict[str, int], options: Options) -> dict[str, Any]:
    return {
        "format": token_shards.FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "separator": tokenizer.eos,
        "dtype": token_shards.token_dtype(tokenizer.size).str,
        "vocabulary_sample": sample,
        "options": options.identity(),
    }


def _index(
    part: Component,
    manifests: Mapping[Path, dict[str, Any]],
    tokenizer: Tokenizer,
    sample: dict[str, int],
    options: Options,
) -> dict[str, Any]:
    """The index of one data set: its shards by split, and the sums of their counts."""
    splits: dict[str, Any] = {}
    dropped: dict[str, dict[str, int]] = {}
    for split, each in part.units.items():
        made = [manifests[unit.manifest] for unit in each]
        reasons = sorted({reason for manifest in made for reason in manifest["dropped"]})
        dropped[split] = {reason: sum(manifest["dropped"].get(reason, 0) for manifest in made) for reason in reasons}
        for name in dict.fromkeys(name for manifest in made for name in manifest["shards"]):
            shards = [manifest["shards"][name] for manifest in made if manifest["shards"][name] is not None]
            if shards:
                splits[name] = {count: sum(shard[count] for shard in shards) for count in COUNTS} | {"shards": shards}
    head = _head(tokenizer, sample, options)
    return {**head, "settings": part.settings, "components": {}, "dropped": dropped, "splits": splits}


def _mixture_index(
    indices: Mapping[str, dict[str, Any]], tokenizer: Tokenizer, sample: dict[str, int], options: Options
) -> dict[str, Any]:
    """The index of a mixture: the counts of each component by split, and their sums."""
    counted = {
        name: {split: {count: each[count] for count in COUNTS} for split, each in index["splits"].items()}
        for name, index in indices.items()
    }
    totals = {
        split: {count: sum(each.get(split, {}).get(count, 0) for each in counted.values()) for count in COUNTS}
        for split in dict.fromkeys(split for each in counted.values() for split in each)
    }
    return {**_head(tokenizer, sample, options), "components": counted, "splits": totals}
