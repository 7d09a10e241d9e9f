"""The compiled steps of training and evaluation.

The training step accumulates gradients over microbatches, updates once, and returns summed measures. Also here: the
state that a step changes (fresh, or as shapes and shardings) and the sharding of its batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer import tasks
from jaxformer.config import Config, overrides
from jaxformer.models import build
from jaxformer.nn import cpu, moe
from jaxformer.parallel import rules, shards
from jaxformer.runtime import programs
from jaxformer.tasks import Task
from jaxformer.train import ema, freezing, optim, recurrence, skip_guard
from jaxformer.train.teacher import Teacher
from jaxformer.types import EMA, MEMORY, Array, Batch, PyTree, Sums, TrainState, overlaid


def make_train_step(
    config: Config,
    module: nn.Module,
    task: Task,
    optimizer: optim.Transform,
    schedule: optim.Schedule,
    mesh: Mesh,
) -> programs.KeptFunction:
    """The compiled step `(state, batch) -> (state, sums)`; the state passed in is donated.

    With `config.distillation` a `teacher.Teacher` is its third argument.

    The biases that balance experts (`moe.correction_rate`) are moved by the load of the batch, not by the optimizer.

    The gradient is that of the summed loss divided once by the summed weights (`batch_gradients`), with respect to the
    trained parameters; frozen ones (`freezing`) pass through. The sums are the task's, with "gradient_norm" (before
    clipping) and "learning_rate".

    A step is skipped if its loss or gradient norm is not finite, or if the norm is a spike (`config.optimizer.spike`,
    see `skip_guard`). It changes the step number only: parameters, optimizer state (with the count that the learning
    rate goes by) and all other variables stay. Its sums are 0, except "skipped" and "spiked".
    """
    shardings = state_shardings(config, module, optimizer, mesh)
    update_at = freezing.trained(config, update_shardings(config, build.shapes(module), shardings.params))
    replicated = NamedSharding(mesh, PartitionSpec())
    train_step = functools.partial(update, config, module, task, optimizer, schedule, update_at)
    return programs.jit(
        train_step,
        depends_on=(overrides.to_json(config), mesh),
        donate_argnums=0,
        out_shardings=(shardings, replicated),
        compiler_options=cpu.step_compiler_options(mesh),
    )


def update(
    config: Config,
    module: nn.Module,
    task: Task,
    optimizer: optim.Transform,
    schedule: optim.Schedule,
    update_at: PyTree | None,
    state: TrainState,
    batch: Batch,
    teacher: Teacher | None = None,
) -> tuple[TrainState, Sums]:
    """One training step: the new state and its sums. See `make_train_step`; not compiled.

    Rates of the config may be traced values (`train/lanes.py`).

    Args:
      update_at: shardings of the trained parameters in their update; None: the partitioner decides.
      teacher: makes the logits that the loss reads beside the labels; None: it does not.
    """
    key = jax.random.fold_in(state.key, state.step)
    collections = state.collections()
    grads, variables, sums = batch_gradients(config, module, task, state.params, collections, batch, key, teacher)
    rates = {path: stack.moe.correction_rate for path, stack in config.model.stacks.items() if stack.moe is not None}
    grads, excess = moe.split_corrections(grads) if any(rates.values()) else (grads, None)
    old_params, frozen = freezing.split(config, state.params)
    if update_at is not None:
        grads, old_params = jax.lax.with_sharding_constraint((grads, old_params), (update_at, update_at))
    norm = optax.global_norm(grads)
    is_good, is_spike = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0]), None
    if config.optimizer.spike is not None:
        is_spike = is_good & skip_guard.is_spike(state.opt_state, norm, config.optimizer.spike)
        is_good &= ~is_spike

    grads = optim.clip_by_norm(grads, norm, config.optimizer.clip)
    updates, opt_state = optimizer.update(grads, state.opt_state, old_params, norm=norm)
    params = optax.apply_updates(old_params, updates)
    params = params if excess is None else moe.update_corrections(params, excess, rates)
    update_count = optim.update_count(state.opt_state)
    if config.train.ema is not None:
        decay = ema.decay_at(config.train, update_count)
        variables = {**variables, EMA: ema.updated(state.variables[EMA], params, decay)}

    rate = jnp.asarray(schedule(update_count))
    sums = {**sums, "gradient_norm": (norm, jnp.ones(())), "learning_rate": (rate, jnp.ones(()))}
    sums = jax.tree.map(lambda x: jnp.where(is_good, x, jnp.zeros_like(x)), sums)
    sums["skipped"] = (jnp.float32(~is_good), jnp.ones(()))
    if is_spike is not None:
        sums["spiked"] = (jnp.float32(is_spike), jnp.ones(()))

    old = (freezing.trained(config, state.params), state.opt_state, dict(state.variables))
    new = (params, opt_state, variables)
    params, opt_state, variables = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, old)
    params = overlaid(frozen, params)
    return TrainState(state.step + 1, params, opt_state, state.key, variables), sums


def make_eval_step(config: Config, module: nn.Module) -> programs.KeptFunction:
    """The compiled function `(variables, batch) -> sums`. It supplies no dropout key, so nothing is random."""
    task = tasks.get(config.task.name)

    def eval_step(variables: PyTree, batch: Batch) -> Sums:
        logits: PyTree = module.apply(variables, batch, full_logits=False)
        return task.metrics(config, logits, batch)

    return programs.jit(eval_step, depends_on=(overrides.to_json(config), module))


def make_binned_eval_step(config: Config, module: nn.Module, upper: tuple[int, ...]) -> jax.stages.Wrapped:
    """The compiled function `(variables, batch) -> sums, sums by bin`: a row of the latter for each bin of lengths.

    Args:
      upper: largest numbers of input tokens of all bins but the last, ascending; see `by_length.LengthBins`.
    """
    task = tasks.get(config.task.name)

    def eval_step(variables: PyTree, batch: Batch) -> tuple[Sums, Sums]:
        logits: PyTree = module.apply(variables, batch, full_logits=False)
        stream = batch.side("source" if config.model.input_side == "source" else "target")
        lengths = jnp.sum(stream.slots.segment > 0, axis=1)
        bins = jnp.searchsorted(jnp.asarray(upper, jnp.int32), lengths, side="left")

        def of_bin(number: Array) -> Sums:
            inside = bins == number
            weights = jnp.asarray(batch.weights)
            kept = jnp.where(inside.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0)
            count = jnp.sum(inside & (lengths > 0)).astype(jnp.float32)
            sums = task.metrics(config, logits, batch._replace(weights=kept))
            return {**sums, "examples": (count, jnp.ones(()))}

        return task.metrics(config, logits, batch), jax.lax.map(of_bin, jnp.arange(len(upper) + 1))

    return jax.jit(eval_step)


def make_reference_step(config: Config, module: nn.Module, mesh: Mesh) -> jax.stages.Wrapped:
    """The compiled function `(variables, batch) -> [B, ...]`: the task's `reference`, complete on every process."""
    measure = tasks.get(config.task.name).reference
    if measure is None:
        raise ValueError(f"reference: got the task {config.task.name}, expected one that compares with a reference")

    def reference_step(variables: PyTree, batch: Batch) -> Array:
        logits: PyTree = module.apply(variables, batch, full_logits=False)
        return measure(config, logits, batch)

    return jax.jit(reference_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


# Gradients.


def batch_gradients(
    config: Config,
    module: nn.Module,
    task: Task,
    params: PyTree,
    variables: PyTree,
    batch: Batch,
    key: Array,
    teacher: Teacher | None = None,
) -> tuple[PyTree, PyTree, Sums]:
    """Gradients of the mean loss over the whole batch, the updated other variables, and the step's sums.

    The gradients are a tree of the trained parameters.

    The batch is split into `config.train.accumulation` microbatches, and their gradients are added. k microbatches
    equal one batch, whatever their token counts, with these exceptions. They see one microbatch (on all devices),
    because they are no sums over rows: batch norm's statistics, the loss that balances experts, router losses where
    labels are not the routed tokens, and a task that `couples_rows` rows. Dropout draws other masks.
    """
    accumulate = functools.partial(accumulate_gradients, config, module, task)
    if can_reduce_once(config, variables, batch):

        def device_gradients(params: PyTree, batch: Batch, key: Array, teacher: Teacher | None) -> tuple[PyTree, Sums]:
            grads, _, sums = accumulate(params, {}, batch, jax.random.fold_in(key, jax.lax.axis_index("data")), teacher)
            return jax.lax.psum((grads, sums), "data")

        replicated, by_row = PartitionSpec(), PartitionSpec("data")
        grads, sums = jax.shard_map(
            device_gradients,
            in_specs=(replicated, by_row, replicated, replicated),
            out_specs=replicated,
            axis_names={"data"},
            check_vma=False,
        )(params, batch, key, teacher)
    else:
        grads, variables, sums = accumulate(params, variables, batch, key, teacher)
    weight = jnp.maximum(sums["loss"][1], 1e-8)
    return jax.tree.map(lambda g: g / weight, grads), variables, sums


def can_reduce_once(config: Config, variables: PyTree, batch: Batch) -> bool:
    """True if gradients can be all-reduced over the mesh axis `data` once per step instead of once per microbatch.

    XLA's partitioner all-reduces wherever a gradient arises, so in every microbatch; reducing once needs a `shard_map`.
    Not possible or not useful:

    * where rows see each other: batch norm's statistics, the loss that balances experts, and a task that `couples_rows`
      rows are functions of the whole batch;
    * where `data` and `fsdp` share a slice: the TPU's compiler then sends more along `fsdp` than is saved;
    * where the partitioner fails inside a `shard_map` over some axes: pipelines (jax 0.12), and heads that pick one
      slot of sequences that are sharded.
    """
    sizes, parts, model = shards.auto_axes(), config.train.accumulation, config.model
    if parts == 1 or "data" not in shards.dividing_axes("batch", jax.tree.leaves(batch)[0].shape[0] // parts):
        return False
    gains = sizes["fsdp"] == 1 or config.mesh.dcn.data != 1
    picks_slot = model.head.kind != "tokens" or model.head.relation
    breaks = sizes["stage"] > 1 or (sizes["context"] > 1 and picks_slot)
    together = variables or any(stack.moe for stack in model.stacks.values())
    return gains and not breaks and not together and not tasks.get(config.task.name).couples_rows(config)


def accumulate_gradients(
    config: Config,
    module: nn.Module,
    task: Task,
    params: PyTree,
    variables: PyTree,
    batch: Batch,
    key: Array,
    teacher: Teacher | None = None,
) -> tuple[PyTree, PyTree, Sums]:
    """Gradients of the summed loss, added over the microbatches, the updated other variables, and all sums."""
    parts = config.train.accumulation
    trained, frozen = freezing.split(config, params)

    def gradients(variables: PyTree, batch: Batch, key: Array) -> tuple[PyTree, PyTree, Sums]:
        if teacher is not None:  # outside of what is differentiated, and of one microbatch, whose logits it has
            batch = batch._replace(teacher=teacher.logits(batch))

        def loss(trained: PyTree) -> tuple[Array, tuple[PyTree, Sums]]:
            return summed_loss(config, module, task, overlaid(frozen, trained), variables, batch, key)

        grads, (variables_after, sums) = jax.grad(loss, has_aux=True)(trained)
        return grads, variables_after, sums

    if parts == 1:
        return gradients(variables, batch, key)
    # Row i goes to microbatch i % parts: the rows of one device then stay on it. Memories go with their rows.
    split = lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)  # noqa: E731
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])  # noqa: E731
    batches = jax.tree.map(split, batch)
    memories = {MEMORY: jax.tree.map(split, variables[MEMORY])} if MEMORY in variables else {}
    variables = {name: value for name, value in variables.items() if name != MEMORY}

    def add(carry: tuple, microbatch: tuple) -> tuple[tuple, PyTree]:
        total, variables, sums = carry
        batch, memory, index = microbatch
        grads, changed, more = gradients({**variables, **memory}, batch, jax.random.fold_in(key, index))
        memory = {name: changed.pop(name) for name in memory}
        return (jax.tree.map(jnp.add, total, grads), changed, jax.tree.map(jnp.add, sums, more)), memory

    first, memory = jax.tree.map(lambda x: x[0], (batches, memories))
    shapes = jax.eval_shape(gradients, {**variables, **memory}, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = (zeros[0], variables, zeros[2])
    (total, variables, sums), memories = jax.lax.scan(add, start, (batches, memories, jnp.arange(parts)))
    return total, {**variables, **jax.tree.map(join, memories)}, sums


def summed_loss(
    config: Config, module: nn.Module, task: Task, params: PyTree, variables: PyTree, batch: Batch, key: Array
) -> tuple[Array, tuple[PyTree, Sums]]:
    """The loss's numerator; beside it the updated variables and all sums."""
    inputs = {"params": params, **variables}
    collections = [*variables, moe.COLLECTION]
    logits, changed = module.apply(inputs, batch, full_logits=False, rngs={"dropout": key}, mutable=collections)
    changed = dict(changed)
    sown = changed.pop(moe.COLLECTION, {})
    sums = dict(moe.add_router_losses(task.loss(config, logits, batch), sown))
    return jnp.asarray(sums["loss"][0]), (changed, sums)


# The state.


def init_state(config: Config, module: nn.Module, optimizer: optim.Transform, mesh: Mesh) -> TrainState:
    """A fresh state, computed on the mesh. `config.train.seed` decides parameters and all later randomness."""
    root = jax.random.key(config.train.seed)
    variables = initial_variables(config, module, mesh)
    params = variables.pop("params")
    if config.train.ema is not None:
        variables[EMA] = jax.tree.map(jnp.copy, freezing.trained(config, params))
    zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)  # noqa: E731
    variables = recurrence.with_memory(config, variables, zeros, mesh)
    shardings = state_shardings(config, module, optimizer, mesh)
    init = programs.jit(optimizer.init, depends_on=(overrides.to_json(config), mesh), out_shardings=shardings.opt_state)
    opt_state = init(freezing.trained(config, params))
    replicated = NamedSharding(mesh, PartitionSpec())
    step, key = jax.device_put((jnp.zeros((), jnp.int32), jax.random.fold_in(root, 1)), replicated)
    return TrainState(step, params, opt_state, key, variables)


def initial_variables(config: Config, module: nn.Module, mesh: Mesh) -> dict[str, PyTree]:
    """Parameters and other variables that a model starts from, computed on the mesh."""
    return build.create(module, jax.random.fold_in(jax.random.key(config.train.seed), 0), mesh)


def make_init(config: Config, module: nn.Module, optimizer: optim.Transform, mesh: Mesh) -> jax.stages.Wrapped:
    """The compiled function `seed -> state`: a fresh state from a uint32 seed, for training from several seeds."""

    def init(seed: Array) -> TrainState:
        root = jax.random.key(seed)
        variables = nn.meta.unbox(build.init_variables(module, jax.random.fold_in(root, 0)))
        params = variables.pop("params")
        trained = freezing.trained(config, params)
        variables = ema.with_average(config.train, variables, trained)
        variables = recurrence.with_memory(config, variables, lambda x: jnp.zeros(x.shape, x.dtype), mesh)
        key = jax.random.fold_in(root, 1)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained), key, variables)

    shardings = state_shardings(config, module, optimizer, mesh)
    return jax.jit(init, out_shardings=shardings, compiler_options=cpu.one_off_compiler_options())


def abstract_state(config: Config, module: nn.Module, optimizer: optim.Transform, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, computing nothing. A checkpoint is restored into it."""
    variables = nn.meta.unbox(build.shapes(module))
    params = variables.pop("params")
    trained = freezing.trained(config, params)
    opt_state = jax.eval_shape(optimizer.init, trained)
    step: PyTree = jax.ShapeDtypeStruct((), jnp.int32)
    key: PyTree = jax.eval_shape(lambda: jax.random.key(0))
    variables = recurrence.with_memory(config, ema.with_average(config.train, variables, trained), lambda x: x, mesh)
    shapes = TrainState(step, params, opt_state, key, variables)
    with_sharding = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(with_sharding, shapes, state_shardings(config, module, optimizer, mesh))


def state_shardings(config: Config, module: nn.Module, optimizer: optim.Transform, mesh: Mesh) -> TrainState:
    """A state whose leaves are shardings. Moments and the average are sharded as their parameters."""
    boxed = build.shapes(module)
    variables = rules.shardings(boxed, mesh)
    params = variables.pop("params")
    shapes = freezing.trained(config, nn.meta.unbox(boxed["params"]))
    update_at = freezing.trained(config, update_shardings(config, boxed, params))
    opt_state = optim.optimizer_state_shardings(optimizer, shapes, update_at, mesh)
    replicated: PyTree = NamedSharding(mesh, PartitionSpec())
    variables = ema.with_average(config.train, variables, freezing.trained(config, params))
    variables = recurrence.with_memory(config, variables, lambda x: x.sharding, mesh)
    return TrainState(replicated, params, opt_state, replicated, variables)


def update_shardings(config: Config, boxed: PyTree, params: PyTree) -> PyTree:
    """Shardings in which the parameters are updated: their own, or with ZeRO-1 further sharded over `data`.

    With ZeRO-1 each device holds the optimizer state of its shard only (Rajbhandari et al. 2020, "ZeRO: Memory
    optimizations toward training trillion parameter models", section 5.1).

    Args:
      boxed: abstract variables with their logical axis names.
      params: shardings of the parameters.
    """
    if not config.mesh.zero1:
        return params
    shapes = nn.meta.unbox(boxed["params"])
    return jax.tree.map(lambda sharding, x: rules.shard_over_axis(sharding, x.shape, "data"), params, shapes)


# The batch.


def shard_batch(batch: Batch, mesh: Mesh, balanced: bool = False) -> Batch:
    """Moves this process's rows of a batch to its devices, as part of one global batch.

    Args:
      balanced: reorder the slots of sequences sharded over `context` so that causal ring attention does equal work on
        every device (`build.uses_causal_ring`). No sum over slots depends on their order.
    """
    processes = rules.process_part(mesh)[1]

    def shard(x: Array) -> Array:
        has_slots = x.ndim > 1 and x is not batch.reference and not (x is batch.labels and x.dtype.kind == "f")
        order = rules.zigzag_order(x.shape[1], mesh.shape["context"]) if balanced and has_slots else None
        x = x if order is None else x[:, order]
        shape = (x.shape[0] * processes, *x.shape[1:])
        return jax.make_array_from_process_local_data(rules.batch_sharding(mesh, shape), x, shape)

    return jax.tree.map(shard, batch)
