"""The trials of a search: Optuna's samplers and pruners, and its journal file in the sweep's folder.

The only file that knows Optuna (extra `[search]`). Decisions are made in memory, by a copy of the study, and a trial is
one line of the journal before it starts and one when it has ended. A trial that was running when the process died is
therefore judged again from its own `metrics.jsonl`, by the same rules, and the stream of trials is what it would have
been: a sampler is made anew for each trial from (seed, number).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError
from jaxformer.sweep.adaptive import Pruner, Search, label
from jaxformer.sweep.space import Axis, Choice, Edits, round_value

JOURNAL = "search.journal"
NAME = "search"
"""Name of the study. Hyperband hashes it with a trial's number to choose the bracket."""

MISSING = "search: got no package optuna, expected it; pip install 'jaxformer[search]'"

EDITS, STEPS, REASON = "edits", "steps", "reason"
"""Attributes of a trial in the journal."""


@dataclass
class Trial:
    """A trial of the study.

    Attributes:
      number: from 0.
      edits: the suggested values.
      state: "running", "complete", "pruned", or "failed": to be tried again, since the journal has it as running.
      value: the final measure, or the last one before it was pruned.
      step: step of the last judged validation.
      trained: steps that were trained, known when the trial has ended.
    """

    number: int
    edits: Edits
    state: str = "running"
    value: float | None = None
    step: int | None = None
    trained: int | None = None
    handle: Any = field(default=None, repr=False, compare=False)


def require() -> Any:
    """The module optuna.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(MISSING) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """The trials of a search, continued from its journal.

    Args:
      mode: "min" or "max".
      steps: length of a whole trial.
      writable: False: reads what is there, as a report does beside a search that is going on.

    Raises:
      ConfigError: Optuna is not installed, or the journal is damaged.
    """

    def __init__(self, workdir: Path, search: Search, mode: str, steps: int, writable: bool = True) -> None:
        self.optuna = require()
        self.search, self.path, self.steps = search, workdir / JOURNAL, steps
        self.space = {path: _distribution(self.optuna, axis) for path, axis in search.axes.items()}
        self.trials: list[Trial] = []
        direction = "minimize" if mode == "min" else "maximize"
        pruner = make_pruner(self.optuna, search.pruner, steps)
        self.memory = self.optuna.create_study(study_name=NAME, direction=direction, pruner=pruner)
        if not writable and not self.path.exists():
            return
        if writable:
            workdir.mkdir(parents=True, exist_ok=True)
            _repair(self.path)
        journal = self.optuna.storages.journal
        try:
            self.storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(self.path)))
            if NAME in [study.study_name for study in self.storage.get_all_studies()]:
                self.journal = self.optuna.load_study(study_name=NAME, storage=self.storage)
            elif writable:
                self.journal = self.optuna.create_study(study_name=NAME, storage=self.storage, direction=direction)
            else:
                return
            for kept in self.journal.get_trials():
                self._restore(kept)
        except (ValueError, KeyError, IndexError, AssertionError, TypeError, StopIteration) as error:
            raise ConfigError(
                f"{self.path}: got a damaged journal ({type(error).__name__}), expected what the search wrote; restore "
                "it, or use another --workdir"
            ) from None

    @property
    def open(self) -> list[Trial]:
        """Trials that have not ended, in their order."""
        return [trial for trial in self.trials if trial.state == "running"]

    def suggest(self) -> Trial:
        """The next trial. It is in the journal, in one line, before this returns."""
        number = len(self.trials)
        self.memory.sampler = make_sampler(self.optuna, self.search, number)
        handle = self.memory.ask(self.space)
        trial = Trial(number, self._edits(handle.params), handle=handle)
        running = self.optuna.trial.TrialState.RUNNING
        attributes = {EDITS: {path: label(value) for path, value in trial.edits.items()}}
        self.journal.add_trial(
            self.optuna.trial.create_trial(
                state=running, params=handle.params, distributions=self.space, user_attrs=attributes
            )
        )
        self.trials.append(trial)
        return trial

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Adds a validation of a running trial, and returns True if the trial is to be pruned.

        Rows up to the last reported step are ignored: a resumed run repeats them.
        """
        if trial.step is not None and step <= trial.step:
            return False
        trial.step, trial.value = step, value
        trial.handle.report(value, step)
        return trial.handle.should_prune()

    def end(self, trial: Trial, state: str, value: float | None = None, trained: int = 0) -> None:
        """Ends a trial.

        Args:
          state: "complete" with its `value`, "pruned", or "failed". A failed trial stays open in the journal, so that
            the next command tries it again; suggestions do not learn from it.
          trained: steps that were trained.
        """
        states = self.optuna.trial.TrialState
        told = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
        ended = self.memory.tell(trial.handle, value if state == "complete" else None, told)
        trial.state, trial.trained = state, trained
        if state == "failed":
            trial.value = None
            return
        trial.value = ended.value
        identity = self.journal.get_trials(deepcopy=False)[trial.number]._trial_id
        for step, number in ended.intermediate_values.items():
            self.storage.set_trial_intermediate_value(identity, step, number)
        for key, kept in ended.system_attrs.items():
            if key != "fixed_params":  # of the copy: see `_restore`
                self.storage.set_trial_system_attr(identity, key, kept)
        self.storage.set_trial_user_attr(identity, STEPS, trained)
        # The last line is the one that counts: until it is there the trial is open and judged again.
        self.storage.set_trial_state_values(identity, told, ended.values)

    def _restore(self, kept: Any) -> None:
        """Copies a trial of the journal into memory. One that was running starts with no validation."""
        states = self.optuna.trial.TrialState
        edits = self._edits(kept.params)
        if kept.state in (states.COMPLETE, states.PRUNED):
            self.memory.add_trial(kept)
            step, state = kept.last_step, kept.state.name.lower()
            self.trials.append(Trial(kept.number, edits, state, kept.value, step, kept.user_attrs.get(STEPS)))
            return
        self.memory.enqueue_trial(kept.params)
        self.memory.sampler = make_sampler(self.optuna, self.search, kept.number)
        self.trials.append(Trial(kept.number, edits, handle=self.memory.ask(self.space)))

    def _edits(self, params: dict[str, Any]) -> Edits:
        return {path: _value(axis, params[path]) for path, axis in self.search.axes.items()}


def make_sampler(optuna: Any, search: Search, number: int) -> Any:
    """The sampler of trial `number`. What it suggests depends on (seed, number) and the trials that it is shown."""
    import numpy as np

    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=search.startup)


def make_pruner(optuna: Any, pruner: Pruner | None, steps: int) -> Any:
    """Optuna's pruner with these settings, ready to judge."""
    if pruner is None:
        return optuna.pruners.NopPruner()
    options = pruner.options
    if pruner.name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=options["startup"], n_warmup_steps=options["warmup"])
    if pruner.name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=options["first"], reduction_factor=options["factor"])
    made = optuna.pruners.HyperbandPruner(
        min_resource=options["first"], max_resource=steps, reduction_factor=options["factor"]
    )
    # It divides trials into brackets from its first judgement on. Optuna documents that samplers see one bracket (those
    # of 5.0 see all trials). Judged once here, it has brackets whether a process starts or resumes the search.
    judged = optuna.create_study(pruner=made).ask()
    judged.report(0.0, 1)
    judged.should_prune()
    return made


def _distribution(optuna: Any, axis: Axis) -> Any:
    if isinstance(axis, Choice):
        return optuna.distributions.CategoricalDistribution([label(value) for value in axis.values])
    if axis.whole:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high))
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _value(axis: Axis, param: Any) -> Any:
    """A suggested parameter as a config's value."""
    if isinstance(axis, Choice):
        return next(value for value in axis.values if label(value) == param)
    return int(param) if axis.whole else round_value(param)


def _repair(path: Path) -> None:
    """Removes what a killed process left: Optuna's lock file, and a last line without its end.

    The caller holds the sweep's lock, so no other process writes.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.lock")
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
