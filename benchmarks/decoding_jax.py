"""The jaxformer programs that `decoding.py` measures and runs."""

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
from jaxformer.config import AttentionConfig, DecodeConfig, EmbedConfig, EncodingConfig, ModelConfig, StackConfig  # noqa: E402
from jaxformer.decode import cache_schedule  # noqa: E402
from jaxformer.decode.compiled import Vocabulary  # noqa: E402
from jaxformer.decode.runner import Runner  # noqa: E402
from jaxformer.models import build  # noqa: E402


def continuation(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """A function that continues prompts with a random decoder of GPT-2's shape; weights have the compute precision."""
    stack = StackConfig(
        layers=task["layers"], width=task["width"], embed=EmbedConfig(vocab=task["vocab"]),
        attention=AttentionConfig(heads=task["width"] // 64),
        encoding=EncodingConfig(kind="learned", max_length=task["prompt"] + task["tokens"]),
    )  # fmt: skip
    module, rng = build.build(ModelConfig(decoder=stack, dtype=task["dtype"])), np.random.default_rng(0)
    draw = lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape), task["dtype"])  # noqa: E731
    variables = jax.tree.map(draw, nn.meta.unbox(build.shapes(module)))
    prompts = [{"target": row} for row in rng.integers(0, task["vocab"], (task["batch"], task["prompt"]))]
    size = {"max_length": task["tokens"], "batch": task["batch"], "beams": task.get("beams", 4)}
    config = DecodeConfig(method=task["method"], **size)
    vocabulary = Vocabulary(eos=(), pad=0)  # without an end token all runs do the same work
    cache_schedule.INITIAL_NEW_TOKENS = task.get("initial_tokens", cache_schedule.INITIAL_NEW_TOKENS)
    runner = Runner(module, variables, vocabulary, buckets=(task["prompt"],))
    return lambda: [hypotheses[0].tokens.tolist() for hypotheses in runner.generate(prompts, config)]


def translation(task: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """A function that translates with a trained model and beam search."""
    model = jaxformer.load(task["workdir"])
    target = model.tokenizers.target
    config = DecodeConfig(
        method="beam", beams=task["beams"], max_length=task["tokens"], batch=task["batch"], length_penalty=1.0,
        length_norm="power", stopping=task["stopping"], weights=task.get("weights", "float"),
    )  # fmt: skip
    vocabulary = Vocabulary(eos=(target.eos,), pad=target.pad, start=target.bos, size=target.size)
    prompts = [{"source": row} for row in task["sources"]]
    runner = Runner(model.module, {"params": model.params}, vocabulary, buckets=model.config.data.buckets)
    return lambda: [
        [token for token in hypotheses[0].tokens.tolist() if token != target.eos]
        for hypotheses in runner.generate(prompts, config)
    ]


if __name__ == "__main__":
    task = turns.task()
    turns.serve({"continue": continuation, "translate": translation}[task["kind"]](task))
