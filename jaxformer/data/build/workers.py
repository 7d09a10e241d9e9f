"""Runs the units of a build: in this process, or in several, each of which uses one core."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from jaxformer.errors import StorageError
from jaxformer.runtime import children

T = TypeVar("T")


def run(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, T]]:
    """(index, result) of `work(*call)` for each call, in the order in which they finish.

    Args:
      work: a function of a module, called in other processes if `workers` is above 1.

    Raises:
      StorageError: a process died.
      Exception: of a call; calls that have not begun are cancelled.
    """
    workers = min(workers, len(calls))
    with one_thread():
        if workers <= 1:
            for index, call in enumerate(calls):
                yield index, work(*call)
            return
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks
        pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (os.getcwd(),))
        try:
            futures = {pool.submit(work, *call): index for index, call in enumerate(calls)}
            for future in concurrent.futures.as_completed(futures):
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise StorageError(
                "--workers: got a process that was ended (by the kernel if memory was short), expected it to finish; "
                "run the same command with fewer: finished shards are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def one_thread() -> Generator[None, None, None]:
    """The `tokenizers` library uses one thread inside the context."""
    before = os.environ.get(children.PARALLELISM)
    os.environ[children.PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[children.PARALLELISM]
        else:
            os.environ[children.PARALLELISM] = before


def _start_worker(directory: str) -> None:
    """Prepares a process: it leaves Ctrl-C to its parent, and ends if its parent is killed."""
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children.follow_parent()
