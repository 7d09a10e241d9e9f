"""Similarity: pairs as segments, both objectives by hand, and vectors that do not depend on who shares a row."""

import builders
import jax
import numpy as np
import pytest
from task_toys import config, encoded, without, words

from jaxformer import metrics, tasks
from jaxformer.config import ConfigError, HeadConfig, ModelConfig, RecurrentConfig
from jaxformer.data import packing
from jaxformer.decode import batching
from jaxformer.nn.heads import pool_segments
from jaxformer.types import Batch, Slots, Stream

TASK = tasks.get("similarity")
PAIR = {"text": "the cat sat", "pair": "a dog", "score": 0.25}


def contrast(**fields):
    return config("similarity", objective="contrastive", **fields)


def pairs(*segments):
    """A stream of rows that hold these segments."""
    segment = np.array(segments, np.int32)
    return Stream(np.zeros_like(segment), Slots(np.zeros_like(segment), segment))


# --- features


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_each_sentence_is_framed_as_a_segment_of_its_own(side):
    both = words()
    tokenizer = both.source
    features = encoded(config("similarity", side=side), both, **PAIR)
    framed = [[tokenizer.cls, *tokenizer.encode(PAIR[role]), tokenizer.sep] for role in ("text", "pair")]
    assert features["source" if side == "encoder" else "target"].tolist() == [*framed[0], *framed[1]]
    assert features["segment"].tolist() == [1] * 5 + [2] * 4
    assert (features["labels"], features["labels"].dtype) == (0.25, np.float32)


def test_a_sentence_has_half_of_a_row_whatever_its_partner():
    settings, both = config("similarity", length=9, kinds=2), words()
    alone = TASK.prompt(settings, both, "the cat sat on the mat")
    assert len(alone["source"]) == 4
    for partner in ("a", "a dog ran after some other cats"):
        features = encoded(settings, both, text="the cat sat on the mat", pair=partner, score=1.0)
        np.testing.assert_array_equal(features["source"][features["segment"] == 1], alone["source"])
        assert not features["token_type"].any()
    bare = without(words(), "cls", "sep", "bos", "eos")
    assert len(TASK.prompt(settings, bare, "the cat sat on the mat")["source"]) == 4


def test_a_line_holds_two_sentences_as_training_reads_them():
    settings, both = config("similarity"), words()
    line = TASK.input_line({**PAIR, "text": "the\tcat sat"})
    assert line == "the cat sat\ta dog"
    prompt, trained = TASK.prompt(settings, both, line), encoded(settings, both, **PAIR)
    for name in ("source", "segment"):
        np.testing.assert_array_equal(prompt[name], trained[name])
    assert TASK.reference_line(settings, PAIR) == "0.2500"
    for wrong in ("the cat", "a\tb\tc"):
        with pytest.raises(ConfigError, match="expected two sentences with a tab between them"):
            TASK.predict(None, ["a\tb", wrong], settings.decode)


def test_partners_are_pairs_of_a_high_score_or_of_none():
    both = words()
    weight = lambda **example: encoded(contrast(positive=0.5), both, text="a", pair="cat", **example)["weights"]  # noqa: E731
    assert (weight(score=0.49), weight(score=0.5), weight()) == (0.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="without a score .text, pair., expected one for the objective regression"):
        encoded(config("similarity"), both, text="a", pair="cat")


def test_segments_reach_the_batch_with_positions_of_their_own():
    settings, both = config("similarity"), words()
    features = [encoded(settings, both, **PAIR), encoded(settings, both, text="a", pair="the dog ran", score=1.0)]
    batch = packing.collate([[features[0]], [], [features[1]]], 12)
    assert batch.source.slots.segment.tolist() == [[1] * 5 + [2] * 4 + [0] * 3, [0] * 12, [1] * 3 + [2] * 5 + [0] * 4]
    expected = [[*range(5), *range(4), 0, 0, 0], [0] * 12, [*range(3), *range(5), 0, 0, 0, 0]]
    assert batch.source.slots.position.tolist() == expected
    assert (batch.labels.tolist(), batch.labels.dtype) == ([0.25, 0.0, 1.0], np.float32)
    assert batch.weights.tolist() == [1.0, 0.0, 1.0]
    prompted = batching.pad_batch([features[0], features[1]], 2, (0, 0), (12,))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[[0, 2]]), prompted.source, batch.source)


# --- objectives


def test_regression_is_the_squared_error_of_cosine_and_score():
    # cosines 0.8, 0 and, of a vector that is 0, 0; the last row is empty
    vectors = np.float32([[[3.0, 4], [0, 2]], [[1, 0], [0, 5]], [[0, 0], [1, 1]], [[1, 0], [1, 0]]])
    batch = Batch(None, None, np.float32([1.0, 0.5, 0.25, 0]), np.float32([1.0, 1, 1, 0]))

    @jax.jit
    def measure(vectors, batch):
        return TASK.loss(config("similarity"), vectors, batch), TASK.metrics(config("similarity"), vectors, batch)

    for sums in measure(vectors, batch):
        np.testing.assert_allclose(sums["loss"], (0.2**2 + 0.5**2 + 0.25**2, 3), rtol=1e-6)
    halves = [
        measure(vectors[i], Batch(None, None, batch.labels[i], batch.weights[i]))[0] for i in (slice(2), slice(2, None))
    ]
    np.testing.assert_allclose(metrics.add(*jax.device_get(halves))["loss"], sums["loss"], rtol=1e-6)


def test_contrast_is_the_cross_entropy_among_the_others_in_both_directions():
    """Three pairs, the second of a low score: nobody's partner, and everybody's negative. The fourth row is empty."""
    angles = np.array([[0.0, 0.3], [1.0, 2.0], [2.5, 2.4], [0.1, 0.1]])
    vectors = 2 * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    batch = Batch(pairs([1, 2], [1, 2], [1, 2], [0, 0]), None, np.zeros(4, np.float32), np.float32([1, 0, 1, 0]))
    scores = np.cos(angles[:3, :1] - angles[:3, 1]) / 0.5
    there, back = (-np.log(np.exp(np.diag(s)) / np.exp(s).sum(axis=1)) for s in (scores, scores.T))
    wanted = sum((there[i] + back[i]) / 2 for i in (0, 2))
    settings = contrast(temperature=0.5)
    loss, measured = jax.jit(lambda x: (TASK.loss(settings, x, batch), TASK.metrics(settings, x, batch)))(
        vectors.astype(np.float32)
    )
    np.testing.assert_allclose(loss["loss"], (wanted, 2), rtol=1e-5)
    np.testing.assert_allclose(measured["loss"], (wanted, 2), rtol=1e-5)
    nearest = scores.argmax(axis=1)
    assert measured["accuracy"] == (sum(nearest[i] == i for i in (0, 2)), 2)
    assert (nearest == np.arange(3)).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "settings", [config("similarity"), contrast(temperature=1.0)], ids=["regression", "contrastive"]
)
def test_gradients_reach_both_sentences_and_no_empty_row(settings):
    vectors = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    vectors[2] = 0.0
    batch = Batch(pairs([1, 2], [1, 2], [0, 0]), None, np.float32([1.0, 0.2, 0]), np.float32([1.0, 1, 0]))
    slope = np.asarray(jax.jit(jax.grad(lambda v: TASK.loss(settings, v, batch)["loss"][0]))(vectors))
    assert (np.abs(slope[:2]).max(axis=-1) > 1e-3).all()
    assert not slope[2].any()
    # A cosine does not know a length: the slope is at a right angle to the vector.
    np.testing.assert_allclose(np.einsum("bnd,bnd->bn", slope, vectors), 0.0, atol=1e-5)


def test_a_score_correlates_all_results_and_needs_scores():
    settings, examples = config("similarity"), [{"score": s} for s in (0.0, 0.5, 1.0, 0.25)]
    assert TASK.score(settings, [0.1, 0.5, 0.9, 0.2], examples)["spearman"] == pytest.approx(1.0)
    assert TASK.score(settings, [0.1, 0.5, 0.9, 0.2], examples)["pearson"] < 0.999
    assert TASK.score(settings, [0.1], [{"text": "a"}]) == {}


# --- vectors


def models():
    lstm = RecurrentConfig(cell="lstm", width=8, bidirectional=True, embed=builders.stack().embed)
    yield "encoder", builders.encoder(layers=1), "mean"
    yield "decoder", builders.decoder(layers=1), "last"
    yield "lstm", ModelConfig(recurrent_encoder=lstm), "first"


@pytest.mark.parametrize(("name", "model", "pooling"), models(), ids=lambda x: x if isinstance(x, str) else "")
def test_sentences_that_share_a_row_have_the_vectors_of_sentences_alone(name, model, pooling):
    """Packed two by two and padded, or in rows of their own: the same to rounding."""
    model = ModelConfig(
        **{part: getattr(model, part) for part in model.parts}, head=HeadConfig("pair", pooling=pooling)
    )
    module, variables = builders.make(model)
    rng, side = np.random.default_rng(1), "source" if model.decoder is None else "target"
    sentences = [rng.integers(1, builders.VOCAB, n).astype(np.int32) for n in (5, 2, 1, 6)]
    rows = [
        {side: np.concatenate(both), "segment": np.repeat([1, 2], [len(both[0]), len(both[1])])}
        for both in (sentences[:2], sentences[2:])
    ]
    batches = (
        batching.pad_batch(rows, 4, (0, 0), (16,)),
        batching.pad_batch([{side: sentence} for sentence in sentences], 4, (0, 0), (8,)),
    )
    run = jax.jit(lambda variables: [module.apply(variables, batch) for batch in batches])
    packed, alone = jax.device_get(run(variables))
    assert packed.shape == (4, 2, 8)
    np.testing.assert_allclose(packed[:2].reshape(4, 8), alone[:, 0], rtol=1e-5, atol=1e-6)
    assert not packed[2:].any() and not alone[:, 1].any()
    assert np.abs(alone[:, 0] - alone[::-1, 0]).max(axis=1).min() > 0.01


def test_pooling_goes_by_positions_not_by_the_order_of_slots():
    x = np.arange(1, 6, dtype=np.float32)[None, :, None]
    slots = Slots(np.int32([[0, 1, 2, 0, 0]]), np.int32([[1, 1, 1, 2, 0]]))
    order = np.array([2, 4, 3, 1, 0])
    expected = {"first": [1, 4, 0], "last": [3, 4, 0], "mean": [2, 4, 0]}
    pool = jax.jit(lambda x, slots: {how: pool_segments(x, slots, how, 3)[0, :, 0] for how in expected})
    for given in ((x, slots), (x[:, order], jax.tree.map(lambda part: part[:, order], slots))):
        assert {how: found.tolist() for how, found in pool(*given).items()} == expected
