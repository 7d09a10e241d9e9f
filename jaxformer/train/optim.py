"""Learning-rate schedules, optimizers, weight-decay masks, and the sharding of the optimizer's state.

Clipping is not part of the optimizer's chain. The step computes the gradient norm once, reports it, and passes it to
`clip_by_norm`, so the norm in the log is the one that was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxformer import registry
from jaxformer.config import OptimizerConfig, ScheduleConfig
from jaxformer.config.layer_groups import first_layers, group_name
from jaxformer.errors import ConfigError
from jaxformer.train import skip_guard
from jaxformer.types import Array, PyTree, is_zero, leaf_path

Schedule = Callable[[ArrayLike], Array]
Transform = optax.GradientTransformationExtraArgs
Path = tuple[str, ...]

MUON_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: about that of Adam's updates (Liu et al. 2025)."""
MATRIX_BATCH_AXES = ("layers", "experts")
"""Logical axes along which a kernel is a batch of matrices."""
ADAM_AXES = ("vocab", "table", "buckets")
"""Logical axes of lookup tables, whose rows get sparse gradients: Muon leaves these kernels to Adam."""
ADAM_WORDS = ("bias", "scale", "embed", "kinds")
"""Words in the paths of vectors and tables, which Muon leaves to Adam too."""


# Schedules. `n` counts completed updates from 0, as optax does, so update n is step s = n + 1.


def _warmup(n: Array, warmup: ArrayLike) -> Array:
    """min(1, s / warmup): update `warmup - 1` is the first at full rate, and no update has rate 0."""
    return jnp.minimum(1.0, (n + 1.0) / _at_least_one(warmup))


def _decay_progress(n: Array, start: Any, end: Any) -> Array:
    """0 up to update `start`, 1 from update `end` on, linear between."""
    return jnp.clip((n - start) / _at_least_one(end - start), 0.0, 1.0)


def _at_least_one(steps: ArrayLike) -> Any:
    """`max(steps, 1)` of a number that is known when the program is traced, or of one that is not."""
    return max(steps, 1) if isinstance(steps, float | int) else jnp.maximum(steps, 1)


def _constant(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    return _warmup(n, config.warmup)


def _linear(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _decay_progress(n, config.warmup, steps)
    return _warmup(n, config.warmup) * (1.0 - (1.0 - config.floor) * done)


def _cosine(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _decay_progress(n, config.warmup, steps)
    return _warmup(n, config.warmup) * (config.floor + (1.0 - config.floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)))


def _wsd(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    done = _decay_progress(n, steps - config.decay * steps, steps)
    return _warmup(n, config.warmup) * (1.0 - (1.0 - config.floor) * done)


def _inverse_sqrt(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    warmup = _at_least_one(config.warmup)
    return jnp.minimum((n + 1.0) / warmup, jnp.sqrt(warmup / (n + 1.0)))


def _noam(config: ScheduleConfig, steps: int, width: int, n: Array) -> Array:
    return width**-0.5 * jnp.minimum((n + 1.0) ** -0.5, (n + 1.0) * _at_least_one(config.warmup) ** -1.5)


SCHEDULES: dict[str, Callable[[ScheduleConfig, int, int, Array], Array]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "noam": _noam,
}


DECAY_TO_END = ("linear", "cosine", "wsd")
"""Schedules whose decay ends at `train.steps`: another number of steps changes the rate of every decaying step."""


def schedule(config: ScheduleConfig, steps: int, width: int) -> Schedule:
    """The learning rate as a function of the number of completed updates `n` (so update n is step s = n + 1).

    Every kind warms up linearly, `peak * s / warmup`, and reaches the peak at step `warmup`. After that, with
    `p = (n - warmup) / (steps - warmup)` and `floor` the fraction of the peak that is reached at the end:

    * constant: `peak`.
    * linear: `peak * (1 - (1 - floor) p)`.
    * cosine: `peak * (floor + (1 - floor) (1 + cos(pi p)) / 2)` (Loshchilov and Hutter 2017, without restarts).
    * wsd: `peak`, then linear to the floor over the last `decay * steps` updates (warm-up, stable, decay; Hu et al.
      2024).
    * inverse_sqrt: `peak * sqrt(warmup / s)`.
    * noam: `peak * width ** -0.5 * min(s ** -0.5, s * warmup ** -1.5)` (Vaswani et al. 2017, equation 3); its highest
      rate, at step `warmup`, is `peak * (width * warmup) ** -0.5`.

    Args:
      steps: number of updates in the run. With `warmup >= steps` the run ends during the warm-up.
      width: model width `D`; only noam uses it.

    Returns:
      A function that returns a float32 scalar and can be compiled.

    Raises:
      ConfigError: `config.kind` is unknown.
    """
    shape = _lookup(SCHEDULES, config.kind, "config.schedule.kind")
    return lambda n: jnp.float32(config.peak) * shape(config, steps, width, jnp.asarray(n, jnp.float32))


# Weight-decay masks.


def has_word(path: Path, words: tuple[str, ...]) -> bool:
    """True if a component of `path` contains one of `words`: `source_embed/table` has the word "embed"."""
    return any(word in component for component in path for word in words)


def decay_mask(params: PyTree, config: OptimizerConfig) -> PyTree:
    """Tree of bools: True for every parameter that decays. `params` may be abstract."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: not has_word(leaf_path(keys), config.decay_exclude), params)


def parameter_table(
    params: PyTree, config: OptimizerConfig, axis_names: PyTree | None = None, frozen: Collection[str] = ()
) -> str:
    """Printable table of the parameters: path, shape, weight decay, and with Muon the update rule.

    With frozen parameters or layer-wise decay of the rate, a column says "frozen" or the factor of the rate. The last
    line counts the entries that decay and are trained. `params` may be abstract; `axis_names` as in `optimizer`.

    Args:
      frozen: paths of the parameters that are not trained.
    """
    rules = _muon_axes_by_path(params, axis_names) if config.name == "muon" else None
    factors: dict[Path, np.ndarray] = {}
    if config.layer_decay != 1:
        factors = traverse_util.flatten_dict(rate_factors(params, config.layer_decay, axis_names))
    shows_rate = bool(frozen or factors)
    rows = [("parameter", "shape", "decay") + (("rule",) if rules else ()) + (("rate",) if shows_rate else ())]
    decaying = total = trained = 0
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        path = leaf_path(keys)
        is_frozen = "/".join(path) in frozen
        decays = config.weight_decay > 0 and not has_word(path, config.decay_exclude) and not is_frozen
        total += value.size
        trained += 0 if is_frozen else value.size
        decaying += value.size if decays else 0
        row = ("/".join(path), " x ".join(map(str, value.shape)) or "scalar")
        row += (f"{config.weight_decay:g}" if decays else "-",)
        row += ("-" if is_frozen else "muon" if rules[path] else "adam",) if rules else ()
        rows.append(row + (("frozen" if is_frozen else _format_factor(factors.get(path)),) if shows_rate else ()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    ending = [f"{trained:,} of {total:,} entries are trained"] if frozen else []
    return "\n".join([*lines, *ending, f"{decaying:,} of {total:,} entries decay"])


def _format_factor(factor: np.ndarray | None) -> str:
    """The factor of a parameter's rate; of stacked layers the first and the last."""
    values = [1.0] if factor is None else factor.reshape(-1)[[0, -1]] if factor.ndim else [factor]
    return "-".join(f"{value:.4g}" for value in values)


# Layer-wise decay of the learning rate.


EMBEDDING_PARTS = ("position", "embed_norm", "embed_projection")
"""Parts of a stack whose parameters act on the embeddings."""


def rate_factors(params: PyTree, decay: float, axis_names: PyTree | None) -> PyTree:
    """Factors of the learning rate, by layer: a tree like `params` of float32 scalars, `[L, 1, ...]` where stacked.

    Layer l of the L layers of a stack (from 1), in whichever group, has `decay ** (L + 1 - l)`, embeddings with all
    that is added to them `decay ** (L + 1)`; head, final norm and what all layers share have 1. An encoder and a
    decoder count each for itself. As in fine-tuning of ELECTRA (Clark et al. 2020, appendix B) and BEiT (Bao et al.
    2022, appendix H).

    Args:
      params: parameters, or their shapes.
      axis_names: a tree like `params` of tuples of logical axis names, which tell stacked layers from other axes.

    Raises:
      ValueError: there are no axis names.
    """
    if axis_names is None:
        raise ValueError("optimizer.layer_decay: got no axis names, expected some to find the layers; pass axis_names")
    names = traverse_util.flatten_dict(axis_names)
    shapes = {path: x.shape for path, x in traverse_util.flatten_dict(params).items()}
    groups: dict[str, dict[str, int]] = {}
    for path in shapes:
        if "layers" in (names[path] or ())[:1]:
            groups.setdefault(path[0], {})[group_name(path)] = shapes[path][0]
    first = {side: first_layers(counts) for side, counts in groups.items()}
    depths = {side: sum(counts.values()) for side, counts in groups.items()}
    below = {"source_embed": "encoder", "mask_embed": "encoder", "target_embed": "decoder"}

    def factor(path: Path, shape: tuple[int, ...]) -> np.ndarray:
        if "layers" in (names[path] or ())[:1]:
            numbers = first[path[0]][group_name(path)] + np.arange(shape[0])
            powers = (depths[path[0]] - numbers).reshape(-1, *(1,) * (len(shape) - 1))
        elif path[0] in below:
            powers = np.asarray(depths.get(below[path[0]], 0) + 1)
        elif path[0] in depths and path[1] in EMBEDDING_PARTS:
            powers = np.asarray(depths[path[0]] + 1)
        elif path[0] in depths and path[1] == "conv":  # beside the first layer
            powers = np.asarray(depths[path[0]])
        else:
            powers = np.asarray(0)
        return (decay**powers).astype(np.float32)

    return traverse_util.unflatten_dict({path: factor(path, shape) for path, shape in shapes.items()})


def _scale_by_layer(factors: PyTree) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(lambda update, factor: update * factor, updates, factors))


# Muon: the axes of a kernel that form the matrix.


def muon_axes(path: Path, names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """Axes that are the rows and columns which Muon orthogonalises; None for a parameter that Adam updates.

    Layers and experts are batches of matrices. Heads and head width are one axis of a matrix, as in `W_Q`
    `[D, H * K]` or `W_O` `[H * K, D]`. If more than two axes are left, those without a logical name (the gates of a
    recurrent or gated kernel) are batches too. Tables, the output head, norms and biases do not map hidden states to
    hidden states: Adam updates them.

    Args:
      path: of the parameter.
      names: logical name of each axis, or None.
    """
    if any(name in ADAM_AXES for name in names) or path[0] == "head" or has_word(path, ADAM_WORDS):
        return None
    groups: list[list[int]] = []
    for axis, name in enumerate(names):
        if name in MATRIX_BATCH_AXES:
            continue
        if name == "head" and groups and names[groups[-1][-1]] in ("heads", "kv_heads"):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) > 2:
        groups = [group for group in groups if names[group[0]] is not None]
    if len(groups) > 2 and names[groups[0][0]] in ("heads", "kv_heads"):  # each head's matrix, of its own chunk
        groups = groups[1:]
    return MuonDimensionNumbers(*map(tuple, groups)) if len(groups) == 2 else None


def _muon_axes_by_path(params: PyTree, axis_names: PyTree | None) -> dict[Path, MuonDimensionNumbers | None]:
    """`muon_axes` of every parameter by path. Without axis names only plain matrices are accepted; others raise."""
    axes: dict[Path, MuonDimensionNumbers | None] = {}
    if axis_names is None:
        logical = {}
    else:
        leaves = jax.tree_util.tree_leaves_with_path(axis_names, is_leaf=lambda x: isinstance(x, tuple) or x is None)
        logical = {leaf_path(keys): tuple(value or ()) for keys, value in leaves}
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        path = leaf_path(keys)
        is_kernel = path[-1] == "kernel"
        names = logical.get(path) or ((None,) * value.ndim if is_kernel and value.ndim == 2 else ())
        if len(names) != value.ndim and (names or is_kernel):
            raise ValueError(
                f"optimizer muon: got axis names {names} for {'/'.join(path)} of shape {value.shape}, expected one per "
                "axis, to separate layers and heads from the matrix; pass `axis_names`"
            )
        axes[path] = muon_axes(path, names)
    return axes


def _muon(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    axes = _muon_axes_by_path(params, axis_names)

    def dimensions(tree: PyTree) -> PyTree:
        # optax.partition masks out the other rule's parameters, and this tree must have the same structure.
        return jax.tree_util.tree_map_with_path(lambda keys, _: axes[leaf_path(keys)], tree)

    def rescale(keys: tuple, update: Array) -> Array:
        # An orthogonal [m, n] matrix has RMS max(m, n) ** -0.5. With that undone one rate serves Muon and Adam.
        matrix = axes[leaf_path(keys)]
        if matrix is None:
            return update
        sides = [
            math.prod(update.shape[axis] for axis in ((side,) if isinstance(side, int) else side)) for side in matrix
        ]
        return update * (MUON_RMS * max(sides) ** 0.5)

    matrices = optax.chain(
        scale_by_muon(beta=config.momentum, eps=config.epsilon, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(rescale, updates)),
    )
    labels = jax.tree_util.tree_map_with_path(lambda keys, _: "muon" if axes[leaf_path(keys)] else "adam", params)
    return optax.chain(optax.partition({"muon": matrices, "adam": _scale_by_adam(config)}, labels), decay)


# Optimizers without the learning rate. `decay` adds the decayed weights to the updates before it in the chain.


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def _adamw(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    return optax.chain(_scale_by_adam(config), decay)


def _adam(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    return optax.chain(decay, _scale_by_adam(config))


def _adafactor(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    # Not optax.adafactor: its decay is not multiplied by the learning rate, so 0.1 would take 10 % of a weight a step.
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms(), decay
    )


def _lion(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), decay)


def _sgd(
    config: OptimizerConfig, decay: optax.GradientTransformation, params: PyTree, axis_names: PyTree | None
) -> optax.GradientTransformation:
    return optax.chain(decay, optax.trace(config.momentum) if config.momentum else optax.identity())


OPTIMIZERS: dict[
    str, Callable[[OptimizerConfig, optax.GradientTransformation, PyTree, PyTree | None], optax.GradientTransformation]
] = {
    "adamw": _adamw,
    "adam": _adam,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


def optimizer(
    config: OptimizerConfig, schedule: Schedule, params: PyTree, axis_names: PyTree | None = None
) -> Transform:
    """The update rule. Apply its updates with `optax.apply_updates`; clip gradients before, with `clip_by_norm`.

    * adamw: Adam with decoupled decay, `-rate * (m / (sqrt(v) + eps) + decay * w)` (Loshchilov and Hutter 2019).
    * adam: Kingma and Ba 2015; `weight_decay` is an L2 penalty, added to the gradient.
    * adafactor: factored second moment, update clipped to RMS 1, rate relative to each parameter's RMS (Shazeer and
      Stern 2018): useful peaks are near 1e-2. Kernels whose two largest axes are both at least 128 are factored, layer
      by layer; the two RMS values are those of the whole layer stack.
    * lion: `sign` of interpolated momentum (Chen et al. 2023); use `beta2` 0.99 and a rate 3 to 10 times smaller.
    * sgd: heavy-ball momentum; `weight_decay` is an L2 penalty.
    * muon: Nesterov momentum orthogonalised per matrix (Jordan 2024), scaled to the RMS of an Adam update (Liu et al.
      2025) so that one rate serves all; tables, output head, norms and biases use AdamW. It is optax's version, with
      `m = b m + (1 - b) g` and bias correction: update t orthogonalises
      `b m / (1 - b^(t + 1)) + (1 - b) g / (1 - b^t)`. Jordan's orthogonalises `b m + (1 - b) g` (his
      `g + b (b m + g)`, up to a factor that orthogonalising removes). The two have the same direction at the first
      update and as t grows, and differ in between.

    Decay is multiplied by the rate in every rule and skips the parameters that `config.decay_exclude` names. Moments
    are float32 whatever the dtype of the parameters. With `config.layer_decay` the rate differs by layer, see
    `rate_factors`.

    Its `update` takes one more argument, `norm`: the norm of the gradient before clipping. Only `config.spike` uses it.

    Args:
      schedule: learning rate by number of completed updates.
      params: the trained parameters, or their shapes (only structure, paths and shapes are read).
      axis_names: a tree like `params` whose leaves are tuples of logical axis names. Muon needs it for kernels of rank
        3 and more, and layer-wise decay of the rate to find the layers; else it is ignored.

    Raises:
      ConfigError: `config.name` is unknown.
      ValueError: muon cannot determine the matrix axes of a kernel.
    """
    build = _lookup(OPTIMIZERS, config.name, "config.optimizer.name")
    decay = optax.identity()
    if not is_zero(config.weight_decay):
        decay = optax.add_decayed_weights(config.weight_decay, decay_mask(params, config))
    rules = [build(config, decay, params, axis_names)]
    if config.layer_decay != 1:
        rules.append(_scale_by_layer(rate_factors(params, config.layer_decay, axis_names)))
    rules.append(optax.scale_by_learning_rate(schedule))
    return _in_float32(optax.chain(*([] if config.spike is None else [skip_guard.track_gradient_norm()]), *rules))


def update_count(state: PyTree) -> Array:
    """Number of updates in the state of an `optimizer`; the learning rate is a function of it."""
    return state[-1].count


def _in_float32(optimizer: optax.GradientTransformation) -> Transform:
    """`optimizer` on float32 copies of parameters and gradients: optax gives moments the dtype of the parameters."""

    def cast(tree: PyTree) -> PyTree:
        return optax.tree.cast(tree, jnp.float32)

    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        return inner.update(cast(updates), state, None if params is None else cast(params), **extra_args)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(cast(params)), update)


def _lookup(table: dict[str, Callable], name: str, field: str) -> Callable:
    if name not in table:
        raise ConfigError(f"{field}: got {name!r}, expected {', '.join(table)}{registry.nearest(name, tuple(table))}")
    return table[name]


def clip_by_norm(grads: PyTree, norm: Array, limit: float | None) -> PyTree:
    """`grads * min(1, limit / norm)` (Pascanu et al. 2013), with `norm` the global norm `optax.global_norm(grads)`.

    A limit of None changes nothing. A norm that is not finite makes every gradient NaN.
    """
    if limit is None:
        return grads
    # The floor keeps 0 gradients 0 without a branch; maximum and minimum propagate NaN, and inf becomes NaN.
    scale = jnp.where(jnp.isinf(norm), jnp.nan, jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30)))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)


def optimizer_state_shardings(
    optimizer: Transform, params_shapes: PyTree, params_shardings: PyTree, mesh: Mesh
) -> PyTree:
    """Shardings of `optimizer.init(params)`: each leaf as the parameter it belongs to, scalars replicated.

    A leaf belongs to the parameter whose path its own path ends with. A leaf with the parameter's shape less one axis
    (Adafactor's row and column statistics) takes the parameter's sharding less that axis, if only one axis fits. All
    other leaves are replicated.

    Args:
      params_shapes: unboxed parameters or their abstract shapes.
      params_shardings: the same tree of `NamedSharding`.
    """
    params = jax.tree.map(lambda shape, sharding: (shape.shape, sharding), params_shapes, params_shardings)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, tuple))
    by_path = {leaf_path(keys): value for keys, value in leaves}
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding(keys: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        path = leaf_path(keys)
        param = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
        return replicated if param is None else _statistic_sharding(leaf.shape, *param, replicated)

    return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(optimizer.init, params_shapes))


def _statistic_sharding(
    shape: tuple[int, ...], param_shape: tuple[int, ...], sharding: NamedSharding, default: NamedSharding
) -> NamedSharding:
    """Sharding of an optimizer statistic of `shape`, from its parameter's shape and sharding; else `default`."""
    if shape == param_shape:
        return sharding
    axes = tuple(sharding.spec) + (None,) * (len(param_shape) - len(sharding.spec))
    fitting = {
        axes[:i] + axes[i + 1 :] for i in range(len(param_shape)) if param_shape[:i] + param_shape[i + 1 :] == shape
    }
    return NamedSharding(sharding.mesh, PartitionSpec(*fitting.pop())) if len(fitting) == 1 else default
