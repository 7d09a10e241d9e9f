"""Random parameters of the old trees by the old rules: normal kernels and tables, zero biases, unit norms."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.hf.flax.layout import Path
from jaxformer.hf.flax.names import T5_TYPES
from jaxformer.hf.flax.spec import Spec
from jaxformer.types import Array

DEVIATION_KEYS = ("initializer_range", "init_std")


def leaf(spec: Spec, settings: Any, path: Path, shape: jax.ShapeDtypeStruct, key: Array) -> Array:
    """One random leaf; its draw depends on the key and the path alone."""
    name, key = path[-1], jax.random.fold_in(key, np.uint32(zlib.crc32("/".join(path).encode())))
    if name == "bias" or path[-1] == "final_logits_bias":
        return jnp.zeros(shape.shape, jnp.float32)
    if name in ("scale", "weight"):
        return jnp.full(shape.shape, 1.0 - spec.stack.norm.offset, jnp.float32)
    return deviation(spec, settings, path) * jax.random.normal(key, shape.shape, jnp.float32)


def deviation(spec: Spec, settings: Any, path: Path) -> float:
    """Standard deviation of a kernel or a table."""
    if spec.model_type in T5_TYPES:
        return _t5_deviation(spec, float(settings("initializer_factor", 1.0)), path)
    for name in DEVIATION_KEYS:
        if settings(name, None) is not None:
            return float(settings(name, None))
    return 0.02


def _t5_deviation(spec: Spec, factor: float, path: Path) -> float:
    """T5's rules, those of mesh-tensorflow: a deviation by the widths of a kernel."""
    width, attention, ffn = spec.stack.width, spec.stack.attention, spec.stack.ffn
    head_width = attention.head_width or width // attention.heads
    inner = attention.heads * head_width
    hidden = width if ffn is None or ffn.width is None else ffn.width
    variances = {
        "q": inner * head_width, "k": inner, "v": inner, "o": inner, "relative_attention_bias": inner,
        "global_relative_attention_bias": inner,
        "wi": width, "wi_0": width, "wi_1": width, "wo": hidden,
    }  # fmt: skip
    return factor * variances.get(path[-2], 1.0) ** -0.5
