"""Mixture of experts: a router sends each token through a few of many feed-forward layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int, Int32

from jaxformer.config import FeedForwardConfig, MoEConfig
from jaxformer.nn import experts
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.layers import Dense, parameter, zeros_parameter
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Sums

COLLECTION = "router"
"""Collection in which layers sow their `Load`. Only training makes it mutable; otherwise it costs nothing."""


MULTI_TOKEN = "multi_token"
"""Parameters of the modules of `model.multi_token` lie below this word and a number: "multi_token_0"."""
CORRECTION = "correction_bias"
"""Name of the parameter that is added to the scores by which experts are chosen."""


class Load(flax.struct.PyTreeNode):
    """Load statistics of one router for one batch: float32 scalars, `[L]` for a stack.

    Attributes:
      penalty: weighted sum of the two losses `balance` and `z`, which is added to the training loss.
      balance: E sum_e f_e P_e over the tokens, with f_e the fraction of assignments to expert e and P_e its mean
        probability (Fedus et al. 2021, Switch, equation 4); 1 when balanced. The gradient flows through P.
      z: mean of (log sum_e exp logit_e)^2 (Zoph et al. 2022, ST-MoE, equation 5).
      dropped: fraction of assignments that exceeded their expert's capacity.
      max_load: largest f_e.
      min_load: smallest f_e; 1 / E when balanced.
    """

    penalty: Array
    balance: Array
    z: Array
    dropped: Array
    max_load: Array
    min_load: Array


class MoE(nn.Module):
    """`sum_i g_i expert_{e_i}(x) + shared(x)` over the k experts with the highest probability (Shazeer et al. 2017).

    Probabilities are softmax(x W_r) over all experts, always in float32, or sigmoid(x W_r) of each by itself with
    `moe.gate` sigmoid (DeepSeek-V3, section 2.1.2); `moe.router_bias` adds a learned bias to x W_r. The gates g are the
    probabilities of the chosen experts, divided by their sum if `moe.normalise`, times `moe.scale`.

    With `moe.groups` experts are chosen within the `moe.top_groups` best groups of each token (DeepSeek-V2, section
    2.1.3: a group is the experts of a device). With `moe.correction` a bias per expert is added to the probabilities
    when experts are chosen, and not to the gates. The loss gives it no gradient. With `moe.correction_rate` its
    "gradient" is the excess load of its expert (`excess_load`), by which `update_corrections` moves it.

    Without `moe.capacity` no assignment is dropped. With it, in training, an expert accepts at most
    `ceil(capacity * k * n / E)` assignments of a row with n tokens, in the order of the tokens, and drops later ones. A
    token whose assignments are all dropped passes through the residual only. GShard serves first choices before second
    ones; here the order of the text decides, so that no token depends on later ones. Capacity is counted by row, so
    neither the mesh nor microbatches change what is dropped. Nothing is dropped without a dropout key (evaluation,
    decoding).

    Shared experts (Dai et al. 2024, DeepSeekMoE) process every token; `moe.shared` of them are computed as one layer of
    that many times the width, or of `moe.shared_width`. With `moe.shared_gate` their output is multiplied by
    sigmoid(x w) (Qwen Team 2024, Qwen1.5-MoE). Padding is not routed and not counted.
    """

    config: FeedForwardConfig
    moe: MoEConfig
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], visible: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Output `[B, T, D]` of the mixture; `visible` is False at padding."""
        config, moe = self.config, self.moe
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        router = parameter(self, "router", init, ("embed", None), (self.width, moe.experts))
        router = constrain(router, None, None)  # gather the router over fsdp rather than exchange tokens
        highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 by default
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=highest)
        if moe.router_bias:
            logits = logits + zeros_parameter(self, "router_bias", (None,), (moe.experts,))
        self.sow("intermediates", "router_logits", logits)
        probs = jax.nn.softmax(logits) if moe.gate == "softmax" else jax.nn.sigmoid(logits)
        correction = zeros_parameter(self, CORRECTION, (None,), (moe.experts,)) if moe.correction else None
        chosen, gates = choose_experts(probs, visible, moe, correction)
        served, queue_position, queue = chosen, None, 0
        if moe.capacity is not None and self.has_rng("dropout"):
            queue_position = queue_positions(chosen, moe.experts)
            share = moe.capacity * moe.top_k / moe.experts
            queue = min(math.ceil(share * x.shape[1]), x.shape[1])
            limit = jnp.minimum(jnp.ceil(share * jnp.sum(visible, axis=1)), queue)
            served = jnp.where(queue_position < limit[:, None, None], chosen, moe.experts)
            gates = jnp.where(served < moe.experts, gates, 0.0)
        if not self.is_initializing():
            load = router_load(logits, probs, chosen, served, visible, moe)
            if correction is not None and moe.correction_rate:
                load = load.replace(penalty=load.penalty + excess_load(chosen, visible, moe, correction))
            self.sow(COLLECTION, "load", load)
        inner = config.width or 4 * self.width
        shapes = {"in": (self.width, inner), "gate": (self.width, inner), "out": (inner, self.width)}
        weights = {
            name: ExpertKernel(
                (moe.experts, *shapes[name]), experts.NAMES[name], config.bias, config.init_scale, name=name
            )(x.dtype)
            for name in (("in", "gate", "out") if config.gated else ("in", "out"))
        }
        key = self.make_rng("dropout") if config.dropout > 0.0 and self.has_rng("dropout") else None
        number = jnp.arange(chosen.size, dtype=jnp.int32).reshape(chosen.shape)
        routed = experts.RoutedTokens(x, served, gates, queue_position, number)
        y = experts.apply_experts(config, weights, routed, queue, key)
        if moe.shared:
            wide = dataclasses.replace(config, width=moe.shared_width or moe.shared * inner)
            shared = FeedForward(wide, self.width, name="shared")(x)
            if moe.shared_gate:
                gate = Dense((self.width, 1), ("embed", None), bias=False, name="shared_gate")(x)
                shared = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype) * shared
            y = y + shared
        return y


class ExpertKernel(nn.Module):
    """A kernel for each expert, each initialised like that of `layers.Dense`, and a bias for each, or None."""

    shape: tuple[int, int, int]
    names: tuple[str, str, str]
    bias: bool
    init_scale: float

    @nn.compact
    def __call__(self, dtype: jnp.dtype) -> tuple[Float[Array, "E _ F"], Float[Array, "E F"] | None]:
        init = nn.initializers.variance_scaling(self.init_scale, "fan_in", "truncated_normal", batch_axis=(0,))
        kernel = parameter(self, "kernel", init, self.names, self.shape).astype(dtype)
        if not self.bias:
            return kernel, None
        names, shape = (self.names[0], self.names[2]), (self.shape[0], self.shape[2])
        return kernel, zeros_parameter(self, "bias", names, shape).astype(dtype)


def choose_experts(
    probs: Float32[Array, "B T E"],
    visible: Bool[Array, "B T"],
    moe: MoEConfig,
    correction: Float32[Array, " E"] | None = None,
) -> tuple[Int32[Array, "B T k"], Float32[Array, "B T k"]]:
    """The k = `top_k` experts of each token with the highest probability plus `correction`, and their gates.

    Padding gets expert E, which does not exist, with gate 0.
    """
    scores = probs if correction is None else probs + jax.lax.stop_gradient(correction)
    if moe.top_groups is not None and moe.top_groups < moe.groups:
        scores = jnp.where(in_best_groups(scores, moe), scores, -jnp.inf)
    _, chosen = jax.lax.top_k(scores, moe.top_k)
    gates = jnp.take_along_axis(probs, chosen, axis=-1)
    if moe.normalise:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    gates = gates * moe.scale
    visible = visible[..., None]
    return jnp.where(visible, chosen, moe.experts).astype(jnp.int32), jnp.where(visible, gates, 0.0)


def in_best_groups(scores: Float32[Array, "B T E"], moe: MoEConfig) -> Bool[Array, "B T E"]:
    """True for the experts of each token's `top_groups` best groups, by `moe.group_score`."""
    grouped = scores.reshape(*scores.shape[:-1], moe.groups, -1)
    best = jax.lax.top_k(grouped, 1 if moe.group_score == "max" else 2)[0]
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), moe.top_groups or moe.groups)
    chosen = jnp.any(jax.nn.one_hot(groups, moe.groups, dtype=bool), axis=-2)
    return jnp.repeat(chosen, grouped.shape[-1], axis=-1)


def queue_positions(chosen: Int[Array, "B T k"], experts: int) -> Int[Array, "B T k"]:
    """For each assignment, the number of earlier assignments of its row to the same expert."""
    flat = chosen.reshape(chosen.shape[0], -1)
    assigned = jax.nn.one_hot(flat, experts, dtype=jnp.int32)
    before = jnp.cumsum(assigned, axis=1) - assigned
    return jnp.sum(before * assigned, axis=-1).reshape(chosen.shape)


def router_load(
    logits: Float32[Array, "B T E"],
    probs: Float32[Array, "B T E"],
    chosen: Int[Array, "B T k"],
    served: Int[Array, "B T k"],
    visible: Bool[Array, "B T"],
    moe: MoEConfig,
) -> Load:
    """The `Load` of a batch. Dropped assignments count in the fractions of the experts they were meant for."""
    real = visible.astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(real), 1.0)
    share = jnp.sum(jax.nn.one_hot(chosen, moe.experts), axis=(0, 1, 2)) / (tokens * moe.top_k)
    if moe.gate == "sigmoid":  # the balance is of probabilities that sum to 1 (DeepSeek-V3, equation 18)
        probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    balance = moe.experts * jnp.sum(share * jnp.einsum("bte,bt->e", probs, real) / tokens)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real) / tokens
    dropped = jnp.sum(served != chosen) / (tokens * moe.top_k)
    penalty = moe.balance_loss * balance + moe.z_loss * z
    return Load(penalty, balance, z, dropped, jnp.max(share), jnp.min(share))


def excess_load(
    chosen: Int[Array, "B T k"], visible: Bool[Array, "B T"], moe: MoEConfig, correction: Float32[Array, " E"]
) -> Float32[Array, ""]:
    """Zero, whose gradient with respect to `correction` is each expert's fraction of the assignments less 1 / E.

    As a part of the loss it is summed over microbatches and devices with the weights of the loss.
    """
    count = jnp.maximum(jnp.sum(visible.astype(jnp.float32)), 1.0) * moe.top_k
    share = jnp.sum(jax.nn.one_hot(chosen, moe.experts), axis=(0, 1, 2)) / count
    return jnp.sum((share - 1.0 / moe.experts) * (correction - jax.lax.stop_gradient(correction)))


def split_corrections(grads: PyTree) -> tuple[PyTree, PyTree]:
    """Gradients with zeros for the corrections of experts, and zeros but for the corrections."""
    is_correction = lambda path: getattr(path[-1], "key", "") == CORRECTION  # noqa: E731
    zero_at = lambda wanted: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, g: jnp.zeros_like(g) if is_correction(path) == wanted else g, grads
    )
    return zero_at(True), zero_at(False)


def update_corrections(params: PyTree, excess: PyTree, rates: Mapping[str, float]) -> PyTree:
    """Parameters whose corrections are moved by the rate of their stack against the sign of the excess load.

    DeepSeek-V3 (DeepSeek-AI 2024), section 2.1.2.

    Args:
      excess: a tree like `params`, 0 but for the corrections, as `split_corrections` returns it.
      rates: stack ("decoder", "generator.encoder") -> its `moe.correction_rate`.
    """

    def move(path: tuple[Any, ...], value: Array, over: Array) -> Array:
        words = [str(getattr(key, "key", key)) for key in path]
        if words[-1] != CORRECTION:
            return value
        return value - rates[stack_path(words)] * jnp.sign(over)

    return jax.tree_util.tree_map_with_path(move, params, excess)


def stack_path(words: Sequence[str]) -> str:
    """Path in the model of the stack ("decoder", "generator.encoder") that a parameter of a layer belongs to.

    Modules of `multi_token` belong to the decoder.
    """
    first = next(i for i, word in enumerate(words) if word.startswith(("blocks", MULTI_TOKEN)))
    return ".".join(words[:first]) or "decoder"


def add_router_losses(sums: Sums, sown: dict) -> Sums:
    """`sums` of a training batch plus the sown loads: penalties in the loss, the other values as means over layers.

    The penalty of every layer is added to the loss (as in Switch). It is a mean over the batch, so the numerator gets
    penalty times denominator: microbatches then average it with the weights of the loss.
    """
    loads = jax.tree.leaves(sown, is_leaf=lambda x: isinstance(x, Load))
    if not loads:
        return sums
    load = jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *loads)
    numerator, weight = sums["loss"]
    values = {"balance": load.balance, "router_z": load.z, "dropped": load.dropped,
              "most_loaded": load.max_load, "least_loaded": load.min_load}  # fmt: skip
    means = {name: (weight * jnp.mean(value), weight) for name, value in values.items()}
    return {**sums, "loss": (numerator + weight * jnp.sum(load.penalty), weight), **means}
