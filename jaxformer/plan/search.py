"""Search for the fastest mesh of a number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from jaxformer.config import Config, MeshConfig, overrides
from jaxformer.errors import ConfigError
from jaxformer.plan import estimate, program
from jaxformer.plan.chips import Hardware
from jaxformer.plan.estimate import Estimate
from jaxformer.plan.program import Compiled

TENSOR_SIZES = (1, 2, 4, 8)
"""Sizes of the tensor axis to try. With larger ones, the traffic in every layer costs more than is saved."""
FSDP_GROUP = 8
"""Size of the fsdp axis to try besides 1 and all remaining devices."""


def candidate_meshes(config: Config, devices: int) -> list[MeshConfig]:
    """Meshes of `devices` devices of a slice: tensor from 1 to 8, the rest fsdp, data or both.

    The axes stage, expert and context keep their sizes from the config.
    """
    base = config.mesh
    fixed = max(base.stage, 1) * max(base.expert, 1) * max(base.context, 1)
    if devices % fixed:
        raise ConfigError(
            f"config.mesh: got stage x expert x context of {fixed}, expected a divisor of {devices} devices"
        )
    candidates = []
    for tensor in TENSOR_SIZES:
        if (devices // fixed) % tensor:
            continue
        rest = devices // fixed // tensor
        for fsdp in sorted({rest, FSDP_GROUP, 1}, reverse=True):
            if rest % fsdp == 0:
                candidates.append(dataclasses.replace(base, data=rest // fsdp, fsdp=fsdp, tensor=tensor))
    return candidates


def search(config: Config, hardware: Hardware, devices: list[jax.Device]) -> Iterator[Estimate | str]:
    """The estimate of each candidate mesh, or the reason why it is not possible.

    A mesh whose train state alone exceeds the memory is not compiled.
    """
    for sizes in candidate_meshes(config, len(devices) // hardware.slices):
        edited = dataclasses.replace(config, mesh=sizes)
        try:
            overrides.check(edited)
            traced = program.trace(edited, program.build_mesh(edited, devices))
        except ConfigError as error:
            yield str(error)
            continue
        state = sum(estimate.state_bytes(traced).values())
        is_too_large = state > hardware.chip.memory
        compiled = Compiled(None, 0.0, state) if is_too_large else program.compile(traced)
        yield estimate.estimate(traced, compiled, hardware)
