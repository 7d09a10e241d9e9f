"""Our side of `decoding.py`, which runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import turns  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxformer  # noqa: E402
from jaxformer.config import (  # noqa: E402
    AttentionConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    ModelConfig,
    StackConfig,
)
from jaxformer.decode import engine, growing  # noqa: E402
from jaxformer.models import build  # noqa: E402


def continued(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """A random decoder of that size, the shape of GPT-2. Weights are held in the precision they are used in."""
    part = StackConfig(
        layers=task["layers"], width=task["width"], embed=EmbedConfig(vocab=task["vocab"]),
        attention=AttentionConfig(heads=task["width"] // 64),
        encoding=EncodingConfig(kind="learned", max_length=task["prompt"] + task["tokens"]),
    )  # fmt: skip
    module, rng = build.build(ModelConfig(decoder=part, dtype=task["dtype"])), np.random.default_rng(0)
    draw = lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape), task["dtype"])  # noqa: E731
    variables = jax.tree.map(draw, nn.meta.unbox(build.shapes(module)))
    prompts = [{"target": row} for row in rng.integers(0, task["vocab"], (task["batch"], task["prompt"]))]
    size = {"max_length": task["tokens"], "batch": task["batch"], "beams": task.get("beams", 4)}
    config = DecodeConfig(method=task["method"], **size)
    end = engine.Vocabulary(eos=(), pad=0)  # nothing ends a row, so that all do the same work
    growing.FIRST = task.get("first", growing.FIRST)
    run = lambda: engine.run(module, variables, prompts, config, end, buckets=(task["prompt"],))  # noqa: E731
    return lambda: [each[0].tokens.tolist() for each in run()]


def translated(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """Beam search of a trained translator."""
    model = jaxformer.load(task["workdir"])
    target = model.tokenizers.target
    config = DecodeConfig(
        method="beam", beams=task["beams"], max_length=task["tokens"], batch=task["batch"], length_penalty=1.0,
        length_norm="power", stopping=task["stopping"], weights=task.get("weights", "float"),
    )  # fmt: skip
    end = engine.Vocabulary(eos=(target.eos,), pad=target.pad, start=target.bos, size=target.size)
    prompts = [{"source": row} for row in task["sources"]]
    variables = {"params": model.params}
    run = lambda: engine.run(model.module, variables, prompts, config, end, buckets=model.config.data.buckets)  # noqa: E731
    return lambda: [[token for token in each[0].tokens.tolist() if token != target.eos] for each in run()]


if __name__ == "__main__":
    given = turns.task()
    turns.serve({"continue": continued, "translate": translated}[given["kind"]](given))
