"""The device mesh. Its six axes always exist, most of size 1, so no code branches on which parallelism is used."""

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

from jaxformer.config import AXES, DcnConfig, MeshConfig, ModelConfig
from jaxformer.errors import ConfigError


def axis_sizes(config: MeshConfig | DcnConfig, devices: int) -> dict[str, int]:
    """Size of every axis, with -1 replaced by the remaining number of devices (for `DcnConfig`: of slices).

    Raises:
      ConfigError: the sizes do not multiply to `devices`.
    """
    path, what = ("config.mesh", "devices") if isinstance(config, MeshConfig) else ("config.mesh.dcn", "slices")
    sizes = {name: getattr(config, name) for name in AXES}
    inferred = [name for name, size in sizes.items() if size == -1]
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]
    if wrong or len(inferred) > 1:
        got = ", ".join(wrong or [f"{name}=-1" for name in inferred])
        raise ConfigError(f"{path}: got {got}, expected sizes >= 1 and at most one -1; change the mesh")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if inferred and devices % fixed == 0:
        sizes[inferred[0]] = devices // fixed
    if math.prod(sizes.values()) != devices:
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "1"
        raise ConfigError(f"{path}: got {shape}, expected a product of {devices} {what}; change the mesh")
    return sizes


def make(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh of a run over `devices` (default: all). Enter it with `jax.set_mesh`.

    Within a slice JAX orders the devices so that the last axes have the nearest neighbours. Across slices, axes are
    laid out as `config.dcn` says. The axis type is Auto: Linen's logical partitioning does not work with Explicit axes,
    which `jax.make_mesh` would choose.

    Raises:
      ConfigError: the sizes do not multiply to the devices, or those of `config.dcn` to the slices.
    """
    devices = jax.devices() if devices is None else devices
    types = (AxisType.Auto,) * len(AXES)
    if count_slices(devices) == 1 and config.dcn == DcnConfig():
        shape = tuple(axis_sizes(config, len(devices)).values())
        # Not jax.make_mesh: it refuses shapes that do not follow the torus, such as fsdp 32 x expert 8 on 16 x 16.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(placed, AXES, axis_types=types)
    return Mesh(multi_slice_devices(config, devices), AXES, axis_types=types)


def smallest_mesh(config: MeshConfig) -> Mesh:
    """The smallest mesh of a run's config, for evaluation: a size of -1 counts as 1.

    A single device if this machine has fewer, for example to evaluate a pod's run on another machine.
    """
    fixed = {axis: max(getattr(config, axis), 1) for axis in AXES}
    devices = jax.devices()[: config.devices]
    if config.devices > len(devices):
        return make(MeshConfig(data=1), devices[:1])
    several = count_slices(devices) > 1 or len({device.process_index for device in devices}) > 1
    config = dataclasses.replace(config, **fixed)
    return make(config if several else merge_slices(config), devices)


def merge_slices(config: MeshConfig) -> MeshConfig:
    """`config` without slices: every axis at its full length, for simulated devices, which have no slices."""
    full = {axis: max(getattr(config.dcn, axis), 1) * getattr(config, axis) for axis in AXES}
    return dataclasses.replace(config, dcn=DcnConfig(), **{axis: max(size, -1) for axis, size in full.items()})


def slice_numbers(config: MeshConfig, shape: Sequence[int]) -> np.ndarray:
    """Slice number of each device of a mesh of this `shape`, flattened. Slices are contiguous along each axis."""
    dcn = [max(getattr(config.dcn, axis), 1) for axis in AXES]
    within = [size // count for size, count in zip(shape, dcn, strict=True)]
    indices = np.indices(shape).reshape(len(AXES), -1)
    return np.ravel_multi_index([index // size for index, size in zip(indices, within, strict=True)], dcn)


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Number of slices that the devices belong to; 1 for devices without slices."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def multi_slice_devices(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of several slices, ordered so that only the axes of `config.dcn` cross the slow network between slices.

    On hosts without slices (GPUs), the devices of a process count as a slice.
    """
    processes = count_slices(devices) == 1
    count = len({device.process_index for device in devices}) if processes else count_slices(devices)
    across = axis_sizes(config.dcn, count)
    within = axis_sizes(config, len(devices) // count)
    return mesh_utils.create_hybrid_device_mesh(
        tuple(within.values()),
        tuple(across.values()),
        devices,
        process_is_granule=processes,
        allow_split_physical_axes=True,
    )


def row_multiple(shape: dict[str, int], model: ModelConfig) -> int:
    """Number that the rows of a batch must be a multiple of, to divide among data shards and pipeline microbatches."""
    stages = shape["stage"]
    parts = math.lcm(*(stack.microbatches or stages for stack in model.stacks.values())) if stages > 1 else 1
    return shape["data"] * shape["fsdp"] * shape["expert"] * parts


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that a program may use on each device of `mesh`, or None if unknown.

    The CPU devices of a process share the memory of its machine.
    """
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if not local:
        return None
    if local[0].platform != "cpu":
        return (local[0].memory_stats() or {}).get("bytes_limit")
    total = host_memory()
    return None if total is None else total // len(local)


def host_memory() -> int | None:
    """Bytes of memory and swap of this machine, or the limit of its container; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:  # not Linux
        return None
    entries = dict(re.findall(r"^(MemTotal|SwapTotal):\s+(\d+) kB$", text, re.MULTILINE))
    total = 1024 * sum(map(int, entries.values()))
    with contextlib.suppress(OSError, ValueError):  # the file says "max" (no limit), or does not exist
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total or None


def platform() -> str:
    """Platform that the traced program will run on, from the entered mesh: "cpu", "gpu" or "tpu".

    It differs from this process's own devices if the program is compiled ahead of time.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name
