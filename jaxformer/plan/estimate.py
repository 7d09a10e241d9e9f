"""From a compiled step to figures: memory by part, what is sent, a roofline, and whether it fits.

The roofline. These take time on each device:

    compute   counted FLOPs / devices / peak
    memory    bytes that must cross the memory's bus at least / bandwidth
    network   bytes that the device sends (`parallel/collectives.py`) in its slice / bandwidth of an axis of its network
    between   bytes that it sends to other slices, where there are some / bandwidth of the data centre's network

A step takes at least the longest of them, if all overlap perfectly, and at most about their sum, if nothing does. No
efficiency is assumed: kernels that do not reach the peak, and elementwise work, make real steps slower than both.
MFU counts model FLOPs as PaLM does (`plan/flops.py`), causal attention counts whole: model FLOPs / (time x devices x
peak). Where a kernel skips masked pairs, it can come out above the share of the peak that is really used.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxformer.config import Config
from jaxformer.data.packing import Shape
from jaxformer.models import build
from jaxformer.parallel import collectives
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import flops
from jaxformer.plan.chips import GIB, Place
from jaxformer.plan.program import Compiled, Program
from jaxformer.types import PyTree

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """What a step needs. Bytes and seconds are those of one device.

    Attributes:
      mesh: sizes of the axes that are not 1.
      flops_per_token: model FLOPs of a token as PaLM counts them, over all keys; MFU counts these.
      flops_per_token_visible: the same over visible keys only.
      flops_per_step: `flops_per_token` times the tokens of a step.
      counted: FLOPs of the products in the program of a step.
      memory: bytes by part, in the order of the page; empty where the program does not compile for lack of memory.
      state: bytes of what a run keeps between steps.
      need: bytes in all; None: the compiler did not say.
      sent: (kind, mesh axes) -> (times a step, bytes a step).
      between: bytes of these that go to other slices.
      unknown: collectives in loops whose length is not known, which count once.
      seconds: compute, memory, network (and between slices, if there are some); empty where there is no program.
      compiled: seconds of a core that the compiler took.
    """

    mesh: dict[str, int]
    shape: Shape
    parameters: int
    flops_per_token: float
    flops_per_token_visible: float
    flops_per_step: float
    counted: float
    memory: dict[str, float]
    state: dict[str, float]
    need: float | None
    sent: dict[tuple[str, str], tuple[int, float]]
    between: float
    unknown: int
    seconds: dict[str, float]
    compiled: float
    place: Place
    devices: int
    advice: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.memory) and self.need <= self.place.chip.memory

    @property
    def best(self) -> float:
        """Seconds of a step in which everything overlaps; infinite where there is no program."""
        return max(self.seconds.values(), default=math.inf)

    @property
    def worst(self) -> float:
        """Seconds of a step in which nothing overlaps."""
        return sum(self.seconds.values()) if self.seconds else math.inf

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilisation of steps that take so long, with model FLOPs over all keys, as PaLM counts them."""
        return self.flops_per_step / (seconds * self.devices * self.place.chip.flops)

    def row(self) -> dict[str, Any]:
        """The figures as JSON takes them."""
        return {
            "topology": self.place.topology,
            "chip": self.place.chip.kind,
            "devices": self.devices,
            "slices": self.place.slices,
            "mesh": self.mesh,
            "rows": self.shape.rows,
            "length": self.shape.length,
            "parameters": self.parameters,
            "flops_token": self.flops_per_token,
            "flops_token_visible": self.flops_per_token_visible,
            "flops_step": self.flops_per_step,
            "flops_counted": self.counted,
            "memory": self.memory,
            "state": self.state,
            "need": self.need,
            "capacity": self.place.chip.memory,
            "fits": self.fits,
            "sent": [[kind, axes, times, size] for (kind, axes), (times, size) in self.sent.items()],
            "between_slices": self.between,
            "unknown_loops": self.unknown,
            "seconds": self.seconds,
            "step_seconds": [self.best, self.worst] if self.seconds else None,
            "mfu": [self.mfu(self.worst), self.mfu(self.best)] if self.seconds else None,
            "compile_core_seconds": round(self.compiled, 1),
        }


def estimate(program: Program, compiled: Compiled, place: Place) -> Estimate:
    """The figures of a compiled program."""
    config, mesh, shape = program.config, program.mesh, program.shape
    per_token = flops.flops_per_token(config, program.state.params, program.names, shape.length)
    counted = program.counted
    state = kept(program)
    memory, sent, between, unknown, seconds = {}, {}, 0.0, 0, {}
    need = compiled.need
    if compiled.executable is not None:
        memory = parts(program, compiled.executable.memory_analysis(), state)
        need = sum(memory.values())
        numbers = [device.id for device in mesh.devices.flat]
        slices = meshes.slice_numbers(config.mesh, mesh.devices.shape).tolist()
        found = collectives.collectives(compiled.executable.as_text(), numbers, slices)
        sent, unknown = traffic(found, mesh.shape), sum(not each.bounded for each in found)
        between = sum(each.between for each in found)
        seconds = {
            "compute": counted / mesh.size / place.chip.flops,
            "memory": bus(program, memory, state) / place.chip.bandwidth,
            "network": (sum(size for _, size in sent.values()) - between) / place.network,
        }
        if place.slices > 1:
            seconds["between slices"] = between / place.chip.dcn
    result = Estimate(
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        shape=shape,
        parameters=build.count(program.state.params),
        flops_per_token=per_token,
        flops_per_token_visible=flops.flops_per_token_visible(
            config, program.state.params, program.names, shape.length
        ),
        flops_per_step=per_token * shape.rows * shape.length,
        counted=counted,
        memory=memory,
        state=state,
        need=need,
        sent=sent,
        between=between,
        unknown=unknown,
        seconds=seconds,
        compiled=compiled.seconds,
        place=place,
        devices=mesh.size,
    )
    return result if result.fits else _advised(result, config)


def held(tree: PyTree) -> float:
    """Bytes that one device holds of a tree of shapes with shardings."""

    def size(x: jax.ShapeDtypeStruct) -> float:
        itemsize = 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        return math.prod(x.sharding.shard_shape(x.shape)) * itemsize

    return float(sum(size(x) for x in jax.tree.leaves(tree)))


def kept(program: Program) -> dict[str, float]:
    """Bytes of the state and the batch on one device, from their shardings."""
    state = program.state
    found = {
        "parameters": held(state.params),
        "optimizer": held(state.opt_state),
        "averages and statistics": held(dict(state.variables)),
        "batch": held(program.batch),
    }
    return {name: size for name, size in found.items() if size}


def parts(program: Program, analysis: Any, state: Mapping[str, float]) -> dict[str, float]:
    """The compiler's memory by what it is for: the state as it is laid out, and the temporaries divided.

    Of the temporaries the gradients (as large as the parameters) and the logits are known; what is left are the
    activations. A compiler that never holds all of them at once leaves less for the last.
    """
    arguments = float(analysis.argument_size_in_bytes)
    fresh = max(float(analysis.output_size_in_bytes - analysis.alias_size_in_bytes), 0.0)
    temporary = float(analysis.temp_size_in_bytes)
    logits = min(logits_of(program), temporary)
    gradients = min(state["parameters"], temporary - logits)
    padding = arguments - sum(state.values())  # tiles of the chip's memory are filled up
    return {
        **state,
        "logits": logits,
        "gradients": gradients,
        "activations": temporary - logits - gradients,
        "program, outputs, padding": max(fresh + padding + float(analysis.generated_code_size_in_bytes), 0.0),
    }


def logits_of(program: Program) -> float:
    """Bytes of float32 logits that one device holds at a time: of a microbatch, or of a chunk of its tokens."""
    config, mesh, model = program.config, program.mesh, program.config.model
    if model.head.kind != "tokens":
        return 0.0
    side = model.decoder or model.recurrent_decoder or model.encoder or model.recurrent_encoder
    spread = math.prod(mesh.shape[axis] for axis in ("stage", "data", "fsdp", "expert", "context"))
    vocab = side.embed.vocab / (mesh.shape["tensor"] if side.embed.vocab % mesh.shape["tensor"] == 0 else 1)
    rows, length = program.shape
    tokens = rows * length / spread / config.train.accumulation
    return 4.0 * min(tokens, model.head.chunk or tokens) * vocab


def traffic(found: list[collectives.Collective], mesh: Mapping[str, int]) -> dict[tuple[str, str], tuple[int, float]]:
    """Times and bytes by kind and mesh axes, the largest first."""
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for each in found:
        row = total[each.kind, " ".join(each.axes(dict(mesh)))]
        row[0] += each.times
        row[1] += each.bytes
    return {key: (int(n), size) for key, (n, size) in sorted(total.items(), key=lambda row: -row[1][1])}


def bus(program: Program, memory: Mapping[str, float], state: Mapping[str, float]) -> float:
    """Bytes that cross the memory's bus in a step at least.

    The state is read and written; every microbatch reads the weights, gathered and in the compute precision, forward
    and twice backward, and writes and reads its temporaries.
    """
    config, mesh = program.config, program.mesh
    parameters = build.count(program.state.params) * BYTES[config.model.dtype]
    weights = parameters / math.prod(mesh.shape[axis] for axis in ("tensor", "expert", "stage"))
    temporary = memory["logits"] + memory["activations"]
    microbatches = config.train.accumulation
    return 2 * sum(state.values()) + microbatches * (3 * weights + 2 * temporary)


def _advised(result: Estimate, config: Config) -> Estimate:
    """With what to change, by what takes the most."""
    state, capacity = sum(result.state.values()), result.place.chip.memory
    parts = result.memory
    rows = result.shape.rows // (result.devices * config.train.accumulation)
    if state > 0.8 * capacity:
        words = "parameters and optimizer alone take it: raise config.mesh.fsdp or tensor, or use more devices"
    elif parts and parts["logits"] > 0.3 * (result.need - state):
        words = "the logits take it: set config.model.head.chunk=1024, or raise config.mesh.tensor"
    elif any(getattr(config.model, p).remat == "none" for p in ("encoder", "decoder") if getattr(config.model, p)):
        words = "the activations take it: set config.model.decoder.remat=full (and the encoder's)"
    elif rows > 1:
        words = "the activations take it: raise config.train.accumulation, or lower config.data.batch"
    else:
        words = "the activations take it at one row a device: raise config.mesh.tensor or context, or use more devices"
    return dataclasses.replace(result, advice=words)


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
