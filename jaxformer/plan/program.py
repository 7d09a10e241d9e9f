"""The compiled training step of a config on a mesh, without arrays: only shapes and shardings."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import tasks
from jaxformer.config import Config
from jaxformer.data import packing
from jaxformer.data.packing import Shape
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import flops
from jaxformer.plan.chips import Hardware
from jaxformer.tasks import permutation_lm
from jaxformer.train import freezing, optim, reference
from jaxformer.train import step as steps
from jaxformer.types import Array, Batch, Permutation, PyTree, Slots, Stream, TrainState

LEARNED_TOKENIZERS = ("word", "bpe", "unigram")
"""Kinds of tokenizer whose vocabulary size is set in the config."""


@dataclass(frozen=True)
class Program:
    """A traced training step: shapes with their shardings, and the trace.

    Attributes:
      config: the config, with all sizes resolved.
      mesh: the mesh.
      shapes: batch shapes of the run; the program is for the last one, `shape`.
      state: the train state, as shapes.
      batch: the batch, as shapes.
      names: logical names of the parameters' axes.
      trace: the traced step, which `compile` lowers.
      counted_flops: FLOPs of the matrix products in the program.
    """

    config: Config
    mesh: Mesh
    shapes: list[Shape]
    state: TrainState
    batch: Batch
    names: PyTree
    trace: Any
    counted_flops: float

    @property
    def shape(self) -> Shape:
        return self.shapes[-1]


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a program.

    Attributes:
      executable: the compiled program; None if it does not fit into the memory.
      seconds: CPU time of the compilation over all threads, which other programs on the machine hardly change.
      needed_bytes: memory that a program without executable would need, if the compiler reports it.
    """

    executable: Any
    seconds: float
    needed_bytes: float | None = None


def devices(hardware: Hardware, config: Config) -> list[jax.Device]:
    """Devices to compile for: TPU chips of the slices, or simulated devices.

    Their number is that of `hardware`, or else of the mesh, in which -1 counts as 1.

    Raises:
      ConfigError: there are too few simulated devices, or the TPU's compiler is not installed.
    """
    if hardware.topology:
        return _slices(hardware.topology, hardware.slices)
    count = hardware.devices or config.mesh.devices
    simulated = jax.devices("cpu")
    if len(simulated) < count:
        raise ConfigError(f"plan: got {len(simulated)} simulated devices, expected {count}; start a fresh process")
    return simulated[:count]


def _slices(topology: str, count: int) -> list[jax.Device]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used, so none needs a lock
    for name in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")  # required, but not used
    try:
        several = {"num_slices": count} if count > 1 else {}
        return list(topologies.get_topology_desc(topology, platform="tpu", **several).devices)
    except Exception as error:  # libtpu is missing, or does not know the slice
        words = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"--topology: got {topology!a} ({words}), expected a slice that libtpu knows; "
            "is the extra installed? pip install 'jaxformer[tpu]'; without it, --devices=N --chip=NAME plans on "
            "simulated devices"
        ) from None


def resolve(config: Config) -> Config:
    """The config with vocabulary size and number of classes filled in, without reading data.

    Raises:
      ConfigError: only the data decides such a size; says which field to set.
    """
    tokenizer = config.data.tokenizer
    series = config.model.series
    reads = [part for part in config.model.parts if part != "encoder" or series is None]
    missing = [part for part in reads if getattr(config.model, part).embed.vocab is None]
    tokens = tokenizer.vocab + tokenizer.sentinels
    vocab = -(-tokens // tokenizer.multiple) * tokenizer.multiple
    if missing and tokenizer.kind not in LEARNED_TOKENIZERS:
        raise ConfigError(
            f"config.model.{missing[0]}.embed.vocab: got None, expected a number, since only the data decides how many "
            f"tokens a {tokenizer.kind} tokenizer has; set --config.model.{missing[0]}.embed.vocab=N"
        )
    classes = config.task.classes or tasks.get(config.task.name).classes or ()
    if config.model.head.kind in ("classes", "slots") and config.model.head.classes is None and not classes:
        raise ConfigError(
            "config.model.head.classes: got None, expected a number, since only the data decides it; "
            "set --config.model.head.classes=N"
        )
    if series is not None and series.channels is None:
        raise ConfigError(
            "config.model.series.channels: got None, expected a number, since only the data decides it; "
            "set --config.model.series.channels=N"
        )
    if config.distillation is not None:
        expected = "None: the memory and the work of a teacher are not planned; plan the run without"
        raise ConfigError(f"config.distillation: got a teacher, expected {expected}")
    if config.model.is_empty:
        raise ConfigError("config.model: got no model, expected one; a run that starts from a directory has no plan")
    sizes = build.SeriesSizes(None, config.data.length, config.data.horizon)
    model = build.resolve(config.model, vocab, vocab, len(classes) or None, sizes)
    task = dataclasses.replace(config.task, vocab=config.task.vocab or (tokens if missing else None))
    return dataclasses.replace(config, model=model, task=task)


def with_scanned_layers(config: Config) -> Config:
    """The config with layers as a loop, as accelerators run them (the default on CPUs is unrolled)."""
    parts: dict[str, Any] = {
        name: dataclasses.replace(getattr(config.model, name), unroll=1)
        for name in ("encoder", "decoder")
        if getattr(config.model, name) is not None and getattr(config.model, name).unroll is None
    }
    generator = config.model.generator
    if generator is not None and generator.encoder.unroll is None:
        encoder = dataclasses.replace(generator.encoder, unroll=1)
        parts["generator"] = dataclasses.replace(generator, encoder=encoder)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **parts))


def batch_shapes(config: Config, mesh: Mesh) -> list[Shape]:
    """The batch shapes of the run's pipeline, shortest first."""
    data = config.data
    lengths = {data.length, *(data.buckets if data.packing == "none" else ())}
    multiple = meshes.row_multiple(mesh.shape, config.model) * config.train.accumulation
    return packing.shapes(lengths, data.batch, data.tokens, multiple)


def abstract_batch(config: Config, mesh: Mesh, shape: Shape) -> Batch:
    """A batch as shapes with shardings, like those of `step.shard_batch`."""

    def array(size: tuple[int, ...], dtype: Any) -> Array:
        shape = jax.ShapeDtypeStruct(size, dtype, sharding=rules.batch_sharding(mesh, size))
        return cast(Array, shape)  # a batch of shapes, as tracing takes it

    ids = array(tuple(shape), jnp.int32)
    stream = Stream(ids, Slots(ids, ids))
    target = Stream(ids, Slots(ids, ids, ids if tasks.get(config.task.name).has_prefix else None))
    kind = config.model.head.kind
    size = (shape.rows,) if kind in ("classes", "pooled", "pair", "forecast") else tuple(shape)
    permutation = None
    if config.task.name == permutation_lm.NAME:
        size = (shape.rows, permutation_lm.targets_per_row(config))
        permutation = Permutation(ids, array(size, jnp.int32))
    source, labels, series = stream, array(size, jnp.float32 if kind == "pair" else jnp.int32), config.model.series
    if series is not None:
        source = stream._replace(tokens=array((*shape, series.channels or 1), jnp.float32))
        if kind == "forecast":
            labels = array((shape.rows, config.model.head.horizon or 1, series.channels or 1), jnp.float32)
    return Batch(
        source if config.model.has_encoder else None,
        target if config.model.has_decoder else None,
        labels,
        array(size, jnp.float32),
        array((shape.rows,), jnp.int32) if config.model.head.relation else None,
        permutation,
        array((shape.rows,), jnp.bool_) if config.task.recurrence else None,
        reference=array((shape.rows, 2), jnp.float32) if reference.is_needed(config) else None,
    )


def trace(config: Config, mesh: Mesh) -> Program:
    """Traces the training step for `mesh`, at the longest batch shape.

    Raises:
      ConfigError: a size of the config is open, or the config does not fit the mesh.
    """
    config = with_scanned_layers(resolve(config))
    task = tasks.get(config.task.name)
    shapes = batch_shapes(config, mesh)
    with jax.set_mesh(mesh):
        module = build.build(config.model)
        schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
        params, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
        trained = [freezing.trained(config, tree) for tree in (params, names)]
        optimizer = optim.optimizer(config.optimizer, schedule, *trained)
        state = steps.abstract_state(config, module, optimizer, mesh)
        batch = abstract_batch(config, mesh, shapes[-1])
        traced = steps.make_train_step(config, module, task, optimizer, schedule, mesh).trace(state, batch)
    return Program(config, mesh, shapes, state, batch, names, traced, flops.count_flops(traced.jaxpr.jaxpr))


def compile(program: Program) -> Compiled:
    """Compiles a program. The result has no executable if the program does not fit into the memory."""
    begun = time.process_time()
    try:
        with jax.set_mesh(program.mesh):
            executable = program.trace.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, time.process_time() - begun, parse_needed_bytes(str(error)))
    return Compiled(executable, time.process_time() - begun)


def parse_needed_bytes(message: str) -> float | None:
    """Bytes that a program needs, from the TPU compiler's out-of-memory error, in either of its wordings."""
    match = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", message)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else None


def build_mesh(config: Config, chips: list[jax.Device]) -> Mesh:
    """The mesh of `config` on these devices. Simulated devices have no slices: axes are at full length."""
    return meshes.make(config.mesh if meshes.count_slices(chips) > 1 else meshes.merge_slices(config.mesh), chips)
