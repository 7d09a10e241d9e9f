"""Workdirs in a bucket (`gs://`, `s3://`) for commands that read a run: they get a local copy of it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from argparse import Namespace
from collections.abc import Generator

from jaxformer.cli.arguments import Command
from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, object_store


@contextlib.contextmanager
def local_copies(command: Command, arguments: Namespace) -> Generator[None]:
    """Replaces the addresses in `arguments` by local copies. Files that the command writes there are published.

    Raises:
      ConfigError: there is no run at an address, or it cannot be read, or what is asked for needs a folder.
      StorageError: the storage does not answer.
    """
    with contextlib.ExitStack() as stack:
        for name, flag in command.flags.items():
            if flag.bucket not in ("copy", "page"):
                continue
            value = getattr(arguments, name)
            values = value if flag.repeats else [value]
            urls = [one for one in values if object_store.is_url(one)]
            if not urls:
                continue
            from jaxformer import storage

            if flag.bucket == "page":
                _check_page(name, urls[0], len(values), arguments)
                values = [run for one in values for run in _runs(name, one)]
                if len(values) > 1 and not arguments.output:
                    arguments.output = stack.enter_context(_published_page(urls[0]))
            which = storage.NONE if flag.bucket == "page" else getattr(arguments, "checkpoint", None)
            paths = [
                str(stack.enter_context(storage.opened(one, f"--{name}", which))) if object_store.is_url(one) else one
                for one in values
            ]
            setattr(arguments, name, paths if flag.repeats else paths[0])
        yield


def _runs(name: str, value: str) -> list[str]:
    """The runs at an address: itself, or those directly below it, as of a sweep. A folder stays what it is.

    Raises:
      ConfigError: no run is there.
      StorageError: the storage does not answer.
    """
    if not object_store.is_url(value):
        return [value]
    store = object_store.Store(value.rstrip("/"), f"--{name}")
    if store.read("config.json") is not None:
        return [value]
    parts = [key.split("/") for key in store.list_keys() if object_store.is_safe(key)]
    found = sorted({part[0] for part in parts if part[1:] == ["config.json"]})
    return [f"{value.rstrip('/')}/{each}" for each in found] or [value]  # which `storage.opened` refuses


@contextlib.contextmanager
def _published_page(url: str) -> Generator[str]:
    """Path in the cache of a page of several runs. The page and its figure are published at their common address."""
    store = object_store.Store(url.rstrip("/"))
    name = hashlib.sha256(str(store.address).encode()).hexdigest()[:16]
    folder = directories.cache() / "pages" / name
    folder.mkdir(parents=True, exist_ok=True)
    names = ("comparison.html", "comparison.png")
    for each in names:
        (folder / each).unlink(missing_ok=True)
    yield str(folder / names[0])
    for each in names:
        if (folder / each).is_file():
            store.write(each, (folder / each).read_bytes())
            print(f"published {store.address}/{each}", file=sys.stderr)


def _check_page(name: str, url: str, count: int, arguments: Namespace) -> None:
    """Refuses a page that a copy, which does not change and has a place of its own, cannot have."""
    if arguments.serve:
        raise ConfigError(f"--{name}: got {url!a} with --serve, expected a folder: a copy does not follow the run")
    if count > 1 and not arguments.output:
        raise ConfigError(f"--{name}: got {url!a} and others without --output, expected --output=FILE.html; add it")
