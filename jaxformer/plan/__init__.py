"""Predicts what a training step, or decoding, needs on given devices: memory, FLOPs, traffic and time.

No accelerator is used.

    chips.py        public figures of accelerators, names of TPU slices
    program.py      config and mesh -> compiled training step
    flops.py        floating-point operations, by formula and counted
    estimate.py     compiled step -> memory by part, traffic, roofline
    assumptions.py  every number of the expected times that is tuned on published ones
    shapes.py       config -> sizes of its layers, as the expected times see them
    step_time.py    expected time of a training step
    decode_time.py  expected time of a decode step, and of reading the prompts
    decoding.py     config -> memory of parameters and caches, times, largest batches of decoding
    search.py       candidate meshes for a number of devices
    page.py         an estimate as text
    decode_page.py  a plan of decoding as text

The step of `train/step.py` is compiled from shapes and shardings, without arrays: by the TPU's compiler (libtpu, from
the extra `[tpu]`) for a named slice, otherwise for simulated devices of this CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.plan import chips

MAX_SIMULATED_DEVICES = 1024
"""Maximum number of simulated devices. Each costs memory and startup time."""


def run(config: Config, title: str, hardware: chips.Hardware, searching: bool) -> None:
    """Prints the plan of `config`, or a ranking of meshes for its devices.

    Args:
      config: the config of the run.
      title: first line of the output.
      hardware: the devices to plan for.
      searching: True to rank meshes.

    Raises:
      ConfigError: the config leaves sizes open, or does not fit the devices.
    """
    simulate(config, hardware)
    from jaxformer.plan import estimate, page, program, search

    devices = program.devices(hardware, config)
    if not searching:
        traced = program.trace(config, program.build_mesh(config, devices))
        result = estimate.estimate(traced, program.compile(traced), hardware)
        print(page.format_page(title, traced, result))
        return
    estimates = []
    print(f"{title}\n  {page.describe_hardware(hardware, len(devices))}\n", flush=True)
    for found in search.search(config, hardware, devices):
        if isinstance(found, str):
            print(f"  left out: {found}")
            continue
        estimates.append(found)
        print(f"  {found.compile_seconds:6.1f} s  {page.format_mesh(found.mesh)}: {page.verdict(found)}", flush=True)
    if estimates:
        print("\n" + page.ranking(estimates))


def run_decoding(config: Config, title: str, hardware: chips.Hardware, sizes: Sequence[int | None]) -> None:
    """Prints the plan of decoding with `config`.

    Args:
      config: the config of the run.
      title: first line of the output.
      hardware: the devices to plan for.
      sizes: batch, tokens of a prompt and new tokens; None: those of the config.

    Raises:
      ConfigError: the model has no decoder, or sizes do not fit it or the devices.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # only shapes are made
    from jaxformer.plan import decode_page, decoding

    print(decode_page.format_page(title, decoding.plan(config, hardware, *sizes)))


def simulate(config: Config, hardware: chips.Hardware) -> None:
    """Sets the environment so that JAX has the CPU devices of the plan; no effect if JAX is imported already.

    Raises:
      ConfigError: there are more devices than can be simulated.
    """
    if "jax" in sys.modules:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # an accelerator of this machine is not used
    count = 1 if hardware.topology else hardware.devices or config.mesh.devices
    if count > MAX_SIMULATED_DEVICES:
        raise ConfigError(
            f"--devices: got {count}, expected at most {MAX_SIMULATED_DEVICES} simulated ones; use --topology"
        )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
