"""Trackio: its database in `trackio/` of the workdir, or in the folder that `TRACKIO_DIR` names.

Rows are written to the local database, by the functions with which trackio itself imports tables: only there can a
run's rows be replaced, and written with their own times. `trackio sync` copies a database to a Space afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from jaxformer.train.trackers import PROJECT, Row, RunInfo

LOCAL_ONLY = "rows can be replaced, as a resumed run needs, in a local database only; copy that with `trackio sync`"


_folder_in_use = threading.Lock()
"""trackio has one folder at a time, and runs of one process (--seeds, a sweep of one program) have one each."""


class Trackio:
    """See `Tracker`."""

    modules = ("trackio",)
    refused_variables: ClassVar = {"TRACKIO_SPACE_ID": LOCAL_ONLY, "TRACKIO_SERVER_URL": LOCAL_ONLY}

    def start(self, run: RunInfo) -> None:
        own = os.environ.get("TRACKIO_DIR")
        self.folder = Path(own) if own else run.workdir / "trackio"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.module: Any = importlib.import_module("trackio.sqlite_storage")
        self.storage = self.module.SQLiteStorage
        self.run, self.project = run, os.environ.get("TRACKIO_PROJECT") or PROJECT
        self.storage.validate_project_name(self.project)

    def config(self, values: Mapping[str, Any]) -> None:
        self.values = {**values, "_Group": self.run.group or None, "_Created": _as_text(datetime.now(UTC))}

    def rewind(self, rows: Sequence[Row]) -> None:
        with self._own_folder():
            self.storage.delete_run(self.project, self.run.name, run_id=self.run.id)
        self._add(rows, self.values)

    def scalars(self, rows: Sequence[Row]) -> None:
        self._add(rows)

    def finish(self, measures: Sequence[Row]) -> None:
        self._add(measures)

    def _add(self, rows: Sequence[Row], config: Mapping[str, Any] | None = None) -> None:
        if config is not None and not rows:  # a config is stored with a row of its run only
            self.pending = config
            return
        config, self.pending = config or getattr(self, "pending", None), None
        with self._own_folder():
            self.storage.bulk_log(
                project=self.project,
                run=self.run.name,
                run_id=self.run.id,
                metrics_list=[row.numbers() for row in rows],
                steps=[row.step for row in rows],
                timestamps=[_as_text(datetime.fromtimestamp(row.wall_time, UTC)) for row in rows],
                config=dict(config) if config else None,
            )

    @contextlib.contextmanager
    def _own_folder(self) -> Generator[None]:
        """Makes trackio use this run's folder, which it otherwise reads once, when it is imported."""
        with _folder_in_use:
            self.module.TRACKIO_DIR = self.folder
            yield


def _as_text(time: datetime) -> str:
    return time.isoformat()


TRACKER = Trackio
