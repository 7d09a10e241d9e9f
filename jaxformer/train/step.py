"""The training step: gradients of summed losses, one division, one optimizer update. One of three places with `jit`."""

from __future__ import annotations

import functools
from typing import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer import tasks
from jaxformer.config import Config
from jaxformer.models import build
from jaxformer.nn import moe
from jaxformer.parallel import rules, shards
from jaxformer.tasks import Task
from jaxformer.train import optim, spikes
from jaxformer.types import Array, Batch, PyTree, Sums, TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, Sums]]


def create(config: Config, module: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A fresh state, made on the mesh. `config.train.seed` decides parameters and all later randomness."""
    root = jax.random.key(config.train.seed)
    variables = build.create(module, jax.random.fold_in(root, 0), mesh)
    params = variables.pop("params")
    if config.train.ema is not None:
        variables["ema"] = jax.tree.map(jnp.copy, params)
    layout = layout_of(config, module, optimizer, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=layout.opt_state)(params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    step, key = jax.device_put((jnp.zeros((), jnp.int32), jax.random.fold_in(root, 1)), everywhere)
    return TrainState(step, params, opt_state, key, variables)


def layout_of(config: Config, module: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The sharding of every leaf of a state. Moments and the average lie where their parameters do."""
    boxed = build.shapes(module)
    layout = rules.shardings(boxed, mesh)
    params = layout.pop("params")
    if config.train.ema is not None:
        layout["ema"] = params
    opt_state = optim.state_shardings(optimizer, nn.meta.unbox(boxed["params"]), updated(config, boxed, params), mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return TrainState(everywhere, params, opt_state, everywhere, layout)


def updated(config: Config, boxed: PyTree, params: PyTree) -> PyTree:
    """Where an update of the parameters is computed: where they lie, or with ZeRO-1 in parts, divided over data.

    Each device then holds the optimizer state of its part alone (Rajbhandari et al. 2020, section 5.1).
    """
    if not config.mesh.zero1:
        return params
    shapes = nn.meta.unbox(boxed["params"])
    return jax.tree.map(lambda place, x: rules.spread(place, x.shape, "data"), params, shapes)


def abstract(config: Config, module: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, computing nothing: what a checkpoint is restored into."""
    boxed = nn.meta.unbox(build.shapes(module))
    params = boxed.pop("params")
    if config.train.ema is not None:
        boxed["ema"] = params
    shapes = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32),
        params,
        jax.eval_shape(optimizer.init, params),
        jax.eval_shape(lambda: jax.random.key(0)),
        boxed,
    )
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
    return jax.tree.map(place, shapes, layout_of(config, module, optimizer, mesh))


def make(
    config: Config,
    module: nn.Module,
    task: Task,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
) -> Step:
    """The compiled step `(state, batch) -> (state, sums)`; the state passed in is donated.

    The batch is split into `config.train.accumulation` microbatches. Their summed losses' gradients are added and
    divided once by the summed weights, so k microbatches equal one batch whatever their token counts. Not so for what
    is no sum over rows, and sees those of one microbatch (on all devices): batch norm's statistics, the loss that
    balances experts, router losses where labels are not the tokens that were routed, and a task that `couples` rows.
    Dropout draws other masks.

    Where the loss or the gradient's norm is not finite, or the norm beyond `config.optimizer.spike`, the step changes
    the step number only: parameters, optimizer (with the count that the learning rate goes by) and all other variables
    stay. Its sums are 0, but for "skipped" and "spiked".
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        key = jax.random.fold_in(state.key, state.step)
        variables = {name: value for name, value in state.variables.items() if name != "ema"}
        grads, variables, sums = accumulate(config, module, task, state.params, variables, batch, key)
        grads, old = jax.lax.with_sharding_constraint((grads, state.params), (where, where))
        norm = optax.global_norm(grads)
        good, spiked = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0]), None
        if config.optimizer.spike is not None:
            spiked = good & spikes.beyond(state.opt_state, norm, config.optimizer.spike)
            good &= ~spiked
        if config.optimizer.clip is not None:
            grads = optim.clip_by_norm(grads, norm, config.optimizer.clip)
        updates, opt_state = optimizer.update(grads, state.opt_state, old, norm=norm)
        params = optax.apply_updates(old, updates)
        if config.train.ema is not None:
            decay = optim.average_decay(config.train, optim.updates(state.opt_state))
            average = lambda old, new: decay * old + (1.0 - decay) * new  # noqa: E731
            variables["ema"] = jax.tree.map(average, state.variables["ema"], params)
        one = jnp.ones(())
        rate = jnp.asarray(schedule(optim.updates(state.opt_state)))
        sums = sums | {"gradient_norm": (norm, one), "learning_rate": (rate, one)}
        sums = jax.tree.map(lambda x: jnp.where(good, x, jnp.zeros_like(x)), sums)
        sums["skipped"] = (jnp.float32(~good), one)
        if spiked is not None:
            sums["spiked"] = (jnp.float32(spiked), one)
        before = (state.params, state.opt_state, dict(state.variables))
        after = (params, opt_state, variables)
        params, opt_state, variables = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
        return TrainState(state.step + 1, params, opt_state, state.key, variables), sums

    layout = layout_of(config, module, optimizer, mesh)
    where = updated(config, build.shapes(module), layout.params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(update, donate_argnums=0, out_shardings=(layout, everywhere))


def accumulate(
    config: Config, module: nn.Module, task: Task, params: PyTree, variables: PyTree, batch: Batch, key: Array
) -> tuple[PyTree, PyTree, Sums]:
    """Gradients of the mean loss over the whole batch, the updated other variables, and the step's sums."""
    total = functools.partial(summed, config, module, task)
    if sums_apart(config, variables, batch):

        def own(params: PyTree, batch: Batch, key: Array) -> tuple[PyTree, Sums]:
            grads, _, sums = total(params, {}, batch, jax.random.fold_in(key, jax.lax.axis_index("data")))
            return jax.lax.psum((grads, sums), "data")

        whole, rows = PartitionSpec(), PartitionSpec("data")
        specs = {"in_specs": (whole, rows, whole), "out_specs": whole}
        grads, sums = jax.shard_map(own, **specs, axis_names={"data"}, check_vma=False)(params, batch, key)
    else:
        grads, variables, sums = total(params, variables, batch, key)
    weight = jnp.maximum(sums["loss"][1], 1e-8)
    return jax.tree.map(lambda g: g / weight, grads), variables, sums


def sums_apart(config: Config, variables: PyTree, batch: Batch) -> bool:
    """Whether the parts of the axis `data` add up their gradients alone, and meet once a step.

    The partitioner has them meet wherever a gradient arises: once a microbatch. Not where rows see each other: batch
    norm's statistics, the loss that balances experts, and the loss of a task that `couples` rows are of the whole
    batch. Not where `data` and `fsdp` share a slice: the TPU's compiler then sends more along `fsdp` than is saved. And
    not what XLA's partitioner breaks off at within a `shard_map` over some axes: a pipeline (jax 0.12), and picking one
    slot of sequences that are divided.
    """
    sizes, parts, model = shards.free(), config.train.accumulation, config.model
    if parts == 1 or "data" not in shards.fitting("batch", jax.tree.leaves(batch)[0].shape[0] // parts):
        return False
    gains = sizes["fsdp"] == 1 or config.mesh.dcn.data != 1
    breaks = sizes["stage"] > 1 or (sizes["context"] > 1 and model.head.kind != "tokens")
    together = variables or any(side and side.moe for side in (model.encoder, model.decoder))
    return gains and not breaks and not together and not tasks.get(config.task.name).couples(config)


def summed(
    config: Config, module: nn.Module, task: Task, params: PyTree, variables: PyTree, batch: Batch, key: Array
) -> tuple[PyTree, PyTree, Sums]:
    """Gradients of the summed loss, microbatch by microbatch, the updated other variables, and all sums."""
    parts = config.train.accumulation

    def gradients(variables: PyTree, batch: Batch, key: Array) -> tuple[PyTree, PyTree, Sums]:
        loss = functools.partial(summed_loss, config, module, task)
        grads, (variables, sums) = jax.grad(loss, has_aux=True)(params, variables, batch, key)
        return grads, variables, sums

    if parts == 1:
        return gradients(variables, batch, key)
    # Row i goes to microbatch i % parts: the rows of one device then stay on it.
    split = lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)  # noqa: E731
    batches = jax.tree.map(split, batch)

    def add(carry: tuple, each: tuple) -> tuple[tuple, None]:
        total, variables, sums = carry
        batch, index = each
        grads, variables, more = gradients(variables, batch, jax.random.fold_in(key, index))
        return (jax.tree.map(jnp.add, total, grads), variables, jax.tree.map(jnp.add, sums, more)), None

    first = jax.tree.map(lambda x: x[0], batches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradients, variables, first, key))
    start = (zeros[0], variables, zeros[2])
    return jax.lax.scan(add, start, (batches, jnp.arange(parts)))[0]


def summed_loss(
    config: Config, module: nn.Module, task: Task, params: PyTree, variables: PyTree, batch: Batch, key: Array
) -> tuple[Array, tuple[PyTree, Sums]]:
    """The loss's numerator, with the updated variables and all sums beside it."""
    inputs = {"params": params, **variables}
    collections = [*variables, moe.COLLECTION]
    logits, changed = module.apply(inputs, batch, whole=False, rngs={"dropout": key}, mutable=collections)
    changed = dict(changed)
    sown = changed.pop(moe.COLLECTION, {})
    sums = dict(moe.add(task.loss(config, logits, batch), sown))
    return sums["loss"][0], (changed, sums)


def place(batch: Batch, mesh: Mesh, balanced: bool = False) -> Batch:
    """Puts this host's rows of a batch on its devices, as part of one global batch.

    Args:
      balanced: sequences are divided and attended to in a ring: slots go in the order that gives causal attention
        equally much to do everywhere (`build.ring` says when). No sum over slots depends on it.
    """

    parts = rules.reader(mesh)[1]

    def put(x: Array) -> Array:
        order = rules.zigzag(x.shape[1], mesh.shape["context"]) if balanced and x.ndim > 1 else None
        x = x if order is None else x[:, order]
        rows = x.shape[0] * parts
        shape = (rows, *x.shape[1:])
        return jax.make_array_from_process_local_data(rules.batch_sharding(mesh, shape), x, shape)

    return jax.tree.map(put, batch)
