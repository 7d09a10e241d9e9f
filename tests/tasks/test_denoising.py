"""Denoising: what each kind of noise keeps, and the statistics of the spans."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from task_toys import TEXT, config, encoded, words

from jaxformer import tasks
from jaxformer.config import ConfigError, overrides
from jaxformer.tasks import denoising

TASK = tasks.get("denoising")
MASK = 4
NOISELESS = dict(infilling=0.0, permutation=0.0)
SENTENCES = "the cat sat . a dog ran after it ! some other cats in our garden . on the mat ?"

sizes, seeds, rates = st.integers(0, 50), st.integers(0, 10**6), st.floats(0.0, 0.95)


def drawn(size, seed):
    """Distinct ids, so that each can be followed, and a generator."""
    rng = np.random.default_rng(seed)
    return rng.permutation(np.arange(100, 100 + size)).astype(np.int32), rng


@hypothesis_settings(max_examples=80, deadline=None)
@given(size=sizes, seed=seeds, rate=rates, mean=st.floats(1.0, 5.0))
def test_infilling_keeps_all_other_tokens_in_order(size, seed, rate, mean):
    ids, rng = drawn(size, seed)
    noisy = denoising.infill(ids, rate, mean, MASK, rng)
    kept = noisy[noisy != MASK]
    assert len(kept) == size - round(rate * size)
    positions = [int(np.flatnonzero(ids == token)[0]) for token in kept]
    assert positions == sorted(positions)
    missing = np.setdiff1d(np.arange(size), positions)
    if len(missing):  # every run of missing tokens has a mask in its place
        before = np.cumsum(noisy != MASK)
        runs = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1)
        for run in runs:
            index = np.searchsorted(positions, run[0])
            assert ((before == index) & (noisy == MASK)).any()
    else:
        assert (noisy == MASK).sum() == 0


def test_spans_have_poisson_lengths_and_empty_ones_insert_a_mask():
    rng, lengths = np.random.default_rng(0), []
    for _ in range(200):
        lengths += denoising._span_lengths(300, 3.0, rng)[:-1]  # the last one may be shortened
    lengths = np.array(lengths)
    assert abs(lengths.mean() - 3.0) < 4 * np.sqrt(3.0 / len(lengths))
    assert abs((lengths == 0).mean() - np.exp(-3.0)) < 4 * np.sqrt(np.exp(-3.0) / len(lengths))
    inserted = denoising.infill(np.arange(100, 400, dtype=np.int32), 0.3, 1.0, MASK, rng)
    spans = 300 - (len(inserted) - (inserted == MASK).sum())
    assert spans == 90 and (inserted == MASK).sum() > 90 / 1.0 * 0.7


def test_spans_are_anywhere_in_the_text():
    """Of four tokens one is dropped: first to last are as likely."""
    rng, ids, seen = np.random.default_rng(0), np.arange(100, 104, dtype=np.int32), Counter()
    for _ in range(4000):
        noisy = denoising.infill(ids, 0.25, 50.0, MASK, rng)
        assert len(noisy) == 4
        seen[int(np.flatnonzero(noisy == MASK)[0])] += 1
    assert max(abs(seen[place] - 1000) for place in range(4)) < 4 * np.sqrt(4000 * 0.25 * 0.75)


@hypothesis_settings(max_examples=60, deadline=None)
@given(size=sizes, seed=seeds, rate=rates)
def test_masking_and_deletion_take_their_share_of_ordinary_tokens(size, seed, rate):
    ids, rng = drawn(size, seed)
    ids[rng.random(size) < 0.2] = MASK
    ordinary = int((ids != MASK).sum())
    masked = denoising.mask_tokens(ids, rate, MASK, rng)
    assert (masked != ids).sum() == round(rate * ordinary)
    assert set(masked[masked != ids].tolist()) <= {MASK}
    left = denoising.delete_tokens(ids, rate, MASK, rng).tolist()
    assert len(left) == size - round(rate * ordinary)
    assert left.count(MASK) == (ids == MASK).sum()
    rest = iter(ids.tolist())
    assert all(token in rest for token in left)  # a subsequence


@hypothesis_settings(max_examples=60, deadline=None)
@given(size=sizes, seed=seeds, fraction=st.floats(0.0, 1.0))
def test_permutation_moves_sentences_whole_and_rotation_turns_the_text(size, seed, fraction):
    ids, rng = drawn(size, seed)
    starts = rng.random(size) < 0.3
    starts[:1] = True
    sentences = [part.tolist() for part in np.split(ids, np.flatnonzero(starts)[1:])]
    moved = denoising.permute_sentences(ids, starts, fraction, rng).tolist()
    found, rest = [], moved
    while rest:
        (sentence,) = [s for s in sentences if s and s[0] == rest[0]]
        assert rest[: len(sentence)] == sentence
        found.append(sentences.index(sentence))
        rest = rest[len(sentence) :]
    assert sorted(found) == list(range(len(found))) and sum(map(len, sentences)) == len(moved)
    stay = sum(place == number for place, number in enumerate(found))
    assert stay >= len(sentences) - round(fraction * len(sentences)) or not size
    turned = denoising.rotate(ids, rng).tolist()
    assert len(turned) == size and any(turned == [*ids[n:], *ids[:n]] for n in range(max(size, 1)))


def test_all_sentences_move_and_every_order_comes():
    ids, starts = np.arange(3, dtype=np.int32), np.ones(3, bool)
    orders = {tuple(denoising.permute_sentences(ids, starts, 1.0, np.random.default_rng(s))) for s in range(60)}
    assert len(orders) == 6
    assert {int(denoising.rotate(ids, np.random.default_rng(s))[0]) for s in range(30)} == {0, 1, 2}


def test_sentences_are_the_tokenizers():
    both = words(SENTENCES)
    settings = config("denoising", **NOISELESS | {"permutation": 1.0})
    source = encoded(settings, both, seed=3, text=SENTENCES)["source"][:-1]
    parts = [part.strip() for part in SENTENCES.replace("!", ".").replace("?", ".").split(".") if part]
    read = both.source.decode(source).replace("!", ".").replace("?", ".").split(".")
    assert sorted(part.strip() for part in read if part) == sorted(parts)
    assert both.source.decode(source) != SENTENCES


def test_noise_is_composed_and_the_target_is_the_text():
    both = words()
    ids = both.source.encode(TEXT)
    settings = config("denoising", infilling=0.3, masking=0.2, deletion=0.2, rotation=1.0)
    features = encoded(settings, both, text=TEXT)
    assert features["target"].tolist() == [both.target.bos, *ids]
    assert features["labels"].tolist() == [*ids, both.target.eos]
    noisy = features["source"].tolist()
    assert noisy.pop() == both.source.eos and set(noisy) - {both.source.mask} < set(ids)
    assert both.source.mask in noisy
    same = encoded(config("denoising", **NOISELESS | {"rotation": 1e-9}), both, text=TEXT)
    assert same["source"].tolist() == [*ids, both.source.eos]


def test_a_truncated_text_has_no_end_and_counts():
    features = encoded(config("denoising", length=6, **NOISELESS, deletion=0.5), words(), text=TEXT)
    assert len(features["labels"]) == 6 and words().target.eos not in features["labels"]
    assert int(features["cut"]) == len(words().source.encode(TEXT)) + 1 - 6
    assert features["source"][-1] == words().source.eos
    inserting = [
        encoded(
            config("denoising", length=6, infilling=0.5, span=1.0), words(), seed=seed, text=" ".join(TEXT.split()[:4])
        )
        for seed in range(40)
    ]
    assert all(len(f["source"]) <= 6 for f in inserting) and any("cut" in f for f in inserting)


def test_windows_hold_the_complete_text_and_end_once():
    both = words()
    for length in (5, 6, 7):
        windows = TASK.encode_windows(
            config("denoising", length=length), both, {"text": TEXT}, np.random.default_rng(0)
        )
        labels = np.concatenate([window["labels"] for window in windows]).tolist()
        assert labels == [*both.source.encode(TEXT), both.source.eos]
        assert all(len(window["labels"]) <= length and "cut" not in window for window in windows)


def test_only_noise_with_masks_needs_one():
    both = words()
    both.source.mask = None
    encoded(config("denoising", **NOISELESS, deletion=0.2, rotation=1.0), both, text=TEXT)
    with pytest.raises(ConfigError, match="task denoising: got a tokenizer without mask token"):
        encoded(config("denoising"), both, text=TEXT)


def test_no_noise_is_refused():
    edits = ["--config.task.infilling=0", "--config.task.permutation=0"]
    with pytest.raises(ConfigError, match="config.task.infilling: got 0.0, expected some noise"):
        overrides.parse(["--config=configs/denoising.py", *edits])


def test_a_sample_is_a_corrupted_line_and_the_text():
    both = words()
    sample = TASK.sample(config("denoising"), both, {"text": TEXT}, np.random.default_rng(0))
    assert sample.reference == TEXT and "<mask>" in sample.input
    assert both.source.mask in TASK.prompt(config("denoising"), both, sample.input)["source"]
