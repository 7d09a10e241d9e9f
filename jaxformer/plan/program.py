"""The step of training for devices that are not here: from a config and a mesh to a compiled program."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import tasks
from jaxformer.config import Config, ConfigError
from jaxformer.data import packing
from jaxformer.data.packing import Shape
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import flops
from jaxformer.plan.chips import Place
from jaxformer.train import optim
from jaxformer.train import step as steps
from jaxformer.types import Batch, PyTree, Slots, Stream, TrainState

LEARNED = ("word", "bpe", "unigram")
"""Tokenizers whose size is a number of the config."""


@dataclass(frozen=True)
class Program:
    """A step of training, not yet compiled: shapes with their shardings, and the trace.

    Attributes:
      shapes: batch shapes of the run; `shape` is the longest, for which the program is.
      names: logical names of the parameters' axes.
      counted: FLOPs of the products in it.
    """

    config: Config
    mesh: Mesh
    shapes: list[Shape]
    state: TrainState
    batch: Batch
    names: PyTree
    trace: Any
    counted: float

    @property
    def shape(self) -> Shape:
        return self.shapes[-1]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says.

    Attributes:
      executable: None: the program does not fit.
      seconds: that it took, of a core (all threads added), which other programs on the machine hardly change.
      need: bytes, where there is no executable and the compiler says how many.
    """

    executable: Any
    seconds: float
    need: float | None = None


def devices(place: Place, config: Config) -> list[jax.Device]:
    """The chips of the slices, or simulated ones: as many as `place` or the mesh says (a -1 in it counts as 1).

    Raises:
      ConfigError: there are not so many, or the TPU's compiler is not installed.
    """
    if place.topology:
        return _slices(place.topology, place.slices)
    count = place.devices or config.mesh.devices
    simulated = jax.devices("cpu")
    if len(simulated) < count:
        raise ConfigError(f"plan: got {len(simulated)} simulated devices, expected {count}; start a fresh process")
    return simulated[:count]


def _slices(topology: str, count: int) -> list[jax.Device]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is taken, so no lock on it either
    for name in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")  # asked for, and then not used
    try:
        several = {"num_slices": count} if count > 1 else {}
        return list(topologies.get_topology_desc(topology, platform="tpu", **several).devices)
    except Exception as error:  # whatever libtpu throws: that it is missing, or that it knows no such slice
        words = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"--topology: got {topology!a} ({words}), expected a slice that libtpu knows; "
            "is the extra installed? pip install 'jaxformer[tpu]'; without it, --devices=N --chip=NAME plans on "
            "simulated devices"
        ) from None


def resolve(config: Config) -> Config:
    """The config with the sizes that only data and tokenizer decide, as far as the config bounds them.

    Raises:
      ConfigError: it does not; says which option to set.
    """
    tokenizer = config.data.tokenizer
    missing = [part for part in config.model.parts if getattr(config.model, part).embed.vocab is None]
    vocab = -(-tokenizer.vocab // tokenizer.multiple) * tokenizer.multiple
    if missing and tokenizer.kind not in LEARNED:
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
    if not config.model.parts:
        raise ConfigError("config.model: got no model, expected one; a run that starts from a directory has no plan")
    model = build.resolve(config.model, vocab, vocab, len(classes) or None)
    task = dataclasses.replace(config.task, vocab=config.task.vocab or (tokenizer.vocab if missing else None))
    return dataclasses.replace(config, model=model, task=task)


def scanned(config: Config) -> Config:
    """The config with one layer an iteration, as an accelerator runs it (simulated devices would unroll)."""
    parts = {
        name: dataclasses.replace(getattr(config.model, name), unroll=1)
        for name in ("encoder", "decoder")
        if getattr(config.model, name) is not None and getattr(config.model, name).unroll is None
    }
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **parts))


def shapes_of(config: Config, mesh: Mesh) -> list[Shape]:
    """The batch shapes that the pipeline will make, shortest first."""
    data = config.data
    lengths = {data.length, *(data.buckets if data.packing == "none" else ())}
    multiple = meshes.row_multiple(mesh.shape, config.model) * config.train.accumulation
    return packing.shapes(lengths, data.batch, data.tokens, multiple)


def batch_of(config: Config, mesh: Mesh, shape: Shape) -> Batch:
    """A batch without values: what `step.place` puts on the mesh."""

    def array(size: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=rules.batch_sharding(mesh, size))

    ids = array(tuple(shape), jnp.int32)
    stream = Stream(ids, Slots(ids, ids))
    kind = config.model.head.kind
    size = (shape.rows,) if kind in ("classes", "pooled", "pair") else tuple(shape)
    reads = {part.removeprefix("recurrent_") for part in config.model.parts}
    return Batch(
        stream if "encoder" in reads else None,
        stream if "decoder" in reads else None,
        array(size, jnp.float32 if kind == "pair" else jnp.int32),
        array(size, jnp.float32),
    )


def trace(config: Config, mesh: Mesh) -> Program:
    """The step of training, traced for `mesh`, at the longest batch shape.

    Raises:
      ConfigError: the config leaves a size open, or does not fit the mesh.
    """
    config = scanned(resolve(config))
    task = tasks.get(config.task.name)
    shapes = shapes_of(config, mesh)
    with jax.set_mesh(mesh):
        module = build.build(config.model)
        schedule = optim.schedule(config.schedule, config.train.steps, build.width(config.model))
        params, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
        optimizer = optim.optimizer(config.optimizer, schedule, params, names)
        state = steps.abstract(config, module, optimizer, mesh)
        batch = batch_of(config, mesh, shapes[-1])
        traced = steps.make(config, module, task, optimizer, schedule, mesh).trace(state, batch)
    return Program(config, mesh, shapes, state, batch, names, traced, flops.counted(traced.jaxpr.jaxpr))


def compile(program: Program) -> Compiled:
    """Compiles a program; one that the compiler refuses for lack of memory has no executable."""
    begun = time.process_time()
    try:
        with jax.set_mesh(program.mesh):
            executable = program.trace.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, time.process_time() - begun, needed(str(error)))
    return Compiled(executable, time.process_time() - begun)


def needed(message: str) -> float | None:
    """Bytes that a program would need, from the TPU compiler's refusal, in either of its wordings."""
    found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", message)
    return float(found[1]) * 1024 ** " KMGT".index(found[2] or " ") if found else None


def mesh_of(config: Config, where: list[jax.Device]) -> Mesh:
    """The mesh. One slice, and simulated devices, which know of none, stand in for as many as the config has."""
    return meshes.make(config.mesh if meshes.slices(where) > 1 else meshes.joined(config.mesh), where)
