"""Dense, embedding, normalisation, dropout: the leaves of every model. Shapes are the true ones, nothing is fused."""

from __future__ import annotations

import functools
import math
from typing import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Float32, Int, Key, Num

from jaxformer.config import EmbedConfig, NormConfig
from jaxformer.nn import cpu
from jaxformer.nn.products import dot
from jaxformer.parallel import shards
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Stream


def activation(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`function` in float32, of which nothing but its argument waits for the backward pass.

    Left to autodiff, every factor of a GELU's derivative would wait, each as large as the feed-forward's hidden
    activations; to compute them again takes less time on a CPU than to write and read them.
    """

    @jax.checkpoint
    def act(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return act


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,  # this one and others without `activation`: the derivative follows from the result
    "gelu": activation(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": activation(lambda x: jax.nn.gelu(x, approximate=True)),
    "gelu_sigmoid": activation(lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "silu": activation(jax.nn.silu),
    "tanh": jnp.tanh,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "mish": activation(jax.nn.mish),
    "sigmoid": jax.nn.sigmoid,
}


class Dense(nn.Module):
    """A linear map whose kernel keeps its true shape, e.g. `[D, H, K]` for a query projection.

    A kernel of integers has a `kernel_scale` of shape `shape[inputs:]` beside it (see decode/int8.py).

    Attributes:
      shape: kernel shape, input axes first.
      names: logical name of each kernel axis.
      inputs: how many leading axes are contracted with the last axes of the input.
      bias: adds a learned `shape[inputs:]`, initially zero.
      init: initialiser of the kernel; None: normal with variance 1 / fan-in (LeCun), truncated at two deviations.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    inputs: int = 1
    bias: bool = True
    init: Callable | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        axes = tuple(range(len(self.shape)))
        init = self.init or nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", in_axis=axes[: self.inputs], out_axis=axes[self.inputs :]
        )
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.names), self.shape)
        bias = None
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.names[self.inputs :])
            bias = self.param("bias", zeros, self.shape[self.inputs :])
        if not self.has_variable("params", "kernel_scale"):
            return dot(x, kernel, self.inputs, bias)
        y = dot(x, kernel, self.inputs) * self.get_variable("params", "kernel_scale").astype(x.dtype)
        return y if bias is None else y + bias.astype(y.dtype)


def fan_out(x: Float[Array, "*batch D"], *maps: Dense) -> tuple[Float[Array, "*batch ..."], ...]:
    """Each of `maps` of the same `x`, whose gradient devices exchange once for all of them, whatever the platform."""
    if not cpu.exchanges_apart(*((each.names[1], each.shape[1]) for each in maps)):
        return tuple(each(x) for each in maps)
    ys = tuple(each(jax.lax.stop_gradient(x)) for each in maps)
    return cpu.joined(x, tuple(nn.meta.unbox(each.variables["params"]["kernel"]) for each in maps), ys)


class Dropout(nn.Module):
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate). Active when a key is supplied.

    `axes` are broadcast: with `axes=(1,)` one mask serves a whole sequence (variational dropout).
    """

    rate: float
    axes: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.rate == 0.0 or not self.has_rng("dropout"):
            return x
        shape = tuple(1 if i in self.axes else size for i, size in enumerate(x.shape))
        keep = keep_mask(self.make_rng("dropout"), self.rate, shape)
        return jnp.where(keep, x / (1.0 - self.rate), jnp.zeros((), x.dtype))


def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Of `shape`, False with probability `rate`, to a resolution of 2 ** -16.

    Drawing random bits is what dropout costs on a CPU; 16 of them decide an entry, so one 32-bit word decides two.
    """
    threshold = jnp.asarray(round(rate * 2**16), jnp.uint32)
    if shape[-1] % 2:
        return jax.random.bits(key, shape, jnp.uint32) >> 16 >= threshold
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    halves = jnp.concatenate([words >> 16, words & 0xFFFF], axis=-1)
    return halves >= threshold


class Norm(nn.Module):
    """The normalisation that `config.kind` names, over the last axis (batch norm: over batch and time).

    layer: `(x - mean) / sqrt(var + eps) * scale + bias` (Ba et al. 2016). rms: `x / sqrt(mean(x^2) + eps) * scale`
    (Zhang and Sennrich 2019). batch: see `BatchNorm`. none: the identity. Statistics are float32 in any precision.
    """

    config: NormConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch D"], visible: Bool[Array, "*batch"] | None = None
    ) -> Float[Array, "*batch D"]:
        """`visible` is False at padding, which batch norm leaves out of its statistics."""
        config, width = self.config, x.shape[-1]
        if config.kind == "none":
            return x
        if config.kind == "batch":
            return BatchNorm(config.epsilon, config.momentum, name="batch")(x, visible)
        init = nn.with_logical_partitioning(nn.initializers.constant(1.0 - config.offset), (None,))
        scale, bias = self.param("scale", init, (width,)) + config.offset, None
        if config.kind == "layer" and config.bias:
            bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros_init(), (None,)), (width,))
        return normalised(x, scale, bias, config.kind == "layer", config.epsilon)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def normalised(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    centred: bool,
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """`x` over its root mean square (about its mean if `centred`) x `scale` + `bias`.

    Only the arguments wait for the backward pass.
    """
    y = x.astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe and Szegedy 2015): one mean and variance a feature.

    Statistics run over all visible slots of the global batch, so they are the same on one device and on eight. In
    training (a dropout key is supplied) the batch's own statistics are used and the running ones, in the collection
    "batch_stats", move towards them; otherwise the running ones are used.
    """

    epsilon: float
    momentum: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], visible: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        width = x.shape[-1]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (width,), jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, (width,), jnp.float32)
        scale = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones_init(), (None,)), (width,))
        bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros_init(), (None,)), (width,))
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


def look_up(table: Num[Array, "V E"], ids: Int[Array, "B T"], rows: str | None = None) -> Num[Array, "B T E"]:
    """Rows of a table whose width is named "table", and whose rows `rows`; NaN where there is no such row.

    An id below 0 is no row: it does not count from the end.

    The partitioner divides this well, but where a `shard_map` has taken over some axes: there it would gather the
    gradients of all slots before it adds them up into the table. So there each device looks up and adds up its own, and
    the sums meet where the table lies.
    """
    count = table.shape[0]
    ids = jnp.where(ids < 0, count, ids)
    if not shards.inside():
        # Gathered over fsdp first, as a kernel is: divided in both, look-up and rows would have to be exchanged.
        return jnp.take(constrain(table, rows, None), ids, axis=0)
    slots = PartitionSpec(shards.fitting("batch", ids.shape[0]), shards.fitting("length", ids.shape[1]))
    divided = shards.fitting(rows, count) if rows else ()
    width = tuple(axis for axis in shards.fitting("table", table.shape[1]) if axis in slots[0])

    def own(table: Num[Array, "_ _"], ids: Int[Array, "_ _"]) -> Num[Array, "_ _ _"]:
        table = jax.lax.all_gather(table, width, axis=1, tiled=True) if width else table
        if not divided:
            return jnp.take(table, ids, axis=0)
        index = ids - jax.lax.axis_index(divided) * table.shape[0]
        here = (index >= 0) & (index < table.shape[0])
        found = jnp.where(here[..., None], jnp.take(table, jnp.where(here, index, 0), axis=0), 0)
        return jnp.where((ids < count)[..., None], jax.lax.psum(found, divided), jnp.nan)

    return shards.shard(own, (PartitionSpec(divided, width), slots), slots)(table, ids)


class Embed(nn.Module):
    """Token table `[V, E]`, with the width correction, token types, norm and dropout that `config` asks for.

    With `config.width` smaller than the model width a projection follows (factorised embedding, Lan et al. 2020).
    `factors` serves a head that reads the same table (Press and Wolf 2017).
    """

    config: EmbedConfig
    width: int
    dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        config = self.config
        if config.vocab is None:
            raise ValueError("embed.vocab: got None, expected a size; resolve the config with a tokenizer first")
        self.inner = config.width or self.width
        deviation = self.inner**-0.5 if config.deviation is None else config.deviation
        init = nn.with_logical_partitioning(nn.initializers.normal(deviation), ("vocab", "table"))
        self.table = self.param("table", init, (config.vocab, self.inner))
        if self.inner != self.width:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            self.up = self.param("up", nn.with_logical_partitioning(init, ("table", "embed")), (self.inner, self.width))
        if config.kinds:
            init = nn.with_logical_partitioning(nn.initializers.normal(deviation), (None, "table"))
            self.kind_table = self.param("kinds", init, (config.kinds, self.width))

    def __call__(self, stream: Stream) -> Float[Array, "B T D"]:
        """Embeddings of a stream, before position, norm and dropout.

        Tokens that are floating point `[B, T, E]` are taken for rows of the table already looked up.
        """
        if jnp.issubdtype(stream.tokens.dtype, jnp.floating):
            x = stream.tokens.astype(self.dtype)
        else:
            x = look_up(self.table, stream.tokens, "vocab").astype(self.dtype)
            if (scale := self.scale()) is not None:
                x = x * jnp.take(scale, stream.tokens)[..., None].astype(self.dtype)
            if self.config.pad is not None:
                x = jnp.where((stream.tokens == self.config.pad)[..., None], jax.lax.stop_gradient(x), x)
        if self.inner != self.width:
            x = dot(x, self.up)
        if self.config.scale:
            x = x * jnp.asarray(math.sqrt(self.width), x.dtype)
        if self.config.kinds:
            kind = jnp.zeros_like(stream.slots.segment) if stream.kind is None else stream.kind
            x = x + look_up(self.kind_table, kind).astype(self.dtype)
        return constrain(x, "batch", "act_length", "act_embed")

    def scale(self) -> Float32[Array, " V"] | None:
        """What a row of a table of integers is multiplied with (see decode/int8.py); None: nothing."""
        return self.get_variable("params", "table_scale")

    def factors(self, x: Float[Array, "*batch D"]) -> tuple[Float[Array, "*batch E"], Num[Array, "V E"]]:
        """What a tied head multiplies: hidden states (through `up.T` if factorised) and the table, see also `scale`."""
        if self.inner != self.width:
            x = jnp.einsum("...d,ed->...e", x, self.up.astype(x.dtype))
        return x, self.table
