"""Translation: alignment, cuts, and scores with their signatures."""

import dataclasses

import builders
import numpy as np
import pytest
from task_toys import config, encoded, learned, without, words

from jaxformer import tasks
from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.config.checks import sections

TASK = tasks.get("translation")


def test_labels_are_the_tokens_after_the_targets():
    both = words()
    side = both.source
    features = encoded(config("translation"), both, source="a cat", target="the cat sat")
    ids = side.encode("the cat sat")
    assert features["source"].tolist() == [*side.encode("a cat"), side.eos]
    assert features["target"].tolist() == [side.bos, *ids]
    assert features["labels"].tolist() == [*ids, side.eos]
    np.testing.assert_array_equal(features["labels"][:-1], features["target"][1:])
    assert features["weights"].tolist() == [1.0] * 4


@pytest.mark.parametrize(("length", "ends"), [(3, False), (4, True), (5, True)])
def test_a_cut_target_does_not_end_and_a_cut_source_does(length, ends):
    both = words()
    features = encoded(config("translation", length), both, source="the cat sat on it", target="the cat sat")
    assert len(features["target"]) == len(features["labels"]) == min(length, 4)
    assert (features["labels"][-1] == both.target.eos) == ends
    assert len(features["source"]) == length
    assert features["source"][-1] == both.source.eos


def test_empty_sides_keep_their_ends():
    both = words()
    features = encoded(config("translation"), both, source="", target="")
    assert features["source"].tolist() == [both.source.eos]
    assert (features["target"].tolist(), features["labels"].tolist()) == ([both.target.bos], [both.target.eos])


def test_a_prompt_knows_the_source_and_the_start():
    both = words()
    prompt = TASK.prompt(config("translation"), both, "a cat")
    assert prompt["source"].tolist() == [*both.source.encode("a cat"), both.source.eos]
    assert prompt["target"].tolist() == [both.target.bos]


def test_a_vocabulary_without_a_start_starts_at_its_end_and_one_without_an_end_is_refused():
    both = without(words(), "bos")
    assert encoded(config("translation"), both, source="a", target="cat")["target"][0] == both.target.eos
    with pytest.raises(ConfigError, match="task translation: got a tokenizer without bos or eos token"):
        encoded(config("translation"), without(words(), "bos", "eos"), source="a", target="cat")


def test_sides_use_their_own_vocabularies():
    mixed = type(words())(words("a cat").source, learned(TokenizerConfig(kind="byte")).target)
    features = encoded(config("translation"), mixed, source="a cat", target="cat")
    assert len(features["source"]) == 3
    assert features["target"].tolist() == [mixed.target.bos, *mixed.target.encode("cat")]
    assert len(features["target"]) == 4


def test_scores_and_their_signatures():
    examples = [{"source": "x", "target": "Ein Hund läuft im Park ."}, {"source": "y", "target": "Zwei"}]
    plain = TASK.score(config("translation"), ["Ein Hund läuft im Park .", "zwei"], examples)
    assert set(plain) == {"bleu", "chrf", "exact_match"}
    assert plain["exact_match"] == 0.5
    settings = config("translation", language="de")
    scores = TASK.score(settings, ["Ein Hund läuft im Park .", "zwei"], examples)
    assert scores["bleu_lc_tok"] == pytest.approx(100.0)
    assert scores["bleu"] == plain["bleu"] < 100.0
    signatures = TASK.score_signatures(settings)
    assert set(signatures) == {"bleu", "chrf", "bleu_lc_tok"}
    assert "tok:13a" in signatures["bleu"]
    assert "tok:none" in signatures["bleu_lc_tok"]


def test_bleu_is_left_out_where_no_reference_has_four_words():
    """Perfect text would have a BLEU of 0."""
    few = [{"source": "x", "target": "Zwei Hunde."}, {"source": "y", "target": "drei"}]
    settings = config("translation", language="de")
    assert TASK.score(settings, ["Zwei Hunde.", "drei"], few) == {"chrf": 100.0, "exact_match": 1.0}
    enough = [*few, {"source": "z", "target": "Zwei Hunde laufen."}]  # the full stop is the fourth
    scores = TASK.score(settings, ["Zwei Hunde.", "drei", "Zwei Hunde laufen."], enough)
    assert scores["bleu"] == pytest.approx(100.0) and scores["bleu_lc_tok"] == pytest.approx(100.0)
    # A hypothesis that is too short is an error of the model, not of the measure.
    assert TASK.score(settings, ["Zwei Hunde.", "drei", "Zwei"], enough)["bleu"] == 0.0


def pairs(name, language):
    return dataclasses.replace(config(name, language=language), model=builders.seq2seq())


def test_languages_with_words_of_their_own(monkeypatch):
    chinese = config("translation", language="zh")
    assert TASK.score(chinese, ["猫坐在垫子上"], [{"target": "猫坐在垫子上"}])["bleu"] == pytest.approx(100.0)
    assert set(TASK.score_signatures(chinese)) == {"bleu", "chrf"}
    sections.check_task(pairs("translation", "zh"))
    monkeypatch.setattr(sections.importlib.util, "find_spec", lambda name: None)
    expected = r"task.language: got 'ja', expected .* the package MeCab; install it: pip install 'sacrebleu\[ja\]'"
    with pytest.raises(ConfigError, match=expected):
        sections.check_task(pairs("translation", "ja"))
    with pytest.raises(ConfigError, match="task.language: got 'de', expected '' for the task summarisation"):
        sections.check_task(pairs("summarisation", "de"))


def test_perplexity_is_of_the_bare_loss():
    assert TASK.derived_metrics(config("translation"), {"loss": np.log(4.0)}, {})["perplexity"] == pytest.approx(4.0)
