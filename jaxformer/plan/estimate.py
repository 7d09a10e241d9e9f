"""Estimates of a compiled step: memory by part, traffic, a roofline, and whether it fits.

The roofline of each device has these times:

    compute          counted FLOPs / devices / peak
    memory           minimum bytes read and written in memory / bandwidth
    network          bytes sent within the slice (`parallel/collectives.py`) / bandwidth along one mesh axis
    between slices   bytes sent to other slices / bandwidth of the data centre's network

A step takes at least the longest of them (if all overlap perfectly) and about their sum at most (if nothing overlaps).
All peaks are assumed to be reached. Real kernels and elementwise operations are slower than both bounds: what a step is
expected to take is another estimate, tuned on published times (`step_time.py`).

MFU counts model FLOPs as PaLM does (`plan/flops.py`), with masked keys: model FLOPs / (time x devices x peak). If a
kernel skips masked pairs, MFU can be higher than the utilization of the hardware.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxformer.config import Config
from jaxformer.data.packing import Shape
from jaxformer.models import build
from jaxformer.parallel import collectives
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import flops, shapes, step_time
from jaxformer.plan.chips import GIB, Hardware
from jaxformer.plan.program import Compiled, Program
from jaxformer.types import PyTree

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """Needs of a training step. Bytes and seconds are those of one device.

    Attributes:
      mesh: sizes of the axes that are not 1.
      shape: batch shape.
      parameters: number of parameters.
      flops_per_token: model FLOPs of a token as PaLM counts them, over all keys; used for MFU.
      flops_per_token_visible: the same over visible keys only.
      flops_per_step: `flops_per_token` times the tokens of a step.
      counted_flops: FLOPs of the products in the program of a step.
      memory: bytes by part; empty if the program does not compile for lack of memory.
      state: bytes of the train state and the batch, by part.
      needed_bytes: bytes in total; None if the compiler does not report them.
      collectives: (kind, mesh axes) -> (executions per step, bytes per step).
      cross_slice_bytes: the part of these bytes that goes to other slices.
      unknown_loops: number of collectives in loops of unknown length, which count as one iteration.
      seconds: compute, memory, network (and between slices, if there are several); empty without a program.
      compile_seconds: CPU time of the compilation.
      hardware: the devices of the plan.
      devices: number of devices.
      advice: what to change, if the step does not fit.
      expected: expected seconds by part, which the assumptions of `step_time.py` give; empty if there are none.
      not_expected: why there are none.
    """

    mesh: dict[str, int]
    shape: Shape
    parameters: int
    flops_per_token: float
    flops_per_token_visible: float
    flops_per_step: float
    counted_flops: float
    memory: dict[str, float]
    state: dict[str, float]
    needed_bytes: float | None
    collectives: dict[tuple[str, str], tuple[int, float]]
    cross_slice_bytes: float
    unknown_loops: int
    seconds: dict[str, float]
    compile_seconds: float
    hardware: Hardware
    devices: int
    advice: str = ""
    expected: dict[str, float] = field(default_factory=dict)
    not_expected: str = ""

    @property
    def expected_seconds(self) -> float:
        """Expected seconds of a step; infinite if there is no such estimate."""
        return sum(self.expected.values()) if self.expected else math.inf

    @property
    def fits(self) -> bool:
        """True if the program needs no more memory than a device has."""
        return bool(self.memory) and self.needed_bytes is not None and self.needed_bytes <= self.hardware.chip.memory

    @property
    def min_seconds(self) -> float:
        """Seconds of a step if everything overlaps; infinite without a program."""
        return max(self.seconds.values(), default=math.inf)

    @property
    def max_seconds(self) -> float:
        """Seconds of a step if nothing overlaps; infinite without a program."""
        return sum(self.seconds.values()) if self.seconds else math.inf

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilization for steps of this many seconds."""
        return self.flops_per_step / (seconds * self.devices * self.hardware.chip.flops)

    def row(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "topology": self.hardware.topology,
            "chip": self.hardware.chip.kind,
            "devices": self.devices,
            "slices": self.hardware.slices,
            "mesh": self.mesh,
            "rows": self.shape.rows,
            "length": self.shape.length,
            "parameters": self.parameters,
            "flops_token": self.flops_per_token,
            "flops_token_visible": self.flops_per_token_visible,
            "flops_step": self.flops_per_step,
            "flops_counted": self.counted_flops,
            "memory": self.memory,
            "state": self.state,
            "need": self.needed_bytes,
            "capacity": self.hardware.chip.memory,
            "fits": self.fits,
            "sent": [[kind, axes, times, size] for (kind, axes), (times, size) in self.collectives.items()],
            "between_slices": self.cross_slice_bytes,
            "unknown_loops": self.unknown_loops,
            "seconds": self.seconds,
            "expected": self.expected,
            "step_seconds": [self.min_seconds, self.max_seconds] if self.seconds else None,
            "mfu": [self.mfu(self.max_seconds), self.mfu(self.min_seconds)] if self.seconds else None,
            "compile_core_seconds": round(self.compile_seconds, 1),
        }


def estimate(program: Program, compiled: Compiled, hardware: Hardware) -> Estimate:
    """Estimates the needs of a compiled program."""
    config, mesh, shape = program.config, program.mesh, program.shape
    per_token = flops.flops_per_token(config, program.state.params, program.names, shape.length)
    counted = program.counted_flops
    state = state_bytes(program)
    memory, sent, between, unknown, seconds = {}, {}, 0.0, 0, {}
    need = compiled.needed_bytes
    if compiled.executable is not None:
        memory = memory_parts(program, compiled.executable.memory_analysis(), state)
        need = sum(memory.values())
        numbers = [device.id for device in mesh.devices.flat]
        slices = meshes.slice_numbers(config.mesh, mesh.devices.shape).tolist()
        found = collectives.collectives(compiled.executable.as_text(), numbers, slices)
        sent, unknown = traffic(found, mesh.shape), sum(not each.is_count_known for each in found)
        between = sum(each.cross_slice_bytes for each in found)
        seconds = {
            "compute": counted / mesh.size / hardware.chip.flops,
            "memory": bus_bytes(program, memory, state) / hardware.chip.bandwidth,
            "network": (sum(size for _, size in sent.values()) - between) / hardware.network,
        }
        if hardware.slices > 1:
            seconds["between slices"] = between / hardware.chip.dcn
    parameters = build.count_params(program.state.params)
    expected, reason = {}, shapes.unsupported(config)
    if not reason:
        model = shapes.training_shapes(config, program.state.params, program.names, parameters, shape.length)
        layout = shapes.layout(config, mesh.shape, hardware.slices)
        expected = step_time.step_seconds(model, layout, shape.rows * shape.length, hardware.chip)
    result = Estimate(
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        shape=shape,
        parameters=parameters,
        flops_per_token=per_token,
        flops_per_token_visible=flops.flops_per_token_visible(
            config, program.state.params, program.names, shape.length
        ),
        flops_per_step=per_token * shape.rows * shape.length,
        counted_flops=counted,
        memory=memory,
        state=state,
        needed_bytes=need,
        collectives=sent,
        cross_slice_bytes=between,
        unknown_loops=unknown,
        seconds=seconds,
        compile_seconds=compiled.seconds,
        hardware=hardware,
        devices=mesh.size,
        expected=expected,
        not_expected=reason,
    )
    return result if result.fits else _with_advice(result, config)


def bytes_per_device(tree: PyTree) -> float:
    """Bytes on one device of a tree of shapes with shardings."""

    def size(x: jax.ShapeDtypeStruct) -> float:
        itemsize = 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        return math.prod(x.sharding.shard_shape(x.shape)) * itemsize

    return float(sum(size(x) for x in jax.tree.leaves(tree)))


def state_bytes(program: Program) -> dict[str, float]:
    """Bytes of the train state and the batch on one device, by part."""
    state = program.state
    sizes = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "averages and statistics": bytes_per_device(dict(state.variables)),
        "batch": bytes_per_device(program.batch),
    }
    return {name: size for name, size in sizes.items() if size}


def memory_parts(program: Program, analysis: Any, state: Mapping[str, float]) -> dict[str, float]:
    """Memory of a program by part: the train state, and the compiler's temporaries divided by use.

    Sizes of the gradients (as large as the parameters) and the logits are known. The rest of the temporaries counts as
    activations, also if the compiler never has all gradients in memory at once.
    """
    arguments = float(analysis.argument_size_in_bytes)
    fresh = max(float(analysis.output_size_in_bytes - analysis.alias_size_in_bytes), 0.0)
    temporary = float(analysis.temp_size_in_bytes)
    logits = min(logits_bytes(program), temporary)
    gradients = min(state["parameters"], temporary - logits)
    padding = arguments - sum(state.values())  # the chip's memory tiles are padded
    return {
        **state,
        "logits": logits,
        "gradients": gradients,
        "activations": temporary - logits - gradients,
        "program, outputs, padding": max(fresh + padding + float(analysis.generated_code_size_in_bytes), 0.0),
    }


def logits_bytes(program: Program) -> float:
    """Bytes of float32 logits on one device: of a microbatch, or of a chunk of its tokens."""
    config, mesh, model = program.config, program.mesh, program.config.model
    head = model.head if model.generator is None else model.generator.head
    if head.kind != "tokens":
        return 0.0
    side = model.decoder_part or model.encoder_part
    if side is None or side.embed.vocab is None:
        return 0.0
    shards = math.prod(mesh.shape[axis] for axis in ("stage", "data", "fsdp", "expert", "context"))
    vocab = side.embed.vocab / (mesh.shape["tensor"] if side.embed.vocab % mesh.shape["tensor"] == 0 else 1)
    labels = program.batch.labels
    slots = math.prod(program.shape if labels is None else labels.shape)
    tokens = slots / shards / config.train.accumulation
    return 4.0 * min(tokens, head.chunk or tokens) * vocab


def traffic(found: list[collectives.Collective], mesh: Mapping[str, int]) -> dict[tuple[str, str], tuple[int, float]]:
    """Executions and bytes by kind and mesh axes, in order of decreasing bytes."""
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for each in found:
        row = total[each.kind, " ".join(each.axes(dict(mesh)))]
        row[0] += each.executions
        row[1] += each.bytes
    return {key: (int(n), size) for key, (n, size) in sorted(total.items(), key=lambda row: -row[1][1])}


def bus_bytes(program: Program, memory: Mapping[str, float], state: Mapping[str, float]) -> float:
    """Minimum bytes read and written in memory per step.

    The state is read and written. Every microbatch reads the gathered weights in the compute precision, once in the
    forward pass and twice in the backward pass, and writes and reads its temporaries.
    """
    config, mesh = program.config, program.mesh
    parameters = build.count_params(program.state.params) * BYTES[config.model.dtype]
    weights = parameters / math.prod(mesh.shape[axis] for axis in ("tensor", "expert", "stage"))
    temporary = memory["logits"] + memory["activations"]
    microbatches = config.train.accumulation
    return 2 * sum(state.values()) + microbatches * (3 * weights + 2 * temporary)


def _with_advice(result: Estimate, config: Config) -> Estimate:
    """The estimate with advice on what to change, by the part that takes the most memory."""
    state, capacity = sum(result.state.values()), result.hardware.chip.memory
    parts = result.memory
    rows = result.shape.rows // (result.devices * config.train.accumulation)
    if state > 0.8 * capacity:
        words = "parameters and optimizer alone take it: raise config.mesh.fsdp or tensor, or use more devices"
    elif parts and parts["logits"] > 0.3 * ((result.needed_bytes or 0.0) - state):
        words = "the logits take it: set config.model.head.chunk=1024, or raise config.mesh.tensor"
    elif any(getattr(config.model, p).remat == "none" for p in ("encoder", "decoder") if getattr(config.model, p)):
        words = "the activations take it: set config.model.decoder.remat=full (and the encoder's)"
    elif rows > 1:
        words = "the activations take it: raise config.train.accumulation, or lower config.data.batch"
    else:
        words = "the activations take it at one row a device: raise config.mesh.tensor or context, or use more devices"
    return dataclasses.replace(result, advice=words)


def format_gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
