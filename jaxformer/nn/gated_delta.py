"""Linear attention by the gated delta rule: a layer whose memory of the text is one matrix a head.

Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464, section 3 and figure 1), in
the form that Qwen3-Next has. The recurrence is in `delta_rule.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int, Key

from jaxformer.config import DeltaConfig, NormConfig
from jaxformer.nn import delta_rule, remat
from jaxformer.nn.cache import DeltaState, DeltaSteps
from jaxformer.nn.layers import ACTIVATIONS, Dense, Norm, parameter
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array

NORM_EPSILON = 1e-6
"""Added to the squared lengths of queries and keys."""

MAX_RATE = 16.0
SHORTEST, LONGEST = 1e-3, 1e-1
"""Initial rates of forgetting a lie in [1, `MAX_RATE`], initial steps softplus(b) in [`SHORTEST`, `LONGEST`], which is
uniform in its logarithm (Dao and Gu 2024, Mamba-2)."""


class GatedDelta(nn.Module):
    """A sub-layer in the place of causal self-attention, without positions.

        [q; k; v] = act(convolution(x [W_q; W_k; W_v]))    g = -exp(a) softplus(x W_g + b)    beta = sigmoid(x W_b)
        o = delta_rule(q / |q| / sqrt(K), k / |k|, v, g, beta)    y = (norm(o) * silu(x W_z)) W_o

    Query and key head h // (H / G) serve value head h, for G key heads and H value heads. The convolution is causal and
    of each channel by itself. Texts that are packed into a row have states and convolutions of their own, and padding
    changes neither. Padding whose output is used (a negative segment) is a slot with input 0, as in the other library:
    its output is 0, and the state decays.

    Attributes:
      width: model width D.
    """

    config: DeltaConfig
    width: int

    def setup(self) -> None:
        config, width = self.config, self.width
        keys, values = config.key_heads * config.key_width, config.heads * config.value_width
        into = lambda channels: Dense((width, channels), ("embed", "heads"), bias=False)  # noqa: E731
        self.query, self.key, self.value, self.gate = into(keys), into(keys), into(values), into(values)
        self.decay, self.beta = into(config.heads), into(config.heads)
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        taps = lambda name, channels: parameter(self, name, init, (None, "heads"), (config.conv_kernel, channels))  # noqa: E731
        self.query_conv, self.key_conv = taps("query_conv", keys), taps("key_conv", keys)
        self.value_conv = taps("value_conv", values)
        self.log_scale = parameter(self, "log_scale", initial_scale, ("heads",), (config.heads,))
        self.step_bias = parameter(self, "step_bias", initial_step, ("heads",), (config.heads,))
        self.norm = Norm(NormConfig("rms", epsilon=config.epsilon))
        self.out = Dense((values, width), ("heads", "embed"), bias=False)

    def __call__(
        self, x: Float[Array, "B T D"], segment: Int[Array, "B T"], state: DeltaState | None = None
    ) -> tuple[Float[Array, "B T D"], DeltaState | None]:
        """Output `[B, T, D]`, and the state after the last slot (None without one).

        Args:
          segment: number of the text that each slot belongs to; 0 is padding, and so are negative ones. The first text
            goes on with `state`.
          state: what earlier slots have left in the cache. With `DeltaSteps` the slots are of one text, and all states
            are returned.
        """
        config = self.config
        recorded = isinstance(state, DeltaSteps)
        start = DeltaState(state.state[0], state.inputs[0]) if isinstance(state, DeltaSteps) else state
        real, run = segment > 0, text_numbers(segment)
        x = jnp.where(real[..., None], x, 0)
        projected = (self.query(x), self.key(x), self.value(x))
        mixed, inputs = self.convolve(jnp.concatenate(projected, axis=-1), run, real, start, recorded)
        q, k, v = self.split_heads(mixed)
        names = zip(("query", "key", "value"), (q, k, v), strict=True)
        q, k, v = (constrain(remat.name_activation(y, name), "batch", "length", "act_heads", None) for name, y in names)
        step = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.step_bias)
        moves = (segment != 0)[..., None]
        log_decay = jnp.where(moves, -jnp.exp(self.log_scale) * step, 0.0)
        beta = jnp.where(moves, jax.nn.sigmoid(self.beta(x).astype(jnp.float32)), 0.0)
        rows = (x.shape[0], config.heads, config.key_width, config.value_width)
        before = jnp.zeros(rows, jnp.float32) if start is None else start.state
        before = constrain(before, "batch", "act_heads", None, None)
        arguments = (normalised(q) * config.key_width**-0.5, normalised(k), v.astype(jnp.float32), log_decay, beta)
        if recorded:
            o, after = delta_rule.slot_by_slot(*arguments, before)
        elif state is not None and x.shape[1] == 1:
            o, after = delta_rule.single(*(y[:, 0] for y in arguments), before)
            o = o[:, None]
        else:
            o, after = delta_rule.chunked(*arguments, run, before, config.chunk)
        gate = self.gate(x).reshape(o.shape).astype(jnp.float32)
        o = (self.norm(o) * jax.nn.silu(gate)).astype(x.dtype)
        y = self.out(o.reshape(*x.shape[:2], -1))
        if state is None:
            return y, None
        return y, type(state)(after, jnp.expand_dims(inputs.astype(state.inputs.dtype), -3))

    def convolve(
        self,
        x: Float[Array, "B T C"],
        run: Int[Array, "B T"],
        real: Bool[Array, "B T"],
        state: DeltaState | None,
        recorded: bool,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "*_ B W C"]]:
        """The convolved and activated channels, and the last inputs of the row's last text, for the slots after it.

        Args:
          recorded: those inputs before each slot and after the last, `[T + 1, B, W, C]`, of slots of one text.
        """
        rows, length, channels = x.shape
        more = self.config.conv_kernel - 1
        earlier = jnp.zeros((rows, more, channels), x.dtype) if state is None else state.inputs[:, 0].astype(x.dtype)
        whole = jnp.concatenate([earlier, x], axis=1)
        runs = jnp.concatenate([jnp.zeros((rows, more), run.dtype), run], axis=1)
        taps = jnp.concatenate([self.query_conv, self.key_conv, self.value_conv], axis=-1)
        y = jnp.zeros(x.shape, jnp.float32)
        for tap in range(more + 1):
            same = (runs[:, tap : tap + length] == run)[..., None]
            y = y + taps[tap] * jnp.where(same, whole[:, tap : tap + length].astype(jnp.float32), 0.0)
        y = ACTIVATIONS[self.config.activation](y).astype(x.dtype)
        if recorded:
            return y, jnp.stack([whole[:, first : first + more] for first in range(length + 1)])
        last = jnp.max(jnp.where(real, jnp.arange(1, length + 1), 0), axis=1)  # slots up to the last real one
        index = last[:, None] + jnp.arange(more)
        kept = jnp.take_along_axis(whole, index[..., None], axis=1)
        is_own = jnp.take_along_axis(runs, index, axis=1) == run[:, -1:]
        return y, jnp.where(is_own[..., None], kept, 0)

    def split_heads(
        self, mixed: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T H V"]]:
        """Queries, keys and values of all value heads."""
        config = self.config
        keys = config.key_heads * config.key_width
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        shared = lambda y: y.reshape(*y.shape[:2], config.key_heads, config.key_width)  # noqa: E731
        times = config.heads // config.key_heads
        q, k = (jnp.repeat(shared(y), times, axis=2) for y in (q, k))
        return q, k, v.reshape(*v.shape[:2], config.heads, config.value_width)


def text_numbers(segment: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number from 0 of the text of each slot in its row; padding has that of the text before it."""
    length = segment.shape[1]
    latest = jax.lax.cummax(jnp.where(segment > 0, jnp.arange(length), -1), axis=1)
    before = jnp.pad(latest[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    previous = jnp.take_along_axis(segment, jnp.maximum(before, 0), axis=1)
    begins = (segment > 0) & (before >= 0) & (segment != previous)
    return jnp.cumsum(begins.astype(jnp.int32), axis=1)


def normalised(x: Float[Array, "B T H K"]) -> Float32[Array, "B T H K"]:
    """Vectors of length 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def initial_scale(key: Key[Array, ""], shape: tuple[int, ...]) -> Float32[Array, " H"]:
    """The logarithm of a rate of forgetting for each head."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=MAX_RATE))


def initial_step(key: Key[Array, ""], shape: tuple[int, ...]) -> Float32[Array, " H"]:
    """The inverse softplus of a step for each head."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(SHORTEST), maxval=jnp.log(LONGEST)))
    return step + jnp.log(-jnp.expm1(-step))
