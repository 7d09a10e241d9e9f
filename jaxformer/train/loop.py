"""A run, from a config to a finished workdir: the same command starts it and resumes it."""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxformer import checks, metrics, overrides, tasks
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import Config, ConfigError
from jaxformer.data import packing, sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.train import evaluate as evaluation
from jaxformer.train import optim, start
from jaxformer.train import step as steps
from jaxformer.train.hooks import Reports
from jaxformer.types import Batch, Sums, TrainState

PREEMPTED = 143


def train(config: Config, workdir: str | Path, origin: start.Origin = start.RUN) -> int:
    """Trains `config` in `workdir` until `config.train.steps`, resuming whatever is there.

    Args:
      origin: how `config.init.directory` is read, if the run starts from one.

    Returns:
      0 when finished, 143 when a SIGTERM or SIGINT asked it to stop and the state was saved.

    Raises:
      ConfigError: the config contradicts itself, the data or the run that `workdir` already holds.
    """
    workdir = Path(workdir).absolute()
    config, tokenizers = start.with_model(config, workdir, origin)
    refuse_other_config(config, workdir)
    mesh = meshes.make(config.mesh)
    dataset = sources.build(config.data)
    tokenizers = tokenizers or tokenizers_of(config, dataset, workdir)
    resolved = resolve(config, dataset, tokenizers)
    checks.divides(resolved, mesh.shape)
    prepare(resolved, workdir, tokenizers)
    with jax.set_mesh(mesh):
        return Run(resolved, workdir, mesh, dataset, tokenizers, origin).finish()


class Run:
    """The parts of a run and how they meet."""

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
        shapes = nn.meta.unbox(build.shapes(self.module))["params"]
        self.schedule = optim.schedule(config.schedule, config.train.steps, width_of(config))
        names = logical_names(self.module)
        self.optimizer = optim.optimizer(config.optimizer, self.schedule, shapes, names)
        self.checkpoints = Checkpoints(workdir, config.checkpoint)
        self.batches = self.pipeline.train()
        self.state = self.first_state()
        self.step = int(self.state.step)
        self.reports = Reports(workdir, config.train.steps, self.step)
        self.measure = evaluation.make(config, self.module)
        self.values: dict[str, float] = {}
        self.measured_at = -1
        self.stop_asked = False
        if jax.process_index() == 0 and not self.step:
            (workdir / "parameters.txt").write_text(optim.decay_table(shapes, config.optimizer, names) + "\n")
        count = build.count(self.state.params)
        begun = f"resumed at step {self.step:,}" if self.step else "started"
        where = f"{jax.device_count()} {jax.default_backend()} device(s)"
        self.reports.say(f"{begun}: {count:,} parameters, listed in parameters.txt; {where}")
        for side, (kernel, reason) in self.attentions.items():
            self.reports.say(f"{side} attention: {kernel} ({reason})")

    def first_state(self) -> TrainState:
        """The newest checkpoint's state, or a fresh one, or one that starts from another run's parameters."""
        config = self.config
        target = steps.abstract(config, self.module, self.optimizer, self.mesh)
        restored = self.checkpoints.restore(target)
        if restored is not None:
            state, data_state = restored
            self.batches.set_state(data_state)
            return state
        state = steps.create(config, self.module, self.optimizer, self.mesh)
        return start.warm(state, config, self.origin) if config.init.directory else state

    def finish(self) -> int:
        """Trains to the end. Whatever happens, what was saved stays whole and errors of saving surface."""
        previous = {s: signal.signal(s, self.ask_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self.loop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.reports.close()
            self.checkpoints.close()

    def ask_stop(self, number: int, frame: Any) -> None:
        """The first signal stops at the next step boundary, after saving; a second one at once."""
        if self.stop_asked:
            sys.exit(PREEMPTED)
        self.stop_asked = True

    def loop(self) -> int:
        config = self.config.train
        if self.step >= config.steps and (self.workdir / "result.json").exists():
            self.reports.say("finished before; raise config.train.steps to go on")
            return 0
        update = steps.make(self.config, self.module, self.task, self.optimizer, self.schedule, self.mesh)
        window = Window()
        while self.step < config.steps:
            batch = next(self.batches)
            self.state, sums = update(self.state, steps.place(batch, self.mesh, self.balanced))
            self.step += 1
            window.add(sums, batch)
            self.checkpoints.check()
            last = self.step == config.steps
            if last or self.step == 1 or due(self.step, config.log_every):
                self.reports.write(self.step, "train", window.values())
                window = Window()
            if last or due(self.step, config.evaluate_every):
                window.pause()
                self.evaluate()
                window.go_on()
            if last or self.stop_asked or due(self.step, config.checkpoint_every):
                window.pause()
                self.save()
                window.go_on()
            if self.stop_asked and not last:
                self.checkpoints.wait()
                self.reports.say(f"stopped at step {self.step:,}, saved; run the same command to go on")
                return PREEMPTED
        self.checkpoints.wait()
        if jax.process_index() == 0:
            values = self.values or self.evaluate()
            evaluation.write_json(self.workdir / "result.json", {"step": self.step, **values})
        return 0

    def save(self) -> None:
        """Saves the state; it competes for the best checkpoints only with measures of its own."""
        values = self.values if self.measured_at == self.step else {}
        self.checkpoints.save(self.state, self.batches.get_state(), values)

    def evaluate(self) -> dict[str, float]:
        """Measures of the validation split, a few decoded examples, and both reported."""
        config = self.config
        if "validation" not in self.dataset.splits:
            return {}
        variables = evaluation.weights(config, self.state.params, self.state.variables)
        batches = self.pipeline.evaluate("validation", examples=config.evaluate.examples)
        size = self.pipeline.size("validation")
        values = evaluation.measure(config, self.measure, variables, batches, size, self.mesh)
        if config.evaluate.decode_examples and self.task.score is not None:
            rest = {name: value for name, value in variables.items() if name != "params"}
            model = Model(self.module, variables["params"], rest, config, self.tokenizers)
            scores, records = evaluation.decode(model, self.dataset, "validation", config.evaluate.decode_examples)
            values |= scores
            self.show(records[: config.evaluate.samples])
        self.reports.write(self.step, "validation", values)
        self.values, self.measured_at = values, self.step
        return values

    def show(self, records: list[dict]) -> None:
        if jax.process_index() == 0:
            evaluation.write_json(self.workdir / "samples" / f"step-{self.step}.json", records)
        for record in records:
            self.reports.say(f"  {record['input']}\n    -> {record['output']}\n     = {record['reference']}")


class Window:
    """Sums since the last report, kept on the device until somebody looks."""

    def __init__(self) -> None:
        self.sums: list[Sums] = []
        self.slots = np.zeros(2)
        self.begun, self.seconds = time.monotonic(), 0.0

    def add(self, sums: Sums, batch: Batch) -> None:
        if self.sums:
            # One step in flight: the host prepares the next batch meanwhile, and never runs ahead further.
            jax.block_until_ready(self.sums[-1])
        self.sums.append(sums)
        self.slots += packing.padding(batch)

    def pause(self) -> None:
        """Stops the clock once the steps so far are done: what follows is not training."""
        jax.block_until_ready(self.sums[-1:])
        self.seconds += time.monotonic() - self.begun

    def go_on(self) -> None:
        """Starts the clock again after `pause`."""
        self.begun = time.monotonic()

    def values(self) -> dict[str, float]:
        """Means over the window, with `tokens_per_second` (weighted labels) and `padding` (share of slots)."""
        total: Sums = {}
        for sums in jax.device_get(self.sums):
            total = metrics.add(total, sums) if total else sums
        seconds = self.seconds + time.monotonic() - self.begun
        values = metrics.divide(total)
        values["tokens_per_second"] = float(total["loss"][1]) / seconds
        values["steps_per_second"] = len(self.sums) / seconds
        values["padding"] = float(self.slots[0] / max(self.slots[1], 1.0))
        return values


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def refuse_other_config(config: Config, workdir: Path) -> None:
    """A workdir belongs to one config; resuming it with another would mix two runs.

    Raises:
      ConfigError: what differs.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    old = overrides.read(workdir)
    differing = overrides.differences(config, old)
    if differing:
        raise ConfigError(
            f"workdir {workdir}: holds a run of a different config ({'; '.join(differing)}), expected the same one; "
            "use another --workdir"
        )


def tokenizers_of(config: Config, dataset: Dataset, workdir: Path) -> Tokenizers:
    """The run's tokenizers: those saved with it, else trained (or loaded) as the config says."""
    if (workdir / "config.json").exists():
        return Tokenizers.load(workdir)
    return Tokenizers.build(config.data, dataset.splits["train"], tasks.get(config.task.name).roles)


def resolve(config: Config, dataset: Dataset, tokenizers: Tokenizers) -> Config:
    """The config with the sizes that only data and tokenizers know."""
    classes = None if dataset.classes is None else len(dataset.classes)
    model = build.resolve(config.model, tokenizers.source.vocab, tokenizers.target.vocab, classes)
    decodes = model.decoder is not None or model.recurrent_decoder is not None
    side = tokenizers.target if decodes else tokenizers.source
    task = dataclasses.replace(config.task, classes=dataset.classes or (), vocab=side.size)
    return dataclasses.replace(config, model=model, task=task)


def prepare(config: Config, workdir: Path, tokenizers: Tokenizers) -> None:
    """Writes what a workdir says about its run. `config.json` comes last: with it the workdir is a run."""
    if jax.process_index() != 0:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "config.json").exists():
        tokenizers.save(workdir)
    evaluation.write_json(workdir / "environment.json", environment())
    temporary = workdir / "config.json.tmp"
    temporary.write_text(overrides.to_json(config), encoding="utf-8")
    os.replace(temporary, workdir / "config.json")


def environment() -> dict[str, Any]:
    """What a figure depends on besides the config: versions, devices, the commit and the command."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "jaxformer")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "commit": git.stdout.strip() or None,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def width_of(config: Config) -> int:
    """The model width that Noam's rule speaks of: the decoder's, else the encoder's."""
    model = config.model
    return (model.decoder or model.recurrent_decoder or model.encoder or model.recurrent_encoder).width


def logical_names(module: nn.Module) -> Any:
    """For every parameter, the tuple of its axes' logical names."""
    boxed = build.shapes(module)["params"]
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    return jax.tree.map(lambda x: tuple(x.names) if is_box(x) else (), boxed, is_leaf=is_box)
