"""Floating-point operations of a training step: by a formula, and counted in the program.

The formula is that of Chowdhery et al. 2022 (PaLM: Scaling Language Modeling with Pathways), appendix B: a token costs

    6 N + 12 L H Q T

with N parameters, L layers, H heads of width Q and T keys: 2 N forward and 4 N backward, and 4 H Q T a layer for the
products of queries with keys and of weights with values, three times as much with their gradients.

N here is what a token is multiplied with: kernels, and the output head (tied or not). Not in N are tables that are
looked up, positions, norms and biases, which cost no product. PaLM's T are all keys, masked or not: `palm` is that
count. `a_token`, which MFU is of, leaves out the masked half of causal attention and what a window hides, so it is the
lower of the two.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend import core

from jaxformer.config import Config, StackConfig

FORMULA = "6 N + 12 x layers x heads x head width x visible keys; MFU is of these"
PALM = "the same with all keys, masked or not (PaLM, appendix B)"


def matmul_parameters(config: Config, params: Any, names: Any) -> float:
    """N: parameters that every token is multiplied with.

    That is every kernel; not biases, norms and the tables (a look-up), but the one that a tied head multiplies with; of
    experts only those that a token is sent to; what is made once a sequence counts 1 / length, once for each of a pair
    2 / length.

    Args:
      params: tree of shapes.
      names: tree of the logical names of their axes.
    """
    total = 0.0
    head = config.model.head
    times = {"classes": 1, "pooled": 1, "pair": 2}  # a row
    once = times[head.kind] / config.data.length if head.kind in times else 1.0
    leaves = jax.tree.leaves_with_path(params)
    for (path, leaf), axes in zip(leaves, jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)), strict=True):
        words = [str(getattr(key, "key", key)) for key in path]
        size = math.prod(leaf.shape)
        if "table" in words:
            total += size if head.kind == "tokens" and head.tied and _is_head(config, words) else 0
        elif len(leaf.shape) - ("layers" in axes) - ("experts" in axes) >= 2 and not _is_added(words[-1]):
            share = 1.0
            if "experts" in axes:
                moe = getattr(config.model, words[0]).moe
                share = moe.top_k / moe.experts
            total += size * share * (once if words[0] == "head" else 1.0)
    return total


def _is_added(name: str) -> bool:
    """True for parameters that are added, not multiplied with: biases, which have two axes where heads have them."""
    return name.endswith("bias") or name == "kinds"


def _is_head(config: Config, words: list[str]) -> bool:
    """Whether this table is the one that a tied head reads: that of the side that predicts, or the shared one."""
    decodes = config.model.decoder is not None or config.model.recurrent_decoder is not None
    return words[0] == ("target_embed" if decodes and not config.model.share_embeddings else "source_embed")


def attention(config: Config, length: int, masked: bool = False) -> float:
    """12 x layers x heads x head width x keys, summed over stacks: forward once, backward twice.

    Keys are the visible ones: all of a row of full length, half of them where attention is causal, the window where
    there is one. Masked pairs that a kernel computes all the same are not part of it.

    Args:
      masked: keys are all of the row, whatever the mask, as PaLM counts them.
    """
    model, total = config.model, 0.0
    for name in ("encoder", "decoder"):
        stack: StackConfig | None = getattr(model, name)
        if stack is None:
            continue
        own = stack.attention
        width = own.heads * (own.head_width or stack.width // own.heads)
        causal = not masked and (name == "decoder" if stack.causal is None else stack.causal)
        banded = 0 if own.window is None or masked else 1 / own.window_every
        whole = (length + 1) / 2 if causal else length
        part = whole if not banded else min(whole, own.window * (1 if causal else 2))
        keys = banded * part + (1 - banded) * whole
        keys += length if name == "decoder" and model.encoder is not None else 0
        total += 12 * stack.layers * width * keys
    return total


def a_token(config: Config, params: Any, names: Any, length: int) -> float:
    """Model FLOPs of one position of a row of `length`: PaLM's formula over visible keys.

    Where there are an encoder and a decoder a position is one of each.
    """
    return 6 * matmul_parameters(config, params, names) + attention(config, length)


def palm(config: Config, params: Any, names: Any, length: int) -> float:
    """Model FLOPs of one position as PaLM counts them, masked keys included: for MFU beside published ones."""
    return 6 * matmul_parameters(config, params, names) + attention(config, length, masked=True)


def counted(jaxpr: core.Jaxpr) -> float:
    """FLOPs of all products in a program, recomputation included: 2 x (entries of the result) x (terms of a sum).

    Loops count as often as they run, a branch as the longest one, what a Pallas kernel does as often as its grid has
    points, and what runs in a `shard_map` once a device. Elementwise operations are left out.
    """
    return sum(_equation(each) for each in jaxpr.eqns)


def _equation(eqn: core.JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)
    if name.startswith("ragged_dot"):
        m, k = eqn.invars[0].aval.shape[-2:]
        return 2.0 * m * k * math.prod(eqn.outvars[0].aval.shape) / max(m, 1)
    if name == "cond":
        return max(counted(branch.jaxpr) for branch in params["branches"])
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    elif name == "pallas_call":
        times = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return times * sum(counted(inner) for value in params.values() for inner in _jaxprs(value))


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    return [inner for each in value for inner in _jaxprs(each)] if isinstance(value, (tuple, list)) else []
