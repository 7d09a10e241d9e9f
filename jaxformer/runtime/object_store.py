"""Objects in a bucket (`gs://`, `s3://`), read and written whole by TensorStore, which Orbax brings along.

An object appears whole or not at all, and a write may demand that the object is new or unchanged. There is no rename
and no append. What the server refuses for a moment (429, 5xx, a lost connection, no answer in time) is tried again.

Variables, those of the vendors' own tools: GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST; AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jaxformer.errors import ConfigError, StorageError

Result = TypeVar("Result")

LOG = logging.getLogger("jaxformer")

SCHEMES = {"gs": "Google Cloud Storage", "s3": "S3"}
"""Kinds of address, with the name of the service."""

ABSENT = b"\x02"
"""Generation of an object that does not exist, as TensorStore writes it: a write with it creates."""

RETRY_SECONDS = 300.0
"""Time after which a request that keeps failing is given up."""
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 20.0
"""Pause before the second attempt, doubled for each later one up to the maximum, and half of it random."""
PATIENT_SECONDS = 3.0
"""Pause from which on a warning says that a request keeps failing."""
REQUEST_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 1 << 20
"""An answer is awaited for `REQUEST_SECONDS`, and for a second more with each of so many bytes."""
PARALLEL_REQUESTS = 8
"""Requests for small objects at a time."""
MAX_PARALLEL_BYTES = 16 << 20
"""Larger objects are read and written one after another, since each is held in memory."""
PART_BYTES = 16 << 20
"""Larger objects are read in parts of this size. Each has a time limit of its own, so a large object may take long."""
MAX_CHANGES = 3
"""Times that an object may change while its parts are read."""

PERMANENT = ("PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND", "INVALID_ARGUMENT")
"""Codes of errors that another attempt would meet again."""
DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")

CREDENTIALS = {
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}


class Conflict(Exception):
    """A conditional write was refused: the object is not the one that it was made for."""


class _OutOfRange(Exception):
    """The object ends before the part that was asked for."""


class _Late(Exception):
    """No answer in time. A smaller part may come in time."""


class Address(NamedTuple):
    """Address of a folder in a bucket, `scheme://bucket/path`. `path` has no slash at its ends."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"


class Stored(NamedTuple):
    """Content of an object, and its generation: another after each write."""

    value: bytes
    generation: bytes


def is_url(path: object) -> bool:
    """True if `path` is an address rather than a folder.

    Raises:
      ConfigError: it is an address that `pathlib` has shortened.
    """
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = os.fspath(path)
    if isinstance(path, PurePath) and text.partition(":")[0] in SCHEMES and ":/" in text and "://" not in text:
        raise ConfigError(f"path: got {path!r}, which pathlib made of an address, expected it as text; give a str")
    return isinstance(text, str) and "://" in text


def parse(what: str, url: str) -> Address:
    """The parts of an address.

    Args:
      what: the flag or field, for the error.

    Raises:
      ConfigError: it is no folder of a bucket.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    path = path.rstrip("/")
    if scheme not in SCHEMES:
        known = " or ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{what}: got {url!a}, expected a folder, or an address that begins with {known}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]+", bucket) or not path:
        raise ConfigError(f"{what}: got {url!a}, expected {scheme}://BUCKET/FOLDER, a folder in a bucket")
    if any(part in ("", ".", "..") for part in path.split("/")) or not path.isprintable() or set(path) & set("?#*[]\\"):
        raise ConfigError(f"{what}: got {url!a}, expected names without '.', '..' and ?#*[]\\ in the path")
    return Address(scheme, bucket, path)


def is_safe(key: str) -> bool:
    """True if a key names a file below the folder that it is written to."""
    return all(part not in ("", ".", "..") for part in key.split("/")) and "\0" not in key


def open_kvstore(address: Address) -> Any:
    """TensorStore's key-value store of the objects below an address."""
    import tensorstore as ts

    retries = {"max_retries": 1, "initial_delay": "100ms", "max_delay": "200ms"}
    spec: dict[str, Any] = {"bucket": address.bucket, "path": address.path + "/"}
    if address.scheme == "gs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator:
            os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator if "://" in emulator else f"http://{emulator}")
        spec |= {"driver": "gcs", "context": {"gcs_request_retries": retries}}
    else:
        spec |= {"driver": "s3", "use_conditional_write": True, "context": {"s3_request_retries": retries}}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if endpoint:
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
        elif region:
            spec["aws_region"] = region
        if os.environ.get("AWS_ACCESS_KEY_ID"):  # asked for by name, it is not looked for in files that may not exist
            spec["aws_credentials"] = {"type": "environment"}
    return ts.KvStore.open(spec).result()


class Store:
    """The objects below an address, by their keys relative to it.

    Args:
      what: the flag or field that holds the address, for errors.
      retry_seconds: time after which a request that keeps failing is given up.
    """

    def __init__(self, url: str, what: str = "--workdir", retry_seconds: float = RETRY_SECONDS) -> None:
        self.address, self.what, self.retry_seconds = parse(what, url), what, retry_seconds
        self.retries = 0
        self._kvstore: Any = None

    def read(self, key: str, seconds: float | None = None, unless: bytes | None = None, size: int = 0) -> Stored | None:
        """An object; None if it does not exist.

        Args:
          seconds: time after which it is given up; None: the store's.
          unless: a generation. An object that has it is not sent: the result is then this generation, and no value.
          size: bytes of the object, if they are known: a large one is read in parts, others if no answer comes in time.
        """

        def call(store: Any) -> Any:
            return store.read(key) if unless is None else store.read(key, if_not_equal=unless)

        if size <= PART_BYTES or unless is not None:
            try:
                found = self._request(f"reading {key}", call, 0, seconds, unless is not None, has_parts=seconds is None)
            except _Late:
                pass
            else:
                if found.state == "unspecified":
                    return Stored(b"", unless or b"")
                return Stored(bytes(found.value), found.stamp.generation) if found.state == "value" else None
        content = io.BytesIO()
        generation = self._read_parts(content, key, size if size > PART_BYTES else 0)
        return None if generation is None else Stored(content.getvalue(), generation)

    def read_into(self, file: BinaryIO, key: str, size: int = 0) -> bytes | None:
        """Writes an object to an open file, with no more than a part of it in memory, if its size is known.

        Returns:
          Its generation; None if it does not exist. What the file then has is undefined.
        """
        if size > PART_BYTES:
            return self._read_parts(file, key, size)
        found = self.read(key, size=size)
        if found is None:
            return None
        file.write(found.value)
        return found.generation

    def read_range(self, key: str, begin: int, end: int) -> Stored | None:
        """Bytes `begin` to `end` of an object; None if it does not exist or is shorter."""
        try:
            found = self._request(f"reading {key}", lambda store: store.read(key, byte_range=slice(begin, end)),
                                  end - begin, None)  # fmt: skip
        except _OutOfRange:
            return None
        return Stored(bytes(found.value), found.stamp.generation) if found.state == "value" else None

    def _read_parts(self, file: BinaryIO, key: str, size: int) -> bytes | None:
        """`read_into` by parts. An object that changes meanwhile is read from its beginning again.

        Args:
          size: bytes of the object, as far as is known; 0: not known.
        """
        start, changes = file.tell(), 0
        begin, known, generation = 0, size, None
        is_sure = False
        while True:
            is_last = 0 < known <= begin + PART_BYTES
            part = slice(begin, None if is_last else begin + PART_BYTES)
            whole = is_last and not begin  # an empty object has no ranges
            options = {} if whole else {"byte_range": part}
            try:
                found = self._request(
                    f"reading {key}",
                    lambda store, options=options: store.read(key, **options),
                    PART_BYTES,
                    None,
                    has_parts=is_last and not is_sure,
                )
            except _Late:  # the object may be larger than was said
                known, is_sure = 0, True
                continue
            except _OutOfRange:
                if is_last:  # it ends where this part begins
                    return generation
                known, is_sure = begin + 1, True  # it ends within this part
                continue
            if found.state != "value":
                return None
            if generation is not None and found.stamp.generation != generation:
                changes += 1
                if changes > MAX_CHANGES:
                    raise StorageError(
                        f"{self.what} {self.address}: got {key}, which changes while it is read, expected the same "
                        "object for all of its parts; run the same command when nothing writes there"
                    )
                file.seek(start)
                file.truncate()
                begin, known, generation = 0, size, None
                continue
            file.write(found.value)
            begin, generation = begin + len(found.value), found.stamp.generation
            if is_last:
                return generation

    def write(self, key: str, value: bytes, generation: bytes | None = None, seconds: float | None = None) -> bytes:
        """Writes an object and returns its generation.

        Args:
          generation: the one that the object must have, or ABSENT; None: any.
          seconds: time after which it is given up; None: the store's.

        Raises:
          Conflict: it has another generation. This may be the caller's own write, whose answer was lost.
        """
        call = lambda store: store.write(key, value, if_equal=generation)  # noqa: E731
        stamp = self._request(f"writing {key}", call, len(value), seconds)
        if not stamp.generation:
            raise Conflict(key)
        return stamp.generation

    def delete(self, key: str) -> None:
        """Deletes an object, which need not exist."""
        self._request(f"deleting {key}", lambda store: store.write(key, None), 0, None)

    def list_keys(self) -> list[str]:
        """Keys of all objects, sorted."""
        return sorted(key.decode() for key in self._request("listing", lambda store: store.list(), 0, None))

    def for_each(self, act: Callable[[Any], object], items: Iterable[tuple[Any, int]]) -> None:
        """Calls `act` with each item, in several threads. The first error is raised once the others have ended.

        Args:
          items: each with the bytes of its object; large ones come one after another.
        """
        listed = list(items)
        small = [item for item, size in listed if size <= MAX_PARALLEL_BYTES]
        if min(len(small), PARALLEL_REQUESTS) > 1:
            with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
                for future in [pool.submit(act, item) for item in small]:
                    future.result()
        else:
            for item in small:
                act(item)
        for item, size in listed:
            if size > MAX_PARALLEL_BYTES:
                act(item)

    def _request(
        self,
        doing: str,
        call: Callable[[Any], Any],
        size: int,
        seconds: float | None,
        may_be_unchanged: bool = False,
        has_parts: bool = False,
    ) -> Any:
        """The result of a request, which is tried again as long as the server may come back.

        Args:
          size: bytes of the request or of its answer, which lengthen all limits.
          seconds: time after which it is given up; None: the store's.
          has_parts: an answer that does not come in time is asked for in parts by the caller.

        Raises:
          _Late: `has_parts`, and no answer came in time.
          _OutOfRange: the object does not have the bytes that were asked for.
          ConfigError: the credentials or the bucket are wrong.
          StorageError: no attempt succeeded.
        """
        transfer = size / MIN_BYTES_PER_SECOND
        limit = time.monotonic() + (self.retry_seconds if seconds is None else seconds) + transfer
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                if self._kvstore is None:
                    self._kvstore = open_kvstore(self.address)
                future = call(self._kvstore)
                patience = REQUEST_SECONDS + transfer
                try:
                    result = future.result(timeout=min(patience, max(limit - time.monotonic(), 1.0)))
                except TimeoutError:
                    future.cancel()
                    if has_parts:
                        self.retries += 1
                        raise _Late from None
                    raise
                if getattr(result, "state", "") == "unspecified" and not may_be_unchanged:
                    raise ValueError("UNKNOWN: an answer without an object")
                return result
            except Exception as error:
                if isinstance(error, (MemoryError, ConfigError, _Late)):
                    raise
                reason = describe_error(error)
                if reason.startswith("OUT_OF_RANGE"):
                    raise _OutOfRange from error
                self._refuse(reason, error)
                if time.monotonic() + delay > limit:
                    raise StorageError(
                        f"{self.what} {self.address}: got {reason} while {doing}, after trying for "
                        f"{self.retry_seconds if seconds is None else seconds:.0f} s, expected the storage to answer; "
                        "run the same command when it does: what is there is complete"
                    ) from error
                if delay < PATIENT_SECONDS <= 2 * delay:
                    LOG.warning("%s: got %s while %s; trying again for %.0f s", self.address, reason, doing,
                                limit - time.monotonic())  # fmt: skip
            self.retries += 1
            time.sleep(delay * (0.5 + random.random() / 2))
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    def _refuse(self, reason: str, error: Exception) -> None:
        """Raises a ConfigError if another attempt would meet the same error."""
        code = reason.partition(":")[0]
        if code in DENIED:
            raise ConfigError(
                f"{self.what}: got {str(self.address)!a}, which {SCHEMES[self.address.scheme]} refuses ({reason}), "
                f"expected credentials that may read and write there; {CREDENTIALS[self.address.scheme]}"
            ) from error
        if code in PERMANENT:
            raise ConfigError(
                f"{self.what}: got {str(self.address)!a} ({reason}), expected a folder in a bucket that exists; check "
                "the address"
            ) from error


def describe_error(error: Exception) -> str:
    """An error of TensorStore on one line, with its code first and no list of internals."""
    if isinstance(error, TimeoutError):
        return "DEADLINE_EXCEEDED: no answer in time"
    code = re.search(r"http_response_code='(\d+)'", str(error))
    text = re.sub(r"\s*\[(?:tensorstore_spec|source locations|http_response_).*", "", str(error), flags=re.DOTALL)
    words = " ".join(text.split())
    return (words if len(words) <= 200 else words[:200] + "...") + (f" (HTTP {code[1]})" if code else "")
