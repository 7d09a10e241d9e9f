"""Workdirs in a bucket (`gs://`, `s3://`) for commands that read a run: they get a local copy of it."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Generator

from jaxformer.cli.arguments import Command
from jaxformer.errors import ConfigError
from jaxformer.runtime import object_store


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
            if flag.bucket == "page":
                _check_page(name, urls[0], len(values), arguments)
            from jaxformer import storage

            which = storage.NONE if flag.bucket == "page" else getattr(arguments, "checkpoint", None)
            paths = [
                str(stack.enter_context(storage.opened(one, f"--{name}", which))) if object_store.is_url(one) else one
                for one in values
            ]
            setattr(arguments, name, paths if flag.repeats else paths[0])
        yield


def _check_page(name: str, url: str, count: int, arguments: Namespace) -> None:
    """Refuses a page that a copy, which does not change and has a place of its own, cannot have."""
    if arguments.serve:
        raise ConfigError(f"--{name}: got {url!a} with --serve, expected a folder: a copy does not follow the run")
    if count > 1 and not arguments.output:
        raise ConfigError(f"--{name}: got {url!a} and others without --output, expected --output=FILE.html; add it")
