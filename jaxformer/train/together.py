"""Runs that one program trains together, each in a workdir of its own.

`lanes` makes the program. Here is its loop, out of the parts of the ordinary one (`loop`): every run reads its own
batches, and logs, evaluates, saves and ends as if it trained alone. Runs need not be at the same step. One that has
ended, or waits for batches of another shape than the others have, is a lane that keeps its state. So a run that
diverges or stops early does not stop the others, and after a kill each goes on from its own newest checkpoint.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, cast

import grain
import jax

from jaxformer.config import Config, checks
from jaxformer.errors import ConfigError
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime.exit_codes import DONE, PREEMPTED, WRONG_INPUT
from jaxformer.train import lanes, loop, results, warm_start
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.preemption import PreemptionListener
from jaxformer.train.run import Run
from jaxformer.train.workdir import check_same_config
from jaxformer.types import Batch, Sums

LOG_NAME = "log.txt"
"""File in a workdir with the lines that a run alone would print."""

Report = Callable[[str, Path, str], None]
"""Called as `report("finished" | "failed" | "stopped", workdir, reason)` when a run ends."""


class SharedBatches:
    """The batches of runs that are at the same step of the same order of data.

    Each of them has it in the place of its iterator. The next batch can be seen before it is taken.

    Attributes:
      users: number of runs that have not closed it.
    """

    def __init__(self, iterator: grain.DatasetIterator) -> None:
        self.iterator, self.users = iterator, 1
        self.waiting: tuple[dict[str, int], Batch] | None = None

    def peek(self) -> Batch:
        """The next batch."""
        if self.waiting is None:
            self.waiting = (self.iterator.get_state(), next(self.iterator))
        return self.waiting[1]

    def take(self) -> None:
        """Goes on to the batch after the next."""
        self.waiting = None

    def get_state(self) -> dict[str, int]:
        """The position of the next batch, seen or not."""
        return self.iterator.get_state() if self.waiting is None else self.waiting[0]

    def close(self) -> None:
        """Ends the iterator once every user has closed it."""
        self.users -= 1
        if self.users <= 0:
            self.iterator.close()


@dataclass(eq=False)
class Member:
    """An open run.

    Attributes:
      lane: its number in the program.
      contexts: its log, lock and watchdog, and what closes it.
      notes: lines for its log.
      source: its batches.
    """

    lane: int
    run: Run
    contexts: contextlib.ExitStack
    notes: list[str] = field(default_factory=list)
    source: SharedBatches = field(init=False)

    def read(self, source: SharedBatches) -> None:
        """Reads its batches from `source` from now on."""
        self.source = source
        self.run.batches = source  # ty: ignore[invalid-assignment]


def train(
    runs: Sequence[tuple[Config, Path]],
    init_format: warm_start.InitFormat = warm_start.RUN_FORMAT,
    report: Report = lambda event, workdir, reason: None,
) -> int:
    """Trains runs that differ in seed and rates only to their last steps, resuming those that have begun.

    There is a lane for every run, done or not, so that a resumed program is the one that was stopped.

    Args:
      runs: config and workdir of each.

    Returns:
      The exit code: 0; 2 if a run failed (its loss diverged); 143 if a signal or the deadline stopped them, and all
      states were saved.

    Raises:
      ConfigError: the configs differ in anything else, or a setting does not work for several runs at once.
      StorageError: something could not be written. Earlier checkpoints are complete.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"processes: got {jax.process_count()}, expected 1: runs of one program train in one process; use "
            "--executor=local"
        )
    configs, workdirs = [config for config, _ in runs], [Path(workdir).absolute() for _, workdir in runs]
    rates = lanes.differing_rates(configs)
    todo = [lane for lane, run in enumerate(workdirs) if results.finished_result(run, configs[lane]) is None]
    if not todo:
        return DONE
    stop = PreemptionListener(configs[0].train.deadline)
    with contextlib.ExitStack() as stack:
        step, members = _open(configs, workdirs, todo, rates, init_format, stack)
        with jax.set_mesh(step.mesh), stop:
            for member in members:
                _restore(member)
            return _Loop(members, step, stop, report).train()


def _open(
    configs: Sequence[Config],
    workdirs: Sequence[Path],
    todo: Sequence[int],
    rates: Sequence[str],
    init_format: warm_start.InitFormat,
    stack: contextlib.ExitStack,
) -> tuple[lanes.LaneStep, list[Member]]:
    """Makes the runs `todo`, checks all that can be checked before the first write, and locks their workdirs.

    They share data, module, optimizer and compiled evaluation, which depend on neither seed nor rates, and their
    batches where the seed is the same.

    Returns:
      The step of all lanes, and the runs.
    """
    first = todo[0]
    base, mesh, dataset, tokenizers, _ = loop.prepare(configs[first], workdirs[first], init_format)
    _check_memory(base, mesh, len(configs))
    paths = (*rates, lanes.SEED)
    resolved = [lanes.with_values(base, {path: lanes.value_at(config, path) for path in paths}) for config in configs]
    members, by_seed = [], dict[int, Run]()
    with jax.set_mesh(mesh):
        for lane in todo:
            notes = check_same_config(resolved[lane], workdirs[lane])
            contexts = stack.enter_context(contextlib.ExitStack())
            log = contexts.enter_context(_LogFile(workdirs[lane] / LOG_NAME))
            run = Run(resolved[lane], workdirs[lane], mesh, dataset, tokenizers, init_format, cast("TextIO", log))
            members.append(Member(lane, run, contexts, notes))
            same = by_seed.setdefault(run.config.train.seed, run)
            run.pipelines, run.pipeline = same.pipelines, same.pipeline
        one = members[0].run
        lanes.check_kernels(rates, one.kernels)
        step = lanes.LaneStep(resolved, rates, one.task, mesh)
        for member in members:
            run = member.run
            run.module, run.optimizer, run.eval_steps = one.module, step.optimizer, one.eval_steps
    for member in members:
        member.contexts.enter_context(WorkdirLock(member.run.workdir))
    return step, members


def _check_memory(config: Config, mesh: jax.sharding.Mesh, count: int) -> None:
    """Refuses more runs than the devices have memory for."""
    memory, lanes_per_device = meshes.device_memory(mesh), -(-count // mesh.size)
    try:
        checks.size.check_memory(config, mesh.shape, None if memory is None else memory // lanes_per_device)
    except ConfigError as error:
        raise ConfigError(f"{error} (a device has {lanes_per_device} of {count} runs; train fewer together)") from None


class _LogFile(io.TextIOBase):
    """A text file that is made with its first line, so that a refused run leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def write(self, text: str) -> int:
        if self.file is None:
            self.file = self.path.open("a", encoding="utf-8")
        return self.file.write(text)

    def flush(self) -> None:
        if self.file is not None and not self.file.closed:
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()


def _restore(member: Member) -> None:
    """Restores a run from its newest checkpoint, or starts it anew."""
    member.run.restore(member.notes)
    member.contexts.callback(member.run.close)
    member.contexts.enter_context(member.run.watchdog)
    member.run.complete_interrupted_step()


class _Loop:
    """The loop over the steps of all runs.

    Attributes:
      open: the runs that have not ended.
      states: the state of every lane.
    """

    def __init__(
        self, members: Sequence[Member], step: lanes.LaneStep, stop: PreemptionListener, report: Report
    ) -> None:
        self.step, self.stop, self.report = step, stop, report
        self.open, self.has_failed = list(members), False
        states = {member.lane: member.run.state for member in members}
        fallback = members[0].run.state  # of lanes that are done, and never train
        self.states = step.stack([states.get(lane, fallback) for lane in range(len(step.configs))])
        for member in members:
            del member.run.state
            member.read(SharedBatches(member.run.batches))
        self._share_batches()

    def train(self) -> int:
        """Trains until every run has ended, or a signal stops them. Returns the exit code."""
        for member in list(self.open):
            if not member.run.has_steps_left:
                self._conclude(member)
            else:
                member.run.window.resume()
                member.run.clock.lap()
        while self.open:
            stepped = self._train_step()
            stopping = bool(self.open) and self.stop.should_stop(max(member.run.step for member in self.open))
            self._evaluate_and_save(stepped, stopping)
            if stopping and self.open:
                for member in self.open:
                    loop.announce_stop(member.run)
                    self.report("stopped", member.run.workdir, "")
                return PREEMPTED
        return WRONG_INPUT if self.has_failed else DONE

    def _train_step(self) -> list[Member]:
        """A step of those runs whose next batches can be read together. Returns them, without those that failed."""
        active = self._choose()
        sources = {id(member.source): member.source for member in active}
        batches = {key: (source.get_state(), source.peek()) for key, source in sources.items()}
        of_lane = {member.lane: batches[id(member.source)][1] for member in active}
        arrays = [of_lane[active[0].lane]]
        if self.step.several_seeds:
            arrays = [of_lane.get(lane, arrays[0]) for lane in range(len(self.step.configs))]
        flags = [lane in of_lane for lane in range(len(self.step.configs))]
        self.states, sums = self.step(self.states, arrays, flags)
        for source in sources.values():
            source.take()
        for member in active:
            position, batch = batches[id(member.source)]
            self._guarded(member, lambda member=member, position=position, batch=batch: self._record(
                member.run, lanes.lane_sums(sums, member.lane), batch, position
            ))  # fmt: skip
        return [member for member in active if member in self.open]

    @staticmethod
    def _record(run: Run, sums: Sums, batch: Batch, position: dict[str, int]) -> None:
        loop.record(run, sums, batch, position, run.train_shapes.is_new(batch))

    def _choose(self) -> list[Member]:
        """The runs to train next: those of one source, or where lanes read batches of their own, of one shape.

        Runs that are behind come first where all have one seed, so that they meet the others and share their batches.
        Otherwise it is the shape that most runs wait for.
        """
        if not self.step.several_seeds:
            self._share_batches()
            behind = min(self.open, key=lambda member: member.run.step)
            return [member for member in self.open if member.source is behind.source]
        shapes = {member.lane: _shapes(member.source.peek()) for member in self.open}
        counts = Counter(shapes.values())
        behind = min(self.open, key=lambda member: (-counts[shapes[member.lane]], member.run.step))
        return [member for member in self.open if shapes[member.lane] == shapes[behind.lane]]

    def _share_batches(self) -> None:
        """Gives runs of one seed that are at the same step one source of batches."""
        sources: dict[tuple[int, int], SharedBatches] = {}
        for member in self.open:
            shared = sources.setdefault((member.run.config.train.seed, member.run.step), member.source)
            if shared is not member.source and shared.get_state() == member.source.get_state():
                member.source.close()
                shared.users += 1
                member.read(shared)

    def _evaluate_and_save(self, stepped: Sequence[Member], stopping: bool) -> None:
        """Evaluates and saves where that is due for runs that made a step; a save of all runs if they are to stop."""
        todo = [
            member
            for member in self.open
            if (member in stepped and (any(loop.due(member.run, stopping)) or not member.run.has_steps_left))
            or stopping
        ]
        if not todo:
            return
        jax.block_until_ready(self.states.step)
        for member in self.open:
            member.run.window.pause()
        for member in todo:
            for other in self.open:
                other.run.watchdog.heartbeat()
            member.run.state = self.step.take(self.states, member.lane)
            self._guarded(member, lambda member=member: self._finish_step(member.run, member in stepped, stopping))
            if member in self.open and not member.run.has_steps_left:
                self._conclude(member)
            del member.run.state
        for member in self.open:
            member.run.window.resume()
            member.run.clock.lap()

    @staticmethod
    def _finish_step(run: Run, stepped: bool, stopping: bool) -> None:
        if stepped:
            loop.evaluate_and_save(run, stopping and run.has_steps_left)
        else:  # it waits for a batch: its evaluation, if one was due, is done
            run.guard.check()
            run.save()

    def _guarded(self, member: Member, act: Callable[[], None]) -> None:
        """Calls `act`. If it raises, its run ends, and the others go on."""
        try:
            act()
        except ConfigError as error:
            member.run.reporter.log(f"error: {error}")
            self.has_failed = True
            self._close(member, "failed", str(error))

    def _conclude(self, member: Member) -> None:
        """Ends a run that has no step left."""
        if not hasattr(member.run, "state"):
            member.run.state = self.step.take(self.states, member.lane)
        loop.conclude(member.run)
        self._close(member, "finished", "")

    def _close(self, member: Member, event: str, reason: str) -> None:
        self.open.remove(member)
        member.contexts.close()
        self.report(event, member.run.workdir, reason)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jax.tree.leaves(batch))
