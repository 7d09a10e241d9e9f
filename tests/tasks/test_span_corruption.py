"""Span corruption: the statistics of T5's noise, and that source and target together are the text."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from task_toys import TEXT, config, encoded, learned, words

from jaxformer import tasks
from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import span_corruption

TASK = tasks.get("span_corruption")


def restored(source, spans, sentinels):
    """The text of a source and a target, without their end tokens: each sentinel gives way to what follows it."""
    numbers = {sentinel: number for number, sentinel in enumerate(sentinels)}
    missing: list[list[int]] = []
    for token in spans:
        if token in numbers:
            assert numbers[token] == len(missing), "sentinels count up from <extra_id_0>"
            missing.append([])
        else:
            missing[-1].append(token)
    text: list[int] = []
    used = 0
    for token in source:
        if token in numbers:
            assert numbers[token] == used
            text += missing[used]
            used += 1
        else:
            text.append(token)
    assert used == len(missing)
    return text


@hypothesis_settings(max_examples=100, deadline=None)
@given(size=st.integers(0, 60), rate=st.floats(0.05, 0.9), mean=st.floats(1.0, 6.0), seed=st.integers(0, 10**6))
def test_source_and_target_are_the_text(size, rate, mean, seed):
    rng = np.random.default_rng(seed)
    ids, sentinels = rng.integers(0, 50, size).astype(np.int32), np.arange(199, 99, -1)
    dropped = span_corruption.noise_mask(size, rate, mean, rng)
    source = span_corruption.corrupt(ids, dropped, sentinels)
    spans = span_corruption.corrupt(ids, ~dropped, sentinels) if dropped.any() else []
    assert restored(source, spans, sentinels.tolist()) == ids.tolist()
    count, number = span_corruption.counts(size, rate, mean)
    runs = [key for key, _ in itertools.groupby(dropped.tolist())]
    assert dropped.sum() == count and runs.count(True) == number
    if size >= 2:  # as in T5's code: kept tokens first, dropped ones last, at least one of each
        assert runs == [False, True] * number and number >= 1
        assert count == min(max(round(size * rate), 1), size - 1)


def test_the_numbers_are_the_papers():
    """15 % in spans of mean length 3: T5's rows of 512 slots hold 568 tokens of text, 85 of them dropped."""
    assert span_corruption.row_length(config("span_corruption", length=512)) == 568
    assert span_corruption.counts(568, 0.15, 3.0) == (85, 28)
    assert 568 - 85 + 28 + 1 == 512


def test_every_division_into_spans_is_as_likely():
    """All ways to divide 5 dropped and 3 kept tokens into 2 spans: 4 times 2."""
    rng, seen = np.random.default_rng(0), Counter()
    for _ in range(4000):
        seen[tuple(span_corruption.noise_mask(8, 0.625, 2.5, rng).tolist())] += 1
    assert len(seen) == 8
    assert max(abs(count - 500) for count in seen.values()) < 4.5 * np.sqrt(500)


def test_features_are_the_frame_of_an_encoder_decoder():
    both = words()
    tokenizer = both.source
    features = encoded(config("span_corruption", length=32), both, text=TEXT)
    source, spans = features["source"].tolist(), features["labels"].tolist()
    assert source.pop() == spans.pop() == tokenizer.eos
    assert restored(source, spans, tokenizer.sentinels) == tokenizer.encode(TEXT)
    assert features["target"].tolist() == [tokenizer.bos, *spans]
    assert (features["weights"] == 1).all()
    assert tokenizer.sentinels[0] == tokenizer.size - 1 and spans[0] == tokenizer.size - 1


def test_a_row_is_as_full_as_its_length_and_the_rest_counts():
    both = words()
    for length in range(6, 16):
        features = encoded(config("span_corruption", length=length), both, text=TEXT)
        assert length - 1 <= len(features["source"]) <= length and len(features["target"]) <= length
        kept = span_corruption.row_length(config("span_corruption", length=length))
        assert int(features["cut"]) == len(both.source.encode(TEXT)) - kept > 0


def test_windows_hold_the_complete_text():
    both, rng = words(), np.random.default_rng(0)
    windows = TASK.encode_windows(config("span_corruption", length=8), both, {"text": TEXT}, rng)
    parts = [
        restored(window["source"].tolist()[:-1], window["labels"].tolist()[:-1], both.source.sentinels)
        for window in windows
    ]
    assert list(itertools.chain(*parts)) == both.source.encode(TEXT) and len(parts) > 1


@pytest.mark.parametrize("text", ["", "cat"])
def test_a_text_without_room_for_a_span_predicts_nothing(text):
    features = encoded(config("span_corruption"), words(), text=text)
    assert features["source"].tolist() == [*words().source.encode(text), words().source.eos]
    assert not features["weights"].any() and len(features["labels"]) == len(features["target"]) == 1


def test_missing_sentinels_are_refused_with_their_number():
    few = learned(TokenizerConfig(kind="word", vocab=100, sentinels=2))
    with pytest.raises(ConfigError, match=r"2 sentinels .*expected 7 for rows of 128 tokens.*sentinels=7"):
        encoded(config("span_corruption", length=128), few, text="a")
    enough = learned(TokenizerConfig(kind="word", vocab=100, sentinels=7))
    encoded(config("span_corruption", length=128), enough, text="a")


def test_two_vocabularies_are_refused():
    one, other = words().source, words().source
    with pytest.raises(ConfigError, match="task span_corruption: got a tokenizer for each side"):
        encoded(config("span_corruption"), Tokenizers(one, other), text="a")


def test_a_prompt_reads_sentinels_by_name():
    both = words()
    tokenizer = both.source
    source = TASK.prompt(config("span_corruption"), both, "the <extra_id_0> sat <extra_id_1>")["source"].tolist()
    the, sat = tokenizer.encode("the sat")
    assert source == [the, tokenizer.sentinels[0], sat, tokenizer.sentinels[1], tokenizer.eos]


def test_a_sample_is_a_line_to_fill_and_its_spans():
    both, rng = words(), np.random.default_rng(0)
    sample = TASK.sample(config("span_corruption"), both, {"text": TEXT}, rng)
    assert sample.reference.startswith("<extra_id_0> ") and "<extra_id_0>" in sample.input
    prompt = TASK.prompt(config("span_corruption"), both, sample.input)["source"].tolist()
    spans = both.source.parse(sample.reference)
    assert restored(prompt[:-1], spans, both.source.sentinels) == both.source.encode(TEXT)
