"""Weights & Biases: online, or offline in `wandb/` of the workdir (or of the folder that `WANDB_DIR` names).

Row n of `metrics.jsonl` is wandb's step n, and the training step is the value "step", the axis of all plots. So to keep
rows of `metrics.jsonl` is to keep as many of wandb's steps:

- Offline, a run is one folder. A resumed run writes it anew, with the rows that it keeps, and deletes the old one. If
  the old one has been uploaded (`wandb sync`), the new one has an id of its own, since offline nothing is taken back.
- Online, the server is asked to rewind the run to the last row that is kept. If it refuses, the rows that are kept are
  uploaded as a run with an id of its own.
"""

from __future__ import annotations

import importlib
import logging
import netrc
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxformer.runtime import files
from jaxformer.train.trackers import PROJECT, Row, RunInfo

LOG = logging.getLogger("jaxformer")

SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "reinit": "create_new",  # several runs of a process (--seeds) are apart
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,  # it holds the command line with its secrets; the config has it without
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB:
    """See `Tracker`."""

    modules = ("wandb",)

    def start(self, run: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.wandb, self.run = importlib.import_module("wandb"), run
        self.mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self.folder = Path(os.environ.get("WANDB_DIR") or run.workdir)
        self.file = run.workdir / "wandb" / "jaxformer.json"
        self.notes = {"attempt": 1, "uploaded": False} | (files.read_json(self.file) if self.file.exists() else {})

    def config(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def rewind(self, rows: Sequence[Row]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.mode == "online":
            held = self._open_online(len(rows))
        else:
            self._open_offline()
            held = 0
        self.notes["uploaded"] |= self.mode == "online"
        files.write_json(self.file, self.notes)
        self.scalars(rows[held:])

    def scalars(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = row.numbers() | {"step": row.step, "_timestamp": row.wall_time}
            self.opened.log(values, step=row.index)

    def finish(self, measures: Sequence[Row]) -> None:
        for row in measures:
            self.opened.summary.update(row.numbers())
        self.opened.finish(exit_code=0 if measures else 1)

    @property
    def id(self) -> str:
        """The run's id; from the second attempt on with its number."""
        attempt = self.notes["attempt"]
        return self.run.id if attempt == 1 else f"{self.run.id}-{attempt}"

    def _open(self, **resume: str) -> None:
        self.opened = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.id,
            name=self.run.name,
            group=self.run.group or os.environ.get("WANDB_RUN_GROUP"),
            dir=str(self.folder),
            config=dict(self.values),
            mode=self.mode,
            settings=self.wandb.Settings(**SETTINGS),
            **resume,
        )
        self.opened.define_metric("step", hidden=True)
        self.opened.define_metric("*", step_metric="step")

    def _open_offline(self) -> None:
        earlier = list((self.folder / "wandb").glob(f"offline-run-*-{self.id}"))
        if self.notes["uploaded"] or any(list(folder.glob("*.synced")) for folder in earlier):
            self._start_attempt()
            return
        for folder in earlier:
            shutil.rmtree(folder)
        self._open()

    def _open_online(self, kept: int) -> int:
        """Opens the run on the server without rows beyond the first `kept`. Returns how many rows it has there."""
        for folder in (self.folder / "wandb").glob(f"offline-run-*-{self.id}"):  # else somebody may upload it, too
            if not list(folder.glob("*.synced")):
                shutil.rmtree(folder)
        self._open(resume="allow")
        held = self.opened.starting_step
        if held <= kept:
            return held
        self.opened.finish()
        if kept:
            try:
                self._open(resume_from=f"{self.id}?_step={kept - 1}")
                return kept
            except Exception as error:  # the server does not rewind: not every one can
                LOG.warning("tracker wandb: the server does not rewind run %s (%s)", self.id, type(error).__name__)
        self._start_attempt()
        return 0

    def _start_attempt(self) -> None:
        self.notes |= {"attempt": self.notes["attempt"] + 1, "uploaded": False}
        LOG.warning("tracker wandb: the run goes on as %s, with all rows that it keeps", self.id)
        self._open()


def _has_key() -> bool:
    """True if this user can log in: by `WANDB_API_KEY`, or by ~/.netrc, where `wandb login` puts the key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


TRACKER = WandB
