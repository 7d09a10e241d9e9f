"""Low-rank adapters (LoRA): the parameters that they add to a model, and how they merge with its kernels.

Hu et al. 2021, "LoRA: Low-rank adaptation of large language models": a linear map `x W` becomes
`x W + scale * dropout(x) A B`. A `[D, r]` and B `[r, D']` are trained, W is not. B starts at zero, so that the model
starts as it was.

Beside its `kernel` an adapted map (`nn.layers.Dense`) has the parameters

    lora_a [*inputs, r], lora_b [r, *outputs]     trained
    lora_scale [], lora_dropout []                constants: alpha / r (0 in layers without adapters), the dropout rate

all with the axis `[L, ...]` of stacked layers in front. So whatever reads parameters (decoding, checkpoints, meshes,
pipelines) reads adapters too, and the module decides by what it is given.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Float32, Key

from jaxformer.config import AdapterConfig, ModelConfig, patterns
from jaxformer.config.layer_groups import first_layers, group_name
from jaxformer.errors import ConfigError
from jaxformer.nn.layers import Dense
from jaxformer.types import Array, PyTree

TRAINED = ("lora_a", "lora_b")
CONSTANTS = ("lora_scale", "lora_dropout")
PATH = "config.model.adapter"

Path = tuple[str, ...]
Layers = dict[Path, Dense]
"""The linear maps of a model by their path in the parameters."""


class Adapter(NamedTuple):
    """Rank and scale of one target's adapter.

    Attributes:
      rank: r.
      scale: factor of the product A B.
    """

    rank: int
    scale: float


@contextlib.contextmanager
def recording(layers: Layers) -> Generator[None]:
    """A context in which every `Dense` that is called is entered in `layers`."""

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Dense):
            layers[context.module.path] = context.module
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        yield


def targets(config: AdapterConfig, layers: Layers) -> dict[Path, Adapter]:
    """The linear maps that get an adapter, by path.

    Raises:
      ConfigError: a pattern matches no linear map.
    """
    paths = ["/".join(path) for path in layers]
    chosen = patterns.select(paths, config.targets, f"{PATH}.targets")
    if not chosen:
        raise ConfigError(f"{PATH}.targets: got {config.targets}, which leaves no linear map, expected at least one")
    for field in ("ranks", "alphas"):
        patterns.select(chosen, [entry.rpartition("=")[0] for entry in getattr(config, field)], f"{PATH}.{field}")
    found = {}
    for path in sorted(chosen):
        rank = int(patterns.last_value(path, config.ranks, config.rank))
        alpha = patterns.last_value(path, config.alphas, config.alpha)
        found[tuple(path.split("/"))] = Adapter(rank, alpha / (math.sqrt(rank) if config.stabilised else rank))
    return found


def leaves(
    config: AdapterConfig, shapes: Mapping[Path, tuple[int, ...]], layers: Layers, key: Key[Array, ""]
) -> dict[Path, tuple[Float32[Array, "..."], tuple[str | None, ...]]]:
    """Initial parameters of the adapters by path, each with the logical names of its axes.

    A is uniform in +-inputs ** -0.5, as in the authors' code (the paper says Gaussian); B is zero.

    Args:
      shapes: of the model's parameters.

    Raises:
      ConfigError: a pattern or a layer number matches nothing.
    """
    found: dict[Path, tuple[Array, tuple[str | None, ...]]] = {}
    adapted, numbers = targets(config, layers), _layer_numbers(shapes, layers)
    _check_layers(config, [path for path in adapted if path in numbers], numbers)
    for path, adapter in adapted.items():
        dense, shape = layers[path], shapes[*path, "kernel"]
        stack = shape[: len(shape) - len(dense.shape)]
        inputs, outputs = dense.shape[: dense.inputs], dense.shape[dense.inputs :]
        stack_names, input_names = ("layers",) * len(stack), dense.names[: dense.inputs]
        bound = math.prod(inputs) ** -0.5
        own_key = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        a = jax.random.uniform(own_key, (*stack, *inputs, adapter.rank), jnp.float32, -bound, bound)
        b = jnp.zeros((*stack, adapter.rank, *outputs))
        found[*path, "lora_a"] = a, (*stack_names, *input_names, "rank")
        found[*path, "lora_b"] = b, (*stack_names, "rank", *dense.names[dense.inputs :])
        found[*path, "lora_scale"] = _scale(config, adapter, numbers.get(path)), stack_names
        if config.dropout:
            found[*path, "lora_dropout"] = jnp.full(stack, config.dropout), stack_names
    return found


def add(config: AdapterConfig, params: PyTree, layers: Layers, key: Key[Array, ""]) -> PyTree:
    """Boxed parameters with those of the adapters beside them; see `leaves`."""
    flat = traverse_util.flatten_dict(params)
    shapes = {path: box.value.shape for path, box in flat.items()}
    for path, (value, names) in leaves(config, shapes, layers, key).items():
        flat[path] = nn.LogicallyPartitioned(value, names)
    return traverse_util.unflatten_dict(flat)


def also_trained(config: ModelConfig, paths: Iterable[str]) -> set[str]:
    """The parameter paths, out of `paths`, that are trained in addition to the adapters.

    Raises:
      ConfigError: a pattern of `adapter.train` matches none.
    """
    others = [path for path in paths if not is_adapter(path.rpartition("/")[2])]
    if config.adapter is None:
        return set(others)
    if config.adapter.train is not None:
        return patterns.select(others, config.adapter.train, f"{PATH}.train")
    return {path for path in others if config.head.kind != "tokens" and path.startswith("head/")}


def _layer_numbers(shapes: Mapping[Path, tuple[int, ...]], layers: Layers) -> dict[Path, range]:
    """Numbers in its stack of the layers of each linear map that is stacked over layers."""
    counts: dict[Path, dict[str, int]] = {}  # of the layers of each group, by the path of the stack
    groups: dict[Path, tuple[Path, str]] = {}
    for path, dense in layers.items():
        shape = shapes[*path, "kernel"]
        if len(shape) > len(dense.shape):
            name = group_name(path)
            groups[path] = path[: path.index(name)], name
            counts.setdefault(groups[path][0], {})[name] = shape[0]
    first = {stack: first_layers(group) for stack, group in counts.items()}
    return {
        path: range(first[stack][name], first[stack][name] + counts[stack][name])
        for path, (stack, name) in groups.items()
    }


def _check_layers(config: AdapterConfig, paths: Iterable[Path], numbers: Mapping[Path, range]) -> None:
    """Raises ConfigError if `adapter.layers` names a layer that has none of the chosen maps, `paths`, of a side."""
    for side in sorted({path[0] for path in paths}):
        existing = {number for path in paths if path[0] == side for number in numbers[path]}
        without_map = sorted(set(config.layers) - existing)
        if without_map:
            last = max(own[-1] for path, own in numbers.items() if path[0] == side)
            expected = f"numbers from 0 to {last}, of layers with one of the targets"
            raise ConfigError(f"{PATH}.layers: got {without_map[0]}, expected {expected}")


def _scale(config: AdapterConfig, adapter: Adapter, numbers: range | None) -> Float32[Array, "..."]:
    """The factor of A B in each of some layers, 0 in layers without adapters; None: a map outside the layers."""
    if numbers is None:
        return jnp.full((), adapter.scale)
    has_adapter = [not config.layers or number in config.layers for number in numbers]
    return jnp.where(jnp.asarray(has_adapter), adapter.scale, 0.0)


def is_adapter(name: str) -> bool:
    """True if a parameter of this name belongs to an adapter."""
    return name in TRAINED + CONSTANTS


def has_adapters(params: PyTree) -> bool:
    """True if some of the parameters belong to adapters."""
    return any(is_adapter(path[-1]) for path in traverse_util.flatten_dict(params))


def without(params: PyTree) -> PyTree:
    """The parameters of the model that was adapted."""
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: x for path, x in flat.items() if not is_adapter(path[-1])})


def with_base(params: PyTree, base: PyTree) -> PyTree:
    """The adapters of `params` on the parameters of `base`, which has none."""
    flat = traverse_util.flatten_dict(params)
    own = {path: x for path, x in flat.items() if is_adapter(path[-1])}
    return traverse_util.unflatten_dict(traverse_util.flatten_dict(base) | own)


def merge(params: PyTree) -> PyTree:
    """Parameters without adapters that compute the same: kernels `W + scale * A B`, in float32."""
    flat = traverse_util.flatten_dict(params)
    merged = {path: x for path, x in flat.items() if not is_adapter(path[-1])}
    for path in [path[:-1] for path in flat if path[-1] == "lora_a"]:
        a, b, scale = (flat[*path, f"lora_{name}"] for name in ("a", "b", "scale"))
        depth, rank = scale.ndim, a.shape[-1]
        stack = scale.shape
        product = jnp.matmul(
            a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1), precision=jax.lax.Precision.HIGHEST
        )
        kernel = flat[*path, "kernel"]
        scales = scale.reshape(*stack, *(1,) * (kernel.ndim - depth))
        merged[*path, "kernel"] = kernel + scales * product.reshape(kernel.shape)
    return traverse_util.unflatten_dict(merged)
