"""Skip-gram: the vector of a word predicts each word around it (Mikolov et al. 2013, section 2.2).

The model is two tables: an encoder without layers holds the vectors of words, the head those of context words. The
noise words of a word are shared by its context words (Ji et al. 2016, https://arxiv.org/abs/1604.04661): in expectation
the loss is that of separate draws.
"""

from __future__ import annotations

import numpy as np

from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, _tokens, _words
from jaxformer.types import Array, Batch, DeferredLogits, Sums


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """The words of a text, each with labels `[2W + K]`: its context words, and K noise words.

    The weight of a noise word is the number of context words that it differs from.
    """
    context = _words.draw_context(config, tokenizers.source, example["text"], rng)
    noise = _words.draw_noise(config, tokenizers.source, len(context.ids), rng)
    times = np.sum(context.inside[:, :, None] & (context.words[:, :, None] != noise[:, None, :]), axis=1)
    return {
        "source": context.ids,
        "labels": np.concatenate([context.words, noise], axis=1),
        "weights": np.concatenate([context.inside, times], axis=1, dtype=np.float32),
        **_tokens.truncation(context.cut),
    }


def measures(config: Config, output: Array | DeferredLogits, batch: Batch) -> Sums:
    """Loss and accuracy a pair of a word and a context word."""
    labels, weights = _tokens.labels_and_weights(batch)
    return _words.sums(_words.scores(output, labels), labels, weights, 2 * config.task.window)


def loss(config: Config, output: Array | DeferredLogits, batch: Batch) -> Sums:
    """The loss that training minimises."""
    return {"loss": measures(config, output, batch)["loss"]}


TASK = _words.task(encode=encode, loss=loss, metrics=measures)
