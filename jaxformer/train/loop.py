"""`jaxformer train`: the same command starts a run and resumes it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import jax

from jaxformer import storage
from jaxformer.config import Config, checks
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import StorageError
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import files, object_store, secrets
from jaxformer.tasks import _datasets
from jaxformer.train import results, trackers, warm_start
from jaxformer.train import step as steps
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.preemption import EXIT_PREEMPTED, PreemptionListener
from jaxformer.train.run import Run
from jaxformer.train.setup import build_or_load_tokenizers, resolve_config, with_chat_template
from jaxformer.train.timing import is_due
from jaxformer.train.workdir import check_same_config
from jaxformer.types import Batch, Sums


def train(config: Config, workdir: str | Path, init_format: warm_start.InitFormat = warm_start.RUN_FORMAT) -> int:
    """Trains `config` in `workdir` until `config.train.steps`, resuming the run that is there.

    Args:
      workdir: a folder, or an address in a bucket (`gs://`, `s3://`).
      init_format: how to read `config.init.directory`, if the run starts from one.

    Returns:
      The exit code: 0 when finished, 143 when a signal or the deadline stopped it and the state was saved.

    Raises:
      ConfigError: the config contradicts itself, the data or the run in `workdir`; another process trains there; too
        many steps in a row were skipped.
      StorageError: something could not be written. Earlier checkpoints are complete.
    """
    stop = PreemptionListener(config.train.deadline)  # which counts from here: fetching a run takes time
    is_address = object_store.is_url(workdir)
    workdir = workdir if is_address else Path(workdir).absolute()
    try:
        if is_address:
            with storage.TrainingSession(str(workdir)) as session:
                return _train(config, session.root, init_format, stop, session)
        return _train(config, Path(workdir), init_format, stop)
    except OSError as error:
        where = error.filename or workdir
        raise StorageError(
            f"workdir {workdir}: got {error.strerror or error} ({where}), expected to read and write there; check the "
            "disk, then run the same command: earlier checkpoints are complete"
        ) from error


def _train(
    config: Config,
    workdir: Path,
    init_format: warm_start.InitFormat,
    stop: PreemptionListener,
    session: storage.TrainingSession | None = None,
) -> int:
    """Checks everything that can be checked before the first write, then trains under the workdir's lock."""
    config, mesh, dataset, tokenizers, notes = prepare(config, workdir, init_format)
    with jax.set_mesh(mesh):
        run = Run(config, workdir, mesh, dataset, tokenizers, init_format)
        run.session = session
        with WorkdirLock(workdir, is_shared=session is None or session.disks is None):
            run.restore(notes)
            with contextlib.closing(run), stop, run.watchdog:
                if stop.is_off_main_thread:
                    run.reporter.log("not on the main thread: signals do not stop this run; train.deadline does")
                return training_loop(run, stop)


def prepare(
    config: Config, workdir: Path, init_format: warm_start.InitFormat
) -> tuple[Config, jax.sharding.Mesh, Dataset, Tokenizers | None, list[str]]:
    """The resolved config of a run, its mesh, data and tokenizers, and lines to log. Writes nothing.

    Raises:
      ConfigError: the config contradicts itself, the data or the run in `workdir`.
    """
    secrets.reject(dataclasses.asdict(config), "config")
    trackers.check_available(config.train.trackers)
    config, tokenizers = warm_start.adopt_model(config, workdir, init_format)
    notes = check_same_config(config, workdir)
    mesh = meshes.make(config.mesh)
    checks.size.check_memory(config, mesh.shape, meshes.device_memory(mesh))
    dataset = _datasets.build(config)
    tokenizers = tokenizers or build_or_load_tokenizers(config, dataset, workdir)
    tokenizers = with_chat_template(config, tokenizers, workdir)
    config = resolve_config(config, dataset, tokenizers)
    checks.mesh.check_divisibility(config, mesh.shape)
    checks.size.check_memory(config, mesh.shape, meshes.device_memory(mesh))  # now with the tokenizer's vocabulary
    return config, mesh, dataset, tokenizers, notes


def training_loop(run: Run, stop: PreemptionListener) -> int:
    """Trains a restored run to `config.train.steps`, or until it has to stop. Returns the exit code.

    At every step: next batch, train step, log. At some: evaluate, save. At the end: evaluate, write `result.json`. The
    end comes sooner if `config.train.patience` evaluations brought nothing better.
    """
    if is_finished(run):
        return 0
    run.complete_interrupted_step()
    train_step = steps.make_train_step(run.config, run.module, run.task, run.optimizer, run.schedule, run.mesh)
    beside = () if run.teacher is None else (run.teacher,)
    run.window.resume()
    run.clock.lap()
    while run.has_steps_left:
        position = run.batches.get_state()
        batch = next(run.batches)
        compiles = run.train_shapes.is_new(batch)
        run.state, sums = train_step(run.state, steps.shard_batch(batch, run.mesh, run.balanced), *beside)
        record(run, sums, batch, position, compiles)
        stopping = stop.should_stop(run.step) and run.step < run.config.train.steps
        evaluation_due, save_due = due(run, stopping)
        if evaluation_due or save_due:
            run.window.pause()
            evaluate_and_save(run, stopping)
            run.window.resume()
        if stopping:
            announce_stop(run)
            return EXIT_PREEMPTED
    conclude(run)
    return 0


# The parts of the loop, which runs that train together (`together`) have in common with it.


def is_finished(run: Run) -> bool:
    """True if a restored run has nothing left to do, which is logged."""
    if run.has_steps_left or results.finished_result(run.workdir) is None:
        return False
    field = "steps" if run.step >= run.config.train.steps else "patience"
    run.reporter.log(f"the run is finished; raise config.train.{field} to continue")
    return True


def record(run: Run, sums: Sums, batch: Batch, position: dict[str, int], compiles: bool) -> None:
    """Counts a step that has been started, and reports where that is due.

    Args:
      position: state of the batches before this one.
      compiles: the batch has a new shape.

    Raises:
      ConfigError: too many steps in a row were skipped.
    """
    run.step += 1
    run.window.add(sums, batch)
    run.guard.add(run.step, sums, position)
    run.watchdog.heartbeat()
    run.checkpoints.check()
    if run.session is not None:
        run.session.check()
    run.clock.record_step(compiles)
    run.heap.after_step()
    if run.step in (1, run.config.train.steps) or is_due(run.step, run.config.train.log_every):
        run.reporter.write(run.step, "train", run.window.flush() | run.progress_of_components())


def due(run: Run, stopping: bool) -> tuple[bool, bool]:
    """Whether an evaluation, and a save, are due after the current step."""
    config = run.config.train
    is_last = run.step == config.steps
    evaluation_due = is_last or is_due(run.step, config.evaluate_every)
    return evaluation_due, is_last or stopping or is_due(run.step, config.checkpoint_every)


def evaluate_and_save(run: Run, stopping: bool) -> None:
    """Does what is due after the current step. The window of the log is paused meanwhile.

    Raises:
      ConfigError: too many steps in a row were skipped, the last of which are checked only here.
    """
    evaluation_due, save_due = due(run, stopping)
    run.clock.lap()
    if evaluation_due and not stopping:
        run.evaluate()
    run.guard.check()
    if save_due or run.patience.is_exhausted:
        run.save(evaluation_due=evaluation_due and stopping)
        run.clock.record_part("save")


def announce_stop(run: Run) -> None:
    """Waits for the last save of a run that was stopped, and says so."""
    run.checkpoints.wait()
    if run.session is not None:
        run.session.flush(run.watchdog.heartbeat)
    run.reporter.log(f"stopped at step {run.step:,}, saved; run the same command to continue")


def conclude(run: Run) -> None:
    """Waits for the last save of a run that has no step left, and writes `result.json`."""
    if run.step < run.config.train.steps:
        run.reporter.log(f"stopped early at step {run.step:,}: {run.patience.describe()}")
    run.checkpoints.wait()
    values = run.values or run.evaluate()
    if jax.process_index() == 0:
        files.write_json(run.workdir / results.FILE_NAME, results.to_record(run.step, run.config, values))
    if run.session is not None:
        run.session.flush(run.watchdog.heartbeat)
