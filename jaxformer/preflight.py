"""Whether the processes of a run belong together: they meet, and compare what must be the same or must differ."""

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

from jaxformer import __version__, checks, overrides
from jaxformer.config import Config, ConfigError


class Finding(NamedTuple):
    """A line of the doctor: `level` is ok, warn or FAIL; the words of the last two end in what to do.

    `code` is what a failure ends the doctor with: 2 where the user's config or files are wrong, as `train` would end;
    1 where the machine is.
    """

    level: str
    name: str
    words: str
    code: int = 1


REMEDIES = {
    "code": "bring the same version of jaxformer to all hosts",
    "config": "start all processes with the same --config and edits",
    "jax": "install the same jax and jaxlib on all hosts: pip install -r requirements.lock",
}
"""Facts that must be the same everywhere, and what to do where they are not."""


def number() -> int:
    """Of this process in its run, from 0; jax need not be importable."""
    try:
        from jaxformer.parallel import distributed
    except ImportError:
        return 0
    return distributed.index()


def facts(config: Config | None) -> dict[str, str]:
    """What must be the same in all processes of a run: digests of the code and of the config, and versions."""
    return {
        "code": f"{__version__} ({code()})",
        "config": "none" if config is None else digest(overrides.to_json(config).encode()),
        "jax": "/".join(metadata.version(name) for name in ("jax", "jaxlib")),
    }


def code() -> str:
    """A digest of this package's files: what runs, whether or not it is committed."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def together(config: Config) -> None:
    """Refuses to start a run whose processes differ in code, config or versions.

    Raises:
      ConfigError: they do; says who differs from whom.
    """
    from jaxformer.parallel import distributed

    distributed.agree("start", facts(config), REMEDIES)


def findings(config: Config | None, devices: int | None, seconds: float) -> Iterator[Finding]:
    """What the doctor says about the processes of a run, once they have joined.

    Args:
      config: whose mesh and data are looked at; None: neither is.
      devices: how many there must be in all; None: as many as the config's mesh has.
      seconds: to wait for the last process.
    """
    import jax

    from jaxformer.parallel import distributed

    begun = time.monotonic()
    own = facts(config) | {
        "host": socket.gethostname(),
        "local": jax.local_device_count(),
        "devices": jax.device_count(),
        "kind": jax.devices()[0].device_kind,
        "data": None if config is None else share(config),
    }
    try:
        everyone = distributed.exchange("preflight", own, seconds)
    except distributed.Stalled as error:
        yield Finding("FAIL", "processes", str(error))
        return
    count, hosts = len(everyone), len({each["host"] for each in everyone})
    words = f"{count}, this is number {jax.process_index()}"
    if count > 1:
        words += f"; all met in {time.monotonic() - begun:.1f} s, on {hosts} host{'s' if hosts > 1 else ''}"
    yield Finding("ok", "processes", words)
    if count > 1:
        for name, remedy in REMEDIES.items():
            words = distributed.differing([each[name] for each in everyone])
            yield Finding("FAIL" if words else "ok", f"same {name}", f"{words}; {remedy}" if words else own[name])
    yield from _devices(everyone, devices, config)
    if config is not None:
        yield _data([each["data"] for each in everyone])


def _devices(everyone: list[dict[str, Any]], expected: int | None, config: Config | None) -> Iterator[Finding]:
    from jaxformer.parallel import distributed

    for name in ("local", "devices", "kind"):
        words = distributed.differing([each[name] for each in everyone])
        if words:
            what = {"local": "devices a process", "devices": "devices in all", "kind": "kind of device"}[name]
            yield Finding(
                "FAIL", what, f"got {words}, expected one for all; look at the drivers, and what each may use"
            )
            return
    total, local = everyone[0]["devices"], everyone[0]["local"]
    if total != local * len(everyone):
        words = f"got {total} in all, expected {len(everyone)} times {local}; the processes were not joined"
        yield Finding("FAIL", "device count", words)
    elif expected is not None and total != expected:
        yield Finding("FAIL", "device count", f"got {total}, expected {expected}; is a host or a device missing?")
    else:
        try:
            sizes = {} if config is None else _judged(config)
        except ConfigError as error:
            yield Finding("FAIL", "config", str(error), code=2)
            return
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        yield Finding("ok", "device count", f"{total}, {local} a process" + (f"; mesh {shape}" if shape else ""))


def _judged(config: Config) -> dict[str, int]:
    """Sizes of the mesh of `config` on the devices that are here.

    Raises:
      ConfigError: there is no such mesh, or its memory cannot hold the run.
    """
    from jaxformer.parallel import mesh as meshes

    mesh = meshes.make(config.mesh)
    checks.size.fits(config, mesh.shape, meshes.memory(mesh))
    return mesh.shape


def share(config: Config) -> dict[str, Any]:
    """What this process reads: which rows of a batch, together with how many processes, out of which data.

    The data is known by its size and its first, middle and last example, since every host opens its own files.
    """
    import jax

    from jaxformer.data import packing, sources
    from jaxformer.parallel import mesh as meshes
    from jaxformer.parallel import rules

    try:
        mesh = meshes.make(config.mesh)
        part, parts = rules.reader(mesh)
        examples = sources.build(config.data).splits["train"]
        count = len(examples)
        if not count:
            raise ConfigError("data: got no training examples, expected some; check the files")
        sample = [examples[place] for place in (0, count // 2, count - 1)]
        multiple = math.lcm(meshes.row_multiple(mesh.shape, config.model) * config.train.accumulation, parts)
        shape = packing.shapes({config.data.length}, config.data.batch, config.data.tokens, multiple)[-1]
    except (ConfigError, OSError) as error:
        return {"error": " ".join(str(error).split())}
    rows = packing.share(shape.rows, part, parts)
    content = digest(json.dumps(sample, default=str, sort_keys=True).encode())
    return {
        "examples": count,
        "content": content,
        "rows": [rows.start, rows.stop],
        "readers": jax.process_count() // parts,
    }


def _data(shares: list[dict[str, Any]]) -> Finding:
    from jaxformer.parallel import distributed

    broken = [f"{each['error']} (on {index})" for index, each in enumerate(shares) if "error" in each]
    if broken:
        return Finding("FAIL", "data", broken[0], code=2)
    words = distributed.differing([f"{each['examples']:,} examples ({each['content']})" for each in shares])
    if words:
        return Finding("FAIL", "data", f"got {words}, expected the same on all hosts; copy it again")
    held = collections.Counter(tuple(each["rows"]) for each in shares)
    parts, readers = sorted(held), shares[0]["readers"]
    if set(held.values()) != {readers} or any(left[1] != right[0] for left, right in itertools.pairwise(parts)):
        got = ", ".join(f"{start} to {stop} by {held[start, stop]}" for start, stop in parts)
        each = "once" if readers == 1 else f"by {readers} processes"
        return Finding("FAIL", "data", f"got rows {got} of a batch, expected each {each}; check the processes' numbers")
    rows = parts[0][1] - parts[0][0]
    words = f"; each process reads its own {rows} rows of a batch" if len(parts) > 1 else ""
    if len(shares) > 1 and readers > 1:
        words = f"; every {readers} processes read the same {rows} rows of a batch"
    return Finding("ok", "data", f"{shares[0]['examples']:,} training examples{words}")
