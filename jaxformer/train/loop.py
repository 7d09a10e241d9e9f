"""A run, from a config to a finished workdir: the same command starts it and resumes it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxformer import checks, files, metrics, overrides, redaction, results, tasks
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import Config, ConfigError, StorageError
from jaxformer.data import packing, sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.train import evaluate as evaluation
from jaxformer.train import measuring, optim, start
from jaxformer.train import step as steps
from jaxformer.train.guard import Guard
from jaxformer.train.hooks import Reports
from jaxformer.train.lock import Lock
from jaxformer.train.stopping import PREEMPTED, Stop, Watchdog
from jaxformer.train.timing import Clock, Shapes
from jaxformer.train.workdir import changes_since, prepare, refuse_other_config
from jaxformer.types import Batch, Sums, TrainState


def train(config: Config, workdir: str | Path, origin: start.Origin = start.RUN) -> int:
    """Trains `config` in `workdir` until `config.train.steps`, resuming whatever is there.

    Args:
      origin: how `config.init.directory` is read, if the run starts from one.

    Returns:
      0 when finished, 143 when a signal or the deadline asked it to stop and the state was saved.

    Raises:
      ConfigError: the config contradicts itself, the data or the run that `workdir` already holds; another process
        trains there; the loss is not finite any more.
      StorageError: something could not be written. What was saved before is whole.
    """
    workdir = Path(workdir).absolute()
    try:
        return _train(config, workdir, origin)
    except OSError as error:
        where = error.filename or workdir
        raise StorageError(
            f"workdir {workdir}: got {error.strerror or error} ({where}), expected to read and write there; see to the "
            "disk, then run the same command: earlier checkpoints are whole"
        ) from error


def _train(config: Config, workdir: Path, origin: start.Origin) -> int:
    stop = Stop(config.train.deadline)
    redaction.refuse(dataclasses.asdict(config), "config")
    config, tokenizers = start.with_model(config, workdir, origin)
    notes = refuse_other_config(config, workdir)
    mesh = meshes.make(config.mesh)
    checks.size.fits(config, mesh.shape, meshes.memory(mesh))
    dataset = sources.build(config.data, tasks.get(config.task.name).roles)
    tokenizers = tokenizers or tokenizers_of(config, dataset, workdir)
    resolved = resolve(config, dataset, tokenizers)
    checks.mesh.divides(resolved, mesh.shape)
    checks.size.fits(resolved, mesh.shape, meshes.memory(mesh))  # now with the tokenizer's vocabulary
    with jax.set_mesh(mesh):
        run = Run(resolved, workdir, mesh, dataset, tokenizers, origin)
        with Lock(workdir):
            run.begin(notes)
            return run.finish(stop)


class Run:
    """The parts of a run and how they meet. Making one refuses what cannot work, and writes nothing."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        mesh: jax.sharding.Mesh,
        dataset: Dataset,
        tokenizers: Tokenizers,
        origin: start.Origin = start.RUN,
    ) -> None:
        self.config, self.workdir, self.mesh, self.dataset, self.tokenizers = config, workdir, mesh, dataset, tokenizers
        self.task, self.origin = tasks.get(config.task.name), origin
        self.module = build.build(config.model)
        self.attentions = build.attentions(config.model, config.data.length)
        self.balanced = build.ring(config.model, config.data.length)
        self.pipeline = Pipeline(
            config,
            dataset,
            tokenizers,
            self.task,
            *rules.reader(mesh),
            multiple=meshes.row_multiple(mesh.shape, config.model) * config.train.accumulation,
        )
        self.shapes = nn.meta.unbox(build.shapes(self.module))["params"]
        self.schedule = optim.schedule(config.schedule, config.train.steps, build.width(config.model))
        self.names = build.logical_names(self.module)
        self.optimizer = optim.optimizer(config.optimizer, self.schedule, self.shapes, self.names)
        self.measure = evaluation.make(config, self.module)

    def begin(self, notes: Sequence[str] = ()) -> None:
        """Takes up what is in the workdir, or starts there, and says so, with `notes` of what changed."""
        config, workdir = self.config, self.workdir
        prepare(config, workdir, self.tokenizers)
        self.checkpoints = Checkpoints(workdir, config.checkpoint)
        # What a resumed run takes up again, beside the state: measures, whether it was stopped before measuring, the
        # sums since the last report, how many steps in a row were left out, and which data it read.
        self.values: dict[str, float] = {}
        self.progress: dict[str, Any] = {"evaluation_due": False, "window": None, "skipped_in_a_row": 0}
        self.progress["data"] = self.dataset.key
        self.changed: list[str] = []
        self.state = self.first_state()
        self.step = int(self.state.step)
        self.measured_at = self.step if self.values else -1
        self.clock = Clock(config.train)
        self.reports = Reports(workdir, self.clock, self.step, not self.progress["evaluation_due"])
        self.trained, self.evaluated = (Shapes(what, self.reports.say) for what in ("step", "evaluation"))
        self.window = Window(self.progress["window"], rules.reader(self.mesh)[1])
        self.guard = Guard(
            config.train.skip_limit, self.progress["skipped_in_a_row"], self.reports.skipped, self.checkpoints.newest
        )
        self.watchdog = Watchdog(config.train.watchdog, workdir)
        if jax.process_index() == 0 and not self.step:
            table = optim.decay_table(self.shapes, config.optimizer, self.names)
            files.write(workdir / "parameters.txt", table + "\n")
        count = build.count(self.state.params)
        begun = f"resumed at step {self.step:,}" if self.step else "started"
        where = f"{jax.device_count()} {jax.default_backend()} device(s)"
        self.reports.say(f"{begun}: {count:,} parameters, listed in parameters.txt; {where}")
        for line in self.changed:
            self.reports.say(line)
        for side, (kernel, reason) in self.attentions.items():
            self.reports.say(f"{side} attention: {kernel} ({reason})")
        if self.progress["data"] != self.dataset.key:
            self.reports.say("the data is not what the run began with: measures before and after do not compare")
        for line in [*notes, *self.pipeline.said(config.evaluate.examples)]:
            self.reports.say(line)

    def first_state(self) -> TrainState:
        """The newest checkpoint's state, or a fresh one, or one that starts from another run's parameters."""
        config = self.config
        target = steps.abstract(config, self.module, self.optimizer, self.mesh)
        saved = self.checkpoints.restore(target)
        if saved is not None:
            if measures_as(config, saved.about):
                self.values = dict(saved.about.get("values", {}))
            self.progress |= saved.about.get("progress", {})
            updates = int(optim.updates(saved.state.opt_state))
            self.changed = changes_since(saved.about.get("config"), config, updates, build.width(config.model))
            self.batches = self.pipeline.resume(saved.data)
            return saved.state
        self.batches = self.pipeline.train()
        state = steps.create(config, self.module, self.optimizer, self.mesh)
        return start.warm(state, config, self.origin) if config.init.directory else state

    def finish(self, stop: Stop) -> int:
        """Trains to the end. Whatever happens, what was saved stays whole and errors of saving surface."""
        try:
            if stop.deaf:
                self.reports.say("not on the main thread: signals do not stop this run; train.deadline does")
            with stop, self.watchdog:
                return self.loop(stop)
        finally:
            self.batches.close()
            self.reports.close()
            self.checkpoints.close()

    def loop(self, stop: Stop) -> int:
        config, window = self.config.train, self.window
        if self.step >= config.steps and results.finished(self.workdir) is not None:
            self.reports.say("finished before; raise config.train.steps to go on")
            return 0
        self.catch_up()
        update = steps.make(self.config, self.module, self.task, self.optimizer, self.schedule, self.mesh)
        window.go_on()
        self.clock.lap()
        while self.step < config.steps:
            place = self.batches.get_state()
            batch = next(self.batches)
            compiled = self.trained.is_new(batch)
            self.state, sums = update(self.state, steps.place(batch, self.mesh, self.balanced))
            self.step += 1
            window.add(sums, batch)
            self.guard.add(self.step, sums, place)
            self.watchdog.beat()
            self.checkpoints.check()
            self.clock.step(compiled)
            last = self.step == config.steps
            stopping = stop.agreed(self.step) and not last
            if last or self.step == 1 or due(self.step, config.log_every):
                self.reports.write(self.step, "train", window.take())
            measuring = last or due(self.step, config.evaluate_every)
            if not (measuring or stopping or due(self.step, config.checkpoint_every)):
                continue
            window.pause()
            self.clock.lap()
            if measuring and not stopping:
                self.evaluate()
            self.guard.settle()
            if last or stopping or due(self.step, config.checkpoint_every):
                self.save(evaluation_due=measuring and stopping)
                self.clock.part("save")
            window.go_on()
            if stopping:
                self.checkpoints.wait()
                self.reports.say(f"stopped at step {self.step:,}, saved; run the same command to go on")
                return PREEMPTED
        self.checkpoints.wait()
        values = self.values or self.evaluate()
        if jax.process_index() == 0:
            files.write_json(self.workdir / results.NAME, results.content(self.step, self.config, values))
        return 0

    def catch_up(self) -> None:
        """What the run did not get to when it was stopped: an evaluation, and the copy among the best checkpoints."""
        if self.progress["evaluation_due"]:
            self.evaluate()
            if due(self.step, self.config.train.checkpoint_every):  # else these measures compete for nothing
                self.save(force=True)
        elif self.values:
            self.save()

    def save(self, evaluation_due: bool = False, force: bool = False) -> None:
        """Saves the state; it competes for the best checkpoints only with measures of its own."""
        values = self.values if self.measured_at == self.step else {}
        progress = {
            "evaluation_due": evaluation_due,
            "window": self.window.state(),
            "skipped_in_a_row": self.guard.row,
            "data": self.dataset.key,
        }
        self.checkpoints.save(self.state, self.pipeline.place(self.batches), values, progress, force)

    def evaluate(self) -> dict[str, float]:
        """Measures of the validation split, a few decoded examples, and both reported."""
        config = self.config
        if "validation" not in self.dataset.splits:
            return {}
        self.clock.lap()
        variables = evaluation.weights(config, self.state.params, self.state.variables)
        part = ("validation", config.evaluate.examples)
        batches, size, cut = self.pipeline.evaluate(*part), self.pipeline.size(*part), self.pipeline.cut(*part)
        values = evaluation.measure(config, self.measure, variables, self.watched(batches), size, self.mesh, cut)
        if config.evaluate.decode_examples and self.task.score is not None:
            rest = {name: value for name, value in variables.items() if name != "params"}
            model = Model(self.module, variables["params"], rest, config, self.tokenizers)
            scores, records = evaluation.decode(model, self.dataset, "validation", config.evaluate.decode_examples)
            values |= scores
            self.show(records[: config.evaluate.samples])
        self.reports.write(self.step, "validation", values)
        self.values, self.measured_at = values, self.step
        self.clock.part("evaluation", self.compiling)
        return values

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an evaluation, with a sign of life at each; adds up in `compiling` what compiling took."""
        self.compiling, begun = 0.0, self.clock.now()
        known: list[float] = []
        fresh: list[float] = []
        for batch in batches:
            self.watchdog.beat()
            seconds = fresh if self.evaluated.is_new(batch) else known
            yield batch
            begun, before = self.clock.now(), begun
            seconds.append(begun - before)
        usual = sum(known) / len(known) if known else 0.0
        self.compiling = sum(max(each - usual, 0.0) for each in fresh)

    def show(self, records: list[dict]) -> None:
        if jax.process_index() == 0:
            files.write_json(self.workdir / "samples" / f"step-{self.step}.json", records)
        for record in records:
            self.reports.say(f"  {record['input']}\n    -> {record['output']}\n     = {record['reference']}")


class Window:
    """Sums since the last report, kept on the device until somebody looks.

    Args:
      saved: what `state` returned, in a run that is resumed between two reports.
      parts: processes that fill other rows of a batch than this one, itself included.
    """

    def __init__(self, saved: dict[str, Any] | None = None, parts: int = 1) -> None:
        self.parts = parts
        self._begin(saved)

    def _begin(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {"total": {}, "slots": [0.0, 0.0], "seconds": 0.0, "steps": 0}
        self.total: Sums = {name: tuple(map(np.float64, pair)) for name, pair in saved["total"].items()}
        self.slots, self.seconds, self.steps = np.array(saved["slots"]), saved["seconds"], saved["steps"]
        self.sums: list[Sums] = []
        self.begun = time.monotonic()

    def add(self, sums: Sums, batch: Batch) -> None:
        if self.sums:
            # One step in flight: the host prepares the next batch meanwhile, and never runs ahead further.
            jax.block_until_ready(self.sums[-1])
        self.sums.append(sums)
        self.slots += packing.padding(batch)
        self.steps += 1

    def pause(self) -> None:
        """Stops the clock once the steps so far are done: what follows is not training."""
        jax.block_until_ready(self.sums[-1:])
        self.seconds += time.monotonic() - self.begun

    def go_on(self) -> None:
        """Starts the clock again after `pause`."""
        self.begun = time.monotonic()

    def state(self) -> dict[str, Any]:
        """JSON values, from which a resumed run reports exactly what this one would. The clock must be stopped."""
        total = {name: [np.asarray(part).tolist() for part in pair] for name, pair in self._added().items()}
        return {"total": total, "slots": self.slots.tolist(), "seconds": self.seconds, "steps": self.steps}

    def take(self) -> dict[str, float]:
        """Means over the window, which begins anew, with its rates, `padding` (share of slots), `skipped` (steps left
        out, which count nowhere else but in the rates) and how many of these `spiked`, if such are.

        `tokens_per_second` are the tokens that a model reads, of both sides, padding left out, whatever the task; on
        several processes this one's times their number.
        """
        total = self._added()
        seconds = self.seconds + time.monotonic() - self.begun
        values = metrics.divide(total)
        values["tokens_per_second"] = float(self.slots[1] - self.slots[0]) * self.parts / seconds
        values["steps_per_second"] = self.steps / seconds
        values["padding"] = float(self.slots[0] / max(self.slots[1], 1.0))
        values |= {name: float(total[name][0]) for name in ("skipped", "spiked") if name in total}
        self._begin()
        return values

    def _added(self) -> Sums:
        for sums in jax.device_get(self.sums):
            self.total = metrics.add(self.total, sums) if self.total else sums
        self.sums = []
        return self.total


def measures_as(config: Config, about: dict[str, Any]) -> bool:
    """True if the measures in a checkpoint's `about` were taken with the evaluation and decoding of `config`."""
    saved, here = about.get("config") or {}, json.loads(overrides.to_json(config))
    return all(saved.get(part, here[part]) == here[part] for part in ("evaluate", "decode"))


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def tokenizers_of(config: Config, dataset: Dataset, workdir: Path) -> Tokenizers:
    """The run's tokenizers: those saved with it, else trained (or loaded) as the config says."""
    if (workdir / "config.json").exists():
        return Tokenizers.load(workdir)
    return Tokenizers.build(config.data, dataset.splits["train"], tasks.get(config.task.name).roles)


def resolve(config: Config, dataset: Dataset, tokenizers: Tokenizers) -> Config:
    """The config with the sizes that only data and tokenizers know.

    Raises:
      ConfigError: it names another number of classes than the data has, or fewer rows than the tokenizer has tokens.
    """
    names = tasks.get(config.task.name).classes or dataset.classes
    classes, head = None if names is None else len(names), config.model.head
    if head.kind in ("classes", "slots") and classes is not None and head.classes not in (None, classes):
        raise ConfigError(f"config.model.head.classes: got {head.classes}, expected {classes} (the data's) or None")
    model = build.resolve(config.model, tokenizers.source.vocab, tokenizers.target.vocab, classes)
    for part in model.parts:
        rows = getattr(model, part).embed.vocab
        size = (tokenizers.source if part.endswith("encoder") else tokenizers.target).size
        if rows < size:  # JAX reads NaN beyond the end of a table
            expected = f"at least {size}, the tokenizer's tokens; take the tokenizer that the model was made for"
            raise ConfigError(f"config.model.{part}.embed.vocab: got {rows}, expected {expected}")
    decodes = model.decoder is not None or model.recurrent_decoder is not None
    side = tokenizers.target if decodes else tokenizers.source
    task = dataclasses.replace(config.task, classes=names or (), vocab=side.size)
    resolved = dataclasses.replace(config, model=model, task=task)
    tasks.get(config.task.name).refuse(resolved)
    if "validation" in dataset.splits:
        measuring.refuse_unknown(resolved)
    return resolved
