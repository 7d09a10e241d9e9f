"""Attention alone, for `gpu.py`: the cuDNN kernel against the dense one, and how fast each kernel is."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import gpu_shared as shared
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels, masks
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Slots

Row = dict[str, Any]

VALUE, GRADIENT = 1e-2, 2e-2
"""Largest relative difference |x - y| / |y| from float32. A bfloat16 number is rounded by up to 2 ** -8 of itself, less
than 0.2 % in the mean. A good kernel rounds probabilities and output once each (backward the scores' gradient too), so
it stays at a few tenths of a percent; one key too many or too few that is seen is an error of tens of percent."""
CASES = ("causal", "padded", "packed", "grouped", "window", "cross", "odd", "cache")


def case(name: str, length: int) -> tuple[masks.Mask, int]:
    """A mask over two rows, and the number of key heads (of four query heads)."""
    index = np.arange(length)
    ragged = (index < np.array([[length], [length // 2 + 1]])).astype(np.int32)
    halves = 1 + (index >= length // 3)
    packed = np.stack([halves, np.where(index < length - 5, 3 - halves, 0)]).astype(np.int32)
    segment = {"padded": ragged, "packed": packed}.get(name, np.ones((2, length), np.int32))
    side = masks.slots_from_segments(jnp.asarray(segment[:, : length - (name == "odd")]))
    if name == "cross":
        return masks.Mask(side, masks.slots_from_segments(jnp.asarray(ragged[:, length // 4 :]))), 4
    if name == "cache":  # one query, and keys beyond it that it must not see
        last = Slots(jnp.full((2, 1), length // 2, jnp.int32), jnp.ones((2, 1), jnp.int32))
        return masks.Mask(last, side, causal=True), 4
    window = length // 4 if name == "window" else None
    return masks.Mask(
        side, side, causal=name != "padded", window=window, same_slots=True
    ), 1 if name == "grouped" else 4


def compare(kernel: str, name: str, length: int, head_width: int = 64) -> Row:
    """How far a kernel in bfloat16, and dense in bfloat16 beside it, are from dense in float32."""
    mask, kv_heads = case(name, length)
    queries, keys = mask.query.segment.shape[1], mask.key.segment.shape[1]
    draw = np.random.default_rng(0).standard_normal
    sizes = [(2, queries, 4), (2, keys, kv_heads), (2, keys, kv_heads), (2, queries, 4)]
    q, k, v, do = (jnp.asarray(draw((*size, head_width)), jnp.bfloat16) for size in sizes)
    config = AttentionConfig(heads=4, kv_heads=kv_heads, window=mask.window)

    def run(kernel: str, dtype: Any, mask: masks.Mask, do: Any, *inputs: Any) -> tuple:
        def total(q, k, v):
            q = q * jnp.asarray(head_width**-0.5, q.dtype)
            o = kernels.get(kernel).apply(q, k, v, mask, None, None, config).astype(jnp.float32)
            return jnp.sum(o * do.astype(jnp.float32)), o

        inputs = [x.astype(dtype) for x in inputs]
        if name == "cache":  # decoding has no backward
            return (total(*inputs)[1],)
        (_, o), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return o, *gradients

    @jax.jit
    def errors(*given: Any) -> dict[str, list]:
        with jax.default_matmul_precision("highest"):
            wanted = run("dense", jnp.float32, *given)
        found = {"": run(kernel, jnp.bfloat16, *given), "dense_": run("dense", jnp.bfloat16, *given)}
        return {who: [relative(x, y) for x, y in zip(got, wanted, strict=True)] for who, got in found.items()}

    row = {}
    for who, (value, *gradients) in jax.device_get(errors(mask, do, q, k, v)).items():
        row[f"{who}value"] = float(value)
        if gradients:
            row[f"{who}gradient"] = float(np.max(gradients))  # NaN if one of them is
    holds = row["value"] <= VALUE and row.get("gradient", 0.0) <= GRADIENT  # False of NaN
    return row | ({} if holds else {"failed": f"further from float32 than {VALUE:g} (value), {GRADIENT:g} (gradient)"})


def relative(x: jax.Array, y: jax.Array) -> jax.Array:
    """|x - y| / |y|."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())


def lacking(length: int) -> str | None:
    """What the cuDNN kernel lacks here."""
    site = kernels.CallSite(meshes.platform(), "bfloat16", 4, 4, 64, length, length, causal=True)
    return kernels.get("cudnn").missing(site)


def speeds(arguments: list[str], toy: bool) -> Iterator[Row]:
    """Forward and backward of a causal attention by each kernel, and by cuDNN told of causality only.

    The last is no kernel of this package, since it ignores segments: it shows what the table of booleans costs.
    """
    for rows, length in ((2, 16),) if toy else ((32, 1024), (8, 4096)):
        names = ["dense", "blockwise"] + ([] if lacking(length) else ["cudnn", "cudnn, causality only"])
        for name in names:
            row = {"check": name, "rows": rows, "length": length}
            yield row | shared.guarded(functools.partial(speed, name, rows, length, 2 if toy else 12, 3 if toy else 20))


def speed(name: str, rows: int, length: int, heads: int, repeats: int, head_width: int = 64) -> Row:
    draw = np.random.default_rng(0).standard_normal
    q, k, v, do = (jnp.asarray(draw((rows, length, heads, head_width)), jnp.bfloat16) for _ in range(4))
    side = masks.slots_from_segments(jnp.ones((rows, length), jnp.int32))

    @jax.jit
    def gradients(q, k, v, do, side):
        def total(q, k, v):
            if name == "cudnn, causality only":
                o = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, implementation="cudnn")
            else:
                mask = masks.Mask(side, side, causal=True, same_slots=True)
                o = kernels.get(name).apply(q, k, v, mask, None, None, AttentionConfig(heads=heads))
            return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32))

        return jax.grad(total, argnums=(0, 1, 2))(q * jnp.asarray(head_width**-0.5, q.dtype), k, v)

    run = gradients.lower(q, k, v, do, side).compile()
    jax.block_until_ready(run(q, k, v, do, side))
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(run(q, k, v, do, side))
        seconds.append(time.perf_counter() - begun)
    temporary = run.memory_analysis().temp_size_in_bytes
    return {"step_ms": 1e3 * statistics.median(seconds), "temporary_bytes": temporary}
