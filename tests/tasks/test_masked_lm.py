"""Masked language modelling: the statistics of BERT's recipe, whole words, frames."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_toys import TEXT, config, encoded, learned, without, words

from jaxformer import tasks
from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.tasks import masked_lm

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
