"""Preference: a language model of conversations that learns which of two replies people prefer.

Direct preference optimization (Rafailov et al. 2023, "Direct preference optimization: Your language model is secretly a
reward model", arXiv 2305.18290). The reward of reply y to conversation x is

    r(x, y) = beta (log p(y | x) - log p_ref(y | x)),

how far the model p has moved from the one that it started as. The loss of a pair is -log sigmoid(r(chosen) -
r(rejected)). The two replies of a pair are the segments 1 and 2 of one row, each behind the whole conversation, so that
the loss is a sum over rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxformer import losses
from jaxformer.config import Config
from jaxformer.data import chat
from jaxformer.data.chat import Dialogue, Message
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Sample, Task, _tokens, dialogue
from jaxformer.types import Array, Batch, DeferredLogits, Sums

NAME = "preference"
SEGMENTS = (1, 2)
"""Segments of a row: the conversation with the chosen reply, and with the rejected one."""


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Both conversations as one row of two segments; labels are the next tokens, with weight 1 in the last replies.

    Of a pair that is too long, the oldest turns are left out, each user's with its reply; the system's turn stays. If
    the last exchanges alone are too long, their ends are cut off, of the longer one first. A pair that loses all of a
    reply has the feature "empty".
    """
    tokenizer, template = tokenizers.target, dialogue.template_of(tokenizers)
    _tokens.required_token(tokenizer, NAME, "eos")
    turns, length = example["messages"], config.data.length

    def pair(turns: Sequence[Message]) -> list[list[Message]]:
        replies = (example[side] for side in ("chosen", "rejected"))
        return [[*turns, {"role": "assistant", "content": reply}] for reply in replies]

    def size(turns: Sequence[Message]) -> int:  # the last tokens are labels only
        return sum(len(chat.encode_prompt(tokenizer, template, each, opening=False)) - 1 for each in pair(turns))

    complete = size(turns)
    drop = 0 if complete <= length else chat.exchanges_to_drop(turns, size, length)
    sides = [chat.encode_dialogue(tokenizer, template, each) for each in pair(chat.without_oldest(turns, drop))]
    first, second = (len(side.ids) - 1 for side in sides)
    second = min(second, max(length // 2, length - first))
    pieces = [
        _last_reply(side, slots) for side, slots in zip(sides, (min(first, length - second), second), strict=True)
    ]
    features = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    features["segment"] = np.repeat(np.array(SEGMENTS, np.int32), [len(piece["target"]) for piece in pieces])
    if not all(piece["weights"].any() for piece in pieces):
        features["empty"] = np.asarray(1, np.int32)
    if "reference" in example:
        features["reference"] = np.asarray(example["reference"], np.float32)
    return {**features, **_tokens.truncation(complete - len(features["target"]))}


def _last_reply(side: Dialogue, slots: int) -> dict[str, np.ndarray]:
    """The first `slots` slots of a conversation, whose last reply is learned."""
    tokens, learned = np.array(side.ids[: slots + 1], np.int32), side.reply == side.reply.max()
    return {"target": tokens[:-1], "labels": tokens[1:], "weights": learned[1 : slots + 1].astype(np.float32)}


# --- loss and measures ------------------------------------------------------------------------------------------------


def reply_log_likelihoods(
    config: Config, logits: Float32[Array, "B T V"] | DeferredLogits, batch: Batch
) -> Float32[Array, "B 2"]:
    """Log-likelihoods (natural logarithm, summed over tokens) of the chosen and the rejected reply of each row."""
    labels, weights = _tokens.labels_and_weights(batch)
    labels = jnp.where(weights != 0, labels, 0)
    log_probs = -losses.negative_log_likelihoods(logits, labels) * weights
    return jnp.stack([jnp.sum(log_probs, axis=1, where=segment) for segment in _segments(batch)], axis=1)


def _segments(batch: Batch) -> list[Array]:
    """Slots of each reply's segment: two of bool `[B, T]`."""
    return [_tokens.read_stream(batch, "target").slots.segment == segment for segment in SEGMENTS]


class Pairs(NamedTuple):
    """The pairs of a batch.

    Attributes:
      log_likelihoods: `[B, 2]` of the chosen and the rejected reply.
      rewards: `[B, 2]`, r(x, y) of both.
      weights: `[B]`, 1 for rows whose replies both have a token, else 0.
    """

    log_likelihoods: Array
    rewards: Array
    weights: Array

    @property
    def margins(self) -> Array:
        """Reward of the chosen reply minus that of the rejected one, `[B]`."""
        return self.rewards[:, 0] - self.rewards[:, 1]

    def mean(self, values: Array) -> tuple[Array, Array]:
        """Sum of `values` `[B]` over the pairs, and number of pairs."""
        return jnp.sum(values * self.weights), jnp.sum(self.weights)


def compare(config: Config, logits: Float32[Array, "B T V"] | DeferredLogits, batch: Batch) -> Pairs:
    """The rewards of a batch's pairs.

    Raises:
      ConfigError: the batch has no log-likelihoods of the reference.
    """
    if batch.reference is None:
        raise ConfigError(
            "batch: got no log-likelihoods of the reference, expected them for the task preference; attach them with "
            "jaxformer.train.reference.attach"
        )
    found = reply_log_likelihoods(config, logits, batch)
    weights = _tokens.labels_and_weights(batch)[1]
    has_reply = [jnp.any((weights != 0) & segment, axis=1) for segment in _segments(batch)]
    return Pairs(found, config.task.beta * (found - batch.reference), jnp.float32(has_reply[0] & has_reply[1]))


def loss(config: Config, logits: Float32[Array, "B T V"] | DeferredLogits, batch: Batch) -> Sums:
    """The loss that training minimises, and accuracy and margin of the same pairs.

    With label noise e the loss is -(1 - e) log sigmoid(m) - e log sigmoid(-m) for margin m: the expected loss if a
    fraction e of the pairs had their labels swapped (conservative DPO; Mitchell 2023, "A note on DPO with noisy
    preferences").
    """
    pairs, noise = compare(config, logits, batch), config.task.label_noise
    margins = pairs.margins
    each = -(1.0 - noise) * jax.nn.log_sigmoid(margins) - noise * jax.nn.log_sigmoid(-margins)
    return {"loss": pairs.mean(each), "accuracy": pairs.mean(_order(margins)), "margin": pairs.mean(margins)}


def preference_metrics(config: Config, logits: Float32[Array, "B T V"] | DeferredLogits, batch: Batch) -> Sums:
    """The loss without label noise, and how often and how far the chosen reply is ahead.

    "accuracy" is the fraction of pairs whose chosen reply has the greater reward, "ranking_accuracy" the greater
    likelihood, whatever the reference says; ties count as a half. "margin", "chosen_reward" and "rejected_reward" are
    means.
    """
    pairs = compare(config, logits, batch)
    likelihoods = pairs.log_likelihoods
    return {
        "loss": pairs.mean(-jax.nn.log_sigmoid(pairs.margins)),
        "accuracy": pairs.mean(_order(pairs.margins)),
        "ranking_accuracy": pairs.mean(_order(likelihoods[:, 0] - likelihoods[:, 1])),
        "margin": pairs.mean(pairs.margins),
        "chosen_reward": pairs.mean(pairs.rewards[:, 0]),
        "rejected_reward": pairs.mean(pairs.rewards[:, 1]),
    }


def _order(differences: Array) -> Array:
    """1 where a difference is positive, 0 where it is negative, 1/2 where there is none."""
    return (jnp.sign(differences) + 1.0) / 2.0


# --- lines ------------------------------------------------------------------------------------------------------------


def input_line(example: Example) -> str:
    """The conversation that waits for its reply, as `dialogue.parse_line` reads it."""
    return json.dumps({"messages": example["messages"]}, ensure_ascii=False)


def reference_line(config: Config, example: Example) -> str:
    """The chosen reply."""
    return example["chosen"]


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The conversation, and the reply that was chosen."""
    return Sample(input_line(example), example["chosen"])


TASK = Task(
    roles=("messages", "chosen", "rejected"),
    head="tokens",
    sides=("decoder",),
    method="chat",
    needs=dialogue.TASK.needs,
    encode=encode,
    loss=loss,
    metrics=preference_metrics,
    reference=reply_log_likelihoods,
    input_line=input_line,
    prompt=dialogue.prompt,
    predict=dialogue.predict,
    output_line=dialogue.output_line,
    reference_line=reference_line,
    sample=sample,
)
