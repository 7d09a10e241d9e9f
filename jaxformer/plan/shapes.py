"""A config as the estimates of `step_time.py` and `decode_time.py` see it: sizes of its layers, and its mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxformer.config import AXES, Config, DeltaConfig, LatentConfig, StackConfig
from jaxformer.parallel import mesh as meshes
from jaxformer.plan import flops
from jaxformer.plan.step_time import RECOMPUTED, Layers, Layout, Shapes
from jaxformer.types import PyTree

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number of the compute precision."""


def unsupported(config: Config) -> str:
    """Why there is no expected step time for this config: a few words, or "" if there is."""
    model = config.model
    if not model.stacks:
        return "it is for transformers"
    for part, words in (
        (model.series, "a series"),
        (model.permutation, "a permutation language model"),
        (model.generator, "a generator"),
        (model.adapter, "adapters"),
        (model.multi_token, "multi-token prediction"),
    ):
        if part is not None:
            return f"no published time is of a model with {words}"
    return ""


def training_shapes(config: Config, params: PyTree, names: PyTree, parameters: float, length: int) -> Shapes:
    """The shapes of a config with transformer stacks.

    Args:
      config: the config, with all sizes resolved.
      params: tree of the parameters' shapes.
      names: tree of the logical names of their axes.
      parameters: number of parameters.
      length: row length.
    """
    model = config.model
    layers = tuple(stack_layers(config, name, length) for name in model.stacks)
    head = flops.matmul_parameters(config, params, names) - sum(each.multiplied for each in layers)
    last = model.decoder or model.encoder
    vocab = (last.embed.vocab or 0) if last is not None and model.head.kind == "tokens" else 0
    return Shapes(layers, max(head, 0.0), vocab, parameters, BYTES[model.dtype])


def stack_layers(config: Config, name: str, length: int) -> Layers:
    """The layers of the stack "encoder" or "decoder"."""
    stack = config.model.stacks[name]
    own, width = stack.attention, stack.width
    head_width = own.head_width or width // own.heads
    kv_heads = own.kv_heads or own.heads
    queries, keys = own.heads * head_width, kv_heads * head_width
    read = width // own.heads if own.input == "chunk" else width
    kv_read = width // kv_heads if own.input == "chunk" else width
    crossed = name == "decoder" and config.model.encoder is not None
    times = 2 if crossed else 1
    up, down, hidden, routed = feed_forward(stack)
    fused = own.kernel != "dense"
    visible = flops.visible_keys(stack, name == "decoder", length) if fused else length
    attended = visible + (length if crossed else 0)
    projections = queries * read + 2 * keys * kv_read
    back = queries * width if own.output else 0
    channels, memory_channels, scores = times * (queries + 2 * keys), 2 * keys, queries * attended
    projections += queries * width * own.gate
    if own.latent is not None:
        projections, back, channels, memory_channels = latent_sizes(own.latent, own.heads, width)
        scores = own.heads * flops.score_width(stack) * visible
        if crossed:  # cross-attention has no latents
            own_width = width // own.heads * own.heads
            projections, back = projections + 3 * own_width * width, back + own_width * width
            channels, scores = channels + 3 * own_width, scores + own_width * length
        times = 1
    if stack.delta is not None:
        share = len(stack.delta_layers) / stack.layers
        mean = lambda one, other: share * one + (1 - share) * other  # noqa: E731
        rule = delta_sizes(stack.delta, width)
        own_sizes = times * projections, times * back, channels, scores
        projections, back, channels, scores = (mean(one, two) for one, two in zip(rule, own_sizes, strict=True))
        times = 1
    return Layers(
        count=stack.layers,
        width=width,
        qkv=times * projections,
        out=times * back,
        up=up,
        down=down,
        channels=channels + hidden,
        scores=scores,
        tables=0 if fused else own.heads * length * times,
        recomputed=recomputed(stack),
        joined=stack.sublayers != "sequential" and not crossed,
        memory_channels=memory_channels,
        routed=routed,
    )


def latent_sizes(latent: LatentConfig, heads: int, width: int) -> tuple[int, int, int, int]:
    """Parameters of the projections to queries, keys and values, and of the output; channels of them, and of keys and
    values alone.
    """
    contents = heads * (latent.content_width + latent.values_width)
    queries, rank = heads * latent.query_width, latent.query_rank
    projections = width * latent.cache_width + latent.rank * contents
    projections += queries * width if rank is None else rank * (width + queries)
    keys_values = heads * (latent.query_width + latent.values_width)
    channels = queries + keys_values + latent.cache_width + (rank or 0)
    return projections, heads * latent.values_width * width, channels, keys_values


def delta_sizes(delta: DeltaConfig, width: int) -> tuple[float, float, float, float]:
    """Sizes of a layer with the gated delta rule: parameters into and out of the rule, channels, and products of the
    rule in the place of scores, which are half of those of a token (`flops.delta_products`).
    """
    values = delta.heads * delta.value_width
    into = width * (delta.channels + values + 2 * delta.heads) + delta.conv_kernel * delta.channels
    channels = delta.channels + delta.heads * (2 * delta.key_width + delta.value_width) + 2 * values
    return into, values * width, channels, flops.delta_products(delta) / 2


def feed_forward(stack: StackConfig) -> tuple[float, float, float, int]:
    """Sizes of the feed-forward layer for one token: parameters into and out of it, hidden activations, routed experts.

    In a stack of layers with and without experts these are means over the layers.
    """
    if stack.moe is not None and stack.ffn is not None and stack.dense_numbers:
        ffn = dataclasses.replace(stack.ffn, width=stack.moe.dense_width or stack.ffn.width)
        first = feed_forward(dataclasses.replace(stack, moe=None, ffn=ffn))
        others = feed_forward(
            dataclasses.replace(stack, moe=dataclasses.replace(stack.moe, dense_layers=0, dense_at=()))
        )
        share = len(stack.dense_numbers) / stack.layers
        up, down, hidden = (share * a + (1 - share) * b for a, b in zip(first[:3], others[:3], strict=True))
        return up, down, hidden, others[3]
    if stack.ffn is None and stack.moe is None:
        return 0.0, 0.0, 0.0, 0
    hidden = (stack.ffn.width if stack.ffn else None) or 4 * stack.width
    gated = 2 if stack.ffn is not None and stack.ffn.gated else 1
    back = 0 if stack.ffn is not None and not stack.ffn.output else 1
    times, router, routed = 1, 0, 0
    if stack.moe is not None:
        shared = stack.moe.shared if stack.moe.shared_width is None else stack.moe.shared_width / hidden
        times, routed = stack.moe.top_k + shared, stack.moe.top_k
        router = (stack.moe.experts + stack.moe.shared_gate) * stack.width
    up = times * gated * stack.width * hidden + router
    return up, back * times * hidden * stack.width, times * (gated + 1) * hidden, routed


def recomputed(stack: StackConfig) -> frozenset[str]:
    """Products of a layer that the backward pass computes again, by the stack's rematerialisation."""
    if stack.remat in RECOMPUTED:
        return RECOMPUTED[stack.remat]
    stored = set(stack.remat_names)
    again = {"scores", "up"} | ({"qkv"} if not {"query", "key", "value"} <= stored else set())
    return frozenset(again | ({"out"} if "attention" not in stored else set()))


def layout(config: Config, sizes: Mapping[str, int], slices: int) -> Layout:
    """The division of a step over a mesh.

    Args:
      config: the config of the run.
      sizes: sizes of the mesh axes over all slices.
      slices: number of slices.
    """
    outside = meshes.axis_sizes(config.mesh.dcn, slices) if slices > 1 else dict.fromkeys(AXES, 1)
    stages = sizes.get("stage", 1)
    parts = [stack.microbatches or stages for stack in config.model.stacks.values()]
    return Layout(
        inside={axis: size // outside[axis] for axis, size in sizes.items()},
        outside=outside,
        accumulation=config.train.accumulation,
        microbatches=math.lcm(*parts) if parts else 1,
        zero1=config.mesh.zero1,
    )
