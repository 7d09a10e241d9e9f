"""The meshes of a number of devices: which are worth trying, and which of them are fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from jaxformer import overrides
from jaxformer.config import Config, ConfigError, MeshConfig
from jaxformer.plan import estimate, program
from jaxformer.plan.chips import Place
from jaxformer.plan.estimate import Estimate
from jaxformer.plan.program import Compiled

TENSOR = (1, 2, 4, 8)
"""Sizes of the tensor axis that are tried: beyond, its traffic every layer outweighs what it saves."""
INNER = 8
"""Besides all or nothing, so many of the devices share the parameters and the rest repeats them."""


def meshes(config: Config, devices: int) -> list[MeshConfig]:
    """A small set of meshes of `devices` (of one slice): tensor of 1 to 8, and the rest fsdp, data or some of both.

    The axes stage, expert and context keep the sizes that the config gives them.
    """
    given = config.mesh
    fixed = max(given.stage, 1) * max(given.expert, 1) * max(given.context, 1)
    if devices % fixed:
        raise ConfigError(
            f"config.mesh: got stage x expert x context of {fixed}, expected a divisor of {devices} devices"
        )
    found = []
    for tensor in TENSOR:
        if (devices // fixed) % tensor:
            continue
        rest = devices // fixed // tensor
        for fsdp in sorted({rest, INNER, 1}, reverse=True):
            if rest % fsdp == 0:
                found.append(dataclasses.replace(given, data=rest // fsdp, fsdp=fsdp, tensor=tensor))
    return found


def search(config: Config, place: Place, where: list[jax.Device]) -> Iterator[Estimate | str]:
    """An estimate of every mesh, or why it cannot be.

    A mesh whose state alone is larger than the memory is not compiled.
    """
    for sizes in meshes(config, len(where) // place.slices):
        edited = dataclasses.replace(config, mesh=sizes)
        try:
            overrides.check(edited)
            traced = program.trace(edited, program.mesh_of(edited, where))
        except ConfigError as error:
            yield str(error)
            continue
        state = sum(estimate.kept(traced).values())
        refused = state > place.chip.memory
        compiled = Compiled(None, 0.0, state) if refused else program.compile(traced)
        yield estimate.estimate(traced, compiled, place)
