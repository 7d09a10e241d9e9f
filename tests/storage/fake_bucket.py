"""A bucket in memory: TensorStore's own, with every request written down and, where a test says so, failing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore as ts

from jaxformer.checkpoint import manifest
from jaxformer.data import shard_copies
from jaxformer.runtime import lease, object_store


class Answer:
    """A future that is done, or fails, or comes after `seconds`, which nobody waits for."""

    def __init__(self, result: Any = None, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.value, self.error, self.seconds = result, error, seconds

    def result(self, timeout: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        if timeout is not None and self.seconds > timeout:
            raise TimeoutError
        return self.value

    def cancel(self) -> None:
        pass


class Bucket:
    """All buckets of a test.

    Attributes:
      log: (verb, key) of every request that was carried out.
      before: called with (verb, key) before each; an error that it returns is the answer, an exception is a kill.
      after: the same, once the request was carried out: an answer that is lost.
      listing: changes what a listing says.
      rate: bytes per second of an answer, or of what is written.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empties it."""
        self.context = ts.Context()
        self.log: list[tuple[str, str]] = []
        self.before: Callable[[str, str], Exception | None] = lambda verb, key: None
        self.after: Callable[[str, str], Exception | None] = lambda verb, key: None
        self.listing: Callable[[list[str]], list[str]] = lambda keys: keys
        self.rate = float("inf")

    def open(self, address: object_store.Address) -> Requests:
        spec = {"driver": "memory", "path": f"{address.scheme}/{address.bucket}/{address.path}/"}
        return Requests(self, ts.KvStore.open(spec, context=self.context).result())


class Requests:
    """TensorStore's key-value store with the bucket's faults."""

    def __init__(self, bucket: Bucket, store: ts.KvStore) -> None:
        self.bucket, self.store = bucket, store

    def read(self, key: str, **options: Any) -> Answer:
        return self._carry_out("read", key, lambda: self.store.read(key, **options).result())

    def write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> Answer:
        verb = "delete" if value is None else "write"
        act = lambda: self.store.write(key, value, if_equal=if_equal).result()  # noqa: E731
        return self._carry_out(verb, key, act, len(value or b""))

    def list(self) -> Answer:
        return self._carry_out("list", "", self._list)

    def _list(self) -> list[bytes]:
        keys = sorted(key.decode() for key in self.store.list().result())
        return [key.encode() for key in self.bucket.listing(keys)]

    def _carry_out(self, verb: str, key: str, act: Callable[[], Any], size: int = 0) -> Answer:
        error = self.bucket.before(verb, key)
        if error is not None:
            return Answer(error=error)
        self.bucket.log.append((verb, key))
        result = act()
        size += len(getattr(result, "value", b""))
        return Answer(result, self.bucket.after(verb, key), size / self.bucket.rate)


def install(monkeypatch: Any, tmp_path: Path) -> Bucket:
    """A new bucket, with a cache of its own for the mirrors."""
    bucket = Bucket()
    monkeypatch.setattr(object_store, "open_kvstore", bucket.open)
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(object_store, "PARALLEL_REQUESTS", 1)
    monkeypatch.setattr(lease, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(shard_copies, "FREE_FRACTION", 0.0)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "host"))
    return bucket


def write_checkpoint(root: Path, name: str, content: str) -> None:
    """A complete checkpoint of two files, as a run leaves it in its folder."""
    folder = root / "checkpoints" / name
    for key, text in (("about/metadata", json.dumps({"format": 2})), ("state/arrays", content)):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(text)
    manifest.write(folder)


def contents(root: Path) -> dict[str, str]:
    """Content of the array files of the intact checkpoints, by name. Raises `Damaged` for others."""
    found = {}
    for path in sorted((root / "checkpoints").glob("*/[0-9]*")):
        listed = manifest.read(path)
        if listed is None:
            raise manifest.Damaged("no manifest")
        manifest.check_files(path, listed)
        found[f"{path.parent.name}/{path.name}"] = (path / "state" / "arrays").read_text()
    return found
