"""Floating-point operations of a training step: by formula, and counted in the program.

The formula is from Chowdhery et al. 2022 (PaLM: Scaling Language Modeling with Pathways), appendix B. A token costs

    6 N + 12 L H Q T

FLOPs, with N parameters, L layers, H heads of width Q and T keys. 2 N are forward and 4 N backward. The products of
queries with keys and of weights with values are 4 H Q T per layer, and three times that with their gradients. T is the
row length, with masked keys. `flops_per_token` and MFU use this formula, like published figures.

N counts the parameters that a token is multiplied with: kernels, the output head (tied or not), and the experts that
the token is routed to. It leaves out biases, norms, embedding look-ups, and kernels that act on positions only.

A permutation language model is counted as its content stream: the query stream, and keys in memories, come on top.

`flops_per_token_visible` has the same N, and counts only the keys that the mask leaves visible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxformer.config import Config, DeltaConfig, StackConfig
from jaxformer.nn import moe
from jaxformer.nn.masks import Blocks

FORMULA = "6 N + 12 x layers x heads x head width x keys, masked ones too (PaLM, appendix B)"
FORMULA_VISIBLE = "the same over visible keys only: not what MFU counts"


def matmul_parameters(config: Config, params: Any, names: Any) -> float:
    """N: the parameters that one token is multiplied with, times the number of multiplications.

    Kernels count, and the embedding table of a tied head. Biases, norms, embedding look-ups and kernels on positions do
    not. Parameters that L layers share count L times. Only the experts that a token is routed to count. A layer that
    runs once per sequence counts 1 / length, one that runs for both segments of a pair 2 / length.

    Args:
      config: the config of the run.
      params: tree of shapes.
      names: tree of the logical names of their axes.
    """
    return sum(multiplied_by_path(config, params, names).values())


def multiplied_by_path(config: Config, params: Any, names: Any) -> dict[tuple[str, ...], float]:
    """The terms of `matmul_parameters` by the path of the parameter; without those that are 0."""
    found: dict[tuple[str, ...], float] = {}
    head = config.model.head
    times = {"classes": 1, "pooled": 1, "pair": 2, "forecast": 1}  # per row
    once = times[head.kind] / config.data.length if head.kind in times else 1.0
    leaves = jax.tree.leaves_with_path(params)
    for (path, leaf), axes in zip(leaves, jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)), strict=True):
        words = [str(getattr(key, "key", key)) for key in path]
        size, share = math.prod(leaf.shape), 0.0
        if words[-1] == "up":
            share = _embedded_sides(config) + (is_head(config, words) and _projects_back(config))
        elif "table" in words or "delta" in words:
            share = float(is_head(config, words))
        elif len(leaf.shape) - ("layers" in axes) - ("experts" in axes) >= 2 and not _is_not_multiplied(words):
            share = once if words[0] == "head" else 1.0
            stack = config.model.stacks[moe.stack_path(words)] if is_of_layers(words) else None
            if stack is not None and stack.share_layers and not words[0].startswith(moe.MULTI_TOKEN):
                share *= stack.layers
            if "experts" in axes:
                mixture: Any = config.model.stacks[moe.stack_path(words)].moe
                share *= mixture.top_k / mixture.experts
        if words[0] == "head" or words[-1] == "up" or ("table" in words and is_head(config, words)):
            share *= 1 + _depth(config)  # each module of multi_token embeds a token and has the head
        if share:
            found[tuple(words)] = size * share
    return found


def by_block(config: Config, params: Any, names: Any, length: int) -> dict[str, float]:
    """`flops_per_token` by block of the model: "encoder attention", "encoder attention scores", "head", ...

    A block of a stack is all its layers together. The products of queries with keys and of weights with values, 12 L H
    Q T of the formula, are "scores" of their own; those of the decoder include cross-attention's.

    Args:
      config: the config of the run.
      params: tree of shapes.
      names: tree of the logical names of their axes.
      length: row length T.
    """
    found: dict[str, float] = {}
    for path, size in multiplied_by_path(config, params, names).items():
        name = _block_name(path)
        found[name] = found.get(name, 0.0) + 6 * size
    for name in config.model.stacks:
        scores = _stack_attention_flops(config, name, length)
        if scores:
            found[f"{name.replace('.', ' ')} attention scores"] = scores
    if config.model.multi_token is not None:
        found["multi token attention scores"] = _multi_token_attention_flops(config, length)
    return found


def _block_name(path: tuple[str, ...]) -> str:
    """Words for the block of a parameter."""
    if "table" in path:
        return "head (tied to the embedding)"
    if path[-1] == "up":
        return "embedding projection"
    start = path[1:] if path[0] == "generator" else path
    prefix = "generator " if path[0] == "generator" else ""
    if start[0] in ("encoder", "decoder") and len(start) > 2:
        return (
            f"{prefix}{start[0]} {start[2] if start[1].startswith(('blocks', 'dense_blocks')) else start[1]}".replace(
                "_", " "
            )
        )
    return prefix + start[0].replace("_", " ")


def is_of_layers(words: Sequence[str]) -> bool:
    """True for the path of a parameter of a stack's layers, but those of first layers of another form."""
    return any(word == "blocks" or word.startswith("blocks_") for word in words)


def _is_not_multiplied(words: list[str]) -> bool:
    """True for biases (two axes where heads have them), token types, and kernels that act on positions only."""
    return words[-1].endswith("bias") or words[-1] == "kinds" or "position" in words


def _embedded_sides(config: Config) -> int:
    """Number of streams that one embedding serves: 2 where an encoder and a decoder share it."""
    return len(config.model.parts) if config.model.share_embeddings else 1


def is_head(config: Config, words: list[str]) -> bool:
    """True if a tied head multiplies with this part of an embedding: the one of the side that predicts, or shared."""
    head, generator = config.model.head, config.model.generator
    if generator is not None:  # the head of tokens is the generator's, and its table may be the model's
        is_shared = generator.sharing == "tied" and words[-1] == "table"
        owner = ["source_embed"] if is_shared else ["generator", "source_embed"]
        return generator.head.tied and words[:-1] == owner
    if head.kind != "tokens" or not head.tied or not head.projection:
        return False
    decodes = config.model.has_decoder
    return words[0] == ("target_embed" if decodes and _embedded_sides(config) == 1 else "source_embed")


def _projects_back(config: Config) -> bool:
    """True if a tied head multiplies with the projection of a factorised embedding: there is no `output_width`."""
    return all(stack.output_width is None for stack in config.model.stacks.values())


def attention_flops(config: Config, length: int, visible: bool = False) -> float:
    """12 x layers x heads x head width x keys, summed over stacks: forward once, backward twice.

    Masked keys count too. Cross-attention counts the keys of the source. Recurrent stacks count 0.

    Args:
      config: the config of the run.
      length: row length.
      visible: True to count visible keys only: half of them if attention is causal, the window if there is one.
    """
    stacks = sum(_stack_attention_flops(config, name, length, visible) for name in config.model.stacks)
    return stacks + _multi_token_attention_flops(config, length, visible)


def _depth(config: Config) -> int:
    """Number of modules of `multi_token`."""
    return 0 if config.model.multi_token is None else config.model.multi_token.depth


def _multi_token_attention_flops(config: Config, length: int, visible: bool = False) -> float:
    """The term of the modules of `multi_token` in `attention_flops`."""
    if config.model.multi_token is None:
        return 0.0
    model = dataclasses.replace(config.model, decoder=config.model.multi_token_stack)
    return _depth(config) * _stack_attention_flops(dataclasses.replace(config, model=model), "decoder", length, visible)


def _stack_attention_flops(config: Config, name: str, length: int, visible: bool = False) -> float:
    """The term of one stack in `attention_flops`."""
    stack = config.model.stacks[name]
    own = stack.attention
    width = own.heads * score_width(stack)
    keys = visible_keys(stack, name == "decoder", length) if visible else length
    keys += 0 if own.summary is None else length // own.summary
    keys += length if name == "decoder" and config.model.encoder is not None else 0
    without = len(stack.delta_layers)
    rule = 0.0 if stack.delta is None else 6 * without * delta_products(stack.delta)
    return 12 * (stack.layers - without) * width * keys + rule


def delta_products(delta: DeltaConfig) -> float:
    """Multiplications of a token in the chunked gated delta rule of one layer, forward (`nn/delta_rule.py`).

    In a chunk of C slots, for each of H heads of widths K and V: products of keys with keys and with queries, C K each,
    of those with what is written, C V, the solution of a triangular system, C (K + V) / 2, and three products with the
    state, K V each. The length of the text does not occur.
    """
    keys, values = delta.key_width, delta.value_width
    within = delta.chunk * (2 * keys + values) + delta.chunk * (keys + values) / 2
    return delta.heads * (within + 3 * keys * values)


def score_width(stack: StackConfig) -> float:
    """Width of a head in products with keys and values: the mean of both widths where they differ."""
    latent = stack.attention.latent
    if latent is not None:
        return (latent.query_width + latent.values_width) / 2
    return stack.attention.head_width or stack.width // stack.attention.heads


def visible_keys(stack: StackConfig, decodes: bool, length: int) -> float:
    """Visible keys of self-attention per query, on average over the row and the layers."""
    own = stack.attention
    causal = decodes if stack.causal is None else stack.causal
    whole = (length + 1) / 2 if causal else length
    blocks = Blocks.of(own.sparse, length)
    if blocks is not None:
        return _keys_of_blocks(blocks, length)
    if own.window is None:
        return whole
    banded = min(whole, own.window * (1 if causal else 2))
    share = len(stack.windowed_layers) / stack.layers if own.window_layers else 1 / own.window_every
    return share * banded + (1 - share) * whole


def _keys_of_blocks(blocks: Blocks, length: int) -> float:
    """Visible keys per query of block-sparse attention; a key that counts several times is one."""
    first = np.arange(0, length, blocks.size)
    sizes = np.minimum(blocks.size, length - first)
    seen = np.asarray(blocks.visible(jnp.asarray(first)[None], jnp.asarray(first)[None]))[0] @ sizes
    return float(seen @ sizes) / length


def flops_per_token(config: Config, params: Any, names: Any, length: int) -> float:
    """Model FLOPs of one token in a row of `length` as PaLM counts them, with masked keys; used for MFU.

    With an encoder and a decoder, a token is one position of each.
    """
    return 6 * matmul_parameters(config, params, names) + attention_flops(config, length)


def flops_per_token_visible(config: Config, params: Any, names: Any, length: int) -> float:
    """Model FLOPs of one token over visible keys only: at most `flops_per_token`. MFU does not count these."""
    return 6 * matmul_parameters(config, params, names) + attention_flops(config, length, visible=True)


def count_flops(jaxpr: core.Jaxpr) -> float:
    """FLOPs of all matrix products in a program, with recomputation: 2 x (elements of the result) x (terms of a sum).

    The body of a loop counts once per iteration, of a Pallas kernel once per grid point, and of a `shard_map` once per
    device. Of branches the largest counts. Elementwise operations are left out.
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(eqn: core.JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = _shape(eqn.invars[0])
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(lhs[axis] for axis in contracted)
    if name.startswith("ragged_dot"):
        m, k = _shape(eqn.invars[0])[-2:]
        return 2.0 * m * k * math.prod(_shape(eqn.outvars[0])) / max(m, 1)
    if name == "cond":
        return max(count_flops(branch.jaxpr) for branch in params["branches"])
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    elif name == "pallas_call":
        times = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return times * sum(count_flops(inner) for value in params.values() for inner in _jaxprs(value))


def _shape(variable: core.Var | core.Literal) -> tuple[int, ...]:
    return cast(jax.ShapeDtypeStruct, variable.aval).shape  # operands of a product are arrays


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    """The programs in a parameter of an equation."""
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    return [inner for item in value for inner in _jaxprs(item)] if isinstance(value, (tuple, list)) else []
