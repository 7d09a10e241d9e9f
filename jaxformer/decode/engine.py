"""Continuous batching of requests that arrive while others are decoded.

`Engine.step` is called again and again, by one thread. It collects what the last launches of the decode loops have
chosen, lets waiting requests join a batch, and launches the loops for a few more tokens. So a request joins the others
within `streaming.LATENCY_SECONDS`, and its tokens come out in pieces.

A batch has rows for a power of `ROW_GROWTH` of requests, and gets more when one waits. Waiting requests join in the
order of their arrival. If the first of them fits into no batch, another batch begins beside it, up to `MAX_BATCHES`;
otherwise all wait until one has ended, so no request waits forever.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence

import jax
import numpy as np

from jaxformer.config import DecodeConfig
from jaxformer.decode.batching import Prompt, PromptBatch, PromptQueue, bucket_length, buckets_within, pad_batch
from jaxformer.decode.compiled import CompiledDecoder
from jaxformer.decode.generate import (
    ModelBundle,
    check_sources,
    check_token_ids,
    compiled_options,
    group_by_context,
    max_new_tokens,
    with_target,
)
from jaxformer.decode.scheduler import FREE_ROW, ActiveBatch, DecodeRun, call_directly, is_on_one_device
from jaxformer.decode.search.base import RowSampling, RowSettings
from jaxformer.decode.streaming import next_steps

ROW_GROWTH = 4
"""A batch has 1, 4, 16, ... rows: few shapes to compile, and a single request does not pay for empty rows."""
MAX_BATCHES = 2
"""Batches at a time: the prompts of a batch have one padded length, so longer ones need another."""
MIN_PROMPT_SLOTS = 64
"""Padded length of a decoder's prompts at least, so that prompts of most lengths fit into one batch."""


class Sampling(NamedTuple):
    """How one request chooses its tokens. The fields are those of `RowSampling`, for one row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    draw: int = 0


class Piece(NamedTuple):
    """What a launch has added to one output.

    Attributes:
      tokens: int32 `[n]`, the new tokens, with the end token if one was reached.
      log_probs: float32 `[n]`, their log-probabilities, before temperature and truncation.
      finished: True if no more tokens will come.
      error: why there are no more, where the caller of `Engine.step` gave up; None: the output has ended by itself.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    finished: bool
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A prompt to be decoded, as `Engine.job` makes it.

    Attributes:
      max_new: tokens that the output may have.
      context_length: see `CompiledDecoder`; `is_long` is True if the prompt alone is longer.
      deliver: called with each piece, by the thread that calls `Engine.step`.
    """

    prompt: Prompt
    max_new: int
    sampling: Sampling
    context_length: int | None
    is_long: bool
    deliver: Callable[[Piece], None]

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of tokens of source and target; 1 for a source that the prompt does not have."""
        return max(len(self.prompt.get("source", ())), 1), len(self.prompt["target"])

    @property
    def kind(self) -> tuple[int | None, bool]:
        """What the jobs of one batch have in common."""
        return self.context_length, self.is_long


@dataclass(frozen=True, eq=False)
class _EngineRun(DecodeRun):
    """A run whose prompts are jobs, by their number."""

    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)

    def row_settings(self, prompts: PromptBatch) -> RowSettings:
        """The settings of a batch's rows; those of empty rows are zeros."""
        jobs = [self.jobs[int(index)] for index in prompts.indices]
        padding = prompts.rows - len(jobs)
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
        columns = zip(*(job.sampling for job in jobs), strict=True)
        sampling = RowSampling(
            *(np.pad(np.array(values, dtype), (0, padding)) for values, dtype in zip(columns, dtypes, strict=True))
        )
        max_lengths = np.pad(np.array([job.max_new for job in jobs], np.int32), (0, padding))
        return RowSettings(max_lengths, np.zeros(prompts.rows, np.int32), self.prompts.key, sampling)


class _EngineBatch(ActiveBatch):
    """An active batch whose rows are given to jobs one by one.

    Attributes:
      kind: that of its jobs.
      steps: tokens of the next launch.
    """

    run: _EngineRun

    def __init__(self, run: _EngineRun, prompts: PromptBatch, kind: tuple[int | None, bool]) -> None:
        self.kind, self.steps, self._none = kind, 1, PromptQueue([], (0, 0))
        self._given = np.zeros(prompts.rows, int)
        self._launched = time.monotonic()
        super().__init__(run, prompts, call_directly, self._none, 1)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.prompt_indices)

    @property
    def free_rows(self) -> np.ndarray:
        """Indices of the rows without a job."""
        return np.flatnonzero(self.prompt_indices == FREE_ROW)

    def fits(self, job: Job) -> bool:
        """True if the job may get a row of this batch."""
        shorter = all(new <= current for new, current in zip(job.lengths, self.lengths, strict=True))
        return self.can_refill and job.kind == self.kind and shorter

    def collect(self) -> list[tuple[int, Piece]]:
        """Waits for the loop; the number of each job with what is new of it. Frees the rows of finished jobs."""
        tokens, lengths, _ = self.hypotheses()
        log_probs = jax.device_get(self.state.search.log_probs)
        finished, pieces = np.asarray(self.status.finished), []
        for row in np.flatnonzero(self.prompt_indices != FREE_ROW).tolist():
            new = slice(self._given[row], int(lengths[row, 0]))
            piece = Piece(tokens[row, 0, new].copy(), log_probs[row, new].copy(), bool(finished[row]))
            if len(piece.tokens) or piece.finished:
                pieces.append((int(self.prompt_indices[row]), piece))
            self._given[row] = new.stop
        self.collect_finished()
        self.steps = next_steps(self.steps, time.monotonic() - self._launched)
        return pieces

    def go_on(self) -> None:
        """Launches the loop for some tokens. It stops as soon as a job has finished."""
        self._launched = time.monotonic()
        self.launch(self._none, self.steps)

    def join(self, prompts: PromptBatch) -> None:
        """Prefills jobs into free rows."""
        # Empty rows of the prompts get an index beyond the batch and are ignored.
        rows = np.full(prompts.rows, self.rows)
        rows[: len(prompts.indices)] = self.free_rows[: len(prompts.indices)]
        self._given[rows[: len(prompts.indices)]] = 0
        self.fill(prompts, rows)

    def release(self, number: int) -> None:
        """Frees the row of a job, whose output ends here."""
        released = self.prompt_indices == number
        self.state = self.run.decoder.release_rows(self.state, released)
        self.prompt_indices[released] = FREE_ROW

    def resize(self, rows: int) -> None:
        """Changes the number of rows; there are at least as many as jobs."""
        active = np.flatnonzero(self.prompt_indices != FREE_ROW)
        indices = np.zeros(rows, int)
        indices[: len(active)] = active
        released = np.arange(rows) >= len(active)
        self.state = self.run.decoder.take_rows(self.state, indices, released)
        for name in ("prompt_indices", "context_lengths", "_given"):
            setattr(self, name, getattr(self, name)[indices])
        self.prompt_indices[released] = FREE_ROW

    def _min_finished(self, queue: PromptQueue) -> int:
        return min(len(self.free_rows) + 1, self.rows)


class Engine:
    """Decodes jobs that arrive at any time. `job` may be called by any thread, the other methods by one.

    Attributes:
      model: the model.
      options: settings that all jobs share: logits processors, rounded weights, what happens past the last position.
      max_new: most tokens that an output may have.
      max_rows: rows of a batch.
      waiting: number and job of each that has no row yet.
    """

    def __init__(self, model: ModelBundle, options: DecodeConfig, max_new: int, max_rows: int = 16) -> None:
        """Prepares the model's variables.

        Raises:
          ConfigError: the options name a token outside the vocabulary.
        """
        check_token_ids(options, model.vocabulary)
        self.model, self.max_new, self.max_rows = model, max_new, max_rows
        self.options = dataclasses.replace(options, method="greedy", hypotheses=1, max_length=max_new)
        shared = dataclasses.replace(self.options, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        decoder = CompiledDecoder(model.module, compiled_options(shared, max_new), model.vocabulary, per_row=True)
        self.variables = decoder.prepare_variables(model.variables)
        self.waiting: deque[tuple[int, Job]] = deque()
        self._decoder, self._key = decoder, jax.random.key(0)
        self._jobs: dict[int, Job] = {}
        self._batches: list[_EngineBatch] = []
        self._count = 0
        self._can_refill = is_on_one_device(model.variables)
        self._buckets = buckets_within(model.buckets, model.max_target_length, model.max_source_length)

    def job(self, prompt: Prompt, sampling: Sampling, max_new: int | None, deliver: Callable[[Piece], None]) -> Job:
        """A prompt that is checked and ready for `submit`.

        Args:
          max_new: tokens of the output at most; None: `self.max_new`.

        Raises:
          ConfigError: as `generate`.
        """
        options = dataclasses.replace(self.options, max_length=max_new or self.max_new)
        prompt = with_target(prompt, self.model.vocabulary)
        limit, source_limit = self.model.max_target_length, self.model.max_source_length
        check_sources([prompt], source_limit)
        tokens = max_new_tokens(prompt, options, limit)
        (group,) = group_by_context([prompt], [tokens], limit)
        is_long = limit is not None and len(prompt["target"]) > limit
        return Job(prompt, tokens, sampling, group.context_length, is_long, deliver)

    def submit(self, job: Job) -> int:
        """Puts a job into the queue; its number."""
        self._count += 1
        self._jobs[self._count] = job
        self.waiting.append((self._count, job))
        return self._count

    def cancel(self, number: int) -> None:
        """Ends a job, wherever it is; nothing more is delivered. One that has ended already is ignored."""
        if self._jobs.pop(number, None) is None:
            return
        self.waiting = deque(entry for entry in self.waiting if entry[0] != number)
        for batch in self._batches:
            if number in batch.prompt_indices:
                batch.release(number)

    def clear(self) -> list[Job]:
        """Forgets all jobs and batches, as after an error; the jobs that had not ended."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self.waiting.clear()
        self._batches.clear()
        return jobs

    @property
    def active(self) -> int:
        """Number of jobs that have a row."""
        return len(self._jobs) - len(self.waiting)

    @property
    def has_jobs(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._jobs)

    def step(self) -> None:
        """Delivers new tokens, lets waiting jobs join, and launches the decode loops."""
        for batch in self._batches:
            for number, piece in batch.collect():
                job = self._jobs[number]
                if piece.finished:
                    del self._jobs[number]
                job.deliver(piece)
        self._batches = [batch for batch in self._batches if batch.has_prompts]
        running = list(self._batches)
        self._admit()
        for batch in running:
            batch.go_on()

    def _admit(self) -> None:
        """Gives rows to waiting jobs, first come, first served."""
        while self.waiting:
            job = self.waiting[0][1]
            fitting = [batch for batch in self._batches if batch.fits(job)]
            batch = min(fitting, key=lambda batch: batch.lengths, default=None)
            if batch is not None and self._make_room(batch):
                self._join(batch)
            elif batch is None and len(self._batches) < MAX_BATCHES:
                self._open()
            else:
                return
        for batch in self._batches:
            smaller = batch.rows // ROW_GROWTH
            if self._can_refill and smaller and batch.rows - len(batch.free_rows) <= smaller // 2:
                batch.resize(smaller)

    def _make_room(self, batch: _EngineBatch) -> bool:
        """True if the batch has a free row, perhaps a new one."""
        if not len(batch.free_rows) and batch.rows < self.max_rows:
            batch.resize(min(self._rows_for(batch.rows + len(self.waiting)), self.max_rows))
        return bool(len(batch.free_rows))

    def _rows_for(self, count: int) -> int:
        """Rows of a batch for so many jobs."""
        rows = 1
        while rows < min(count, self.max_rows):
            rows *= ROW_GROWTH
        return min(rows, self.max_rows)

    def _join(self, batch: _EngineBatch) -> None:
        """Gives free rows of a batch to the first of the waiting jobs, up to one that does not fit."""
        count = next((i for i, (_, job) in enumerate(self.waiting) if not batch.fits(job)), len(self.waiting))
        taken = self._take(min(count, len(batch.free_rows)))
        source, target = ((*self._buckets, length) for length in batch.lengths)
        # A prefill has a whole power of rows, so that few shapes are compiled; the batch may have fewer.
        batch.join(self._batch_of(taken, self._rows_for(len(taken)), source, target))

    def _open(self) -> None:
        """Begins a batch with the first of the waiting jobs, and others that are of its kind and no longer."""
        first = self.waiting[0][1]
        source, target = (bucket_length(length, self._buckets) for length in first.lengths)
        if "source" not in first.prompt:
            limit = self.model.max_target_length or MIN_PROMPT_SLOTS
            target = max(target, min(MIN_PROMPT_SLOTS, limit))

        def fits(job: Job) -> bool:
            return job.kind == first.kind and job.lengths[0] <= source and job.lengths[1] <= target

        count = next((i for i, (_, job) in enumerate(self.waiting) if not fits(job)), len(self.waiting))
        taken = self._take(min(count, self.max_rows))
        rows = self._rows_for(len(taken)) if self._can_refill else self.max_rows
        decoder = dataclasses.replace(self._decoder, context_length=first.context_length)
        none = RowSettings(np.zeros(0, np.int32), np.zeros(0, np.int32), self._key)
        run = _EngineRun(decoder, self.variables, none, self._can_refill, self._jobs)
        prompts = self._batch_of(taken, rows, (source,), (target,))
        self._batches.append(_EngineBatch(run, prompts, first.kind))

    def _take(self, count: int) -> list[tuple[int, Job]]:
        return [self.waiting.popleft() for _ in range(count)]

    def _batch_of(
        self, taken: Sequence[tuple[int, Job]], rows: int, source: tuple[int, ...], target: tuple[int, ...]
    ) -> PromptBatch:
        """Jobs as a padded batch of so many rows."""
        pads = (self.model.source_pad, self.model.vocabulary.pad)
        batch = pad_batch([job.prompt for _, job in taken], rows, pads, source, target)
        return PromptBatch(np.array([number for number, _ in taken]), batch)
