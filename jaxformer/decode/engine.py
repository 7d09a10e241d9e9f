"""Continuous batching of requests that arrive while others are decoded.

`Engine.step` is called again and again, by one thread. It collects what the last launches of the decode loops have
chosen, lets waiting requests take free rows, and launches the loops for a few more tokens. So a request joins the
others within `streaming.LATENCY_SECONDS`, and its tokens come out in pieces.

The shapes are few and known, so that `Engine.warm_up` can compile all of them: a batch has a fixed number of rows, and
prompts are padded to one of a few widths. Waiting requests join in the order of their arrival. If the first of them is
too long for every batch, a wider batch begins beside it, up to `MAX_BATCHES`; otherwise all wait until a row is free or
a batch has ended, so no request waits forever.
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
from jaxformer.decode.batching import Prompt, PromptBatch, PromptQueue, pad_batch
from jaxformer.decode.compiled import DecodeState
from jaxformer.decode.generate import (
    ModelBundle,
    check_proposals,
    check_rotations,
    check_speculation,
    check_token_ids,
    compiled_options,
    max_new_tokens,
    with_target,
)
from jaxformer.decode.scheduler import FREE_ROW, ActiveBatch, DecodeRun, call_directly, is_on_one_device
from jaxformer.decode.search.base import RowSampling, RowSettings
from jaxformer.decode.streaming import next_steps
from jaxformer.errors import ConfigError

MAX_BATCHES = 2
"""Batches at a time: the prompts of a batch have one padded length, so longer ones need another."""
MIN_WIDTH = 64
"""Padded length of prompts at least."""
WIDTH_GROWTH = 4
"""Ratio of two padded lengths: prompts are at most this many times shorter than what they are padded to."""


class PromptTooLong(ConfigError):
    """A prompt has more tokens than the engine reads, or leaves too few positions for the output."""


class Sampling(NamedTuple):
    """Settings by which one request chooses its tokens. The fields are those of `RowSampling`, for one row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Piece(NamedTuple):
    """The tokens that a launch has added to one output.

    Attributes:
      tokens: int32 `[n]`, the new tokens, with the end token if one was reached.
      finished: True if no more tokens will come.
      error: why there are no more, where the caller of `Engine.step` gave up; None: the output has ended by itself.
    """

    tokens: np.ndarray
    finished: bool
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A prompt to be decoded, as `Engine.job` makes it.

    Attributes:
      max_new: tokens that the output may have.
      width: padded length of the prompt.
      deliver: called with each piece, by the thread that calls `Engine.step`.
    """

    prompt: Prompt
    max_new: int
    width: int
    sampling: Sampling
    deliver: Callable[[Piece], None]


@dataclass(frozen=True, eq=False)
class _EngineRun(DecodeRun):
    """A run whose prompts are jobs, by their number."""

    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)

    def row_settings(self, prompts: PromptBatch) -> RowSettings:
        """The settings of a batch's rows; those of empty rows are zeros."""
        jobs = [self.jobs[int(index)] for index in prompts.indices]
        padding = (0, prompts.rows - len(jobs))
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.uint32)
        columns = zip(*(job.sampling for job in jobs), strict=True)
        sampling = RowSampling(
            *(np.pad(np.array(values, dtype), padding) for values, dtype in zip(columns, dtypes, strict=True))
        )
        max_lengths = np.pad(np.array([job.max_new for job in jobs], np.int32), padding)
        return RowSettings(max_lengths, np.zeros(prompts.rows, np.int32), self.prompts.key, sampling)

    def prefill(self, prompts: PromptBatch, prompt_width: int | None = None) -> DecodeState:
        """Prefills as any run does; prompts that begin a batch and those that join it share a program."""
        return super().prefill(prompts, prompts.lengths[1])


class _EngineBatch(ActiveBatch):
    """An active batch whose rows are given to jobs one by one.

    Attributes:
      steps: tokens of the next launch.
    """

    run: _EngineRun

    def __init__(self, run: _EngineRun, prompts: PromptBatch) -> None:
        self.steps, self._none = 1, PromptQueue([], (0, 0))
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
        return self.can_refill and job.width <= self.lengths[1]

    @property
    def is_reusable(self) -> bool:
        """True if jobs may join a batch that has none: its cache has room for a token of theirs."""
        return self.can_refill and self._max_steps() >= 1

    def collect(self) -> list[tuple[int, Piece]]:
        """Waits for the loop; the number of each job with what is new of it. Frees the rows of finished jobs."""
        tokens, lengths, _ = self.hypotheses()
        finished, pieces = np.asarray(self.status.finished), []
        for row in np.flatnonzero(self.prompt_indices != FREE_ROW).tolist():
            new = slice(self._given[row], int(lengths[row, 0]))
            piece = Piece(np.array(tokens[row, 0, new]), bool(finished[row]))
            if len(piece.tokens) or piece.finished:
                pieces.append((int(self.prompt_indices[row]), piece))
            self._given[row] = new.stop
        self.collect_finished()
        self.steps = next_steps(self.steps, time.monotonic() - self._launched)
        return pieces

    def resume(self, steps: int | None = None) -> None:
        """Launches the loop for some tokens, None: `steps`. It stops as soon as a job has finished."""
        self._launched = time.monotonic()
        self.launch(self._none, self.steps if steps is None else steps)

    def join(self, prompts: PromptBatch) -> None:
        """Prefills jobs into free rows."""
        # Empty rows of the prompts get an index beyond the batch and are ignored.
        rows = np.full(prompts.rows, self.rows)
        rows[: len(prompts.indices)] = self.free_rows[: len(prompts.indices)]
        self._given[rows[: len(prompts.indices)]] = 0
        self.fill(prompts, rows)

    def release(self, number: int) -> None:
        """Frees the row of a job. What the device still adds to it is not read, and the next job overwrites it."""
        self.prompt_indices[self.prompt_indices == number] = FREE_ROW

    def compile_capacities(self, joining: Sequence[PromptBatch]) -> None:
        """Compiles the programs of all capacities that the cache may have, with rows that `joining` takes over."""
        decoder, capacities = self.run.decoder, self.schedule.capacities
        for index, capacity in enumerate(capacities):
            if capacity > self.capacity:
                self.state = self.state._replace(model=decoder.grow(self.state.model, self.schedule, capacity))
                self.capacity = capacity
            for prompts in joining if self.can_refill else ():
                new = self.run.prefill(prompts)
                self.state = decoder.refill_rows(self.state, np.full(prompts.rows, self.rows), new)
            self.resume(0)
            for smaller in capacities[: index + 2]:
                decoder.compact(self.state, self.schedule, smaller)
        self.hypotheses()

    def _min_finished(self, queue: PromptQueue) -> int:
        return min(len(self.free_rows) + 1, self.rows)


class Engine:
    """Decodes jobs that arrive at any time. `job` may be called by any thread, the other methods by one.

    Attributes:
      model: the model, which reads prompts and goes on from them: it has no encoder.
      options: settings that all jobs share: logits processors, rounded weights, how long an output usually gets.
      max_new: most tokens that an output may have.
      max_prompt: most tokens of a prompt.
      rows: rows of a batch.
      widths: the lengths that prompts are padded to, ascending; the last is `max_prompt`.
      waiting: number and job of each that has no row yet.
    """

    def __init__(self, model: ModelBundle, options: DecodeConfig, max_new: int, max_prompt: int, rows: int = 8) -> None:
        """Prepares the model's variables. Prompts and outputs are no longer than the model's positions.

        Raises:
          ConfigError: the options name a token outside the vocabulary.
        """
        check_token_ids(options, model.vocabulary)
        limit = model.max_target_length
        self.model, self.rows = model, rows
        self.max_new, self.max_prompt = (min(most, limit or most) for most in (max_new, max_prompt))
        if options.speculate and model.draft is not None:
            check_speculation(model.draft, options.speculate, min(self.max_prompt + self.max_new, limit or 2**31) - 1)
        check_proposals(model, options)
        self.widths = _widths(self.max_prompt)
        usual = min(options.max_length, self.max_new)
        self.options = dataclasses.replace(
            options, method="greedy", hypotheses=1, max_length=usual, past_positions="stop"
        )
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # every row has its own
        shared = dataclasses.replace(self.options, max_length=self.max_new, **settings)
        decoder, variables = model.decoder(compiled_options(shared, self.max_new), per_row=True)
        self.waiting: deque[tuple[int, Job]] = deque()
        self._jobs: dict[int, Job] = {}
        self._batches: list[_EngineBatch] = []
        self._count = 0
        none = RowSettings(np.zeros(0, np.int32), np.zeros(0, np.int32), jax.random.key(0))
        self._run = _EngineRun(decoder, variables, none, is_on_one_device(model.variables), jobs=self._jobs)

    def job(self, prompt: Prompt, sampling: Sampling, max_new: int | None, deliver: Callable[[Piece], None]) -> Job:
        """A prompt that is checked and ready for `submit`.

        Args:
          max_new: tokens of the output at most; None: as the options say, or as many as the model has positions for.

        Raises:
          PromptTooLong: the prompt is too long, alone or with the output.
          ConfigError: as `generate`.
        """
        prompt = with_target(prompt, self.model.vocabulary)
        size, limit = len(prompt["target"]), self.model.max_target_length
        if size > self.max_prompt:
            raise PromptTooLong(f"prompt: got {size} tokens, expected at most {self.max_prompt}; shorten it")
        if max_new is not None and limit is not None and size + max_new - 1 > limit:
            got = f"prompt: got {size} tokens and up to {max_new} new ones"
            raise PromptTooLong(f"{got}, expected at most {limit + 1} together; shorten it, or ask for fewer new ones")
        options = self.options if max_new is None else dataclasses.replace(self.options, max_length=max_new)
        width = next(width for width in self.widths if width >= size)
        most = max_new_tokens(prompt, options, limit)
        check_rotations(self.model, [prompt], [most])
        return Job(prompt, most, width, sampling, deliver)

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
            batch.release(number)
        # One that has lost its last job still runs, and nobody will collect how far it got: it is not kept.
        self._batches = [batch for batch in self._batches if batch.has_prompts]

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
        running = [batch for batch in self._batches if batch.has_prompts]
        for batch in running:
            for number, piece in batch.collect():
                job = self._jobs[number]
                if piece.finished:
                    del self._jobs[number]
                job.deliver(piece)
        self._batches = [batch for batch in self._batches if batch.has_prompts or batch.is_reusable]
        joined = self._admit()
        for batch in self._batches:
            if batch in joined or (batch in running and batch.has_prompts):
                batch.resume()

    def warm_up(self, prompt: Prompt) -> None:
        """Compiles the programs that jobs like this short prompt need, whatever their lengths and settings."""
        job = self.job(prompt, Sampling(), None, lambda piece: None)
        number = self.submit(job)
        entries = [self.waiting.pop()]
        for width in self.widths:
            batch = _EngineBatch(self._run, self._batch_of(entries, self.rows, width))
            batch.compile_capacities([self._batch_of(entries, rows, width) for rows in {1, self.rows}])
        del self._jobs[number]

    def _admit(self) -> list[_EngineBatch]:
        """Gives rows to waiting jobs, first come, first served; the batches that have got jobs and are not launched.

        A batch without jobs is kept for the next ones, which are then prefilled alone and not with empty rows, unless
        a narrower one or a wider one is needed.
        """
        joined: list[_EngineBatch] = []
        while self.waiting:
            first = self.waiting[0][1]
            fitting = [
                batch
                for batch in self._batches
                if batch.fits(first) and (batch.has_prompts or batch.lengths[1] == first.width)
            ]
            batch = min(fitting, key=lambda batch: (not len(batch.free_rows), batch.lengths), default=None)
            if batch is None:
                self._batches = [batch for batch in self._batches if batch.has_prompts]
            if batch is not None and len(batch.free_rows):
                taken = self._take(batch.fits, len(batch.free_rows))
                # One prompt or as many as there are rows: few shapes to compile.
                batch.join(self._batch_of(taken, 1 if len(taken) == 1 else self.rows, batch.lengths[1]))
                joined.append(batch)
            elif batch is None and len(self._batches) < MAX_BATCHES:
                taken = self._take(lambda job, width=first.width: job.width <= width, self.rows)
                self._batches.append(_EngineBatch(self._run, self._batch_of(taken, self.rows, first.width)))
            else:
                break
        return joined

    def _take(self, fits: Callable[[Job], bool], most: int) -> list[tuple[int, Job]]:
        """The first of the waiting jobs, up to one that does not fit."""
        taken: list[tuple[int, Job]] = []
        while self.waiting and len(taken) < most and fits(self.waiting[0][1]):
            taken.append(self.waiting.popleft())
        return taken

    def _batch_of(self, taken: Sequence[tuple[int, Job]], rows: int, width: int) -> PromptBatch:
        """Jobs as a padded batch of so many rows."""
        pads = (self.model.source_pad, self.model.vocabulary.pad)
        batch = pad_batch([job.prompt for _, job in taken], rows, pads, widths=(1, width))
        return PromptBatch(np.array([number for number, _ in taken]), batch)


def _widths(most: int) -> tuple[int, ...]:
    widths = [min(MIN_WIDTH, most)]
    while widths[-1] < most:
        widths.append(min(widths[-1] * WIDTH_GROWTH, most))
    return tuple(widths)
