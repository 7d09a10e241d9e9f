"""Mixture of experts: many feed-forward layers, of which every token passes the few that a router chooses."""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int, Int32

from jaxformer.config import FeedForwardConfig, MoEConfig
from jaxformer.nn import experts
from jaxformer.nn.ffn import FeedForward
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Sums

COLLECTION = "router"
"""Where layers sow their `Load`. Whoever trains makes it mutable; to all others it costs nothing."""


@flax.struct.dataclass
class Load:
    """What one router did with one batch: float32 scalars, `[L]` for a stack.

    Attributes:
      penalty: what the training loss gets, the two losses below with their weights.
      balance: E sum_e f_e P_e over the real tokens, f_e the share of assignments that expert e got and P_e its mean
        probability (Fedus et al. 2021, Switch, equation 4); 1 when balanced. The gradient runs through P.
      z: the mean of (log sum_e exp logit_e)^2 (Zoph et al. 2022, ST-MoE, equation 5).
      dropped: share of assignments that found their expert full.
      most: f_e of the expert with the most.
      least: f_e of the expert with the least; 1 / E when balanced.
    """

    penalty: Array
    balance: Array
    z: Array
    dropped: Array
    most: Array
    least: Array


class MoE(nn.Module):
    """`sum_i g_i expert_{e_i}(x) + shared(x)` over the k experts with the highest probability (Shazeer et al. 2017).

    Probabilities are softmax(x W_r) over all experts, in float32 in any precision; the weights g are those of the
    chosen, divided by their sum if `moe.normalise`. Without `moe.capacity` every assignment is served. With it, an
    expert takes in training at most `ceil(capacity * k * n / E)` assignments of a row with n real tokens, in the
    order of the tokens; those that come later are dropped, and if all of a token's are, only the residual stream
    carries it on. The order is that of the text, not first choices before second ones as in GShard, so that no token
    depends on what comes after it; and rows are the groups, so that neither the mesh nor microbatches change what is
    dropped. Without a dropout key (evaluation, decoding) nothing is.

    Shared experts (Dai et al. 2024, DeepSeekMoE) serve every token; `shared` of them are one layer of so many times
    the width. Padding is routed nowhere, and is in no statistic.
    """

    config: FeedForwardConfig
    moe: MoEConfig
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], visible: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """The mixture, of slots that are real where `visible`."""
        config, moe = self.config, self.moe
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        init = nn.with_logical_partitioning(init, ("embed", None))
        router = self.param("router", init, (self.width, moe.experts))
        router = constrain(router, None, None)  # gathered: a token is not to be spread over fsdp to meet it
        highest = jax.lax.Precision.HIGHEST  # else a TPU would multiply these in bfloat16
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=highest)
        self.sow("intermediates", "router_logits", logits)
        probs = jax.nn.softmax(logits)
        chosen, gates = choose(probs, visible, moe)
        kept, place, queue = chosen, None, 0
        if moe.capacity is not None and self.has_rng("dropout"):
            place = places(chosen, moe.experts)
            share = moe.capacity * moe.top_k / moe.experts
            queue = min(math.ceil(share * x.shape[1]), x.shape[1])
            limit = jnp.minimum(jnp.ceil(share * jnp.sum(visible, axis=1)), queue)
            kept = jnp.where(place < limit[:, None, None], chosen, moe.experts)
            gates = jnp.where(kept < moe.experts, gates, 0.0)
        if not self.is_initializing():
            self.sow(COLLECTION, "load", measure(logits, probs, chosen, kept, visible, moe))
        inner = config.width or 4 * self.width
        shapes = {"in": (self.width, inner), "gate": (self.width, inner), "out": (inner, self.width)}
        weights = {
            name: Kernel((moe.experts, *shapes[name]), experts.NAMES[name], config.bias, name=name)(x.dtype)
            for name in (("in", "gate", "out") if config.gated else ("in", "out"))
        }
        key = self.make_rng("dropout") if config.dropout > 0.0 and self.has_rng("dropout") else None
        number = jnp.arange(chosen.size, dtype=jnp.int32).reshape(chosen.shape)
        y = experts.run(config, weights, experts.Sent(x, kept, gates, place, number), queue, key)
        if moe.shared:
            wide = dataclasses.replace(config, width=moe.shared * inner)
            y = y + FeedForward(wide, self.width, name="shared")(x)
        return y


class Kernel(nn.Module):
    """A kernel for every expert, each initialised as `layers.Dense` would alone, and a bias if there is one."""

    shape: tuple[int, int, int]
    names: tuple[str, str, str]
    bias: bool

    @nn.compact
    def __call__(self, dtype: jnp.dtype) -> tuple[Float[Array, "E _ F"], Float[Array, "E F"] | None]:
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.names), self.shape).astype(dtype)
        if not self.bias:
            return kernel, None
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (self.names[0], self.names[2]))
        return kernel, self.param("bias", zeros, (self.shape[0], self.shape[2])).astype(dtype)


def choose(
    probs: Float32[Array, "B T E"], visible: Bool[Array, "B T"], moe: MoEConfig
) -> tuple[Int32[Array, "B T k"], Float32[Array, "B T k"]]:
    """The k = `top_k` experts of every token, and their weights.

    Padding gets expert E, which does not exist, with weight 0.
    """
    gates, chosen = jax.lax.top_k(probs, moe.top_k)
    if moe.normalise:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    there = visible[..., None]
    return jnp.where(there, chosen, moe.experts).astype(jnp.int32), jnp.where(there, gates, 0.0)


def places(chosen: Int[Array, "B T k"], experts: int) -> Int[Array, "B T k"]:
    """How many assignments of the same row come before each of `chosen` to the same expert."""
    flat = chosen.reshape(chosen.shape[0], -1)
    mine = jax.nn.one_hot(flat, experts, dtype=jnp.int32)
    before = jnp.cumsum(mine, axis=1) - mine
    return jnp.sum(before * mine, axis=-1).reshape(chosen.shape)


def measure(
    logits: Float32[Array, "B T E"],
    probs: Float32[Array, "B T E"],
    chosen: Int[Array, "B T k"],
    kept: Int[Array, "B T k"],
    visible: Bool[Array, "B T"],
    moe: MoEConfig,
) -> Load:
    """The `Load` of a batch. Shares count what the router chose, whether or not it was dropped."""
    real = visible.astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(real), 1.0)
    share = jnp.sum(jax.nn.one_hot(chosen, moe.experts), axis=(0, 1, 2)) / (tokens * moe.top_k)
    balance = moe.experts * jnp.sum(share * jnp.einsum("bte,bt->e", probs, real) / tokens)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real) / tokens
    dropped = jnp.sum(kept != chosen) / (tokens * moe.top_k)
    penalty = moe.balance_loss * balance + moe.z_loss * z
    return Load(penalty, balance, z, dropped, jnp.max(share), jnp.min(share))


def add(sums: Sums, sown: dict) -> Sums:
    """`sums` of a training batch with what its layers sowed: penalties in the loss, the rest as means over layers.

    Every layer's penalty is added to the loss (as Switch does), and is a mean over the batch. So it enters the
    numerator times the denominator; over microbatches the penalties are thus averaged with the weights of the loss.
    """
    loads = jax.tree.leaves(sown, is_leaf=lambda x: isinstance(x, Load))
    if not loads:
        return sums
    every = jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *loads)
    numerator, weight = sums["loss"]
    shown = {"balance": every.balance, "router_z": every.z, "dropped": every.dropped,
             "most_loaded": every.most, "least_loaded": every.least}  # fmt: skip
    means = {name: (weight * jnp.mean(value), weight) for name, value in shown.items()}
    return {**sums, "loss": (numerator + weight * jnp.sum(every.penalty), weight), **means}
