"""Accelerators that `jaxformer plan` knows: public figures, and names of TPU slices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxformer.errors import ConfigError
from jaxformer.registry import nearest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Figures of one device for the roofline.

    Attributes:
      flops: peak of bfloat16 products with float32 sums, without sparsity, in FLOP/s.
      memory: bytes that a program may use. For TPUs this is the compiler's limit, slightly less than the total.
      bandwidth: memory bandwidth in bytes/s.
      link: bytes/s of one network link, in one direction.
      dcn: bytes/s of a device to other slices, over the data centre's network; for GPUs, to other hosts.
      ring: minimum side length of a TPU slice whose sides are closed rings; None for a switched network.
      sides: number of sides of a slice (2 or 3); 0 for a switched network.
      kind: name of the device and its network.
      source: source of the figures.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    dcn: float
    ring: int | None
    kind: str
    source: str
    sides: int = 0

    def network(self, sides: tuple[int, ...]) -> float:
        """Bytes/s that a device can send in a collective along one mesh axis.

        On a torus these are two links, one in each direction of the ring. If a side of the slice is not a closed ring,
        only one counts. The model ignores that a mesh axis may use several sides at once, and the latency of hops.
        """
        if self.ring is None:
            return self.link
        return self.link * (2 if all(side % self.ring == 0 for side in sides if side > 1) else 1)


TPU = "cloud.google.com/tpu/docs"
NVIDIA = "NVIDIA's data sheet"

# A TPU's link is its two-way ICI bandwidth / 2 / ports: 600 GB/s and 6 ports (v4), 400 and 4 (v5e), 1200 and 6 (v5p),
# 800 and 4 (v6e). The data centre's network: 6.4 (v5e) and 25.6 Tbit/s (v6e) a pod of 256, 50 Gbit/s a chip (v4, v5p),
# and of DGX machines one adapter a GPU, 200 Gbit/s (A100) or 400. The memory of v4 is the total: its compiler's limit
# has not been read.
CHIPS: dict[str, Chip] = {
    "v4": Chip(275e12, 32 * GIB, 1228e9, 50e9, 6.25e9, 4, "TPU v4", f"{TPU}/v4", 3),
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 50e9, 3.125e9, 16, "TPU v5e", f"{TPU}/v5e", 2),
    "v5p": Chip(459e12, 95.74 * GIB, 2765e9, 100e9, 6.25e9, 4, "TPU v5p", f"{TPU}/v5p", 3),
    "v6e": Chip(918e12, 31.25 * GIB, 1638e9, 100e9, 12.5e9, 16, "TPU v6e", f"{TPU}/v6e", 2),
    "a100": Chip(312e12, 80e9, 2039e9, 300e9, 25e9, None, "A100 SXM 80 GB, one NVLink domain", f"{NVIDIA} of the A100"),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, 50e9, None, "H100 SXM, one NVLink domain", f"{NVIDIA} of the H100"),
    "h200": Chip(989e12, 141e9, 4800e9, 450e9, 50e9, None, "H200 SXM, one NVLink domain", f"{NVIDIA} of the H200"),
}
DEFAULT_CHIP = "h100"


def name_of(chip: Chip) -> str:
    """The name of a chip in `CHIPS`, by its kind."""
    return next(name for name, known in CHIPS.items() if known.kind == chip.kind)


@dataclass(frozen=True)
class Hardware:
    """The devices of a plan.

    Attributes:
      chip: figures of one device.
      devices: number of devices of all slices; None: as many as the mesh has.
      topology: name of a TPU slice, as "v5e:16x16"; "" for simulated devices.
      sides: sides of the slice.
      slices: number of slices.
    """

    chip: Chip
    devices: int | None
    topology: str = ""
    sides: tuple[int, ...] = ()
    slices: int = 1

    @property
    def network(self) -> float:
        """Bytes/s that a device can send along one mesh axis."""
        return self.chip.network(self.sides)


def parse_hardware(topology: str, chip: str, devices: int | None, slices: int = 1) -> Hardware:
    """The hardware of the flags `--topology` (of one slice), `--chip` and `--devices` (of all `slices`).

    Raises:
      ConfigError: a name is unknown, or the numbers of devices differ.
    """
    if not topology:
        name = chip or DEFAULT_CHIP
        if name not in CHIPS:
            raise ConfigError(f"--chip: got {name!a}, expected one of {', '.join(CHIPS)}{nearest(name, tuple(CHIPS))}")
        return Hardware(CHIPS[name], devices, slices=slices)
    name, _, shape = topology.partition(":")
    known = [key for key, known_chip in CHIPS.items() if known_chip.ring is not None]
    if name not in known or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        example = "v5p:4x4x8" if name in ("v4", "v5p") else "v5e:16x16"
        raise ConfigError(
            f"--topology: got {topology!a}, expected NAME:SIDES such as {example}, NAME one of {', '.join(known)}"
        )
    sides = tuple(map(int, shape.split("x")))
    count = math.prod(sides) * slices
    if devices is not None and devices != count:
        times = f", {slices} times (config.mesh.dcn)" if slices > 1 else ""
        raise ConfigError(f"--devices: got {devices}, expected {count}, those of --topology={topology}{times}")
    if chip and chip != name:
        raise ConfigError(f"--chip: got {chip!a}, expected {name}, that of --topology={topology}; leave it out")
    return Hardware(CHIPS[name], count, topology, sides, slices)
