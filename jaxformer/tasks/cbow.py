"""Continuous bag of words: the mean vector of the words around a gap predicts the word in it (Mikolov et al. 2013).

The architecture is of https://arxiv.org/abs/1301.3781, section 3.1, the loss that of skip-gram. The model is two
tables: an encoder without layers holds the vectors of context words, the head those of the predicted words.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, _tokens, _words
from jaxformer.types import Array, Batch, DeferredLogits, Sums


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """The words of a text, each with labels `[2W + 1 + K]`: its context words, itself, and K noise words."""
    context = _words.draw_context(config, tokenizers.source, example["text"], rng)
    noise = _words.draw_noise(config, tokenizers.source, len(context.ids), rng)
    true, has_context = context.ids[:, None], context.inside.any(axis=1, keepdims=True)
    return {
        "source": context.ids,
        "labels": np.concatenate([context.words, true, noise], axis=1),
        "weights": np.concatenate(
            [context.inside, has_context, has_context & (noise != true)], axis=1, dtype=np.float32
        ),
        **_tokens.truncation(context.cut),
    }


def measures(config: Config, output: Array | DeferredLogits, batch: Batch) -> Sums:
    """Loss and accuracy a word. Means of logits are logits of means: the head is linear."""
    labels, weights = _tokens.labels_and_weights(batch)
    inside, weights = jnp.split(weights, [2 * config.task.window], axis=-1)
    labels = labels[..., inside.shape[-1] :]
    if isinstance(output, DeferredLogits):
        output = output.replace(hidden=window_mean(output.hidden, inside, config.task.window))
    else:
        output = window_mean(output, inside, config.task.window)
    return _words.sums(_words.scores(output, labels), labels, weights, 1)


def window_mean(x: Float[Array, "B T D"], inside: Float[Array, "B T _"], window: int) -> Float[Array, "B T D"]:
    """Mean of `x` over the slots of each slot's context; 0 where it has none."""
    shifted = (
        inside[..., column, None].astype(x.dtype) * jnp.roll(x, -offset, axis=1)
        for column, offset in enumerate(_words.offsets(window).tolist())
    )
    count = jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1.0)
    return sum(shifted) / count.astype(x.dtype)


def loss(config: Config, output: Array | DeferredLogits, batch: Batch) -> Sums:
    """The loss that training minimises."""
    return {"loss": measures(config, output, batch)["loss"]}


TASK = _words.task(encode=encode, loss=loss, metrics=measures)
