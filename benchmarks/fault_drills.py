"""The drills of `faults.py` besides kills: stops, other layouts, damaged checkpoints, disks that refuse, a long run."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

RATES = ("tokens_per_second", "steps_per_second")


def row(part: str, drill: str, words: str, wrong: list[str], **numbers: Any) -> dict[str, Any]:
    """One row of the table; what went wrong is said in it."""
    words += "".join(f"; {each}" for each in wrong[:3])
    return {"part": part, "drill": drill, "words": words, "good": not wrong, **numbers}


def remove(workdir: Path) -> None:
    shutil.rmtree(workdir, ignore_errors=True)


def newest(workdir: Path) -> Path | None:
    """The checkpoint that a resumed run would take."""
    found = [each for part in ("best", "last") for each in (workdir / "checkpoints" / part).glob("[0-9]*")]
    return max(found, key=lambda each: (int(each.name), each.parent.name == "last"), default=None)


def problem(directory: Path) -> str:
    """What is wrong with a checkpoint by its manifest; "": nothing."""
    from jaxformer.checkpoint import manifest

    try:
        files = manifest.listed(directory)
        if files is None:
            return "no manifest"
        manifest.compare(directory, files)
    except manifest.Damaged as error:
        return str(error)
    return ""


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Step, tag and value of every scalar of the TensorBoard files in a folder, without the rates."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                if not value.tag.endswith(RATES):
                    found.append((event.step, value.tag, value.simple_value))
    return sorted(found)
