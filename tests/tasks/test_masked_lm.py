"""Masked language modelling: the statistics of BERT's recipe, whole words, frames."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_toys import TEXT, config, encoded, learned, without, words

from jaxformer import tasks
from jaxformer.config import ConfigError, StackConfig, TokenizerConfig, overrides
from jaxformer.tasks import masked_lm
from jaxformer.types import Batch, RelationLogits

TASK = tasks.get("masked_lm")
NUMBERS = " ".join(f"w{i}" for i in range(400))


def test_eighty_ten_ten_of_fifteen_percent():
    both = learned(TokenizerConfig(kind="word", vocab=500), NUMBERS)
    tokenizer = both.source
    features = encoded(config("masked_lm", length=200_000), both, text=" ".join([NUMBERS] * 250))
    chosen = features["weights"] == 1.0
    source, labels = features["source"], features["labels"]
    assert chosen.sum() == 15_000  # exactly 15 % of 100,000
    np.testing.assert_array_equal(source[~chosen], labels[~chosen])
    masked, same = (source[chosen] == tokenizer.mask).mean(), (source[chosen] == labels[chosen]).mean()
    # Four standard errors of a share p of 15,000; of the random tokens one in 400 is the true one.
    assert abs(masked - 0.8) < 4 * np.sqrt(0.8 * 0.2 / 15_000)
    assert abs(same - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 15_000) + 0.1 / 400
    others = source[chosen & (source != tokenizer.mask) & (source != labels)]
    ordinary = set(range(tokenizer.size)) - {getattr(tokenizer, role) for role in masked_lm.SPECIAL_ROLES}
    assert set(others.tolist()) <= ordinary
    assert len(set(others.tolist())) > 0.9 * len(ordinary)  # 1500 draws of 400: 98 % are expected
    places = np.flatnonzero(chosen)
    assert abs(places.mean() / len(chosen) - 0.5) < 0.02  # spread over the text


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 60), rate=st.floats(0.01, 0.9), seed=st.integers(0, 99))
def test_at_least_one_token_is_chosen_and_none_twice(count, rate, seed):
    chosen = masked_lm.choose(count, rate, np.random.default_rng(seed))
    assert len(chosen) == len(set(chosen.tolist())) == max(1, round(count * rate))
    assert chosen.min() >= 0
    assert chosen.max() < count


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_words_are_chosen_whole(sizes, seed):
    starts = np.array([place == 0 for size in sizes for place in range(size)])
    chosen = np.zeros(len(starts), bool)
    chosen[masked_lm.choose(len(starts), 0.3, np.random.default_rng(seed), starts)] = True
    parts = np.split(chosen, np.flatnonzero(starts)[1:])
    assert all(part.all() or not part.any() for part in parts)
    assert chosen.any()
    wanted = max(1, round(0.3 * len(starts)))
    assert chosen.sum() <= wanted or sum(part.any() for part in parts) == 1


def test_whole_words_follow_the_tokenizer():
    both = learned(TokenizerConfig(kind="byte"))
    tokenizer = both.source
    ids = tokenizer.encode(TEXT)
    starts = np.array(tokenizer.word_starts(ids))
    assert 1 < starts.sum() < len(ids)
    settings_ = config("masked_lm", length=200, mask_rate=0.4, whole_words=True)
    weights = encoded(settings_, both, text=TEXT)["weights"][1:-1]
    assert all(len(set(part.tolist())) == 1 for part in np.split(weights, np.flatnonzero(starts)[1:]))
    single = encoded(config("masked_lm", length=200, mask_rate=0.4), both, text=TEXT)["weights"][1:-1]
    assert any(len(set(part.tolist())) == 2 for part in np.split(single, np.flatnonzero(starts)[1:]))


def test_the_frame_is_never_hidden():
    both = words()
    tokenizer = both.source
    for seed in range(10):
        features = encoded(config("masked_lm", mask_rate=0.9), both, seed=seed, text="a cat")
        assert (features["source"][0], features["source"][-1]) == (tokenizer.cls, tokenizer.sep)
        assert (features["weights"][0], features["weights"][-1]) == (0.0, 0.0)
        assert features["labels"].tolist() == [tokenizer.cls, *tokenizer.encode("a cat"), tokenizer.sep]


def test_vocabularies_without_a_frame_have_none_and_without_mask_are_refused():
    features = encoded(config("masked_lm"), without(words(), "cls", "sep"), text="a cat sat")
    assert len(features["source"]) == len(features["weights"]) == 3
    features = encoded(config("masked_lm", length=3), without(words(), "cls"), text="a cat sat")
    assert features["labels"].tolist() == [*words().source.encode("a cat"), words().source.sep]
    with pytest.raises(ConfigError, match="task masked_lm: got a tokenizer without mask token"):
        encoded(config("masked_lm"), without(words(), "mask"), text="a cat")


def test_an_empty_text_predicts_nothing():
    both = words()
    features = encoded(config("masked_lm"), both, text="")
    assert features["source"].tolist() == [both.source.cls, both.source.sep]
    assert not features["weights"].any()


def test_a_prompt_marks_what_to_fill():
    both = words()
    tokenizer = both.source
    source = TASK.prompt(config("masked_lm"), both, "the <mask> sat")["source"]
    the, sat = tokenizer.encode("the sat")
    assert source.tolist() == [tokenizer.cls, the, tokenizer.mask, sat, tokenizer.sep]


def test_another_generator_hides_other_tokens():
    first, second = (encoded(config("masked_lm"), words(), seed=seed, text=TEXT)["weights"] for seed in (0, 1))
    assert (first != second).any()


PAIRED = "the cat sat . on the mat ! a dog ran after it . some other cats in our garden"
OTHER = "w1 w2 . w3 w4 w5 w6 w7 w8 w9 w10"


def paired(relation, both, seed, text=PAIRED, other=OTHER, **options):
    features = encoded(config("masked_lm", kinds=2, relation=relation, **options), both, seed, text=text, other=other)
    parts = [features["labels"][features["token_type"] == kind].tolist() for kind in (0, 1)]
    tokenizer = both.source
    assert parts[0][0] == tokenizer.cls and parts[0].pop() == parts[1].pop() == tokenizer.sep
    return features, parts[0][1:], parts[1]


def test_sentences_follow_each_other_or_are_swapped():
    both, seen = words(PAIRED), []
    ids = both.source.encode(PAIRED)
    borders = np.flatnonzero(both.source.sentence_starts(ids))[1:].tolist()
    assert borders == [4, 8, 14]
    for seed in range(200):
        features, first, second = paired("sentence_order", both, seed)
        swapped = int(features["relation"])
        whole = [*second, *first] if swapped else [*first, *second]
        assert whole == ids and len(second if swapped else first) in borders
        seen.append((swapped, len(first)))
    assert len(set(seen)) == 6 and abs(np.mean([swapped for swapped, _ in seen]) - 0.5) < 0.15


def test_the_second_part_follows_or_is_of_another_text():
    both, labels = words(f"{PAIRED} {OTHER}"), []
    ids, others = both.source.encode(PAIRED), both.source.encode(OTHER)
    starts = {0, 3}
    for seed in range(200):
        features, first, second = paired("next_sentence", both, seed)
        label = int(features["relation"])
        labels.append(label)
        assert first == ids[: len(first)]
        if label == 0:
            assert [*first, *second] == ids
        else:
            assert any(second == others[s : s + len(ids) - len(first)] for s in starts)
    assert set(labels) == {0, 1} and abs(np.mean(labels) - 0.5) < 0.15
    _, first, second = paired("next_sentence", both, 0, text="", other=OTHER)
    assert first == second == []


def test_one_sentence_is_divided_anywhere_and_one_token_is_no_pair():
    both, borders = words(), set()
    ids = both.source.encode("the cat sat on the mat")
    for seed in range(60):
        features, first, second = paired("sentence_order", both, seed, text="the cat sat on the mat")
        borders.add(len(second if int(features["relation"]) else first))
    assert borders == set(range(1, len(ids)))
    for text in ("", "cat"):
        assert int(paired("next_sentence", both, 0, text=text)[0]["relation"]) == -1
    relations = {int(paired("next_sentence", both, s, text="the cat", other="")[0]["relation"]) for s in range(20)}
    assert relations == {-1, 0}


def test_a_pair_is_truncated_to_the_row_and_its_frame_is_never_hidden():
    both = words(PAIRED)
    count = len(both.source.encode(PAIRED))
    for seed in range(20):
        features, first, second = paired("next_sentence", both, seed, length=10, mask_rate=0.9, whole_words=True)
        assert len(features["source"]) <= 10 and len(first) + len(second) <= 7
        assert int(features["cut"]) == count - 7
        special = np.isin(features["labels"], [both.source.cls, both.source.sep])
        np.testing.assert_array_equal(features["source"][special], features["labels"][special])
        assert not features["weights"][special].any() and features["weights"].any()


def test_all_positions_are_labels_and_as_many_are_hidden():
    both = words()
    for relation in ("none", "sentence_order"):
        settings_ = config("masked_lm", kinds=2, relation=relation, all_positions=True)
        features = encoded(settings_, both, text=TEXT)
        chosen = encoded(config("masked_lm", kinds=2, relation=relation), both, text=TEXT)
        np.testing.assert_array_equal(features["source"], chosen["source"])
        special = np.isin(features["labels"], [both.source.cls, both.source.sep])
        np.testing.assert_array_equal(features["weights"], 1.0 - special)
        assert (chosen["weights"] <= features["weights"]).all() and chosen["weights"].sum() == 3


def test_the_loss_of_both_outputs_is_a_sum_over_rows():
    """Against numpy: a row's relation counts as often as it has labels, one without a relation not at all."""
    rng = np.random.default_rng(0)
    tokens, relation = rng.standard_normal((4, 3, 5)).astype(np.float32), rng.standard_normal((4, 2)).astype(np.float32)
    labels, weights = rng.integers(5, size=(4, 3)).astype(np.int32), np.float32(rng.random((4, 3)) > 0.4)
    known = np.array([1, -1, 0, 0], np.int32)
    batch = Batch(None, None, labels, weights, known)
    settings_ = config("masked_lm", relation="next_sentence")
    both = jax.jit(lambda logits, batch: [task(settings_, logits, batch) for task in (TASK.loss, TASK.metrics)])
    sums = both(RelationLogits(tokens, relation), batch)
    loss, measures = ({name: (float(a), float(b)) for name, (a, b) in found.items()} for found in sums)
    nll = np.log(np.exp(tokens).sum(-1)) - np.take_along_axis(tokens, labels[..., None], -1)[..., 0]
    rows = np.log(np.exp(relation).sum(-1)) - relation[np.arange(4), np.maximum(known, 0)]
    real = known >= 0
    total = (nll * weights).sum() + (rows * real * weights.sum(-1)).sum()
    np.testing.assert_allclose(loss["loss"], (total, weights.sum()), rtol=1e-5)
    np.testing.assert_allclose(measures["loss"], ((nll * weights).sum(), weights.sum()), rtol=1e-5)
    np.testing.assert_allclose(measures["relation_loss"], (rows[real].sum(), 3), rtol=1e-5)
    right = (relation.argmax(-1) == known)[real].sum()
    assert measures["relation_accuracy"] == (right, 3)
    with pytest.raises(ConfigError, match="got no relation, expected one for each row"):
        TASK.loss(settings_, RelationLogits(tokens, relation), batch._replace(relation=None))


def test_a_prompt_of_two_parts_has_a_tab():
    both = words()
    tokenizer, settings_ = both.source, config("masked_lm", kinds=2, relation="next_sentence")
    the, cat, sat = tokenizer.encode("the cat sat")
    prompt = TASK.prompt(settings_, both, "the <mask>\tcat sat")
    assert prompt["source"].tolist() == [tokenizer.cls, the, tokenizer.mask, tokenizer.sep, cat, sat, tokenizer.sep]
    assert prompt["token_type"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert TASK.prompt(settings_, both, "the cat")["source"].tolist()[:3] == [tokenizer.cls, the, cat]


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (("task.relation=next_sentence",), "task.relation: got 'next_sentence', expected none without .*head.relation"),
        (("model.head.relation=true",), "task.relation: got 'none', expected next_sentence or sentence_order with"),
        (("model.head.relation=true", "task.name=none"), ""),
    ],
)
def test_the_relation_and_its_head_go_together(edits, message):
    arguments = ["--config=configs/bert_mlm.py", *(f"--config.{edit}" for edit in edits)]
    if not message:
        overrides.parse(arguments)
        return
    with pytest.raises(ConfigError, match=message):
        overrides.parse(arguments)


def test_running_text_has_no_relation():
    made = overrides.defaults()
    made.task.name, made.task.relation, made.data.packing = "masked_lm", "next_sentence", "concat"
    made.model.encoder = overrides.section(StackConfig, embed=dict(kinds=2))
    made.model.head.relation = True
    with pytest.raises(ConfigError, match="data.packing: got 'concat', expected none with task.relation next_sentence"):
        overrides.freeze(made)
