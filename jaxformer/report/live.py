"""`jaxformer report --serve`: a page that follows runs while they train, on this machine only.

The page asks every two seconds for the data sets of its curves, and gets all of them whole whenever a file of a run has
changed. So it has nothing to join: a run that was killed and resumed cuts `metrics.jsonl` back to its checkpoint and
writes the steps after it again, and the page shows what is in the file, each step once. Rows are read as
`runs.read` reads them: the last row of a step counts, and a line that is being written is left for the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxformer.errors import ConfigError
from jaxformer.report import curves, page, runs, sections, templating
from jaxformer.report.runs import Run
from jaxformer.runtime import secrets
from jaxformer.runtime.local_server import LocalHandler, LocalServer

REST_FACTOR = 4.0
"""Runs are read again after this many times the seconds that reading took, at most: reading must not slow training."""

WATCHED = ("metrics.jsonl", "config.json", "result.json", "environment.json", "parameters.txt")
"""Files of a run whose change is a change of the page, beside evaluations and samples."""


class State:
    """Contents of the page, read again when files change. Its methods may be called from several threads.

    Args:
      workdirs: as `report.write` takes them; folders of seeds are looked into each time.
    """

    def __init__(self, workdirs: Sequence[str | os.PathLike[str]]) -> None:
        self.workdirs = list(workdirs)
        self._lock = threading.Lock()
        self._version, self._runs = "", []
        self._answer: dict[str, Any] = {}
        self._next = 0.0

    def page(self) -> str:
        """The page as HTML. It requests the data of its curves after it has loaded."""
        with self._lock:
            self._refresh()
            return page.render(self._runs, live=self._answer["page"])

    def data(self, version: str) -> dict[str, Any]:
        """News since `version`, an earlier answer's: "page" changes if the page has to be loaded again,
        "version" if there is "data", the columns of curves by name, with "results" and "status" as HTML and text."""
        with self._lock:
            self._refresh()
            if version == self._version:
                return {"page": self._answer["page"], "version": version}
            return self._answer

    def _refresh(self) -> None:
        """Reads the runs, if a file has changed since they were read and some time has passed."""
        if self._answer and time.monotonic() < self._next:
            return
        begun = time.monotonic()
        paths = runs.expand(self.workdirs)
        version = _version(paths)  # before the files are read: what changes meanwhile is read the next time
        if version != self._version:
            found = runs.read(paths)
            self._answer = {
                "page": _page_key(found),
                "version": version,
                "data": {name: dict(data) for chart in curves.all_charts(found) for name, data in chart.data.items()},
                "results": templating.blocks_html(sections.results(found)),
                "status": _status(found),
            }
            self._runs, self._version = found, version
        self._next = time.monotonic() + REST_FACTOR * (time.monotonic() - begun)


def _version(paths: Sequence[Path]) -> str:
    """A text that differs whenever a file of the runs was replaced, grew, shrank or was written."""
    digest = hashlib.sha256()
    for path in paths:
        watched = [path / name for name in WATCHED]
        for file in [*watched, *sorted(path.glob("eval-*.json")), *sorted((path / "samples").glob("*.json"))]:
            try:
                facts = os.stat(file)
            except OSError:
                continue
            digest.update(f"{file} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _page_key(found: Sequence[Run]) -> str:
    """A text that differs whenever the page has other parts than curves with more points."""
    parts = [(chart.name, chart.spec["layer"][0]["encoding"]["color"]["scale"]) for chart in curves.all_charts(found)]
    others = [(r.name, sorted(r.samples), r.evaluations, bool(r.result), r.raw_config) for r in found]
    return hashlib.sha256(json.dumps([parts, others], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _status(found: Sequence[Run]) -> str:
    """How far the runs are, in words."""
    words = []
    for run in found:
        planned = f" of {run.config.train.steps:,}" if run.config else ""
        name = f"{run.name}: " if run.number else ""
        words.append(f"{name}step {run.step:,}{planned}{', finished' if run.result else ''}")
    return f"live, {time.strftime('%H:%M:%S')}: {'; '.join(words)}"


# --- the server -------------------------------------------------------------------------------------------------------


class Server(LocalServer):
    """The server of one `State`. `url` is the address of the page."""

    def __init__(self, state: State, port: int) -> None:
        self.state = state
        super().__init__(port, Handler)


class Handler(LocalHandler):
    """Answers the page and its questions for data, to requests that name this machine as their host."""

    server: Server  # ty: ignore[incompatible-mutable-override]

    def do_GET(self) -> None:
        """The page at /, JSON at /data."""
        if not self.names_this_server():
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                self.send_text(HTTPStatus.OK, "text/html", self.server.state.page())
            elif url.path == "/data":
                version = parse_qs(url.query).get("version", [""])[0]
                text = json.dumps(self.server.state.data(version), allow_nan=False)
                self.send_text(HTTPStatus.OK, "application/json", text)
            else:
                self.send_text(HTTPStatus.NOT_FOUND, "text/plain", "not found\n")
        except ConfigError as error:  # a run was moved or deleted
            self.send_text(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{secrets.redact(str(error))}\n")


def serve(workdirs: Sequence[str | os.PathLike[str]], port: int = 0) -> int:
    """Serves the page of runs until it is interrupted, and returns the exit code 0. Prints the address.

    Raises:
      ConfigError: a workdir is none, or the port is taken.
    """
    state = State(workdirs)
    state.data("")  # says now what is wrong with the workdirs
    with Server(state, port) as server:
        return server.run(f"following {len(state.workdirs)} workdir(s) at {server.url} (Ctrl-C ends it)")
