"""The device mesh. Its six axes always exist, mostly of size 1, so no code asks which parallelism is on."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxformer.config import ConfigError, MeshConfig

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


def sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """The size of every axis, with a -1 replaced by the devices that are left.

    Raises:
      ConfigError: the sizes do not multiply to `devices`.
    """
    given = {name: getattr(config, name) for name in AXES}
    free = [name for name, size in given.items() if size == -1]
    wrong = [f"{name}={size}" for name, size in given.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
        got = ", ".join(wrong or [f"{name}=-1" for name in free])
        raise ConfigError(f"config.mesh: got {got}, expected sizes >= 1 and at most one -1; change the mesh")
    fixed = math.prod(size for size in given.values() if size != -1)
    if free and devices % fixed == 0:
        given[free[0]] = devices // fixed
    if math.prod(given.values()) != devices:
        shape = " x ".join(f"{name} {size}" for name, size in given.items() if size != 1) or "1"
        raise ConfigError(f"config.mesh: got {shape}, expected a product of {devices} devices; change the mesh")
    return given


def make(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of a run over `devices` (default: all of them). Enter it with `jax.set_mesh`.

    The axes are of type Auto: under Explicit axes, which `jax.make_mesh` would choose, Linen's logical partitioning
    does not work.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes(config, len(devices)).values())
    if devices == jax.devices():
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform() -> str:
    """What the program that is being traced will run on: "cpu", "gpu" or "tpu", as the entered mesh says.

    A program compiled ahead of time is for other devices than this process has.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
