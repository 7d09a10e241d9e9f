"""Log-likelihoods of texts under a language model or a translation model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import tasks
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, _tokens, text_lines
from jaxformer.types import Array, Batch


def log_likelihoods(predictor: Predictor, lines: Sequence[str], targets: Sequence[str] | None) -> list[float]:
    """The log-likelihood (natural logarithm) of each line, or of each target given its line.

    Args:
      targets: as many as lines for a task with targets; None for a language model.

    Raises:
      ConfigError: targets are missing or superfluous, or one has more tokens than `config.data.length`.
    """
    config, tokenizers = predictor.config, predictor.framing.tokenizers
    lines, task = text_lines(lines), tasks.get(config.task.name)
    has_targets = "target" in task.roles
    if has_targets != (targets is not None) or (targets is not None and len(text_lines(targets)) != len(lines)):
        expected = "as many targets as lines" if has_targets else "none: a language model reads lines only"
        got = "none" if targets is None else str(len(targets))
        raise ConfigError(f"score: got targets {got}, expected {expected}; change the call")
    if targets is None:
        examples = [{"text": line} for line in lines]
    else:
        check_lengths(tokenizers.target, targets, config.data.length)
        examples = [{"source": source, "target": target} for source, target in zip(lines, targets, strict=True)]
    rng = np.random.default_rng(0)
    pieces: list[Features] = []
    line_of_piece: list[int] = []
    for index, example in enumerate(examples):
        encode = task.encode_score or task.encode_windows
        windows = (
            [task.encode(config, tokenizers, example, rng)]
            if encode is None
            else encode(config, tokenizers, example, rng)
        )
        pieces += windows
        line_of_piece += [index] * len(windows)
    scores = np.zeros(len(lines))
    for indices, _, sums in predictor.runner.forward(pieces, finish=summed_log_probs):
        np.add.at(scores, np.asarray(line_of_piece)[indices], sums)
    return scores.tolist()


def check_lengths(tokenizer: Tokenizer, targets: Sequence[str], max_length: int) -> None:
    """Raises a ConfigError for a target that would be scored only in part."""
    for target in targets:
        size = len(tokenizer.encode(target)) + 1
        if size > max_length:
            shown = target if len(target) < 60 else target[:60] + "..."
            raise ConfigError(
                f"score: got a target of {size} tokens, its end included ({shown!a}), expected at most {max_length} "
                "(data.length); shorten it"
            )


def summed_log_probs(logits: Array, batch: Batch) -> Array:
    """`[B]`: the weighted sum of the labels' log-probabilities."""
    labels, weights = _tokens.labels_and_weights(batch)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, :, None], axis=-1)[:, :, 0]
    return jnp.sum(log_probs * weights, axis=1)
