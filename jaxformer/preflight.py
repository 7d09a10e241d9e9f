"""Checks that the processes of a run belong together: they meet, and compare what must be equal or must differ."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer import __version__
from jaxformer.config import Config, checks, components, overrides
from jaxformer.errors import ConfigError


class Finding(NamedTuple):
    """One result of a check.

    Attributes:
      level: "ok", "warn" or "FAIL".
      name: of the check.
      message: the value found; of a warning or failure also what to do.
      code: exit code of the doctor if this fails: 2 if the user's config or files are wrong, 1 if the machine is.
    """

    level: str
    name: str
    message: str
    code: int = 1


REMEDIES = {
    "code": "bring the same version of jaxformer to all hosts",
    "config": "start all processes with the same --config and edits",
    "jax": "install the same jax and jaxlib on all hosts: pip install -r requirements.lock",
}
"""Facts that must be equal in all processes, and what to do if they are not."""


def process_index() -> int:
    """Index of this process in its run, from 0; jax need not be importable."""
    try:
        from jaxformer.parallel import distributed
    except ImportError:
        return 0
    return distributed.process_index()


def process_facts(config: Config | None) -> dict[str, str]:
    """Facts that must be equal in all processes of a run: digests of the code and the config, and versions."""
    return {
        "code": f"{__version__} ({code_digest()})",
        "config": "none" if config is None else digest(overrides.to_json(config).encode()),
        "jax": "/".join(metadata.version(name) for name in ("jax", "jaxlib")),
    }


def code_digest() -> str:
    """Digest of the package's source files, committed or not."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.name.encode() + path.read_bytes())
    return code.hexdigest()[:12]


def digest(content: bytes) -> str:
    """The first 12 hexadecimal digits of the SHA-256 digest."""
    return hashlib.sha256(content).hexdigest()[:12]


def check_processes_agree(config: Config) -> None:
    """Refuses to start a run whose processes differ in code, config or versions.

    Raises:
      ConfigError: they differ; the message names the processes.
    """
    from jaxformer.parallel import distributed

    distributed.check_agreement("start", process_facts(config), REMEDIES)


def compare_processes(config: Config | None, devices: int | None, seconds: float) -> Iterator[Finding]:
    """Compares the processes of a run, which must have joined: their facts, devices and data.

    Args:
      config: its mesh and data are compared too; None: neither is.
      devices: expected number, of all processes; None: as many as the config's mesh has.
      seconds: time limit for waiting for the last process.
    """
    import jax

    from jaxformer.parallel import distributed

    start = time.monotonic()
    own: dict[str, Any] = process_facts(config) | {
        "host": socket.gethostname(),
        "local": jax.local_device_count(),
        "devices": jax.device_count(),
        "kind": jax.devices()[0].device_kind,
        "data": None if config is None else data_share(config),
    }
    try:
        processes = distributed.all_gather_host_value("preflight", own, seconds)
    except distributed.BarrierTimeout as error:
        yield Finding("FAIL", "processes", str(error))
        return
    count, hosts = len(processes), len({process["host"] for process in processes})
    message = f"{count}, this is number {jax.process_index()}"
    if count > 1:
        message += f"; all met in {time.monotonic() - start:.1f} s, on {hosts} host{'s' if hosts > 1 else ''}"
    yield Finding("ok", "processes", message)
    if count > 1:
        for name, remedy in REMEDIES.items():
            difference = distributed.describe_differences([process[name] for process in processes])
            message = f"{difference}; {remedy}" if difference else str(own[name])
            yield Finding("FAIL" if difference else "ok", f"same {name}", message)
    yield from _compare_devices(processes, devices, config)
    if config is not None:
        yield _compare_data([process["data"] for process in processes])


def _compare_devices(processes: list[dict[str, Any]], expected: int | None, config: Config | None) -> Iterator[Finding]:
    from jaxformer.parallel import distributed

    for name in ("local", "devices", "kind"):
        difference = distributed.describe_differences([process[name] for process in processes])
        if difference:
            fact = {"local": "devices a process", "devices": "devices in all", "kind": "kind of device"}[name]
            yield Finding(
                "FAIL", fact, f"got {difference}, expected one for all; look at the drivers, and what each may use"
            )
            return
    total, local = processes[0]["devices"], processes[0]["local"]
    if total != local * len(processes):
        message = f"got {total} in all, expected {len(processes)} times {local}; the processes were not joined"
        yield Finding("FAIL", "device count", message)
    elif expected is not None and total != expected:
        yield Finding("FAIL", "device count", f"got {total}, expected {expected}; is a host or a device missing?")
    else:
        try:
            sizes = {} if config is None else _mesh_sizes(config)
        except ConfigError as error:
            yield Finding("FAIL", "config", str(error), code=2)
            return
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        yield Finding("ok", "device count", f"{total}, {local} a process" + (f"; mesh {shape}" if shape else ""))


def _mesh_sizes(config: Config) -> dict[str, int]:
    """Axis sizes of the config's mesh on the present devices.

    Raises:
      ConfigError: the mesh does not fit the devices, or their memory cannot hold the run.
    """
    from jaxformer.parallel import mesh as meshes

    mesh = meshes.make(config.mesh)
    checks.size.check_memory(config, mesh.shape, meshes.device_memory(mesh))
    return mesh.shape


def data_share(config: Config) -> dict[str, Any]:
    """The data that this process reads: its rows of a batch, how many processes read the same rows, and a digest.

    The digest is of the first, middle and last example, since every host opens its own files.
    """
    import jax

    from jaxformer.data import packing, sources
    from jaxformer.parallel import mesh as meshes
    from jaxformer.parallel import rules

    try:
        mesh = meshes.make(config.mesh)
        part, parts = rules.process_part(mesh)
        views = components.views(config)
        splits = [sources.build(views[name].data).splits["train"] for name in components.trained(config)]
        if not all(map(len, splits)):
            raise ConfigError("data: got no training examples, expected some; check the files")
        count = sum(map(len, splits))
        sample = [examples[index] for examples in splits for index in (0, len(examples) // 2, len(examples) - 1)]
        multiple = math.lcm(meshes.row_multiple(mesh.shape, config.model) * config.train.accumulation, parts)
        shape = packing.shapes({config.data.length}, config.data.batch, config.data.tokens, multiple)[-1]
    except (ConfigError, OSError) as error:
        return {"error": " ".join(str(error).split())}
    rows = packing.process_rows(shape.rows, part, parts)
    content = digest(json.dumps(sample, default=str, sort_keys=True).encode())
    return {
        "examples": count,
        "content": content,
        "rows": [rows.start, rows.stop],
        "readers": jax.process_count() // parts,
    }


def _compare_data(shares: list[dict[str, Any]]) -> Finding:
    """Checks that all processes see the same data, and that together they read each row of a batch equally often."""
    from jaxformer.parallel import distributed

    errors = [f"{share['error']} (on {index})" for index, share in enumerate(shares) if "error" in share]
    if errors:
        return Finding("FAIL", "data", errors[0], code=2)
    difference = distributed.describe_differences(
        [f"{share['examples']:,} examples ({share['content']})" for share in shares]
    )
    if difference:
        return Finding("FAIL", "data", f"got {difference}, expected the same on all hosts; copy it again")
    counts = collections.Counter(tuple(share["rows"]) for share in shares)
    ranges, readers = sorted(counts), shares[0]["readers"]
    has_gap = any(left[1] != right[0] for left, right in itertools.pairwise(ranges))
    if has_gap or set(counts.values()) != {readers}:
        got = ", ".join(f"{start} to {stop} by {counts[start, stop]}" for start, stop in ranges)
        expected = "once" if readers == 1 else f"by {readers} processes"
        message = f"got rows {got} of a batch, expected each {expected}; check the processes' numbers"
        return Finding("FAIL", "data", message)
    rows = ranges[0][1] - ranges[0][0]
    message = f"{shares[0]['examples']:,} training examples"
    if len(shares) > 1 and readers > 1:
        message += f"; every {readers} processes read the same {rows} rows of a batch"
    elif len(ranges) > 1:
        message += f"; each process reads its own {rows} rows of a batch"
    return Finding("ok", "data", message)
