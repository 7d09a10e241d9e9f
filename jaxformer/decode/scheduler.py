"""Continuous batching: when sequences of a batch finish, queued prompts take over their rows.

Outputs differ in length, and a decode step costs the same however many rows are still active. So the decode loop of a
batch stops once `REFILL_FRACTION` of its rows are free, and the next prompts are prefilled into these rows. Rows stay
empty only after the last prompt has left the queue.

On a CPU several batches run at the same time, since parts of each step keep only one core busy.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Generator, Iterator, Sequence

import jax
import numpy as np

from jaxformer.decode.batching import PromptBatch, PromptQueue
from jaxformer.decode.cache_schedule import prompt_stream
from jaxformer.decode.compiled import CompiledDecoder, DecodeState, DecodeStatus
from jaxformer.decode.cropped_context import CachedContext
from jaxformer.decode.search.base import Hypotheses, RowSettings
from jaxformer.parallel import mesh
from jaxformer.types import CompactableState, PyTree, RefillableState

REFILL_FRACTION = 1 / 4
"""Fraction of a batch's rows that must be free to refill them; as many prompts are prefilled together."""
MAX_PADDING_RATIO = 4
"""Do not refill with prompts more than this many times shorter than the batch: they would be mostly padding."""
CONCURRENT_BATCHES = 2
"""Batches that run at the same time on a CPU; on other platforms it is one."""
POLL_SECONDS = 2e-4
"""Seconds between two checks which of the running batches has stopped."""
FREE_ROW = -1
"""Index of a row without a prompt."""

Program = Callable[..., tuple[DecodeState, DecodeStatus]]
Dispatch = Callable[..., tuple[DecodeState, DecodeStatus]]
"""Function `(program, *arguments)` that calls a compiled program, directly or in a thread of its own."""


@dataclass
class Tally:
    """Tokens that decode loops have chosen, and passes of the model over a row that they took."""

    tokens: int = 0
    passes: int = 0


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """The state that all batches of one call of `generate` share.

    Attributes:
      decoder: the compiled programs.
      variables: the model's variables, as `decoder.prepare_variables` returns them.
      prompts: the settings of all prompts, as numpy arrays.
      can_refill: True if queued prompts may take over free rows. Batches on several devices are decoded to their end,
        since their rows are divided among the devices.
      tally: what the batches have done; the first tokens, which prompts give, are not counted.
    """

    decoder: CompiledDecoder
    variables: PyTree
    prompts: RowSettings
    can_refill: bool
    tally: Tally = field(default_factory=Tally)

    def prefill(self, prompts: PromptBatch, prompt_width: int | None = None) -> DecodeState:
        """Reads prompts and chooses the first tokens (see `CompiledDecoder.prefill`)."""
        rows = self.row_settings(prompts)
        return self.decoder.prefill(self.variables, prompts.batch, rows, prompt_width=prompt_width)

    def row_settings(self, prompts: PromptBatch) -> RowSettings:
        """The settings of a batch's rows."""
        padding = (0, prompts.rows - len(prompts.indices))
        max_lengths, row_indices = (
            np.pad(values[prompts.indices], padding) for values in (self.prompts.max_lengths, self.prompts.row_indices)
        )
        return RowSettings(max_lengths, row_indices, self.prompts.key)


class ActiveBatch:
    """A batch of prompts whose decode loop runs.

    `launch`, `collect_finished` and `refill` are called in turns as long as it `has_prompts`.

    Attributes:
      prompt_indices: int `[rows]`, index of each row's prompt in the input, or `FREE_ROW`.
      lengths: padded lengths of source and target.
      capacity: new tokens that the state has slots for beside the prompts.
      used_slots: slots that are written.
      context_lengths: int `[rows]`, number of tokens that the model has read of each row's text.
    """

    def __init__(
        self,
        run: DecodeRun,
        prompts: PromptBatch,
        dispatch: Dispatch,
        queue: PromptQueue,
        max_steps: int | None = None,
    ) -> None:
        """Prefills the prompts and launches the decode loop, with `max_steps` as in `launch`."""
        self.run, self.dispatch = run, dispatch
        self.state = run.prefill(prompts)
        self.lengths = prompts.lengths
        self.prompt_indices = np.full(prompts.rows, FREE_ROW)
        self.prompt_indices[: len(prompts.indices)] = prompts.indices
        self.can_refill = run.can_refill and isinstance(self.state.model, RefillableState)
        self.schedule = run.decoder.schedule_for(self.state.model, self.lengths[1])
        self.capacity, self.used_slots = self.schedule.capacities[0], self.lengths[1]
        self.context_lengths = _prompt_lengths(prompts)
        self.launch(queue, max_steps)

    @property
    def has_prompts(self) -> bool:
        """True if any row has a prompt that is not finished."""
        return bool((self.prompt_indices != FREE_ROW).any())

    @property
    def refill_rows(self) -> int:
        """Number of prompts that are prefilled together into free rows."""
        return max(int(len(self.prompt_indices) * REFILL_FRACTION), 1)

    @property
    def is_ready(self) -> bool:
        """True if the decode loop has stopped, so that `collect_finished` does not wait."""
        # The type stub of jax.Array leaves `is_ready` out.
        return self.status.finished.is_ready()  # ty: ignore[missing-attribute]  # pyright: ignore[reportAttributeAccessIssue]

    def accepts(self, queue: PromptQueue) -> bool:
        """True if the next prompts of the queue fit into free rows without being mostly padding."""
        if not self.can_refill or not queue:
            return False
        lengths = zip(queue.next_lengths(self.refill_rows), self.lengths, strict=True)
        return all(new <= current <= new * MAX_PADDING_RATIO for new, current in lengths)

    def launch(self, queue: PromptQueue, max_steps: int | None = None) -> None:
        """Launches the decode loop and returns at once.

        The loop stops when enough rows for a refill are free, when all prompts are finished, when the state is full,
        when a text is as long as the model's context, or after `max_steps`. The results do not depend on `max_steps`.
        """
        self._drop_cache_if_context_is_full()
        steps = min(self._max_steps(), self._max_cached_steps())
        limits = np.int32(self._min_finished(queue)), np.int32(steps if max_steps is None else min(steps, max_steps))
        self.state, self.status = self.dispatch(self.run.decoder.decode_steps, self.run.variables, self.state, *limits)

    def hypotheses(self) -> Hypotheses:
        """Waits for the loop; the outputs of all rows so far, `[rows, n, T]`."""
        return jax.device_get(self.run.decoder.hypotheses(self.state.search))

    def collect_finished(self) -> list[tuple[int, Hypotheses]]:
        """Waits for the loop; input indices of newly finished prompts with their hypotheses, `[n, T]` each.

        Frees their rows, and resizes the state if it is full or drops its cache if a text does not fit any more.
        """
        finished = np.asarray(self.status.finished) & (self.prompt_indices != FREE_ROW)
        results: list[tuple[int, Hypotheses]] = []
        if finished.any():
            hypotheses = self.hypotheses()
            for row in np.flatnonzero(finished).tolist():
                results.append((int(self.prompt_indices[row]), Hypotheses(*(x[row] for x in hypotheses))))
            self.prompt_indices[finished] = FREE_ROW
        self.run.tally.tokens += int(self.status.tokens)
        self.run.tally.passes += int(self.status.passes)
        self.used_slots += int(self.status.steps) * self.schedule.slots_per_token
        self.context_lengths += int(self.status.steps)
        self._drop_cache_if_context_is_full()
        if self.has_prompts and self._max_steps() < 1:
            can_compact = isinstance(self.state.model, CompactableState)
            self._resize_cache(int(self.status.used_slots) if can_compact else self.used_slots)
        return results

    def refill(self, queue: PromptQueue) -> None:
        """Prefills prompts from the queue into free rows, as long as enough are free."""
        count = self.refill_rows
        while self.accepts(queue) and (self.prompt_indices == FREE_ROW).sum() >= count:
            prompts = queue.pop_refill(count, self.lengths)
            free_rows = np.flatnonzero(self.prompt_indices == FREE_ROW)[: len(prompts.indices)]
            # Empty rows of the refill get an index beyond the batch and are ignored.
            rows = np.full(count, len(self.prompt_indices))
            rows[: len(free_rows)] = free_rows
            self.fill(prompts, rows)

    def fill(self, prompts: PromptBatch, rows: np.ndarray) -> None:
        """Prefills prompts into free rows; row `rows[i]` gets row i of `prompts`, whose empty rows have none."""
        new = self.run.prefill(prompts, self.lengths[1])
        self.state = self.run.decoder.refill_rows(self.state, rows, new)
        self.used_slots = max(self.used_slots, prompts.lengths[1])
        filled = rows[: len(prompts.indices)]
        self.prompt_indices[filled] = prompts.indices
        self.context_lengths[filled] = _prompt_lengths(prompts)[: len(filled)]

    def _min_finished(self, queue: PromptQueue) -> int:
        """Number of finished or free rows at which the loop stops before it must."""
        rows, free = len(self.prompt_indices), int((self.prompt_indices == FREE_ROW).sum())
        return min(free + self.refill_rows, rows) if self.accepts(queue) else rows

    def _max_steps(self) -> int:
        """Number of decode steps that fit into the cache."""
        return self.schedule.max_steps(self.capacity, self.used_slots)

    def _max_cached_steps(self) -> int:
        """Number of decode steps until the longest active text has as many tokens as the model's context."""
        if not isinstance(self.state.model, CachedContext):
            return self._max_steps()
        active = self.context_lengths[self.prompt_indices != FREE_ROW]
        return self.state.model.context_length - int(active.max(initial=0))

    def _drop_cache_if_context_is_full(self) -> None:
        """Goes on without a cache if the next token of an active text does not fit (see `cropped_context`).

        Waiting prompts do not join such a batch, since those that fit are decoded faster in a batch with a cache.
        """
        if not self.has_prompts or self._max_cached_steps() >= 1 or not isinstance(self.state.model, CachedContext):
            return
        self.state = self.state._replace(model=self.run.decoder.drop_cache(self.state.model))
        self.schedule = self.run.decoder.schedule_for(self.state.model, self.lengths[1])
        self.capacity, self.can_refill = self.schedule.capacities[0], False

    def _resize_cache(self, needed_slots: int) -> None:
        """Drops slots that no active row reads, and changes the capacity to what `needed_slots` require."""
        decoder = self.run.decoder
        self.capacity = self.schedule.smallest_capacity(needed_slots)
        if needed_slots < self.used_slots:
            model_state = decoder.compact(self.state, self.schedule, self.capacity)
            self.used_slots = needed_slots
        else:
            model_state = decoder.grow(self.state.model, self.schedule, self.capacity)
        if self._max_steps() < 1:  # the loop would be launched for no step, again and again
            total_slots = self.schedule.total_slots(self.capacity)
            raise RuntimeError(f"cache: got {self.used_slots} used slots, expected fewer than {total_slots}")
        self.state = self.state._replace(model=model_state)


def _prompt_lengths(prompts: PromptBatch) -> np.ndarray:
    """Number of tokens of each row's prompt; 0 for an empty row."""
    return np.sum(np.asarray(prompt_stream(prompts.batch).slots.segment) != 0, axis=1)


def decode_queue(
    run: DecodeRun, queue: PromptQueue, max_rows: int, dispatchers: Sequence[Dispatch]
) -> Iterator[list[tuple[int, Hypotheses]]]:
    """Decodes all prompts of the queue, in batches of up to `max_rows` rows.

    Args:
      dispatchers: one for each batch that may run at the same time.

    Yields:
      Newly finished prompts (see `ActiveBatch.collect_finished`), perhaps none.
    """
    idle = list(dispatchers)
    active: list[ActiveBatch] = []
    while queue or active:
        while queue and idle:
            if active and active[0].can_refill and len(queue) < max_rows:
                break  # too few for a full batch: they wait for free rows
            active.append(ActiveBatch(run, queue.pop_batch(max_rows), idle.pop(), queue))
        batch = _wait_for_any(active)
        yield batch.collect_finished()
        batch.refill(queue)
        if batch.has_prompts:
            batch.launch(queue)
        else:
            active.remove(batch)
            idle.append(batch.dispatch)


def _wait_for_any(batches: Sequence[ActiveBatch]) -> ActiveBatch:
    """The first batch whose loop stops; a single one is returned at once."""
    while len(batches) > 1:
        for batch in batches:
            if batch.is_ready:
                return batch
        time.sleep(POLL_SECONDS)
    return batches[0]


@contextlib.contextmanager
def open_dispatchers(variables: PyTree) -> Generator[list[Dispatch], None, None]:
    """Dispatchers for the batches that should run at the same time: several on a single CPU device, else one."""
    if not is_on_one_device(variables) or mesh.platform() != "cpu":
        yield [call_directly]
        return
    with contextlib.ExitStack() as stack:
        yield [in_thread(stack.enter_context(ThreadPoolExecutor(max_workers=1))) for _ in range(CONCURRENT_BATCHES)]


def call_directly(program: Program, *arguments: PyTree) -> tuple[DecodeState, DecodeStatus]:
    """Calls a compiled program in the calling thread."""
    return program(*arguments)


def in_thread(worker: Executor) -> Dispatch:
    """A dispatcher that calls programs in `worker`.

    A CPU runs the programs of one thread one after the other, so concurrent batches need a thread each.
    """
    current_mesh = jax.sharding.get_mesh()

    def call(program: Program, *arguments: PyTree) -> tuple[DecodeState, DecodeStatus]:
        with contextlib.nullcontext() if current_mesh.empty else jax.set_mesh(current_mesh):
            return program(*arguments)

    return lambda *arguments: worker.submit(call, *arguments).result()


def is_on_one_device(variables: PyTree) -> bool:
    """True if no array of the tree lies on several devices."""
    return all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(variables) if isinstance(x, jax.Array))
