"""The drills of `faults.py` besides kills: stops, other layouts, damaged checkpoints, disks that refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import fault_processes as processes
import tiny_runs

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
        files = manifest.read(directory)
        if files is None:
            return "no manifest"
        manifest.check_files(directory, files)
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


# --- stops and other layouts ------------------------------------------------------------------------------------------


def stops(folder: Path) -> list[dict[str, Any]]:
    """Signals, the deadline, several processes, and going on with other numbers of processes and devices."""
    name = "packed"
    reference = folder / "stops-reference"
    _go(folder, name, reference)
    rows = [_signal(folder, name, reference, number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    rows += [_deadline(folder, name, reference), _twice(folder, name)]
    return rows + layouts(folder, name)


def layouts(folder: Path, name: str) -> list[dict[str, Any]]:
    """Batches of 16 rows divide among 8 devices with 2 microbatches each, so the rows are the same on all layouts."""
    reference, rows = folder / "layouts-reference", []
    _go(folder, name, reference, data__batch=16)
    rows.append(_layouts(folder, name, reference, "2 processes, SIGTERM to one of them", [(2, 1), (2, 1)]))
    rows.append(_layouts(folder, name, reference, "2 -> 1 -> 4 processes", [(2, 1), (1, 1), (4, 1)]))
    rows.append(_layouts(folder, name, reference, "8 -> 4 -> 1 devices", [(1, 8), (1, 4), (1, 1)]))
    return rows


def _go(folder: Path, name: str, workdir: Path, expected: int = 0, before: Any = None, **edits: Any) -> list[str]:
    """Runs in one process; what was wrong with how it ended."""
    config = tiny_runs.config(name, folder / "files", **edits)
    code = processes.wait(processes.spawn(processes.training(config, workdir, before), workdir.with_suffix(".log")))
    return [] if code == expected else [f"exit code {code}, expected {expected}"]


def _same(workdir: Path, reference: Path) -> list[str]:
    mine, theirs = (json.loads((each / processes.FINAL).read_text()) for each in (workdir, reference))
    wrong = [] if mine == theirs else ["the final state differs"]
    return wrong + ([] if processes.tries(workdir) == processes.tries(reference) else ["the batches differ"])


def _signal(folder: Path, name: str, reference: Path, number: int) -> dict[str, Any]:
    workdir, word = folder / f"stops-{number}", signal.Signals(number).name
    config = tiny_runs.config(name, folder / "files")
    pid = processes.spawn(processes.training(config, workdir), workdir.with_suffix(".log"))
    processes.at_step(workdir, 7)
    os.kill(pid, number)
    code = processes.wait(pid)
    wrong = [] if code == 143 else [f"exit code {code}, expected 143"]
    step = int(newest(workdir).name)
    wrong += _go(folder, name, workdir) or _same(workdir, reference)
    words = f"saved at step {step}, exit code {code}; resumed: state and batches those of the uninterrupted run"
    return row("stops", word, words, wrong)


def _deadline(folder: Path, name: str, reference: Path) -> dict[str, Any]:
    workdir = folder / "stops-deadline"
    wrong = _go(folder, name, workdir, 143, train__deadline=1e-4)
    step = int(newest(workdir).name)
    wrong += _go(folder, name, workdir) or _same(workdir, reference)
    return row("stops", "deadline", f"saved at step {step}, exit code 143; resumed: the same state and batches", wrong)


def _twice(folder: Path, name: str) -> dict[str, Any]:
    """The second signal comes while the first one's step is still going on."""
    workdir = folder / "stops-twice"

    def slow() -> None:
        from jaxformer.train.metric_window import MetricWindow

        add = MetricWindow.add
        MetricWindow.add = lambda *args: (add(*args), time.sleep(3.0))

    config = tiny_runs.config(name, folder / "files")
    pid = processes.spawn(processes.training(config, workdir, slow), workdir.with_suffix(".log"))
    processes.at_step(workdir, 2)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    begun = time.monotonic()
    os.kill(pid, signal.SIGINT)
    code, seconds = processes.wait(pid), time.monotonic() - begun
    wrong = [] if code == 130 and newest(workdir) is None else [f"exit code {code}, saved {newest(workdir)}"]
    return row("stops", "a second signal", f"exit code {code} after {seconds:.2f} s, without saving", wrong)


def _layouts(folder: Path, name: str, reference: Path, drill: str, layouts: list[tuple[int, int]]) -> dict[str, Any]:
    """A run on several (processes, devices of each) in turn, stopped by SIGTERM to its last process in between."""

    def before() -> None:
        from jaxformer.train import preemption

        preemption.AGREEMENT_SECONDS = 0.2  # such short runs would be over before they had asked each other

    workdir = folder / f"stops-{'-'.join(f'{p}x{d}' for p, d in layouts)}"
    config, wrong, stopped = tiny_runs.config(name, folder / "files", data__batch=16), [], []
    for turn, (count, devices) in enumerate(layouts):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = []
        for index in range(count):
            partners = f"127.0.0.1:{port}/{count}/{index}" if count > 1 else ""
            act, log = processes.training(config, workdir, before), workdir.with_suffix(f".{turn}.{index}.log")
            pids.append(processes.spawn(act, log, devices, partners))
        last = turn == len(layouts) - 1
        if not last:
            processes.at_step(workdir, (stopped[-1] if stopped else 0) + 4)
            os.kill(pids[-1], signal.SIGTERM)
        codes = {processes.wait(pid) for pid in pids}
        if codes != ({0} if last else {143}):
            wrong.append(f"exit codes {codes} on {count} process(es)")
            break
        stopped.append(int(newest(workdir).name))
    theirs = processes.sequence(reference)
    if not wrong and processes.sequence(workdir) != theirs:
        wrong.append("the batches differ")
    difference = max((abs(a - b) for a, b in zip(_losses(workdir), _losses(reference), strict=False)), default=1.0)
    if len(_losses(workdir)) != len(_losses(reference)) or difference > 1e-4:
        wrong.append("the losses differ")
    words = (
        f"stopped at steps {stopped[:-1]}, the same on every process; the same global batches in the same order as "
        f"one process on one device; losses differ by at most {difference:.1e}"
    )
    return row("stops", drill, words, wrong)


def _losses(workdir: Path) -> list[float]:
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [each["loss"] for each in rows]


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def damage(folder: Path) -> list[dict[str, Any]]:
    """Every file of the newest checkpoint truncated, zeroed, bit-flipped and deleted, and the manifest forged."""
    workdir, report = folder / "damage", folder / "damage.json"
    wrong = _go(folder, "packed", workdir, checkpoint__keep_best=0)
    if wrong:
        return [row("damage", "damaged checkpoints", "", wrong)]
    config = tiny_runs.config("packed", folder / "files", checkpoint__keep_best=0)
    act = lambda: _damage(config, workdir, report)  # noqa: E731
    code = processes.wait(processes.spawn(act, folder / "damage.log"))
    if code:
        return [row("damage", "damaged checkpoints", "", [f"exit code {code}; see damage.log"])]
    found, rows = json.loads(report.read_text()), []
    for kind in dict.fromkeys(each["kind"] for each in found):
        mine = [each for each in found if each["kind"] == kind]
        back, refused = (sum(each["outcome"] == word for each in mine) for word in ("back", "refused"))
        wrong = [f"{each['file']}: {each['outcome']}" for each in mine if each["outcome"] not in ("back", "refused")]
        words = f"{len(mine)} corruptions: {back} went back to the step before, {refused} refused in one line"
        rows.append(row("damage", f"checkpoint: {kind}", words, wrong, count=len(mine)))
    return rows


def _damage(config: Any, workdir: Path, report: Path) -> int:
    """In a process of its own: damages copies of a run and restores them."""
    import jax
    from flax import linen as nn

    from jaxformer.checkpoint import Checkpoints, manifest
    from jaxformer.config import ConfigError, overrides
    from jaxformer.models import build
    from jaxformer.parallel import mesh as meshes
    from jaxformer.train import optim
    from jaxformer.train import step as steps

    resolved, place = overrides.read(workdir), workdir.with_name("damage-copy")
    module, mesh = build.build(resolved.model), meshes.make(resolved.mesh)
    schedule = optim.schedule(resolved.schedule, resolved.train.steps, build.model_width(resolved.model))
    shapes = nn.meta.unbox(build.shapes(module))["params"]
    optimizer = optim.optimizer(resolved.optimizer, schedule, shapes, build.logical_names(module))
    target = steps.abstract_state(resolved, module, optimizer, mesh)
    last = newest(workdir)
    files = [path.relative_to(last) for path in sorted(last.rglob("*")) if path.is_file()]

    def content(path: Path, **edits: Any) -> None:
        value = json.loads(path.read_text())
        value.pop("sha256")
        value |= edits
        path.write_text(json.dumps(value | {"sha256": manifest._digest(value)}))

    flip = lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]  # noqa: E731
    kinds = {
        "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "one bit flipped": lambda path: path.write_bytes(flip(path.read_bytes())),
        "deleted": lambda path: path.unlink(),
    }
    listed = json.loads((last / manifest.FILE_NAME).read_text())["files"]
    first = next(iter(listed))
    forged = {
        "newer format": dict(format=manifest.FORMAT + 1),
        "another checksum": dict(files=listed | {first: listed[first] | {"sha256": "0" * 64}}),
        "another size": dict(files=listed | {first: listed[first] | {"bytes": 1}}),
        "a file outside": dict(files={"../../../config.json": listed[first]}),
        "an absolute file": dict(files={"/etc/passwd": listed[first]}),
        "no such file": dict(files=listed | {"state/none": listed[first]}),
        "numbers for names": dict(files={"": 1}),
        "a list": dict(files=[]),
        "a text": dict(format="2"),
    }
    cases = [
        (kind, str(file), lambda at, act=act, file=file: act(at / file))
        for kind, act in kinds.items()
        for file in files
    ]
    cases += [
        (
            "manifest forged, with a right checksum",
            word,
            lambda at, edits=edits: content(at / manifest.FILE_NAME, **edits),
        )
        for word, edits in forged.items()
    ]
    ruin = lambda at: [kinds["truncated"](each) for each in (at.parents[1]).rglob("metadata")]  # noqa: E731
    cases.append(("every checkpoint damaged", "all", ruin))
    found = []
    with jax.set_mesh(mesh):
        for kind, file, act in cases:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(workdir / "checkpoints", place / "checkpoints")
            act(place / last.relative_to(workdir))
            checkpoints = Checkpoints(place, resolved.checkpoint)
            try:
                saved = checkpoints.restore(target)
                went = saved is not None and int(saved.state.step) < int(last.name)
                aside = processes.names(place / "checkpoints" / "damaged") == [f"last-{last.name}"]
                outcome = "back" if went and aside else "restored as if nothing were wrong"
            except ConfigError as error:
                outcome = "refused" if "\n" not in str(error) else "refused in several lines"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            finally:
                checkpoints.close()
            found.append({"kind": kind, "file": file, "outcome": outcome})
    report.write_text(json.dumps(found))
    return 0


# --- disks that refuse ------------------------------------------------------------------------------------------------


def disk(folder: Path) -> list[dict[str, Any]]:
    """A full, read-only, forbidden, vanished and slow disk: one clear line, what was saved intact, and going on."""
    reference = folder / "disk-reference"
    _go(folder, "packed", reference)
    rows = [_vanished(folder), _slow(folder, reference)]
    place = folder / "small"
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=False).returncode:
        return [*rows, row("disk", "full, read-only", "left out: mounting is not allowed here", [])]
    try:
        return [_full(folder, place, reference), _read_only(folder, place, reference), _forbidden(folder, place), *rows]
    finally:
        subprocess.run(["umount", place], check=False)


def _remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def _refused(log: Path) -> list[str]:
    """What is wrong with how a process said no: one line, whatever threads of others print when theirs are cut off."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    return [] if len(lines) == 1 else [f"{len(lines)} lines of error"]


def _full(folder: Path, place: Path, reference: Path) -> dict[str, Any]:
    workdir = place / "run"
    size = sum(each.stat().st_blocks * 512 for each in newest(reference).rglob("*"))
    _remount(place, f"size={int(size * 2.5) // 4096 * 4 + 64}k")
    wrong = _go(folder, "packed", workdir, 1) + _refused(workdir.with_suffix(".log"))
    held = newest(workdir)
    wrong += [problem(held)] if held is not None and problem(held) else []
    kept = held.name if held else "none"
    _remount(place, "size=64m")
    wrong += _go(folder, "packed", workdir) or _same(workdir, reference)
    words = f"one line, exit code 1, newest checkpoint ({kept}) whole; with room again: the same final state"
    shutil.rmtree(workdir)
    return row("disk", "disk full", words, wrong)


def _read_only(folder: Path, place: Path, reference: Path) -> dict[str, Any]:
    workdir, log = place / "again", folder / "again.log"
    wrong = _go(folder, "packed", workdir, 143, train__deadline=1e-4)
    _remount(place, "ro")
    config = tiny_runs.config("packed", folder / "files")
    code = processes.wait(processes.spawn(processes.training(config, workdir), log))
    wrong += ([] if code == 1 else [f"exit code {code}"]) + _refused(log)
    _remount(place, "rw")
    wrong += _go(folder, "packed", workdir) or _same(workdir, reference)
    return row("disk", "disk read-only", "one line, exit code 1; writable again: the same final state", wrong)


def _forbidden(folder: Path, place: Path) -> dict[str, Any]:
    workdir, log = place / "forbidden" / "run", folder / "forbidden.log"
    workdir.mkdir(parents=True)
    os.chmod(workdir, 0o555)
    log.touch()
    config = tiny_runs.config("packed", folder / "files")

    def before() -> None:
        """Nobody's user from the first touch of the workdir on: it may not read everybody's Python either."""
        from jaxformer.train import loop

        lock = loop.WorkdirLock
        loop.WorkdirLock = lambda place: (os.setuid(65534), lock(place))[1]

    code = processes.wait(processes.spawn(processes.training(config, workdir, before), log))
    wrong = ([] if code == 1 else [f"exit code {code}"]) + _refused(log)
    return row("disk", "permission denied", "one line, exit code 1", wrong)


def _vanished(folder: Path) -> dict[str, Any]:
    workdir = folder / "vanished"
    config = tiny_runs.config("packed", folder / "files", train__steps=2000)
    pid = processes.spawn(processes.training(config, workdir), workdir.with_suffix(".log"))
    processes.at_step(workdir, 6)
    shutil.rmtree(workdir, ignore_errors=True)
    code = processes.wait(pid)
    wrong = ([] if code == 1 else [f"exit code {code}"]) + _refused(workdir.with_suffix(".log"))
    return row("disk", "directory deleted under the run", "one line, exit code 1", wrong)


def _slow(folder: Path, reference: Path) -> dict[str, Any]:
    workdir = folder / "slow"

    def before() -> None:
        from jaxformer.checkpoint import manifest

        write = manifest.write
        manifest.write = lambda directory: (time.sleep(1.0), write(directory))

    wrong = _go(folder, "packed", workdir, before=before) or _same(workdir, reference)
    return row("disk", "slow disk", "every save a second longer: the same final state", wrong)
