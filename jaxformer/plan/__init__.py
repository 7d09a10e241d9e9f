"""What a training step will need on devices that are not here: memory, operations, traffic, time.

    chips.py     public figures of accelerators, names of TPU slices
    program.py   a config and a mesh -> the compiled step of training
    flops.py     floating-point operations, by formula and counted
    estimate.py  a compiled step -> memory by part, traffic, a roofline, a verdict
    search.py    the meshes of a number of devices
    page.py      an estimate as text

Nothing is computed and no parameter exists: the step of `train/step.py` is compiled from shapes and shardings, by the
compiler of the TPU (libtpu, from the extra `[tpu]`) for a named slice, or else for simulated devices of this CPU.
"""

from __future__ import annotations

import os
import sys

from jaxformer.config import Config, ConfigError
from jaxformer.plan import chips

MOST = 1024
"""Simulated devices: each costs memory and time to start."""


def run(config: Config, title: str, place: chips.Place, searching: bool) -> None:
    """Prints the plan of `config`, or a ranking of the meshes of its devices.

    Raises:
      ConfigError: there is no such plan.
    """
    simulate(config, place)
    from jaxformer.plan import estimate, page, program, search

    where = program.devices(place, config)
    if not searching:
        traced = program.trace(config, program.mesh_of(config, where))
        found = estimate.estimate(traced, program.compile(traced), place)
        print(page.page(title, traced, found))
        return
    estimates = []
    print(f"{title}\n  {page.where(place, len(where))}\n", flush=True)
    for found in search.search(config, place, where):
        if isinstance(found, str):
            print(f"  left out: {found}")
            continue
        estimates.append(found)
        print(f"  {found.compiled:6.1f} s  {page.mesh_words(found.mesh)}: {page.verdict(found)}", flush=True)
    if estimates:
        print("\n" + page.ranking(estimates))


def simulate(config: Config, place: chips.Place) -> None:
    """Lets this process have the CPU devices that the plan needs, unless jax is there already.

    Raises:
      ConfigError: more than can be simulated.
    """
    if "jax" in sys.modules:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # an accelerator, if there is one, has nothing to do with it
    count = 1 if place.topology else place.devices or config.mesh.devices
    if count > MOST:
        raise ConfigError(f"--devices: got {count}, expected at most {MOST} simulated ones; use --topology")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
