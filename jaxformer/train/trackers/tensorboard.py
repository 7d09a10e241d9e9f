"""TensorBoard event files in `tensorboard/` of the workdir, under tags `split/name`.

A resumed run writes them anew from the rows that it keeps, so that they never hold a step twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.train.trackers import Row, RunInfo


class TensorBoard:
    """See `Tracker`."""

    modules = ("tensorboardX",)

    def start(self, run: RunInfo) -> None:
        self.folder = run.workdir / "tensorboard"

    def config(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def rewind(self, rows: Sequence[Row]) -> None:
        from tensorboardX import SummaryWriter  # slow to import

        for events in self.folder.glob("events.out.tfevents.*"):
            events.unlink()
        self.writer = SummaryWriter(str(self.folder))
        text = json.dumps(self.values, indent=1, sort_keys=True)
        self.writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)  # a block of code
        self.scalars(rows)

    def scalars(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for tag, value in row.numbers().items():
                self.writer.add_scalar(tag, value, row.step, walltime=row.wall_time)
        self.writer.flush()

    def finish(self, measures: Sequence[Row]) -> None:
        self.scalars(measures)
        self.writer.close()


TRACKER = TensorBoard
