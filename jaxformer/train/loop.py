"""`jaxformer train`: the same command starts a run and resumes it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import jax

from jaxformer.config import Config, checks
from jaxformer.errors import StorageError
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import files, secrets
from jaxformer.tasks import _datasets
from jaxformer.train import results, trackers, warm_start
from jaxformer.train import step as steps
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.preemption import EXIT_PREEMPTED, PreemptionListener
from jaxformer.train.run import Run
from jaxformer.train.setup import build_or_load_tokenizers, resolve_config, with_chat_template
from jaxformer.train.timing import is_due
from jaxformer.train.workdir import check_same_config


def train(config: Config, workdir: str | Path, init_format: warm_start.InitFormat = warm_start.RUN_FORMAT) -> int:
    """Trains `config` in `workdir` until `config.train.steps`, resuming the run that is there.

    Args:
      init_format: how to read `config.init.directory`, if the run starts from one.

    Returns:
      The exit code: 0 when finished, 143 when a signal or the deadline stopped it and the state was saved.

    Raises:
      ConfigError: the config contradicts itself, the data or the run in `workdir`; another process trains there; too
        many steps in a row were skipped.
      StorageError: something could not be written. Earlier checkpoints are complete.
    """
    workdir = Path(workdir).absolute()
    try:
        return _train(config, workdir, init_format)
    except OSError as error:
        where = error.filename or workdir
        raise StorageError(
            f"workdir {workdir}: got {error.strerror or error} ({where}), expected to read and write there; check the "
            "disk, then run the same command: earlier checkpoints are complete"
        ) from error


def _train(config: Config, workdir: Path, init_format: warm_start.InitFormat) -> int:
    """Checks everything that can be checked before the first write, then trains under the workdir's lock."""
    stop = PreemptionListener(config.train.deadline)
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
    with jax.set_mesh(mesh):
        run = Run(config, workdir, mesh, dataset, tokenizers, init_format)
        with WorkdirLock(workdir):
            run.restore(notes)
            with contextlib.closing(run), stop, run.watchdog:
                if stop.is_off_main_thread:
                    run.reporter.log("not on the main thread: signals do not stop this run; train.deadline does")
                return training_loop(run, stop)


def training_loop(run: Run, stop: PreemptionListener) -> int:
    """Trains a restored run to `config.train.steps`, or until it has to stop. Returns the exit code.

    At every step: next batch, train step, log. At some: evaluate, save. At the end: evaluate, write `result.json`. The
    end comes sooner if `config.train.patience` evaluations brought nothing better.
    """
    config = run.config.train
    if (run.step >= config.steps or run.patience.is_exhausted) and results.finished_result(run.workdir) is not None:
        field = "steps" if run.step >= config.steps else "patience"
        run.reporter.log(f"the run is finished; raise config.train.{field} to continue")
        return 0
    run.complete_interrupted_step()
    train_step = steps.make_train_step(run.config, run.module, run.task, run.optimizer, run.schedule, run.mesh)
    run.window.resume()
    run.clock.lap()
    while run.step < config.steps and not run.patience.is_exhausted:
        position = run.batches.get_state()
        batch = next(run.batches)
        compiles = run.train_shapes.is_new(batch)
        run.state, sums = train_step(run.state, steps.shard_batch(batch, run.mesh, run.balanced))
        run.step += 1
        run.window.add(sums, batch)
        run.guard.add(run.step, sums, position)
        run.watchdog.heartbeat()
        run.checkpoints.check()
        run.clock.record_step(compiles)

        is_last = run.step == config.steps
        stopping = stop.should_stop(run.step) and not is_last
        if is_last or run.step == 1 or is_due(run.step, config.log_every):
            run.reporter.write(run.step, "train", run.window.flush() | run.progress_of_components())
        evaluation_due = is_last or is_due(run.step, config.evaluate_every)
        save_due = is_last or stopping or is_due(run.step, config.checkpoint_every)
        if evaluation_due or save_due:
            run.window.pause()
            run.clock.lap()
            if evaluation_due and not stopping:
                run.evaluate()
            run.guard.check()
            if save_due or run.patience.is_exhausted:
                run.save(evaluation_due=evaluation_due and stopping)
                run.clock.record_part("save")
            run.window.resume()
        if stopping:
            run.checkpoints.wait()
            run.reporter.log(f"stopped at step {run.step:,}, saved; run the same command to continue")
            return EXIT_PREEMPTED

    if run.step < config.steps:
        run.reporter.log(f"stopped early at step {run.step:,}: {run.patience.describe()}")
    run.checkpoints.wait()
    values = run.values or run.evaluate()
    if jax.process_index() == 0:
        files.write_json(run.workdir / results.FILE_NAME, results.to_record(run.step, run.config, values))
    return 0
