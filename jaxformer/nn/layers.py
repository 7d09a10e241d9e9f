"""Dense, dropout, normalisation and embedding: the layers that all models are made of."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Generator
from typing import Callable, cast

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Float32, Int, Key, Num

from jaxformer.config import EmbedConfig, FeedForwardConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.nn import cpu, matching
from jaxformer.nn.products import dot
from jaxformer.parallel import shards
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Rate, Stream, is_zero

_shapes_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_alone", default=False)


@contextlib.contextmanager
def shapes_alone() -> Generator[None]:
    """Inside, new parameters are zeros of their shape: for tracing the shapes of a model, not its values.

    Keys and random numbers are up to half of what there is to trace in an initialisation.
    """
    token = _shapes_alone.set(True)
    try:
        yield
    finally:
        _shapes_alone.reset(token)


def parameter(
    module: nn.Module, name: str, init: Callable, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> Num[Array, "..."]:
    """Parameter `name` of `module`, of that shape, with the logical names of its axes for sharding.

    Raises:
      flax.errors.ScopeParamShapeError: the parameter that is given has another shape.
    """
    if not module.has_variable("params", name):
        if _shapes_alone.get():
            zeros = jnp.zeros(shape, jnp.float32)
            module.put_variable("params", name, nn.with_logical_partitioning(lambda: zeros, axes)())
            return zeros
        # Linen types a parameter as the box that holds its names, but returns the array.
        return cast(Array, module.param(name, nn.with_logical_partitioning(init, axes), shape))
    # Linen's `param` would trace the initialiser of every parameter at every call, only to compare the shapes.
    value = meta.unbox(module.get_variable("params", name))
    if value.shape != tuple(shape):
        raise flax.errors.ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value


def zeros_parameter(
    module: nn.Module, name: str, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> Num[Array, "..."]:
    """`parameter` with initial value 0."""
    return parameter(module, name, nn.initializers.zeros_init(), axes, shape)


def in_float32(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`function` computed in float32, with only its argument stored for the backward pass.

    Autodiff would store every factor of a GELU's derivative, each as large as the hidden activations. On a CPU
    recomputing them takes less time than writing and reading them.
    """

    @jax.checkpoint
    def act(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return act


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,  # no `in_float32`: the derivative of relu, tanh and sigmoid follows from the result
    "gelu": in_float32(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": in_float32(lambda x: jax.nn.gelu(x, approximate=True)),
    "gelu_sigmoid": in_float32(lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "silu": in_float32(jax.nn.silu),
    "tanh": jnp.tanh,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "mish": in_float32(jax.nn.mish),
    "sigmoid": jax.nn.sigmoid,
}


def activate(
    config: FeedForwardConfig, x: Float[Array, "*shape"], gate: Float[Array, "*shape"] | None = None
) -> Float[Array, "*shape"]:
    """Hidden activations: act(x), or act(min(gate, limit)) * (clip(x, -limit, limit) + offset) of a gated layer."""
    activation = ACTIVATIONS[config.activation]
    if config.slope != 1.0:
        activation = in_float32(lambda y: y * jax.nn.sigmoid(config.slope * y))
    if gate is None:
        return activation(x)
    if config.limit is not None:
        gate, x = jnp.minimum(gate, config.limit), jnp.clip(x, -config.limit, config.limit)
    return activation(gate) * (x + config.offset if config.offset else x)


def soft_cap(x: Float32[Array, "*shape"], cap: float | None) -> Float32[Array, "*shape"]:
    """Scores or logits between -cap and cap: cap tanh(x / cap) (Gemma 2, 2024, section 2); None: as they are."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Dense(nn.Module):
    """A linear map whose kernel is not flattened to two axes, e.g. `[D, H, K]` for a query projection.

    An integer kernel has a parameter `kernel_scale` of shape `shape[inputs:]` beside it (see decode/int8.py). An
    adapted map has the parameters `lora_a` and `lora_b` (see models/adapters.py).

    Attributes:
      shape: kernel shape, input axes first.
      names: logical name of each kernel axis.
      inputs: number of leading kernel axes that are contracted with the last axes of the input.
      bias: adds a learned array `shape[inputs:]`, initially zero.
      init_scale: initial variance of the kernel times its fan-in.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    inputs: int = 1
    bias: bool = True
    init_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        axes = tuple(range(len(self.shape)))
        init = nn.initializers.variance_scaling(
            self.init_scale, "fan_in", "truncated_normal", in_axis=axes[: self.inputs], out_axis=axes[self.inputs :]
        )
        kernel = parameter(self, "kernel", init, self.names, self.shape)
        outputs = slice(self.inputs, None)
        bias = zeros_parameter(self, "bias", self.names[outputs], self.shape[outputs]) if self.bias else None
        if not self.has_variable("params", "kernel_scale"):
            y = dot(x, kernel, self.inputs, bias)
        else:
            y = dot(x, kernel, self.inputs) * self.get_variable("params", "kernel_scale").astype(x.dtype)
            y = y if bias is None else y + bias.astype(y.dtype)
        return y + self._adapter_output(x) if self.has_variable("params", "lora_a") else y

    def _adapter_output(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """`scale * dropout(x) A B` (Hu et al. 2021, equation 3), without a bias."""
        a, b, scale = (self.get_variable("params", f"lora_{name}") for name in ("a", "b", "scale"))
        rate = self.get_variable("params", "lora_dropout")
        if rate is not None and self.has_rng("dropout"):
            x = dropped(x, self.make_rng("dropout"), rate)
        return dot(dot(x, a, self.inputs), b) * scale.astype(x.dtype)


class ChunkDense(nn.Module):
    """The projection of heads that each see a chunk of the channels: `y[h] = x[h D / H : (h + 1) D / H] W[h] + b[h]`.

    It is `Dense` with a block-diagonal kernel, and has H times fewer parameters. The kernel is `[H, D / H, K]`.

    Attributes:
      shape: input width D, heads H and head width K, as of the `Dense` in its place; H divides D.
      names: logical names of D, H and K.
      bias: adds a learned array `[H, K]`, initially zero.
      init_scale: initial variance of the kernel times its fan-in D / H.
    """

    shape: tuple[int, int, int]
    names: tuple[str | None, str | None, str | None]
    bias: bool = True
    init_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch H K"]:
        (width, heads, head_width), (embed, head, channel) = self.shape, self.names
        init = nn.initializers.variance_scaling(
            self.init_scale, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0
        )
        shape = (heads, width // heads, head_width)
        kernel = parameter(self, "kernel", init, (head, embed, channel), shape)
        bias = zeros_parameter(self, "bias", (head, channel), (heads, head_width)) if self.bias else None
        scale = self.get_variable("params", "kernel_scale")  # of an integer kernel: see decode/int8.py
        chunks = x.reshape(*x.shape[:-1], heads, width // heads)
        y = jnp.einsum("...hd,hdk->...hk", chunks, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        y = y if scale is None else y * scale
        return (y if bias is None else y + bias).astype(x.dtype)


def project_jointly(x: Float[Array, "*batch D"], *maps: Dense | ChunkDense) -> tuple[Float[Array, "*batch ..."], ...]:
    """Outputs of `maps` for the same `x`. Devices exchange the gradient of `x` once for all maps, on any platform."""
    # The gradient of adapted projections is not the kernels' alone, and heads of chunks have kernels of another form.
    separate = any(isinstance(dense, ChunkDense) or dense.has_variable("params", "lora_a") for dense in maps)
    if separate or not cpu.exchanges_separately(*((dense.names[1], dense.shape[1]) for dense in maps)):
        return tuple(dense(x) for dense in maps)
    ys = tuple(dense(jax.lax.stop_gradient(x)) for dense in maps)
    return cpu.share_input_gradient(x, tuple(nn.meta.unbox(dense.variables["params"]["kernel"]) for dense in maps), ys)


class Dropout(nn.Module):
    """Dropout: zeroes entries with probability `rate`, scales the others by 1 / (1 - rate). Needs a dropout key.

    One mask is shared along `axes`: with `axes=(1,)` by a whole sequence (variational dropout).
    """

    rate: Rate
    axes: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if is_zero(self.rate) or not self.has_rng("dropout"):
            return x
        return dropped(x, self.make_rng("dropout"), self.rate, self.axes)


def dropped(
    x: Float[Array, "*shape"], key: Key[Array, ""], rate: float | Float32[Array, ""], axes: tuple[int, ...] = ()
) -> Float[Array, "*shape"]:
    """`x` after dropout with one mask along `axes`."""
    shape = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    keep = keep_mask(key, rate, shape)
    return jnp.where(keep, (x / (1.0 - rate)).astype(x.dtype), jnp.zeros((), x.dtype))


def keep_mask(key: Key[Array, ""], rate: float | Float32[Array, ""], shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Random booleans of `shape`, False with probability `rate`, which is rounded to a multiple of 2 ** -16.

    On a CPU dropout spends most of its time drawing random bits, so one 32-bit word decides two entries.
    """
    count = round(rate * 2**16) if isinstance(rate, float | int) else jnp.round(rate * 2**16)
    threshold = jnp.asarray(count, jnp.uint32)
    if shape[-1] % 2:
        return jax.random.bits(key, shape, jnp.uint32) >> 16 >= threshold
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    halves = jnp.concatenate([words >> 16, words & 0xFFFF], axis=-1)
    return halves >= threshold


class Norm(nn.Module):
    """Normalisation over the last axis, of the kind `config.kind`; batch norm averages over batch and time instead.

    layer: `(x - mean) / sqrt(var + eps) * scale + bias` (Ba et al. 2016). rms: `x / sqrt(mean(x^2) + eps) * scale`
    (Zhang and Sennrich 2019). batch: see `BatchNorm`. none: the identity. Statistics are float32 in any precision.
    """

    config: NormConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch D"], visible: Bool[Array, "*batch"] | None = None
    ) -> Float[Array, "*batch D"]:
        """Normalised `x`. `visible` is False at padding, which the statistics of batch norm leave out."""
        config, width = self.config, x.shape[-1]
        if config.kind == "none":
            return x
        if config.kind == "batch":
            return BatchNorm(config.epsilon, config.momentum, name="batch")(x, visible)
        scale = None
        if config.scale:
            ones = nn.initializers.constant(1.0 - config.offset)
            scale = parameter(self, "scale", ones, (None,), (width,)) + config.offset
        has_bias = config.kind == "layer" and config.bias
        bias = zeros_parameter(self, "bias", (None,), (width,)) if has_bias else None
        return normalize(x, scale, bias, config.kind == "layer", config.epsilon)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def normalize(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None,
    centred: bool,
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """`x / rms(x) * scale + bias`, after subtracting the mean if `centred`. The backward pass stores only arguments."""
    y = x.astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).astype(x.dtype)


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe and Szegedy 2015): one mean and one variance for each feature.

    Statistics are over all visible slots of the global batch, whatever the number of devices. Training (a dropout key
    is supplied) uses the statistics of the batch and moves the running ones, in the collection "batch_stats", towards
    them. Evaluation uses the running ones.
    """

    epsilon: float
    momentum: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], visible: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        width = x.shape[-1]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (width,), jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, (width,), jnp.float32)
        scale = parameter(self, "scale", nn.initializers.ones_init(), (None,), (width,))
        bias = zeros_parameter(self, "bias", (None,), (width,))
        y = x.astype(jnp.float32)
        if self.has_rng("dropout"):
            weight = jnp.ones(x.shape[:-1]) if visible is None else visible.astype(jnp.float32)
            count = jnp.maximum(jnp.sum(weight), 1.0)
            mean = jnp.einsum("bt,btd->d", weight, y) / count
            var = jnp.einsum("bt,btd->d", weight, jnp.square(y - mean)) / count
            if not self.is_initializing() and self.is_mutable_collection("batch_stats"):
                running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
                running_var.value = self.momentum * running_var.value + (1 - self.momentum) * var
        else:
            mean, var = running_mean.value, running_var.value
        y = (y - mean) * jax.lax.rsqrt(var + self.epsilon) * scale + bias
        return y.astype(x.dtype)


def embedding_lookup(table: Num[Array, "V E"], ids: Int[Array, "B T"], rows: str | None = None) -> Num[Array, "B T E"]:
    """Rows `ids` of `table`: `[B, T, E]`; NaN for ids outside the table, negative ones included.

    The partitioner shards this look-up well, except inside a `shard_map` over some of the axes: there it would gather
    the gradients of all slots before adding them into the table. Each device then looks up and adds its own rows, and
    the sums are reduced over the devices that share a part of the table.

    Args:
      rows: logical name of the axis V; None if it is not sharded. The axis E has the name "table".
    """
    count = table.shape[0]
    ids = jnp.where(ids < 0, count, ids)
    if not shards.is_inside_shard_map():
        # Gather the table over fsdp first, like a kernel: sharded in both axes, ids and rows would be exchanged.
        return jnp.take(constrain(table, rows, None), ids, axis=0)
    slots = PartitionSpec(shards.dividing_axes("batch", ids.shape[0]), shards.dividing_axes("length", ids.shape[1]))
    divided = shards.dividing_axes(rows, count) if rows else ()
    width = tuple(axis for axis in shards.dividing_axes("table", table.shape[1]) if axis in slots[0])

    def local(table: Num[Array, "_ _"], ids: Int[Array, "_ _"]) -> Num[Array, "_ _ _"]:
        table = jax.lax.all_gather(table, width, axis=1, tiled=True) if width else table
        if not divided:
            return jnp.take(table, ids, axis=0)
        index = ids - jax.lax.axis_index(divided) * table.shape[0]
        present = (index >= 0) & (index < table.shape[0])
        x = jnp.where(present[..., None], jnp.take(table, jnp.where(present, index, 0), axis=0), 0)
        return jnp.where((ids < count)[..., None], jax.lax.psum(x, divided), jnp.nan)

    return shards.shard(local, (PartitionSpec(divided, width), slots), slots)(table, ids)


def _with_zero_row(init: nn.initializers.Initializer, row: int | None) -> nn.initializers.Initializer:
    """An initializer of a table whose `row` (padding) is zero; None: `init` itself."""
    if row is None:
        return init
    return lambda key, shape, dtype=jnp.float32: init(key, shape, dtype).at[row].set(0.0)


class Embed(nn.Module):
    """Token embedding table `[V, E]`, with the scaling and token types of `config`.

    With `config.matches` two learned vectors are added before the scaling, times a slot's `matching.match_features`.
    With `config.width` a projection to the model width follows (factorised embedding, Lan et al. 2020): here, or with
    `config.projection` "sum" in the stack, and the embeddings are then `[B, T, E]`. A tied head reads the same table
    through `unembedding_factors` (Press and Wolf 2017). With `values` there
    is no table, and the projection, with a bias, maps the numbers of a slot to the model width.

    Attributes:
      values: numbers that a slot holds in place of a token; None: slots hold tokens.
      base: the embedding whose table this one uses too; None: it has a table of its own.
      residual: add an own table "delta", initially 0, to that of `base`, which then gets no gradient from here
        (gradient-disentangled embedding sharing; He et al. 2021, DeBERTaV3, section 3.2.3).
    """

    config: EmbedConfig
    width: int
    dtype: jnp.dtype = jnp.float32
    values: int | None = None
    base: Embed | None = None
    residual: bool = False

    def setup(self) -> None:
        config = self.config
        self.inner = self.values or config.width or self.width
        self.sum_width = config.sum_width or self.width
        self.projects = self.values is not None or self.inner != self.sum_width
        normal = nn.initializers.normal(self.inner**-0.5 if config.deviation is None else config.deviation)
        if self.values is None:
            self.table = self.make_table(normal)
        if self.projects:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            self.up = parameter(self, "up", init, (None, "embed"), (self.inner, self.width))
            if config.projection_bias or self.values is not None:
                self.up_bias = zeros_parameter(self, "up_bias", ("embed",), (self.width,))
        if config.kinds:
            self.token_type_table = parameter(self, "kinds", normal, (None, "table"), (config.kinds, self.sum_width))
        if config.matches:
            shape = (matching.FEATURES, self.sum_width)
            self.match_table = parameter(self, "matches", normal, (None, "table"), shape)

    @nn.nowrap
    def make_table(self, normal: nn.initializers.Initializer) -> Num[Array, "V E"]:
        """The table, of its own or of `base`."""
        config = self.config
        if config.vocab is None:
            raise ValueError("embed.vocab: got None, expected a size; resolve the config with a tokenizer first")
        shape, names = (config.vocab, self.inner), ("vocab", "table")
        if self.base is None:
            return parameter(self, "table", _with_zero_row(normal, config.pad), names, shape)
        if self.residual:
            return jax.lax.stop_gradient(self.base.table) + zeros_parameter(self, "delta", names, shape)
        return self.base.table

    def __call__(self, stream: Stream) -> Float[Array, "B T _"]:
        """Embeddings `[B, T, D]` (or E) of a stream, before position, norm and dropout.

        Floating-point tokens `[B, T, E]` are used as rows of the table that are already looked up.
        """
        if jnp.issubdtype(stream.tokens.dtype, jnp.floating):
            x = stream.tokens.astype(self.dtype)
        else:
            x = embedding_lookup(self.table, stream.tokens, "vocab").astype(self.dtype)
            if (scale := self.table_scale()) is not None:
                x = x * jnp.take(scale, stream.tokens)[..., None].astype(self.dtype)
            if self.config.pad is not None:
                x = jnp.where((stream.tokens == self.config.pad)[..., None], jax.lax.stop_gradient(x), x)
        if self.projects:
            has_bias = self.config.projection_bias or self.values is not None
            x = dot(x, self.up, bias=self.up_bias if has_bias else None)
        if self.config.matches:
            x = x + dot(self.match_features(stream).astype(self.dtype), self.match_table)
        if self.config.scale:
            x = x * jnp.asarray(math.sqrt(self.width), x.dtype)
        if self.config.kinds:
            token_type = jnp.zeros_like(stream.slots.segment) if stream.token_type is None else stream.token_type
            x = x + embedding_lookup(self.token_type_table, token_type).astype(self.dtype)
        return constrain(x, "batch", "act_length", "act_embed")

    def match_features(self, stream: Stream) -> Float32[Array, "B T 2"]:
        """Features of tokens that are in both texts of a pair; see `matching.match_features`.

        Raises:
          ConfigError: the tokens are looked up already.
        """
        if jnp.issubdtype(stream.tokens.dtype, jnp.floating):
            raise ConfigError("embed.matches: got vectors in place of token ids, expected ids to compare; pass ids")
        return matching.match_features(stream, self.config.unmatched or ())

    def table_scale(self) -> Float32[Array, " V"] | None:
        """Factor of each row of an integer table (see decode/int8.py); None for a table of floats."""
        return self.get_variable("params", "table_scale")

    def unembedding_factors(self, x: Float[Array, "*batch _"]) -> tuple[Float[Array, "*batch E"], Num[Array, "V E"]]:
        """The two factors of a tied head's logits: hidden states (times `up.T` if factorised) and the table.

        Hidden states that have the width of the table already (`StackConfig.output_width`) are not projected.
        """
        if self.projects and x.shape[-1] != self.inner:
            x = jnp.einsum("...d,ed->...e", x, self.up.astype(x.dtype))
        return x, self.table
