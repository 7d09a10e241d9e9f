"""The device mesh. Its six axes always exist, mostly of size 1, so no code asks which parallelism is on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxformer.config import AXES, ConfigError, DcnConfig, MeshConfig, ModelConfig


def sizes(config: MeshConfig | DcnConfig, devices: int) -> dict[str, int]:
    """The size of every axis, with a -1 replaced by the devices (for `DcnConfig`: slices) that are left.

    Raises:
      ConfigError: the sizes do not multiply to `devices`.
    """
    path, what = ("config.mesh", "devices") if isinstance(config, MeshConfig) else ("config.mesh.dcn", "slices")
    given = {name: getattr(config, name) for name in AXES}
    free = [name for name, size in given.items() if size == -1]
    wrong = [f"{name}={size}" for name, size in given.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
        got = ", ".join(wrong or [f"{name}=-1" for name in free])
        raise ConfigError(f"{path}: got {got}, expected sizes >= 1 and at most one -1; change the mesh")
    fixed = math.prod(size for size in given.values() if size != -1)
    if free and devices % fixed == 0:
        given[free[0]] = devices // fixed
    if math.prod(given.values()) != devices:
        shape = " x ".join(f"{name} {size}" for name, size in given.items() if size != 1) or "1"
        raise ConfigError(f"{path}: got {shape}, expected a product of {devices} {what}; change the mesh")
    return given


def make(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run over `devices` (default: all of them). Enter it with `jax.set_mesh`.

    Within a slice JAX orders the devices so that the last axes have the nearest neighbours. Across slices, axes are
    laid out as `config.dcn` says. The axes are of type Auto: under Explicit axes, which `jax.make_mesh` would choose,
    Linen's logical partitioning does not work.

    Raises:
      ConfigError: the sizes do not multiply to the devices, or those of `config.dcn` to the slices.
    """
    devices = jax.devices() if devices is None else devices
    types = (AxisType.Auto,) * len(AXES)
    if slices(devices) == 1 and config.dcn == DcnConfig():
        shape = tuple(sizes(config, len(devices)).values())
        # Not jax.make_mesh: it refuses what does not follow the torus, as fsdp 32 x expert 8 on 16 x 16 chips.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=types)
    return Mesh(hybrid(config, devices), AXES, axis_types=types)


def smallest(config: MeshConfig) -> Mesh:
    """The mesh of a run with the least devices, for work that is not training: a -1 counts as 1.

    One device where there are fewer than that, as when a run of a pod is evaluated on another machine.
    """
    fixed = {axis: max(getattr(config, axis), 1) for axis in AXES}
    devices = jax.devices()[: config.devices]
    if config.devices > len(devices):
        return make(MeshConfig(data=1), devices[:1])
    several = slices(devices) > 1 or len({device.process_index for device in devices}) > 1
    config = dataclasses.replace(config, **fixed)
    return make(config if several else joined(config), devices)


def joined(config: MeshConfig) -> MeshConfig:
    """The mesh with every axis at its full length, for devices that know of no slices and stand in for some."""
    full = {axis: max(getattr(config.dcn, axis), 1) * getattr(config, axis) for axis in AXES}
    return dataclasses.replace(config, dcn=DcnConfig(), **{axis: max(size, -1) for axis, size in full.items()})


def slice_numbers(config: MeshConfig, shape: Sequence[int]) -> np.ndarray:
    """The slice of each device of a mesh of this `shape`, flattened: an axis runs through one before it leaves it."""
    dcn = [max(getattr(config.dcn, axis), 1) for axis in AXES]
    within = [size // count for size, count in zip(shape, dcn, strict=True)]
    places = np.indices(shape).reshape(len(AXES), -1)
    return np.ravel_multi_index([each // size for each, size in zip(places, within, strict=True)], dcn)


def slices(devices: Sequence[jax.Device]) -> int:
    """Of how many slices the devices are; 1 where they know of no slices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def hybrid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of several slices in the mesh's shape, neighbours on the slow network only where `config.dcn` says so.

    Without slices, as on hosts with GPUs, each process's devices are taken for one.
    """
    processes = slices(devices) == 1
    count = len({device.process_index for device in devices}) if processes else slices(devices)
    across = sizes(config.dcn, count)
    within = sizes(config, len(devices) // count)
    return mesh_utils.create_hybrid_device_mesh(
        tuple(within.values()),
        tuple(across.values()),
        devices,
        process_is_granule=processes,
        allow_split_physical_axes=True,
    )


def row_multiple(shape: dict[str, int], model: ModelConfig) -> int:
    """What the rows of a batch must be a multiple of on a mesh of this `shape`, to be divided and pipelined evenly."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    stages = shape["stage"]
    parts = math.lcm(*(stack.microbatches or stages for stack in stacks)) if stages > 1 else 1
    return shape["data"] * shape["fsdp"] * shape["expert"] * parts


def memory(mesh: Mesh) -> int | None:
    """Bytes that a program may use on each device of `mesh`; None where this is not known.

    The CPU devices of a process share the memory of its machine.
    """
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if not own:
        return None
    if own[0].platform != "cpu":
        return (own[0].memory_stats() or {}).get("bytes_limit")
    total = host_memory()
    return None if total is None else total // len(own)


def host_memory() -> int | None:
    """Bytes of memory and swap of this machine, or of the container that this process runs in; None: not known."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:  # not Linux
        return None
    found = dict(re.findall(r"^(MemTotal|SwapTotal):\s+(\d+) kB$", text, re.MULTILINE))
    total = 1024 * sum(map(int, found.values()))
    with contextlib.suppress(OSError, ValueError):  # no limit, which says "max", or no such file
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total or None


def platform() -> str:
    """What the program that is being traced will run on: "cpu", "gpu" or "tpu", as the entered mesh says.

    A program compiled ahead of time is for other devices than this process has.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name
