"""Vectors of texts, from any model: pooled hidden states, or the output of a sentence model's head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.decode.compiled import Finish
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import pool
from jaxformer.nn.recurrent import EncoderOutput
from jaxformer.registry import nearest
from jaxformer.tasks import Predictor, text_lines
from jaxformer.types import Array, Batch

POOLINGS = ("mean", "first", "last")


def embed(predictor: Predictor, lines: Sequence[str], pooling: str | None = None) -> np.ndarray:
    """One vector per line, float32 `[n, D]`.

    Args:
      pooling: "mean" over the real tokens, the "first" or the "last" of them, of the hidden states below the head (an
        encoder's, if there is one). None: the output of a head "pair"; "mean" for other models.
    """
    if pooling is not None and pooling not in POOLINGS:
        hint = nearest(str(pooling), POOLINGS)
        raise ConfigError(f"embed: got pooling {pooling!r}, expected one of {', '.join(POOLINGS)}{hint}")
    model, lines = predictor.config.model, text_lines(lines)
    if model.series is not None:
        raise ConfigError("embed: got a model of series, expected one that reads text; call model.forecast or classify")
    side, width = model.input_side, _width(model)
    method, finish = "encode" if model.has_encoder else "hidden", _pooled(side, pooling or "mean")
    if model.head.kind == "pair":
        lines = [line.replace("\t", " ") for line in lines]  # a tab would separate the sentences of a pair
        if pooling is None:
            method, finish, width = None, _first_of_pair, model.head.width or width
    vectors = np.zeros((len(lines), width), np.float32)
    prompts = [
        {name: x for name, x in prompt.items() if name in (side, "token_type")} for prompt in predictor.prompts(lines)
    ]
    for indices, _, outputs in predictor.runner.forward(prompts, method, finish):
        vectors[indices] = outputs
    return vectors


def cosines(predictor: Predictor, pairs: Sequence[Sequence[str]], pooling: str | None = None) -> list[float]:
    """The cosine, -1 to 1, of the vectors that `embed` returns for the two sentences of each pair.

    Raises:
      ConfigError: `pairs` are no pairs of strings, or `pooling` is unknown.
    """
    pairs = list(pairs)
    for pair in pairs:
        if isinstance(pair, (str, bytes)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"similarity: got {pair!r}, expected two strings; give a list of pairs of sentences")
    index = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    vectors = embed(predictor, list(index), pooling).astype(np.float64)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    products = [units[index[first]] @ units[index[second]] for first, second in pairs]
    return np.clip(products, -1.0, 1.0).tolist()


def _width(model: ModelConfig) -> int:
    part = model.encoder_part or model.decoder_part
    if part is None:
        raise ConfigError("config.model: got no part, expected an encoder or a decoder; add one")
    return (part.output_width or part.width) if isinstance(part, StackConfig) else part.width


@functools.cache
def _pooled(side: str, pooling: str) -> Finish:
    """The pooling of hidden states as a function of a module's output; cached, since each function is compiled."""

    def finish(output: Any, batch: Batch) -> Array:
        hidden = output.outputs if isinstance(output, EncoderOutput) else output
        return pool(hidden.astype(jnp.float32), getattr(batch, side).slots, pooling)

    return finish


def _first_of_pair(vectors: Array, batch: Batch) -> Array:
    """`[B, D]` of the first segment, from `[B, 2, D]`."""
    return vectors[:, 0]
