"""Learning-rate schedules, optimizers, decay masks, and where the optimizer's state lives on the mesh.

Clipping is not part of the chain: the step computes the gradient norm once, reports it, and passes it to
`clip_by_norm`, so that the norm in the log is the one that was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxformer import registry
from jaxformer.config import ConfigError, OptimizerConfig, ScheduleConfig, TrainConfig
from jaxformer.train import spikes
from jaxformer.types import Array, PyTree

Schedule = Callable[[Array | int], Array]
Rule = optax.GradientTransformation
Path = tuple[str, ...]

MUON_RMS = 0.2  # root mean square of a Muon update before the rate: what Adam's is in practice (Liu et al. 2025)
MATRIX_BATCH = ("layers", "experts")  # axes along which a kernel is many matrices
ADAM_AXES = ("vocab", "table", "buckets")  # kernels with such an axis are tables: rows of them see sparse gradients
ADAM_WORDS = ("bias", "scale", "embed", "kinds")  # parameters under these words are vectors and tables too


# Schedules. `n` counts completed updates from 0, as optax counts, so update n is step s = n + 1.


def _ramp(n: Array, warmup: int) -> Array:
    """min(1, s / warmup): update `warmup - 1` is the first at full rate, and no update has rate 0."""
    return jnp.minimum(1.0, (n + 1.0) / max(warmup, 1))


def _progress(n: Array, start: float, end: float) -> Array:
    """0 up to update `start`, 1 from update `end` on, linear between."""
    return jnp.clip((n - start) / max(end - start, 1.0), 0.0, 1.0)


def _constant(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    return _ramp(n, config.warmup)


def _linear(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _progress(n, config.warmup, steps)
    return _ramp(n, config.warmup) * (1.0 - (1.0 - config.floor) * done)


def _cosine(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _progress(n, config.warmup, steps)
    return _ramp(n, config.warmup) * (config.floor + (1.0 - config.floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)))


def _wsd(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _progress(n, steps - config.decay * steps, steps)
    return _ramp(n, config.warmup) * (1.0 - (1.0 - config.floor) * done)


def _inverse_sqrt(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    warmup = max(config.warmup, 1)
    return jnp.minimum((n + 1.0) / warmup, jnp.sqrt(warmup / (n + 1.0)))


def _noam(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    return width**-0.5 * jnp.minimum((n + 1.0) ** -0.5, (n + 1.0) * max(config.warmup, 1) ** -1.5)


SCHEDULES: dict[str, Callable[[ScheduleConfig, int, int, Array], Array]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "noam": _noam,
}


ENDING = ("linear", "cosine", "wsd")
"""Schedules whose decay ends at `train.steps`: another number of steps changes the rates of all decaying steps."""


def schedule(config: ScheduleConfig, steps: int, width: int) -> Schedule:
    """The learning rate as a function of the number of completed updates `n` (so update n is step s = n + 1).

    Every kind warms up linearly, `peak * s / warmup`, reaching the peak at step `warmup`. After that, with
    `p = (n - warmup) / (steps - warmup)` and `floor` a share of the peak that is reached when the run is over:

    * constant: `peak`.
    * linear: `peak * (1 - (1 - floor) p)`.
    * cosine: `peak * (floor + (1 - floor) (1 + cos(pi p)) / 2)` (Loshchilov and Hutter 2017, without restarts).
    * wsd: `peak`, then linear to the floor over the last `decay * steps` updates (warm-up, stable, decay; Hu et al.
      2024).
    * inverse_sqrt: `peak * sqrt(warmup / s)`.
    * noam: `peak * width ** -0.5 * min(s ** -0.5, s * warmup ** -1.5)` (Vaswani et al. 2017, equation 3); its highest
      rate, at step `warmup`, is `peak * (width * warmup) ** -0.5`.

    Args:
      steps: updates of the whole run. With `warmup >= steps` the run ends during warm-up.
      width: model width `D`; only noam uses it.

    Returns:
      A function to a float32 scalar, usable under `jit`.

    Raises:
      ConfigError: `config.kind` is unknown.
    """
    shape = _choose(SCHEDULES, config.kind, "config.schedule.kind")
    return lambda n: jnp.float32(config.peak) * shape(config, steps, width, jnp.asarray(n, jnp.float32))


# Paths, decay masks.


def path_of(keys: tuple) -> Path:
    """A JAX key path as words: `("encoder", "blocks", "attention", "query", "kernel")`."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)


def avoids(path: Path, words: tuple[str, ...]) -> bool:
    """Whether no component of `path` contains one of `words`. `source_embed/table` does not avoid "embed"."""
    return not any(word in component for component in path for word in words)


def decay_mask(params: PyTree, config: OptimizerConfig) -> PyTree:
    """For every parameter whether it decays, as a tree of bools. `params` may be abstract."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: avoids(path_of(keys), config.decay_exclude), params)


def decay_table(params: PyTree, config: OptimizerConfig, names: PyTree | None = None) -> str:
    """What happens to every parameter, to be printed: path, shape, weight decay, and with Muon the update rule.

    The last line counts the entries that decay. `params` may be abstract; `names` as in `optimizer`.
    """
    rules = _muon_axes(params, names) if config.name == "muon" else None
    rows = [("parameter", "shape", "decay") + (("rule",) if rules else ())]
    decaying = total = 0
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(keys)
        decays = config.weight_decay > 0 and avoids(path, config.decay_exclude)
        total += value.size
        decaying += value.size if decays else 0
        row = ("/".join(path), " x ".join(map(str, value.shape)) or "scalar")
        row += (f"{config.weight_decay:g}" if decays else "-",)
        rows.append(row + (("muon" if rules[path] else "adam",) if rules else ()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{decaying:,} of {total:,} entries decay"])


# Muon: which axes of a kernel are the matrix.


def muon_axes(path: Path, names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Which axes of a kernel are the rows and columns that Muon orthogonalises; None: the parameter goes to Adam.

    Layers and experts are batches of matrices. Heads and head width are one axis of a matrix, as they are in
    `W_Q` `[D, H * K]` or `W_O` `[H * K, D]`. If more than two axes are left, those without a logical name (the gates
    of a recurrent or gated kernel) are batches too. Tables, the output head, norms and biases are not matrices that
    map hidden states to hidden states, and go to Adam.
    """
    if any(name in ADAM_AXES for name in names) or path[0] == "head" or not avoids(path, ADAM_WORDS):
        return None
    groups: list[list[int]] = []
    for axis, name in enumerate(names):
        if name in MATRIX_BATCH:
            continue
        if name == "head" and groups and names[groups[-1][-1]] in ("heads", "kv_heads"):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) > 2:
        groups = [group for group in groups if names[group[0]] is not None]
    return MuonDimensionNumbers(*map(tuple, groups)) if len(groups) == 2 else None


def _muon_axes(params: PyTree, names: PyTree | None) -> dict[Path, MuonDimensionNumbers | None]:
    """`muon_axes` of every parameter by path. Without `names` only plain matrices can be told, so others raise."""
    found: dict[Path, MuonDimensionNumbers | None] = {}
    if names is None:
        logical = {}
    else:
        leaves = jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda x: isinstance(x, tuple) or x is None)
        logical = {path_of(keys): tuple(value or ()) for keys, value in leaves}
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        path, kernel = path_of(keys), path_of(keys)[-1] == "kernel"
        given = logical.get(path) or ((None,) * value.ndim if kernel and value.ndim == 2 else ())
        if len(given) != value.ndim and (given or kernel):
            raise ValueError(
                f"optimizer muon: got axis names {given} for {'/'.join(path)} of shape {value.shape}, expected one an "
                "axis, to tell layers and heads from the matrix; pass `names`"
            )
        found[path] = muon_axes(path, given)
    return found


def _muon(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    axes = _muon_axes(params, names)

    def dimensions(tree: PyTree) -> PyTree:
        # optax.partition cuts out the other rule's parameters, and this tree must have the same holes.
        return jax.tree_util.tree_map_with_path(lambda keys, _: axes[path_of(keys)], tree)

    def rescale(keys: tuple, update: Array) -> Array:
        # An orthogonal [m, n] matrix has RMS max(m, n) ** -0.5. With that undone one rate serves Muon and Adam.
        sides = [math.prod(update.shape[axis] for axis in side) for side in axes[path_of(keys)]]
        return update * (MUON_RMS * max(sides) ** 0.5)

    matrices = optax.chain(
        scale_by_muon(beta=config.momentum, eps=config.epsilon, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(rescale, updates)),
    )
    labels = jax.tree_util.tree_map_with_path(lambda keys, _: "muon" if axes[path_of(keys)] else "adam", params)
    return optax.chain(optax.partition({"muon": matrices, "adam": _scale_by_adam(config)}, labels), decay)


# Optimizers, up to the learning rate. `decay` adds the decayed weights to what comes before it.


def _scale_by_adam(config: OptimizerConfig) -> Rule:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def _adamw(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    return optax.chain(_scale_by_adam(config), decay)


def _adam(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    return optax.chain(decay, _scale_by_adam(config))


def _adafactor(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    # Not optax.adafactor: its decay is not multiplied by the learning rate, so 0.1 would cost 10 % of a weight a step.
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms(), decay
    )


def _lion(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), decay)


def _sgd(config: OptimizerConfig, decay: Rule, params: PyTree, names: PyTree | None) -> Rule:
    return optax.chain(decay, optax.trace(config.momentum) if config.momentum else optax.identity())


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Rule, PyTree, PyTree | None], Rule]] = {
    "adamw": _adamw,
    "adam": _adam,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


def optimizer(config: OptimizerConfig, schedule: Schedule, params: PyTree, names: PyTree | None = None) -> Rule:
    """The update rule. Apply its updates with `optax.apply_updates`; clip gradients before, with `clip_by_norm`.

    * adamw: Adam with decoupled decay, `-rate * (m / (sqrt(v) + eps) + decay * w)` (Loshchilov and Hutter 2019).
    * adam: Kingma and Ba 2015; `weight_decay` is an L2 penalty, added to the gradient.
    * adafactor: factored second moment, update clipped to RMS 1, rate relative to each parameter's RMS (Shazeer and
      Stern 2018): useful peaks are near 1e-2. Kernels whose two largest axes are both at least 128 are factored, layer
      by layer; the two RMS values are those of the whole layer stack.
    * lion: `sign` of interpolated momentum (Chen et al. 2023); wants `beta2` 0.99 and a rate 3 to 10 times smaller.
    * sgd: heavy-ball momentum; `weight_decay` is an L2 penalty.
    * muon: Nesterov momentum orthogonalised per matrix (Jordan 2024), scaled to the RMS of an Adam update (Liu et al.
      2025) so that one rate serves all; tables, output head, norms and biases use AdamW. It is optax's, with
      `m = b m + (1 - b) g` and bias correction: update t is of `b m / (1 - b^(t + 1)) + (1 - b) g / (1 - b^t)`.
      Jordan's is of `b m + (1 - b) g` (his `g + b (b m + g)`, up to a factor that orthogonalising removes).
      The two are the same direction at the first update and as t grows, and differ between.

    Decay is multiplied by the rate in every rule and skips the parameters that `config.decay_exclude` names. Moments
    are float32 whatever the dtype of the parameters.

    With `config.spike` its update takes one more argument, `norm`: the gradient's, before clipping.

    Args:
      schedule: learning rate by number of completed updates.
      params: parameters, or their shapes (only structure, paths and shapes are read).
      names: a tree like `params` whose leaves are tuples of logical axis names; muon needs it for kernels of rank 3
        and more, the other rules ignore it.

    Raises:
      ConfigError: `config.name` is unknown.
      ValueError: muon meets a kernel whose matrix it cannot tell.
    """
    build = _choose(OPTIMIZERS, config.name, "config.optimizer.name")
    decay = optax.identity()
    if config.weight_decay:
        decay = optax.add_decayed_weights(config.weight_decay, decay_mask(params, config))
    rules = [build(config, decay, params, names), optax.scale_by_learning_rate(schedule)]
    return _in_float32(optax.chain(*([] if config.spike is None else [spikes.track()]), *rules))


def updates(state: PyTree) -> Array:
    """How many updates the state of an `optimizer` has seen: what its learning rate goes by."""
    return state[-1].count


def average_decay(config: TrainConfig, updates: Array) -> Array | float:
    """Decay of the weight average at an update: `ema`, or with `ema_warmup` `min(ema, (1 + n) / (10 + n))`.

    The warm-up is that of TensorFlow's `ExponentialMovingAverage` with `num_updates`.

    Args:
      updates: n, how many were made before. Steps left out do not count.
    """
    if not config.ema_warmup:
        return config.ema
    return jnp.minimum(config.ema, (1.0 + updates) / (10.0 + updates))


def _in_float32(inner: Rule) -> Rule:
    """`inner` on float32 copies of parameters and gradients: optax gives moments the dtype of the parameters."""

    def cast(tree: PyTree) -> PyTree:
        return optax.tree.cast(tree, jnp.float32)

    inner = optax.with_extra_args_support(inner)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: Array) -> tuple[PyTree, PyTree]:
        return inner.update(cast(grads), state, None if params is None else cast(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(cast(params)), update)


def _choose(table: dict[str, Callable], name: str, field: str) -> Callable:
    if name not in table:
        raise ConfigError(f"{field}: got {name!r}, expected {', '.join(table)}{registry.nearest(name, tuple(table))}")
    return table[name]


def clip_by_norm(grads: PyTree, norm: Array, limit: float | None) -> PyTree:
    """`grads * min(1, limit / norm)` (Pascanu et al. 2013), with `norm` the global norm `optax.global_norm(grads)`.

    A limit of None changes nothing. A norm that is not finite makes every gradient NaN, so that it is noticed.
    """
    if limit is None:
        return grads
    # A tiny floor keeps 0 gradients 0 without a branch; maximum and minimum propagate NaN, and inf is made NaN.
    scale = jnp.where(jnp.isinf(norm), jnp.nan, jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30)))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)


def state_shardings(optimizer: Rule, params_shapes: PyTree, params_shardings: PyTree, mesh: Mesh) -> PyTree:
    """Shardings for `optimizer.init(params)`: each leaf lies as the parameter it belongs to, scalars everywhere.

    A leaf belongs to the parameter whose path its own path ends with. If it has the parameter's shape less one axis
    (Adafactor's row and column statistics) it takes the parameter's sharding less that axis, where only one axis fits;
    all else is replicated.

    Args:
      params_shapes: unboxed parameters or their abstract shapes.
      params_shardings: the same tree of `NamedSharding`.
    """
    places = jax.tree.map(lambda shape, place: (shape.shape, place), params_shapes, params_shardings)
    leaves = jax.tree_util.tree_leaves_with_path(places, is_leaf=lambda x: isinstance(x, tuple))
    by_path = {path_of(keys): value for keys, value in leaves}
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(keys: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        path = path_of(keys)
        owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
        return replicated if owner is None else _like(leaf.shape, *owner, replicated)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params_shapes))


def _like(shape: tuple[int, ...], owner: tuple[int, ...], place: NamedSharding, other: NamedSharding) -> NamedSharding:
    """Sharding of a statistic of `shape` whose parameter, of shape `owner`, lies at `place`; `other` if unclear."""
    if shape == owner:
        return place
    axes = tuple(place.spec) + (None,) * (len(owner) - len(place.spec))
    fitting = {axes[:i] + axes[i + 1 :] for i in range(len(owner)) if owner[:i] + owner[i + 1 :] == shape}
    return NamedSharding(place.mesh, PartitionSpec(*fitting.pop())) if len(fitting) == 1 else other
