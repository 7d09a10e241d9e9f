"""Tagging: which token carries a word's tag, what is judged, and what becomes of words without a token."""

import dataclasses
import types

import numpy as np
import pytest
from task_toys import config, encoded, learned, without, words

from jaxformer import tasks
from jaxformer.config import CheckpointConfig, ConfigError, TokenizerConfig
from jaxformer.tasks import tagging

TASK = tasks.get("tagging")
TEXT = "the cat sat"


def pieces():
    """Words fall into several tokens each."""
    return learned(TokenizerConfig(kind="bpe", vocab=270))


def named(*classes, **fields):
    return config("tagging", classes=classes, **fields)


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe", "unigram"])
def test_the_first_token_of_a_word_carries_its_tag_with_every_tokenizer(kind):
    both = learned(TokenizerConfig(kind=kind, vocab=270))
    features = encoded(config("tagging", length=64), both, text="the garden cats", tags=(3, 1, 2))
    judged = np.flatnonzero(features["weights"])
    assert features["labels"][judged].tolist() == [3, 1, 2]
    assert both.source.decode(features["source"]).split() == ["the", "garden", "cats"]
    bounds = [*judged, len(features["source"])]
    for word, begin, end in zip(("the", "garden", "cats"), bounds[:-1], bounds[1:], strict=True):
        assert both.source.decode(features["source"][begin:end]).strip() == word


def test_other_tokens_are_not_judged():
    features = encoded(config("tagging"), pieces(), text="the garden", tags=(1, 2))
    assert len(features["source"]) > 4
    assert features["weights"].sum() == 2
    assert not features["labels"][features["weights"] == 0].any()


def test_a_prompt_is_read_as_in_training():
    settings = config("tagging")
    for both in (words(), pieces(), without(words(), "cls", "sep")):
        trained = encoded(settings, both, text=TEXT, tags=(0, 1, 2))
        np.testing.assert_array_equal(TASK.prompt(settings, both, TEXT)["source"], trained["source"])
    decoder = TASK.prompt(config("tagging", side="decoder"), words(), TEXT)
    assert set(decoder) == {"target"}


def test_a_word_that_is_cut_off_or_unknown_to_a_vocabulary_has_no_slot():
    both = words()
    ids, places, cut = tagging.encode_words(config("tagging", length=4), both.source, TEXT)
    assert len(ids) == 4
    assert (places, cut) == ([1, 2, None], 1)
    assert tagging.encode_words(config("tagging"), both.source, "the zebra")[1] == [1, 2], "<unk> stands for it"
    nothing = types.SimpleNamespace(encode=lambda word: [] if "?" in word else [7, 8], unk=None, cls=None, sep=None)
    ids, places, cut = tagging.encode_words(config("tagging"), nothing, "the ? cat")
    assert (ids.tolist(), places, cut) == ([7, 8, 7, 8], [0, None, 2], 0)


def test_as_many_tags_as_words():
    message = "tagging: got 2 tags for 'the cat sat', expected 3, one a word"
    with pytest.raises(ConfigError, match=message):
        encoded(config("tagging"), words(), text=TEXT, tags=(0, 1))


def refused(classes, metric="loss"):
    settings = named(*classes)
    TASK.check(dataclasses.replace(settings, checkpoint=CheckpointConfig(metric=metric)))


@pytest.mark.parametrize("metric", ["f1", "precision", "recall", "loss", "accuracy"])
@pytest.mark.parametrize("classes", [("O", "B-x", "I-x"), ("O", "B-x", "E-x", "I-x", "S-x"), ("O", "I-x")])
def test_tags_of_all_three_schemes_are_judged_as_entities(classes, metric):
    refused(classes, metric)


def test_tags_that_cannot_be_judged_are_refused_before_training():
    with pytest.raises(ConfigError, match="tagging: got the tags L-x, U-x among tags of entities, expected O and tags"):
        refused(("O", "B-x", "I-x", "L-x", "U-x"))
    with pytest.raises(ConfigError, match=r"checkpoint.metric: got 'f1', which is of entities, and tags .*ADJ, NOUN"):
        refused(("ADJ", "NOUN"), "f1")
    with pytest.raises(ConfigError, match="got 'word_accuracy', which is of tags that mark no entities"):
        refused(("O", "B-x", "I-x"), "word_accuracy")
    refused(("ADJ", "NOUN"), "word_accuracy")
    refused((), "loss")


def test_blanks_in_a_row_make_no_words():
    assert tagging.split_words("  the   cat\u00a0s ") == ["the", "cat\u00a0s"]


def test_a_score_counts_entities_of_all_sentences_together():
    settings = named("O", "B-x", "I-x")
    answer = [[{"label": "B-x"}, {"label": "I-x"}, {"label": "O"}], [{"label": "B-x"}]]
    examples = [{"text": "a b c", "tags": (1, 2, 1)}, {"text": "d", "tags": (1,)}]
    score = TASK.score(settings, answer, examples)
    assert score == {"precision": 1.0, "recall": 2 / 3, "f1": 0.8}
    assert TASK.reference_line(settings, examples[0]) == "B-x I-x B-x"


def test_tags_that_are_no_spans_are_counted_word_by_word():
    settings = named("ADJ", "NOUN")
    answer = [[{"label": "ADJ"}, {"label": "NOUN"}], [{"label": "NOUN"}]]
    score = TASK.score(settings, answer, [{"tags": (0, 1)}, {"tags": (0,)}])
    assert score == {"word_accuracy": 2 / 3}
