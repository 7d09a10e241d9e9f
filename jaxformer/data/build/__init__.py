"""`jaxformer data build`: a corpus to token shards, once, by any number of processes, before anything trains on it.

    plan        pieces of the input, grouped into units, each of which becomes a shard (`pieces`)
    vocabulary  learned from a sample, or loaded; one for all components of a mixture
    duplicates  keys of all documents by the workers, then which documents survive (`deduplication`)
    shards      each read, cleaned, tokenized and written by one worker (`units`), of this machine (`workers`) or of an
                Apache Beam pipeline (`beam`)
    index       counts and checksums of all shards, written last

A build that was stopped goes on with the same command: finished shards are checked and kept. The files have the same
bytes whatever the number of workers. They lie in a folder or in a bucket (`targets`). How the shards are read is in
`jaxformer.data.token_shards`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import Config, components
from jaxformer.data import token_shards, vocabularies
from jaxformer.data.build import beam as pipelines
from jaxformer.data.build import deduplication, pieces, targets, units, workers
from jaxformer.data.build.options import Options
from jaxformer.data.build.targets import PLAN, WORK, Target
from jaxformer.data.build.units import Unit
from jaxformer.data.sources import shards as shards_source
from jaxformer.data.token_shards import COUNTS, INDEX
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runtime import object_store

LOG = logging.getLogger("jaxformer")
LOG_SECONDS = 10.0
SAMPLE = f"{WORK}/sample.json"

__all__ = ["Options", "build"]


@dataclasses.dataclass(frozen=True)
class Component:
    """One data set of a build: the only one, named "", or a component of a mixture.

    Attributes:
      target: of its shards.
      settings: how its text is read and tokenized, for the index.
      units: by split, in order.
    """

    target: Target
    settings: dict[str, Any]
    units: Mapping[str, Sequence[Unit]]


def build(
    config: Config,
    target: str | Path,
    workers: int = 1,
    options: Options = Options(),  # noqa: B008
    beam: str = "",
) -> dict[str, Any]:
    """Builds token shards of the data of `config` in `target`, a folder or an address in a bucket, or completes them.

    A mixture becomes a folder of shards for each component, with one tokenizer.

    Args:
      workers: processes; each uses one core.
      beam: options of Apache Beam, as "--runner=DirectRunner", whose pipeline makes the shards; "": processes do.

    Returns:
      The index, as written to `target/index.json`.

    Raises:
      ConfigError: the input is missing or damaged, a value is out of range, `target` holds other data or the shards of
        other input or settings, or another build writes there.
      StorageError: a shard could not be written, or another build has taken over. Finished ones are kept.
    """
    options.check()
    if beam:
        _check_beam(config, beam, workers)
        # Workers may run in another folder, and open sources without pieces of their own themselves.
        paths = {name: _absolute(getattr(config.data, name)) for name in ("dir", "cache")}
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **paths))
    goal = targets.open_target(str(target), options.shard_mb)
    run = Runner(workers, beam)
    found, plan = _plan(config, goal, options, bool(beam))
    _check_target(goal, plan)
    with goal.locked() as check:
        if not _check_target(goal, plan):  # it may have changed; and arrays may be of another plan
            LOG.warning("%s/%s is damaged: made again, and what is without a checksum, too", goal, PLAN)
            every = [unit for part in found.values() for each in part.units.values() for unit in each]
            targets.for_each(goal, _delete_arrays, every)
        for part in found.values():
            for leftover in part.target.partials.glob("*.partial"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
        targets.write_json(goal, PLAN, {"plan": plan})
        tokenizer, sample = _tokenizer(config, goal, found, options)
        for part in found.values():
            if part.target != goal:
                _save_tokenizer(tokenizer, part.target)
        if options.deduplicate != "none":
            for part in found.values():
                _deduplicate(part.units.get("train", ()), options, run)
        check()
        return _make_shards(goal, found, tokenizer, sample, options, run, check)


def _delete_arrays(unit: Unit) -> None:
    unit.target.delete(unit.keys)
    unit.target.delete(unit.survivors)


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
            pipelines.run(units.write_keys, calls, self.beam)
        else:
            list(workers.run(units.write_keys, calls, self.workers))

    def shards(self, todo: Sequence[Unit], fingerprint: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, manifest) of each unit, in the order in which they finish."""
        calls = [(unit, fingerprint) for unit in todo]
        if not self.beam or not todo:
            yield from workers.run(units.make, calls, self.workers)
            return
        # One of a damaged shard would stand for what the pipeline makes elsewhere.
        targets.for_each(todo[0].target, lambda unit: unit.target.delete(unit.manifest), todo)
        pipelines.run(units.make, calls, self.beam)
        read = targets.for_each(todo[0].target, lambda unit: targets.read_json(unit.target, unit.manifest), todo)
        for index, manifest in enumerate(read):
            if not manifest:
                raise pipelines.not_written(todo[index], todo[index].manifest)
            yield index, manifest


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path and not object_store.is_url(path) else path


def _check_beam(config: Config, beam: str, workers: int) -> None:
    if workers != 1:
        raise ConfigError(
            f"--workers: got {workers} beside --beam, expected one of them; the engine's own options say how many, as "
            "--direct_num_workers"
        )
    pipelines.check(beam)


# --- plan -------------------------------------------------------------------------------------------------------------


def _plan(config: Config, target: Target, options: Options, by_address: bool) -> tuple[dict[str, Component], str]:
    """The components with their units, and the hash of all that decides their content.

    Args:
      by_address: workers fetch the files of a bucket themselves.
    """
    views = components.views(config)
    sources = {name: pieces.inputs(view.data, by_address) for name, view in views.items()}
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
        folder = target.child(name)
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


def _check_target(target: Target, plan: str) -> bool:
    """True if what is in the target is of this build; False if its plan cannot be read: then every shard says itself.

    Raises:
      ConfigError: the target is no folder for this build.
    """
    target.check()
    found = targets.read_json(target, PLAN)
    if found is None:
        if target.holds_others():  # a build that was killed before it wrote the plan has left `WORK` alone
            raise ConfigError(f"--target: got {str(target)!r}, which holds other files, expected a new or empty folder")
        return True
    built = found.get("plan")
    if built is not None and built != plan:
        raise ConfigError(
            f"--target: got {str(target)!r}, which holds shards of other input, settings or options, expected the "
            "same or a new folder; name another, or remove it"
        )
    return built is not None


# --- vocabulary -------------------------------------------------------------------------------------------------------


def _tokenizer(
    config: Config, target: Target, found: Mapping[str, Component], options: Options
) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer of all shards, and the size of the sample that it was learned from.

    An earlier start of the same build may have saved it; a damaged one is made again. The sample is the first documents
    of every training shard.
    """
    settings = config.data.tokenizer
    sample = {"documents": 0, "bytes": 0}
    saved = targets.read_json(target, SAMPLE) or {}
    path = target.copy(Tokenizers.FILE)
    if saved.keys() == sample.keys() and path is not None:
        with contextlib.suppress(ConfigError):
            return Tokenizers.load(path.parent).target, saved
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
    _save_tokenizer(tokenizer, target)
    targets.write_json(target, SAMPLE, sample)
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


def _save_tokenizer(tokenizer: Tokenizer, target: Target) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Tokenizers(tokenizer, tokenizer).save(folder)
        for path in sorted(Path(folder).iterdir()):
            target.write(path.name, path.read_bytes())


# --- duplicates, shards, index ----------------------------------------------------------------------------------------


def _deduplicate(train: Sequence[Unit], options: Options, run: Runner) -> None:
    """Writes which documents of each unit survive, unless it is known."""
    if not train or all(targets.for_each(train[0].target, _has_survivors, train)):
        return
    run.keys(train)
    keys = targets.for_each(train[0].target, _keys_file, train)
    if options.deduplicate == "exact":
        survivors = deduplication.exact_survivors(keys)
    else:
        survivors = deduplication.near_survivors(keys, options.similarity)
    for unit, survives in zip(train, survivors, strict=True):
        units.save_array(unit.target, unit.survivors, survives)
    targets.for_each(train[0].target, lambda unit: unit.target.delete(unit.keys), train)
    total = sum(map(len, survivors))
    LOG.info("%s of %s documents are duplicates", f"{total - sum(map(np.sum, survivors)):,}", f"{total:,}")


def _has_survivors(unit: Unit) -> bool:
    return units.load_array(unit.target, unit.survivors) is not None


def _keys_file(unit: Unit) -> Path:
    """Path on this machine of the keys of a unit."""
    path = unit.target.copy(unit.keys)
    if path is None:
        raise pipelines.not_written(unit, unit.keys)
    return path


def _make_shards(
    target: Target,
    found: Mapping[str, Component],
    tokenizer: Tokenizer,
    sample: dict[str, int],
    options: Options,
    run: Runner,
    check: Callable[[], None],
) -> dict[str, Any]:
    """Makes the shards of all components, then the index of each, and returns that of the target.

    Args:
      check: raises if the target is no longer this build's.
    """
    every = [unit for part in found.values() for each in part.units.values() for unit in each]
    finished = targets.for_each(
        target, lambda unit: units.finished_manifest(unit, tokenizer.fingerprint), every, run.workers
    )
    manifests = {(unit.target, unit.name): known for unit, known in zip(every, finished, strict=True) if known}
    if manifests:
        LOG.info("%d of %d shards are finished", len(manifests), len(every))
    todo = [unit for unit in every if (unit.target, unit.name) not in manifests]
    start = logged = time.monotonic()
    for index, manifest in run.shards(todo, tokenizer.fingerprint):
        check()
        manifests[todo[index].target, todo[index].name] = manifest
        if time.monotonic() - logged > LOG_SECONDS or len(manifests) == len(every):
            logged = time.monotonic()
            tokens = sum(shard["tokens"] for each in manifests.values() for shard in each["shards"].values() if shard)
            LOG.info("%d of %d shards, %s tokens, %.0f s", len(manifests), len(every), f"{tokens:,}", logged - start)
    indices = {name: _index(part, manifests, tokenizer, sample, options) for name, part in found.items()}
    for name, part in found.items():
        if not indices[name]["splits"].get("train", {}).get("documents"):
            raise ConfigError(
                f"{part.target}: got no training document after cleaning, expected some; mend the filters"
            )
    check()
    if "" in indices:
        targets.write_json(target, INDEX, indices[""])
        return indices[""]
    for name, part in found.items():
        targets.write_json(part.target, INDEX, indices[name])
    whole = _mixture_index(indices, tokenizer, sample, options)
    targets.write_json(target, INDEX, whole)
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
    manifests: Mapping[tuple[Target, str], dict[str, Any]],
    tokenizer: Tokenizer,
    sample: dict[str, int],
    options: Options,
) -> dict[str, Any]:
    """The index of one data set: its shards by split, and the sums of their counts."""
    splits: dict[str, Any] = {}
    dropped: dict[str, dict[str, int]] = {}
    for split, each in part.units.items():
        made = [manifests[unit.target, unit.name] for unit in each]
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
