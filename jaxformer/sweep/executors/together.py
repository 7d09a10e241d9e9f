"""Trains all runs of a sweep as one program in this process: runs that differ in seed and rates only."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.sweep import progress, ranking
from jaxformer.sweep.planning import Plan


def check(plan: Plan, workers: int) -> None:
    """Checks that one program can train all runs.

    Raises:
      ConfigError: the runs differ in more than seed and rates, or have a setting that one program cannot honour.
    """
    if workers != 1:
        raise ConfigError(f"--workers: got {workers}, expected 1 with --executor=together, which is one program")
    from jaxformer.train import lanes

    lanes.differing_rates([run.config for run in plan.runs])


class Drawing:
    """Context manager in which a thread redraws the table, since the main thread trains.

    Attributes:
      mutex: held by whoever writes to the terminal.
    """

    def __init__(self, table: progress.Table) -> None:
        self.table, self.mutex, self.ended = table, threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._draw, name="table", daemon=True)

    def __enter__(self) -> Drawing:
        if self.table.block is not None:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread.ident is not None:
            self.thread.join()
        self.table.close()

    def _draw(self) -> None:
        while not self.ended.wait(progress.DRAW_SECONDS):
            with self.mutex:
                self.table.draw()


def execute(plan: Plan, workers: int) -> int:
    """Trains the runs as lanes of one program (`train.together`), each in its own folder with its lines in `log.txt`.

    A terminal shows a table that is redrawn in place. SIGTERM and Ctrl-C save all runs, and the same command goes on.
    A run whose loss diverges does not stop the others.

    Returns:
      0; 2 if a run failed; 143 if the sweep was stopped.
    """
    from jaxformer import report
    from jaxformer.hf import workdirs
    from jaxformer.train import together

    runs = {run.workdir.absolute(): run for run in plan.runs}
    table = progress.Table(plan.runs, plan.runs[0].config.checkpoint, len(plan.runs), has_estimate=False)
    table.log(f"{len(plan.runs)} runs: {len(plan.runs) - len(plan.unfinished)} finished, one program for all")

    def tell(event: str, workdir: Path, reason: str) -> None:
        with drawn.mutex:
            table.end(runs[workdir.absolute()], event, f"({reason})" if reason else "")
            if event == "finished":
                table.close()
                report.write_after_training(workdir)

    for run in plan.unfinished:
        table.running[run.workdir] = run, time.monotonic()
    with Drawing(table) as drawn:
        code = together.train([(run.config, run.workdir) for run in plan.runs], workdirs.ORIGIN, tell)
    ranking.write_ranking(plan)
    return code
