"""Preference: how a pair becomes a row, what is cut of it, and loss, gradient and measures beside formulas in numpy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from task_toys import config, encoded
from test_dialogue import CONTENTS, conversation, tokenizers, written

from jaxformer import metrics
from jaxformer.config import ConfigError, MeshConfig, TrainConfig, overrides
from jaxformer.data import truncation
from jaxformer.parallel import mesh as meshes
from jaxformer.tasks import preference
from jaxformer.train import step
from jaxformer.types import Batch, DeferredLogits, Slots, Stream

PAIR = {"chosen": "so it is", "rejected": "no"}


def settings(length=500, **task):
    return config("preference", length=length, side="decoder", **task)


def sides(turns):
    """(token, whether it is of the last reply) of both conversations, by hand."""
    before = [(token, False) for token, _ in written(turns)]
    return [before + written([{"role": "assistant", "content": PAIR[side]}]) for side in ("chosen", "rejected")]


def test_a_pair_is_a_row_of_two_conversations_whose_last_replies_are_learned():
    turns = conversation(5)
    features = encoded(settings(), tokenizers(), messages=turns, reference=np.array([-3.5, -2.0]), **PAIR)
    both = sides(turns)
    assert features["target"].tolist() == [token for side in both for token, _ in side[:-1]]
    assert features["labels"].tolist() == [token for side in both for token, _ in side[1:]]
    assert features["weights"].tolist() == [float(learned) for side in both for _, learned in side[1:]]
    assert features["segment"].tolist() == [1] * (len(both[0]) - 1) + [2] * (len(both[1]) - 1)
    assert features["weights"].sum() == sum(len(reply) + 1 for reply in PAIR.values())
    assert features["reference"].tolist() == [-3.5, -2.0] and features["reference"].dtype == np.float32
    assert not {"cut", "empty"} & set(features)
    assert json.loads(preference.TASK.input_line({"messages": turns})) == {"messages": list(turns)}


@pytest.mark.parametrize("system", [None, "be brief"])
def test_what_does_not_fit_is_cut_and_counted_at_every_length(system):
    """The oldest exchanges of both, one by one, and then the end of the longer conversation."""
    turns, begin = list(conversation(5, system)), int(system is not None)
    whole = sum(len(side) - 1 for side in sides(turns))
    found, empty = [], 0
    for length in range(2, whole + 2):
        kept = list(turns)
        while len(kept) > begin + 1 and sum(len(side) - 1 for side in sides(kept)) > length:
            del kept[begin : begin + 2]
        first, second = (len(side) - 1 for side in sides(kept))
        while first + second > length:  # equal ones lose a token by turns, the rejected reply first
            first, second = (first - 1, second) if first > second else (first, second - 1)
        features = encoded(settings(length), tokenizers(), messages=turns, **PAIR)
        assert [int((features["segment"] == number).sum()) for number in (1, 2)] == [first, second], length
        pieces = [side[: count + 1] for side, count in zip(sides(kept), (first, second), strict=True)]
        assert features["labels"].tolist() == [token for piece in pieces for token, _ in piece[1:]]
        assert features["weights"].tolist() == [float(learned) for piece in pieces for _, learned in piece[1:]]
        assert int(features.get("cut", 0)) == whole - first - second
        lost = not all(any(learned for _, learned in piece[1:]) for piece in pieces)
        assert int(features.get("empty", 0)) == lost
        found, empty = [*found, features], empty + lost
    counted = truncation.count_truncated(found)
    assert counted.counts()["empty_examples"] == empty > 0
    assert f"{empty} examples have no token of a reply left" in counted.sentence("train", 9)
    assert truncation.from_json(json.loads(json.dumps(truncation.to_json(counted)))).empty_examples == empty
    assert "empty_examples" not in truncation.count_truncated(found[-1:]).counts()


# --- loss and measures ------------------------------------------------------------------------------------------------

VOCAB, BETA, NOISE = 5, 0.7, 0.2
SEGMENT = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 2, 2, 2], [0] * 7], np.int32)
WEIGHTS = np.array([[0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1], [0] * 7], np.float32)
"""The third row has lost its chosen reply, and the fourth fills the batch up."""


def batch_of(rng):
    labels = rng.integers(VOCAB, size=SEGMENT.shape).astype(np.int32)
    stream = Stream(labels, Slots(np.zeros_like(SEGMENT), SEGMENT))
    return Batch(None, stream, labels, WEIGHTS, reference=rng.normal(-4, 1, (4, 2)).astype(np.float32))


def slow(logits, batch, noise):
    """Loss, margins and the gradient with respect to the logits, pair by pair and token by token, in float64."""
    total, margins, rewards, likelihoods, gradient = 0.0, [], [], [], np.zeros(logits.shape)
    for row in (0, 1):
        log_p = [0.0, 0.0]
        d_log_p = [np.zeros(logits.shape), np.zeros(logits.shape)]
        for t in range(logits.shape[1]):
            if WEIGHTS[row, t]:
                x, side = logits[row, t].astype(np.float64), SEGMENT[row, t] - 1
                probs = np.exp(x) / np.exp(x).sum()
                log_p[side] += np.log(probs[batch.labels[row, t]])
                d_log_p[side][row, t] = np.eye(VOCAB)[batch.labels[row, t]] - probs
        reward = [BETA * (log_p[side] - float(batch.reference[row, side])) for side in (0, 1)]
        margin = reward[0] - reward[1]
        win = 1 / (1 + np.exp(-margin))
        total += -(1 - noise) * np.log(win) - noise * np.log(1 - win)
        gradient += (win - (1 - noise)) * BETA * (d_log_p[0] - d_log_p[1])
        margins, rewards, likelihoods = [*margins, margin], [*rewards, reward], [*likelihoods, log_p]
    return total, np.array(margins), np.array(rewards), np.array(likelihoods), gradient


def test_loss_gradient_and_measures_are_those_of_the_formula():
    rng, task = np.random.default_rng(5), preference.TASK
    batch, logits = batch_of(rng), rng.normal(0, 2, (4, 7, VOCAB)).astype(np.float32)
    noisy = settings(beta=BETA, label_noise=NOISE)

    @jax.jit
    def found(logits, batch):
        loss = lambda x: task.loss(noisy, x, batch)["loss"]  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(logits), task.metrics(noisy, logits, batch)

    ((total, count), gradient), sums = found(logits, batch)
    expected, margins, rewards, likelihoods, slope = slow(logits, batch, NOISE)
    assert count == 2
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)
    values = metrics.divide(jax.device_get(sums))
    assert values.pop("loss") == pytest.approx(slow(logits, batch, 0.0)[0] / 2, rel=1e-5), "without noise"
    assert values == pytest.approx(
        {
            "accuracy": (margins > 0).mean(),
            "ranking_accuracy": (likelihoods[:, 0] > likelihoods[:, 1]).mean(),
            "margin": margins.mean(),
            "chosen_reward": rewards[:, 0].mean(),
            "rejected_reward": rewards[:, 1].mean(),
        },
        rel=1e-5,
    )
    np.testing.assert_array_equal(preference._order(jnp.array([2.0, 0.0, -1.0])), [1.0, 0.5, 0.0])

    # Deferred logits, in chunks that no row is a multiple of: the same loss and gradients.
    hidden, table = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((4, 7, 3), (VOCAB, 3)))

    @jax.jit
    def of_parts(hidden, table, batch):
        chunked = lambda h, t: task.loss(noisy, DeferredLogits(h, t, None, chunk=4), batch)["loss"][0]  # noqa: E731
        plain = lambda h, t: task.loss(noisy, h @ t.T, batch)["loss"][0]  # noqa: E731
        return [jax.value_and_grad(each, (0, 1))(hidden, table) for each in (chunked, plain)]

    chunked, plain = of_parts(hidden, table, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), chunked, plain)


class Table(nn.Module):
    """Logits that the token alone decides: a step of it compiles at once."""

    @nn.compact
    def __call__(self, batch, full_logits=True):
        return self.param("table", nn.initializers.normal(), (VOCAB, VOCAB))[batch.target.tokens]


def test_a_step_on_a_mesh_is_exact_whatever_the_lengths_of_replies():
    """Rows and slots divided over devices, and in two microbatches, of which one has fewer whole pairs."""
    rng = np.random.default_rng(7)
    once = batch_of(rng)
    batch = jax.tree.map(lambda x: np.concatenate([x, x])[:, : x.shape[1]], once)
    wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 1))) if x.shape[1] == 7 else x, batch)
    settings_ = dataclasses.replace(
        settings(beta=BETA, label_noise=NOISE),
        train=TrainConfig(accumulation=2),
        mesh=MeshConfig(data=2, fsdp=2, context=2),
    )
    table, mesh = rng.normal(0, 2, (VOCAB, VOCAB)).astype(np.float32), meshes.make(settings_.mesh)
    with jax.set_mesh(mesh):
        act = lambda p, b: step.batch_gradients(settings_, Table(), preference.TASK, p, {}, b, jax.random.key(0))  # noqa: E731
        # In the order in which a balanced ring reads slots, which leaves the reference as it is.
        found, _, sums = jax.jit(act)({"table": table}, step.shard_batch(wide, mesh, balanced=True))
    total, _, _, _, slope = slow(table[once.target.tokens], once, NOISE)
    expected = np.zeros(table.shape)
    np.add.at(expected, once.target.tokens.ravel(), slope.reshape(-1, VOCAB))
    assert sums["loss"][1] == 4
    np.testing.assert_allclose(sums["loss"][0], 2 * total, rtol=1e-5)
    np.testing.assert_allclose(found["table"], expected / 2, rtol=1e-4, atol=1e-6)


def test_wrong_settings_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="batch: got no log-likelihoods of the reference, expected them for the task"):
        preference.TASK.loss(
            settings(), jnp.zeros((4, 7, VOCAB)), batch_of(np.random.default_rng(0))._replace(reference=None)
        )
    base = settings(label_noise=0.5)
    for changed, message in (
        (base, "config.task.label_noise: got 0.5, expected less than 0.5"),
        (settings(label_smoothing=0.1), "config.task.label_smoothing: got 0.1, expected 0 for the task preference"),
        (
            dataclasses.replace(settings(), data=dataclasses.replace(base.data, packing="first_fit")),
            "config.data.packing: got 'first_fit', expected none for the task preference",
        ),
        (config("dialogue", side="decoder", beta=0.2), "config.task.beta: got 0.2, expected 0.1 for the task dialogue"),
        (config("preference"), "config.task.name: got 'preference', expected a decoder alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            overrides.check(changed)
    assert set(CONTENTS) > set(PAIR.values())
