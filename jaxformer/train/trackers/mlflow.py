"""MLflow: a SQLite database in `mlflow/` of the workdir, or the store that `MLFLOW_TRACKING_URI` names.

MLflow can add points to a metric but not remove any. A point that it has already is not added again, so a run that is
resumed exactly where it stopped goes on in its MLflow run. If that holds points that the run has not kept, a new MLflow
run of the same name gets the rows that are kept, and the old one is deleted, which MLflow can undo until `mlflow gc`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxformer.runtime import files
from jaxformer.train.trackers import PROJECT, Row, RunInfo, flatten

MAX_METRICS, MAX_PARAMS, MAX_TEXT = 1000, 100, 5000
"""Limits of one call of MLflow: metrics, parameters, and characters of a parameter's value."""

Point = tuple[str, float, int, int]
"""Metric, value, Unix milliseconds, step."""


class MLflow:
    """See `Tracker`."""

    modules = ("mlflow", "sqlalchemy", "alembic")

    def start(self, run: RunInfo) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        folder = run.workdir / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        self.mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every table
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self.client, self.run, self.file = self.mlflow.MlflowClient(uri), run, folder / "run.json"
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            self.experiment = experiment.experiment_id
        elif os.environ.get("MLFLOW_TRACKING_URI"):
            self.experiment = self.client.create_experiment(name)
        else:
            self.experiment = self.client.create_experiment(name, (folder / "artifacts").as_uri())

    def config(self, values: Mapping[str, Any]) -> None:
        texts = ((_clean(name), json.dumps(value)[:MAX_TEXT]) for name, value in flatten(values).items())
        self.values = {name: text.strip('"') for name, text in texts}

    def rewind(self, rows: Sequence[Row]) -> None:
        kept = {point for row in rows for point in _points(row)}
        previous = self._previous_run()
        held = set() if previous is None else set(self._held_points(previous, rows))
        if previous is not None and held <= kept:
            self.id = previous
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {"jaxformer.run": self.run.id} | ({"jaxformer.group": self.run.group} if self.run.group else {})
            tags |= {} if previous is None else {"jaxformer.replaces": previous}
            created = self.client.create_run(self.experiment, run_name=self.run.name, tags=tags)
            self.id = created.info.run_id
        self._set_config()
        self._log(sorted(kept - held if self.id == previous else kept, key=lambda point: (point[3], point[0])))
        files.write_json(self.file, {"run_id": self.id})
        if previous not in (None, self.id):
            self.client.delete_run(previous)

    def scalars(self, rows: Sequence[Row]) -> None:
        self._log([point for row in rows for point in _points(row)])

    def finish(self, measures: Sequence[Row]) -> None:
        held = {(point.key, point.step): point.value for point in self._latest(measures)}
        points = [point for row in measures for point in _points(row)]
        self._log([point for point in points if held.get((point[0], point[3])) != point[1]])
        self.client.set_terminated(self.id, "FINISHED" if measures else "KILLED")

    def _previous_run(self) -> str | None:
        """Id of the MLflow run that an earlier start wrote to, if it is still there."""
        try:
            found = self.client.get_run(files.read_json(self.file)["run_id"])
        except (FileNotFoundError, KeyError, self.mlflow.MlflowException):
            # Not in this store, or the process died before it could note it: the tag says which.
            query = f"tags.`jaxformer.run` = '{self.run.id}'"
            runs = self.client.search_runs([self.experiment], query, max_results=1)
            return runs[0].info.run_id if runs else None
        return found.info.run_id if found.info.lifecycle_stage == "active" else None

    def _held_points(self, run_id: str, rows: Sequence[Row]) -> Iterator[Point]:
        """All points of a run but final measures of steps that it has kept."""
        last = max((row.step for row in rows), default=-1)
        for name in self.client.get_run(run_id).data.metrics:
            for point in self.client.get_metric_history(run_id, name):
                if not name.startswith("final/") or point.step > last:
                    yield (name, point.value, point.timestamp, point.step)

    def _latest(self, measures: Sequence[Row]) -> Iterator[Any]:
        """The newest point of each final measure."""
        names = {point[0] for row in measures for point in _points(row)}
        for name in names & self.client.get_run(self.id).data.metrics.keys():
            yield self.client.get_metric_history(self.id, name)[-1]

    def _set_config(self) -> None:
        """Writes the config as parameters. MLflow changes none: one with another value is a tag `now.<name>`."""
        entities = self.mlflow.entities
        present = self.client.get_run(self.id).data.params
        params = [entities.Param(name, text) for name, text in self.values.items() if name not in present]
        tags = [
            entities.RunTag(f"now.{name}", text)
            for name, text in self.values.items()
            if present.get(name, text) != text and not name.startswith("environment.")
        ]
        for first in range(0, max(len(params), len(tags)), MAX_PARAMS):
            part = slice(first, first + MAX_PARAMS)
            self.client.log_batch(self.id, (), params[part], tags[part])

    def _log(self, points: Sequence[Point]) -> None:
        for first in range(0, len(points), MAX_METRICS):
            metrics = [self.mlflow.entities.Metric(*point) for point in points[first : first + MAX_METRICS]]
            self.client.log_batch(self.id, metrics)


def _points(row: Row) -> Iterator[Point]:
    for name, value in row.numbers().items():
        yield (_clean(name), value, round(row.wall_time * 1000), row.step)


def _clean(name: str) -> str:
    """`name` with the characters that MLflow does not take replaced."""
    return re.sub(r"[^\w. :/-]", "_", name, flags=re.ASCII)


TRACKER = MLflow
