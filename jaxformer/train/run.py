"""A training run: its parts, its state, and what it restores, saves, evaluates and reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import grain
import jax
from flax import linen as nn

from jaxformer import framing
from jaxformer.checkpoint import Checkpoints, Damaged, list_checkpoints, read_about, read_data
from jaxformer.config import Config, overrides
from jaxformer.data import token_shards
from jaxformer.data.mixture import Mixture
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.runtime import files, memory
from jaxformer.storage import TrainingSession
from jaxformer.tasks import _distillation, _mixture
from jaxformer.train import digest, freezing, optim, reference, teacher, warm_start
from jaxformer.train import evaluate as evaluation
from jaxformer.train import step as steps
from jaxformer.train.metric_window import MetricWindow
from jaxformer.train.patience import Patience
from jaxformer.train.preemption import Watchdog
from jaxformer.train.reporting import Reporter
from jaxformer.train.setup import build_pipelines
from jaxformer.train.skip_guard import SkipGuard
from jaxformer.train.timing import Clock, CompiledShapes, is_due
from jaxformer.train.workdir import describe_changes, write_run_files
from jaxformer.types import Batch


class Run:
    """The parts of a training run and its current state.

    Creating one raises for whatever cannot work and writes nothing. `restore` opens the workdir and completes it.

    Args:
      stream: where lines for people go; None: stderr.

    Attributes:
      state: the training state; `step` is its step number, known to the host without waiting for the device.
      session: publishes the workdir to a bucket, if it lies in one.
      values: measures of the last evaluation, which was at step `evaluated_at`; -1: none.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        mesh: jax.sharding.Mesh,
        dataset: Dataset,
        tokenizers: Tokenizers | None,
        init_format: warm_start.InitFormat = warm_start.RUN_FORMAT,
        stream: TextIO | None = None,
    ) -> None:
        self.stream = stream
        self.session: TrainingSession | None = None
        self.config, self.workdir, self.mesh, self.dataset, self.tokenizers = config, workdir, mesh, dataset, tokenizers
        self.task, self.init_format = _distillation.objective(config, _mixture.objective(config)), init_format
        self.module = build.build(config.model)
        self.teacher = None
        if config.distillation is not None:
            self.teacher = teacher.load(config, mesh, tokenizers, init_format)
        self.reference = None
        if reference.is_needed(config):
            counts = {"train": config.data.examples, "validation": config.evaluate.examples}
            known = reference.recorded(workdir)
            dataset, self.reference = reference.attach(config, dataset, counts, tokenizers, mesh, init_format, known)
            self.dataset = dataset
        self.kernels = build.chosen_kernels(config.model, config.data.length, self.task.has_prefix)
        self.balanced = build.uses_causal_ring(config.model, config.data.length)
        part, multiple = rules.process_part(mesh), meshes.row_multiple(mesh.shape, config.model)
        hosts = (*part, multiple * config.train.accumulation)
        self.pipelines = build_pipelines(config, dataset, tokenizers, *hosts)
        mixed = config.data.mixture is not None
        self.pipeline = Mixture(config, self.pipelines, *hosts) if mixed else self.pipelines[""]
        self.param_shapes = nn.meta.unbox(build.shapes(self.module))["params"]
        self.schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
        self.axis_names = build.logical_names(self.module)
        self.frozen = freezing.frozen_paths(config, self.param_shapes) if freezing.may_freeze(config) else set()
        trained = [freezing.trained(config, tree) for tree in (self.param_shapes, self.axis_names)]
        self.optimizer = optim.optimizer(config.optimizer, self.schedule, *trained)
        self.eval_steps = evaluation.make_eval_steps(config, self.module)

    # Restoring.

    def restore(self, notes: Sequence[str] = ()) -> None:
        """Restores the newest checkpoint, or starts anew, and logs which, with `notes`.

        Raises:
          ConfigError: the run reads token shards, and its checkpoint is of other data.
        """
        config, workdir = self.config, self.workdir
        self._check_same_shards()
        write_run_files(config, workdir, self.tokenizers)
        self.checkpoints = Checkpoints(workdir, config.checkpoint, self.session.disks if self.session else None)
        self.values: dict[str, float] = {}
        # What a resumed run needs beside its state: whether it was stopped before an evaluation that was due, the sums
        # since the last log entry, the number of skipped steps in a row, and which data it read.
        self.progress: dict[str, Any] = {"evaluation_due": False, "window": None, "skipped_in_a_row": 0}
        self.progress["data"] = self.dataset.key
        self.progress["patience"] = None
        self.progress["reference"] = self.reference
        self.progress["teacher"] = None if self.teacher is None else digest.params_digest(self.teacher.params)
        changes = self._restore_state()
        self.patience = Patience(config.train.patience, config.checkpoint, self.progress["patience"])
        self.step = int(self.state.step)
        self.evaluated_at = self.step if self.values else -1
        self.clock = Clock(config.train)
        self.heap = memory.HeapTrimmer(self.mesh.devices.flat[0].platform)
        self.reporter = Reporter(
            workdir, self.clock, self.step, not self.progress["evaluation_due"], config, self.stream
        )
        self.train_shapes, self.eval_shapes = (
            CompiledShapes(program, self.reporter.log) for program in ("step", "evaluation")
        )
        self.window = MetricWindow(self.progress["window"], rules.process_part(self.mesh)[1])
        self.guard = SkipGuard(
            config.train.skip_limit,
            self.progress["skipped_in_a_row"],
            self.reporter.log_skipped,
            self.checkpoints.newest,
        )
        self.watchdog = Watchdog(config.train.watchdog, workdir)
        if jax.process_index() == 0 and not self.step:
            table = optim.parameter_table(self.param_shapes, config.optimizer, self.axis_names, self.frozen)
            files.write_atomic(workdir / "parameters.txt", table + "\n")
        self._log_start([*changes, *self._kernel_lines(), *self._data_lines(), *notes])

    def _check_same_shards(self) -> None:
        """Refuses to go on with token shards that are not those of the newest checkpoint.

        Other data only leads to a line in the log: a corpus in shards is not changed in passing, so it is a mistake.
        """
        newest = list_checkpoints(self.workdir / "checkpoints" / "last")[:1]
        saved = read_about(newest[0]).get("progress", {}).get("data") if newest else None
        if saved not in (None, self.dataset.key) and token_shards.shared_tokenizers(self.dataset) is not None:
            raise ConfigError(
                f"data.dir: got token shards with the key {self.dataset.key}, expected {saved}, which the checkpoint "
                f"in {self.workdir} was trained on; restore them, or start another run (from this one: init.directory)"
            )

    def _check_same_teacher(self, saved: str | None) -> None:
        """Refuses to go on with another teacher than that of the newest checkpoint."""
        if self.config.distillation is not None and saved not in (None, self.progress["teacher"]):
            raise ConfigError(
                f"config.distillation.directory: got {self.config.distillation.directory}, whose parameters are no "
                "longer those that the run began with, expected the same teacher; restore it, or start another run"
            )

    def _restore_state(self) -> list[str]:
        """Sets the state and the batches: from the newest checkpoint, fresh, or from another run's parameters.

        Returns:
          Lines to log: settings that changed since the checkpoint.
        """
        config = self.config
        target = steps.abstract_state(config, self.module, self.optimizer, self.mesh)
        position, batches = self._start_batches()
        try:
            saved = self.checkpoints.restore(target)
            if batches is None or position != (None if saved is None else saved.data):
                if batches is not None:
                    batches.close()
                batches = self.pipeline.train() if saved is None else self.pipeline.resume(saved.data)
        except BaseException:
            if batches is not None:
                batches.close()
            raise
        self.batches = batches
        if saved is None:
            self.state = steps.init_state(config, self.module, self.optimizer, self.mesh)
            if config.init.directory:
                self.state = warm_start.load_initial_params(self.state, config, self.init_format)
            return []
        self._check_same_teacher(saved.about.get("progress", {}).get("teacher"))
        self.state = saved.state
        if has_same_measurement(config, saved.about):
            self.values = dict(saved.about.get("values", {}))
        self.progress |= saved.about.get("progress", {})
        updates = int(optim.update_count(saved.state.opt_state))
        return describe_changes(saved.about.get("config"), config, updates, build.model_width(config.model))

    def _start_batches(self) -> tuple[dict[str, Any] | None, grain.DatasetIterator | None]:
        """Begins to read the batches of the newest checkpoint, since its arrays may take long to restore.

        Returns:
          Their position, None at the start of a run; and the batches, None if `restore` has to say what is wrong.
        """
        newest, position = self.checkpoints.newest(), None
        try:
            if newest is not None:
                position = read_data(newest)
            if newest is not None and int(newest.name) >= self.config.train.steps:
                return None, None  # no more batches are needed
            batches = self.pipeline.train() if position is None else self.pipeline.resume(position)
        except (ConfigError, Damaged, OSError):
            return None, None
        batches.start_prefetch()
        return position, batches

    def _log_start(self, lines: Sequence[str]) -> None:
        start = f"resumed at step {self.step:,}" if self.step else "started"
        count = build.count_params(self.state.params)
        if self.frozen:
            trained = build.count_params(freezing.trained(self.config, self.param_shapes))
            lines = [f"{trained:,} of the {count:,} parameters are trained", *lines]
        devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
        self.reporter.log(f"{start}: {count:,} parameters, listed in parameters.txt; {devices}")
        for line in [*lines, *self.pipeline.truncation_notes(self.config.evaluate.examples)]:
            self.reporter.log(line)

    def _kernel_lines(self) -> list[str]:
        return [f"{side} attention: {kernel} ({reason})" for side, (kernel, reason) in self.kernels.items()]

    def _data_lines(self) -> list[str]:
        lines = [] if self.reference is None else [f"reference: the starting parameters, hash {self.reference[:12]}"]
        if self.progress["data"] == self.dataset.key:
            return lines
        return [*lines, "the data changed since the run started: measures before and after cannot be compared"]

    @property
    def has_steps_left(self) -> bool:
        """True unless the run is at its last step, or has waited too long for a better validation."""
        return self.step < self.config.train.steps and not self.patience.is_exhausted

    def complete_interrupted_step(self) -> None:
        """Does what the run was stopped before: the evaluation that was due, or the copy to the best checkpoints."""
        if self.progress["evaluation_due"]:
            self.evaluate()
            if is_due(self.step, self.config.train.checkpoint_every):  # else these measures are not ranked
                self.save(force=True)
        elif self.values:
            self.save()

    # Saving, evaluating, closing.

    def save(self, evaluation_due: bool = False, force: bool = False) -> None:
        """Saves the state in the background. It is ranked among the best only by measures of exactly this state.

        Args:
          evaluation_due: the run stops before an evaluation, which the resumed run has to do.
          force: replace a checkpoint of the same step.
        """
        values = self.values if self.evaluated_at == self.step else {}
        progress = {
            "evaluation_due": evaluation_due,
            "window": self.window.state(),
            "skipped_in_a_row": self.guard.consecutive,
            "data": self.dataset.key,
            "patience": self.patience.state(),
            "reference": self.progress["reference"],
            "teacher": self.progress["teacher"],
        }
        self.checkpoints.save(self.state, self.pipeline.data_state(self.batches), values, progress, force)

    def evaluate(self) -> dict[str, float]:
        """Measures the validation split, decodes a few of its examples, and reports both."""
        config = self.config
        if not any("validation" in part.splits for part in self.dataset.components.values()):
            return {}
        self.clock.lap()
        compile_seconds: list[float] = []

        def watched(batches: Iterable[Batch]) -> Iterator[Batch]:
            yield from self.timed_batches(batches)
            compile_seconds.append(self.compile_seconds)

        variables = self.state.evaluation_variables()
        values, _ = evaluation.evaluate_components(
            config,
            self.eval_steps,
            variables,
            self.pipelines,
            "validation",
            config.evaluate.examples,
            self.mesh,
            watched,
        )
        if config.evaluate.decode_examples:
            predictor_of = framing.predictors(config, self.module, variables, self.tokenizers)
            decoded = evaluation.decode_components(
                predictor_of, config, self.dataset.components, "validation", config.evaluate.decode_examples
            )
            scores, records = evaluation.score_components(config, decoded), evaluation.records_of(decoded)
            values |= scores
            if records:
                self._report_samples(records)
        self.reporter.write(self.step, "validation", values)
        self.values, self.evaluated_at = values, self.step
        self.patience.add(values)
        self.clock.record_part("evaluation", sum(compile_seconds))
        return values

    def timed_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches`, with a heartbeat at each. Afterwards `compile_seconds` holds the time that compilation took.

        That is, for each batch shape seen for the first time, the time beyond the mean of the other batches.
        """
        self.compile_seconds, started = 0.0, self.clock.now()
        compiled: list[float] = []
        first: list[float] = []
        for batch in batches:
            self.watchdog.heartbeat()
            seconds = first if self.eval_shapes.is_new(batch) else compiled
            yield batch
            started, before = self.clock.now(), started
            seconds.append(started - before)
        mean = sum(compiled) / len(compiled) if compiled else 0.0
        self.compile_seconds = sum(max(duration - mean, 0.0) for duration in first)

    def progress_of_components(self) -> dict[str, float]:
        """Examples and epochs that have been drawn of each component of a mixture."""
        return self.pipeline.progress(self.batches) if isinstance(self.pipeline, Mixture) else {}

    def _report_samples(self, records: list[dict]) -> None:
        """Reports `evaluate.samples` records; of a mixture as many of each component."""
        counts: Counter[str] = Counter()
        shown = []
        for record in records:
            name = record.get("component", "")
            counts[name] += 1
            if counts[name] <= self.config.evaluate.samples:
                shown.append(record)
        if jax.process_index() == 0:
            files.write_json(self.workdir / "samples" / f"step-{self.step}.json", shown)
        for record in shown:
            line = {name: text.replace("\r", "\\r").replace("\n", "\\n") for name, text in record.items()}
            note = f"  ({line['note']})" if "note" in line else ""
            self.reporter.log(f"  {line['input']}{note}\n    -> {line['output']}\n     = {line['reference']}")

    def close(self) -> None:
        """Stops the background threads and waits for the last save, then for the trackers, which have a deadline.

        Raises:
          StorageError: a save failed.
        """
        self.batches.close()
        try:
            self.checkpoints.close()
        finally:
            self.reporter.close(is_finished=self.step >= self.config.train.steps or self.patience.is_exhausted)


def has_same_measurement(config: Config, about: dict[str, Any]) -> bool:
    """True if the measures in a checkpoint's `about` were taken with the evaluation and decoding of `config`."""
    saved, current = about.get("config") or {}, json.loads(overrides.to_json(config))
    return all(saved.get(section, current[section]) == current[section] for section in ("evaluate", "decode"))
