"""Processes that read, encode and fill training batches: grain's `mp_prefetch` over the planned batches of a run.

Every process plans all blocks, which is arithmetic, and fills every n-th batch. The batches come in the order, and with
the bits, of a run without such processes: a batch is sent with the position after it, so three numbers resume the run
with any number of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
from absl import flags

from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import children
from jaxformer.types import Batch

if TYPE_CHECKING:
    from jaxformer.data.batches import TrainingBatches

BUFFERED_BATCHES = 2
"""Batches that each process fills ahead."""
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}

Position = dict[str, int]


class Loaded(NamedTuple):
    """A batch from a process.

    Attributes:
      batch: this host's rows of the batch.
      position: of the next batch.
      block: number of its block, through all epochs.
      note: what the main process has to know of the block; None if this process has sent it.
    """

    batch: Batch
    position: Position
    block: int
    note: Any


class EveryNth(grain.IterDataset):
    """Every n-th batch from a position on, where `mp_prefetch` sets n and the first. It runs in a loader process."""

    def __init__(self, batches: TrainingBatches, position: Position) -> None:
        super().__init__()
        self.batches, self.position = batches, position
        self.part = slice(0, None, 1)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called by grain in each process."""
        self.part = sl

    def __iter__(self) -> grain.DatasetIterator:
        return EveryNthIterator(self)


class EveryNthIterator(grain.DatasetIterator):
    """Iterator of `EveryNth`."""

    def __init__(self, dataset: EveryNth) -> None:
        super().__init__()
        self.batches, self.part = dataset.batches, dataset.part
        self.planned = self.batches.planned_batches()
        self.planned.set_state(dataset.position)
        self.number = 0
        self.noted = -1

    def __next__(self) -> Loaded:
        while True:
            number, block, planned = next(self.planned)
            self.number += 1
            if (self.number - 1) % self.part.step == self.part.start:
                break
        note = None if self.noted == number else self.batches.note(number)
        self.noted = number
        return Loaded(self.batches.fill(block, planned), self.planned.get_state(), number, note)

    def get_state(self) -> dict[str, Any]:
        """Only grain reads it: a run resumes from `Loaded.position`."""
        return {"number": self.number}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a run that resumes starts new processes")


class LoadedBatches(grain.DatasetIterator):
    """The training batches, from `processes` loader processes that `start_prefetch` starts, or the first `next`.

    Its state is the position of the next batch, as of a `batches.BatchIterator`.

    Args:
      batches: what is read; the processes get copies.
      processes: at least 1.

    Raises:
      ConfigError: by `next`: `batches` cannot be sent to other processes, or what filling a batch raises.
      StorageError: by `next`: a process ended.
    """

    def __init__(self, batches: TrainingBatches, processes: int) -> None:
        super().__init__()
        self.batches, self.processes = batches, processes
        self.position = {"epoch": 0, "block": 0, "batch": 0}
        self.loaded: grain.DatasetIterator | None = None
        self.starting: tuple[threading.Thread, list[Loaded | BaseException]] | None = None

    def __next__(self) -> Batch:
        try:
            found: Loaded = self._first() if self.loaded is None or self.starting else next(self.loaded)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise StorageError(
                f"config.data.workers: got a loader process that ended ({' '.join(str(error).split())[:90]}), expected "
                "it to go on; if memory or /dev/shm was short, lower it, and in a script of your own train below "
                "`if __name__ == '__main__':`; earlier checkpoints are complete"
            ) from None
        if found.note is not None:
            self.batches.learn(found.block, found.note)
        self.position = found.position
        return found.batch

    def start_prefetch(self) -> None:
        """Starts the processes, which takes seconds, and returns at once.

        They are started by a thread that SIGINT and SIGTERM do not reach, and inherit this: the main process decides
        what a signal means, and may need batches until it has saved.
        """
        if self.starting is not None or self.loaded is not None:
            return
        if not flags.FLAGS.is_parsed():  # grain asks for flags of its own, and the command line has none
            flags.FLAGS.mark_as_parsed()
        parallelism = os.environ.get(children.PARALLELISM, "")
        dataset = EveryNth(self.batches, self.position).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=self.processes, per_worker_buffer_size=BUFFERED_BATCHES),
            worker_init_fn=_Start(os.getcwd(), parallelism or "false"),
        )
        resource_tracker.ensure_running()  # it unblocks these signals in the thread that starts it
        found: list[Loaded | BaseException] = []

        def first() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self.loaded = iter(dataset)
                found.append(next(self.loaded))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=first, name="start of loader processes", daemon=True)
        self.starting = thread, found
        thread.start()

    def _first(self) -> Loaded:
        """The first batch of the processes, which are started unless they have been."""
        self.start_prefetch()
        if self.starting is None:
            raise RuntimeError("no loader processes")
        thread, found = self.starting
        thread.join()
        self.starting, result = None, found[0]
        if not isinstance(result, BaseException):
            return result
        # By name: cloudpickle's error is that of the module `pickle`, which nothing here may load.
        if isinstance(result, (TypeError, AttributeError)) or type(result).__name__ == "PicklingError":
            raise ConfigError(
                f"config.data.workers: got {self.processes} and data that cannot be sent to other processes "
                f"({' '.join(str(result).split())[:120]}), expected what can be pickled; set it to 0"
            ) from result
        raise result

    def get_state(self) -> Position:
        return self.position

    def set_state(self, state: Position) -> None:
        self.close()
        self.position = dict(state)

    def close(self) -> None:
        """Ends the processes."""
        if self.starting is not None:
            self.starting[0].join()
            self.starting = None
        if self.loaded is not None:
            self.loaded.close()
            self.loaded = None


class _Start:
    """Prepares a process, which ends if its parent is killed, and uses neither an accelerator nor further threads."""

    def __init__(self, directory: str, parallelism: str) -> None:
        self.directory, self.parallelism = directory, parallelism

    def __call__(self, index: int, count: int) -> None:
        os.chdir(self.directory)
        os.environ[children.PARALLELISM] = self.parallelism
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")
        children.follow_parent()
