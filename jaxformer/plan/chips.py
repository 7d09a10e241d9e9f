"""Accelerators that a plan can be made for: public figures, and the names of TPU slices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxformer.config import ConfigError
from jaxformer.registry import nearest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What the roofline needs of one device.

    Attributes:
      flops: peak of bfloat16 products with float32 sums, operations/s, without sparsity.
      memory: bytes that a program may use; of TPUs what their compiler allows, which is a little less than is sold.
      bandwidth: of that memory, bytes/s.
      link: bytes/s that one network link sends, in one direction.
      dcn: bytes/s that a device sends to other slices, over the data centre's network; of GPUs, to other hosts.
      ring: devices that a side of a TPU slice must have for its ends to be joined; None: a switched network.
      kind: what is joined, in words.
      source: who says so.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    dcn: float
    ring: int | None
    kind: str
    source: str

    def network(self, sides: tuple[int, ...]) -> float:
        """Bytes/s that a device can send in a collective along one axis of the mesh.

        On a torus that is two links, one in each direction of the ring; where some side of the slice is an open line,
        its last link is the bottleneck and one counts. That a mesh axis may use several sides of a torus at once is
        left out, as is the latency of a hop.
        """
        if self.ring is None:
            return self.link
        return self.link * (2 if all(side % self.ring == 0 for side in sides if side > 1) else 1)


TPU = "cloud.google.com/tpu/docs"
NVIDIA = "NVIDIA's data sheet"

# A TPU's link is its two-way ICI bandwidth / 2 / ports: 400 GB/s and 4 ports (v5e), 1200 and 6 (v5p), 800 and 4 (v6e).
# The data centre's network: 6.4 (v5e) and 25.6 Tbit/s (v6e) a pod of 256, 50 Gbit/s a chip (v5p), and of DGX
# machines one adapter a GPU, 200 Gbit/s (A100) or 400.
CHIPS: dict[str, Chip] = {
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 50e9, 3.125e9, 16, "TPU v5e", f"{TPU}/v5e"),
    "v5p": Chip(459e12, 95.74 * GIB, 2765e9, 100e9, 6.25e9, 4, "TPU v5p", f"{TPU}/v5p"),
    "v6e": Chip(918e12, 31.25 * GIB, 1638e9, 100e9, 12.5e9, 16, "TPU v6e", f"{TPU}/v6e"),
    "a100": Chip(312e12, 80e9, 2039e9, 300e9, 25e9, None, "A100 SXM 80 GB, one NVLink domain", f"{NVIDIA} of the A100"),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, 50e9, None, "H100 SXM, one NVLink domain", f"{NVIDIA} of the H100"),
    "h200": Chip(989e12, 141e9, 4800e9, 450e9, 50e9, None, "H200 SXM, one NVLink domain", f"{NVIDIA} of the H200"),
}
DEFAULT = "h100"


@dataclass(frozen=True)
class Place:
    """Where a plan's program runs: `devices` chips, of TPU slices with these sides if `topology` names one."""

    chip: Chip
    devices: int | None
    topology: str = ""
    sides: tuple[int, ...] = ()
    slices: int = 1

    @property
    def network(self) -> float:
        return self.chip.network(self.sides)


def place(topology: str, chip: str, devices: int | None, slices: int = 1) -> Place:
    """What `--topology` (of one slice), `--chip` and `--devices` (of all `slices`) mean together.

    Raises:
      ConfigError: an unknown name, or numbers of devices that contradict each other.
    """
    if not topology:
        name = chip or DEFAULT
        if name not in CHIPS:
            raise ConfigError(f"--chip: got {name!a}, expected one of {', '.join(CHIPS)}{nearest(name, CHIPS)}")
        return Place(CHIPS[name], devices, slices=slices)
    name, _, shape = topology.partition(":")
    known = [each for each, found in CHIPS.items() if found.ring is not None]
    if name not in known or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        example = "v5p:4x4x8" if name == "v5p" else "v5e:16x16"
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
    return Place(CHIPS[name], count, topology, sides, slices)
