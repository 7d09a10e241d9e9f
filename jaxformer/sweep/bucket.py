"""A sweep whose folder is in a bucket, on which several machines work that share no disk.

    submissions/0001.zip   a frozen submission: one object, which is created only if it is absent
    claims/<run>           lease of the machine that works on a run
    <run>/                 workdir of a run, as `jaxformer train` keeps it there
    logs/<run>/<claim>.txt output of one attempt at a run
    ranking.json, ranking.md, best.py

Each machine has a folder in its cache, in which the sweep is as it is in a local folder: submissions, logs, and copies
of the files of the runs that reports and tables read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import secrets
import shutil
import time
import zipfile
from collections.abc import Generator, Sequence
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files, lease, workdir_lock
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import ABSENT, Conflict, Store
from jaxformer.sweep import ranking, submission
from jaxformer.sweep.planning import Plan, Run
from jaxformer.train import results

COPIED = ("config.json", results.FILE_NAME, "metrics.jsonl", workdir_lock.FILE_NAME)
"""Files of a run that reports and tables read."""
PUBLISHED = ("ranking.json", "ranking.md", ranking.BEST)
LOOK_SECONDS = 5.0
"""Seconds between two looks for a run that can be claimed, and between two updates of a table."""


class BucketSweep:
    """The sweep at an address, and its folder on this machine.

    Attributes:
      folder: the folder.
      id: identifies the folder in claims.
    """

    def __init__(self, url: str) -> None:
        self.url, self.store = url.rstrip("/"), Store(url)
        address = self.store.address
        cache = directories.cache() / "sweeps" / hashlib.sha256(str(address).encode()).hexdigest()[:16]
        self.folder = cache / address.path.rpartition("/")[2]
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(cache / "id.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (cache / "id").exists():
                files.write_atomic(cache / "id", secrets.token_hex(16))
            self.id = (cache / "id").read_text(encoding="utf-8")
        self.generations: dict[str, bytes] = {}

    # Submissions.

    def fetch_submissions(self) -> None:
        """Makes the submissions in the folder equal to those in the bucket.

        They are numbered without gaps and looked for by number: a listing may be old.
        """
        parent = self.folder / submission.FOLDER
        number = 1
        while (found := self.store.read(_key(number))) is not None:
            _unpack(found.value, parent / f"{number:04d}", f"{self.url}/{_key(number)}")
            number += 1
        for folder in parent.glob("[0-9]*"):
            if folder.name.isdecimal() and int(folder.name) >= number:
                shutil.rmtree(folder)

    def freeze(self, plan: Plan, arguments: Sequence[str], changed: bool) -> Plan:
        """As `submission.freeze`; a new submission is in the bucket, too.

        Raises:
          ConfigError: also if another machine has submitted at the same time.
        """
        self.fetch_submissions()
        before = submission.read_newest(plan.workdir)
        with self._named():
            frozen = submission.freeze(plan, arguments, changed)
        newest = submission.read_newest(plan.workdir)
        if newest is not None and (before is None or before.folder != newest.folder):
            try:
                self.store.write(_key(int(newest.folder.name)), _pack(newest.folder), ABSENT)
            except Conflict:
                found = self.store.read(_key(int(newest.folder.name)))
                if found is None or found.value != _pack(newest.folder):  # else the answer to this very write was lost
                    shutil.rmtree(newest.folder)
                    raise ConfigError(
                        f"workdir {self.url}: got a submission that another machine wrote at the same time, expected "
                        "none; give the command again"
                    ) from None
        return self.addressed(frozen)

    def submitted(self, plan: Plan) -> Plan:
        """As `submission.submitted`, with the newest copies of the runs' files."""
        self.fetch_submissions()
        with self._named():
            plan = self.addressed(submission.submitted(plan))
        self.update(plan.runs)
        return plan

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        """Names the address in errors, in the place of the folder."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(self.folder), self.url)) from None

    def addressed(self, plan: Plan) -> Plan:
        """`plan` with commands that train in the bucket."""
        runs = (
            dataclasses.replace(run, command=(*run.command[:-1], f"--workdir={self.url}/{run.workdir.name}"))
            for run in plan.runs
        )
        return Plan(plan.workdir, tuple(runs))

    # Files.

    def update(self, runs: Sequence[Run]) -> None:
        """Brings the newest copies of the files of runs, unless this process has seen that they are finished."""

        def fetch(key: str) -> None:
            path = self.folder / key
            generation = self.generations.get(key) if path.exists() else None
            found = self.store.read(key, unless=generation)
            if found is None:
                path.unlink(missing_ok=True)
            elif found.generation != generation:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists() or path.read_bytes() != found.value:
                    files.write_atomic(path, found.value)
                self.generations[key] = found.generation

        for run in runs:
            if not run.is_finished or f"{run.workdir.name}/{results.FILE_NAME}" not in self.generations:
                self.store.for_each(fetch, ((f"{run.workdir.name}/{name}", 0) for name in COPIED))

    def publish_ranking(self) -> None:
        """Writes the ranking to the bucket. The last machine that is done writes the whole of it."""
        for name in PUBLISHED:
            with contextlib.suppress(FileNotFoundError):
                self.store.write(name, (self.folder / name).read_bytes())


class Claims:
    """The runs on which this machine works: each is a lease, so that no other machine begins it meanwhile."""

    def __init__(self, sweep: BucketSweep) -> None:
        self.sweep, self.store = sweep, sweep.store
        self.held: dict[str, tuple[Lease, int]] = {}
        self.seen: dict[str, tuple[bytes, float]] = {}
        self.looked = float("-inf")

    def take(self, queue: list[Run], finished: list[Run]) -> Run | None:
        """Claims a run of `queue` and removes it there; None if all are claimed, or it is too early to look again.

        Args:
          finished: gets the runs that other machines have finished, which are removed from `queue`, too.
        """
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return None
        for run in list(queue):
            name = run.workdir.name
            generation = self._free(name)
            if generation is None:
                continue
            claim = Lease(self.store, self.sweep.id, key=f"claims/{name}")
            if not claim.take(generation):
                continue
            queue.remove(run)
            self.sweep.update([run])
            if run.is_finished:
                claim.release()
                finished.append(run)
                continue
            log = run.workdir / "log.txt"
            self.held[name] = claim, log.stat().st_size if log.exists() else 0
            return run
        self.looked = time.monotonic()
        self._drop_finished(queue, finished)
        return None

    def _drop_finished(self, queue: list[Run], finished: list[Run]) -> None:
        self.sweep.update(queue)
        done = [run for run in queue if run.is_finished]
        finished += done
        queue[:] = [run for run in queue if run not in done]

    def _free(self, name: str) -> bytes | None:
        """Generation of a claim that can be taken: free, expired, or of a dead process of this folder; else None."""
        found = self.store.read(f"claims/{name}")
        if found is None:
            return ABSENT
        owner = lease.owner_of(found)
        if not owner or owner.get("mirror") == self.sweep.id:
            return found.generation
        generation, since = self.seen.get(name, (b"", 0.0))
        if generation != found.generation:
            self.seen[name] = found.generation, lease.clock()
            return None
        return found.generation if lease.clock() - since > lease.LEASE_SECONDS else None

    def end(self, run: Run) -> None:
        """Publishes the output of an attempt, brings the run's result, and releases the claim."""
        claim, begin = self.held.pop(run.workdir.name)
        try:
            with open(run.workdir / "log.txt", "rb") as log:
                log.seek(begin)
                self.store.write(f"logs/{run.workdir.name}/{claim.token}.txt", log.read())
            self.sweep.update([run])
        finally:
            claim.release()

    def close(self) -> None:
        """Releases what is still held."""
        for claim, _ in self.held.values():
            claim.release()


@contextlib.contextmanager
def claiming(sweep: BucketSweep) -> Generator[Claims]:
    """The claims of this machine, released at the end."""
    with contextlib.closing(Claims(sweep)) as claims:
        yield claims


def _key(number: int) -> str:
    return f"{submission.FOLDER}/{number:04d}.zip"


def _pack(folder: Path) -> bytes:
    """A zip file of the files in `folder`, the same for the same files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _unpack(content: bytes, folder: Path, what: str) -> None:
    """Writes the files of `_pack` to `folder`, all or nothing. `submission` compares them with their checksums.

    Raises:
      ConfigError: it is no such zip file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ConfigError(f"{what}: got no zip file ({error}), expected what the sweep wrote; restore it") from None
    if any("/" in name or "\\" in name or name in ("", ".", "..") for name in parts):
        raise ConfigError(f"{what}: got files in folders, expected what the sweep wrote; restore it")
    if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == parts:
        return
    temporary = folder.parent / f"{submission.TEMPORARY}{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    for name, part in parts.items():
        (temporary / name).write_bytes(part)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
