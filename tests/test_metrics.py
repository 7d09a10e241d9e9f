"""Sums that add up, and scores against values worked out by hand."""

import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import metrics

MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k_en_de"


def logits_of(predictions, classes):
    """Logits whose highest entry is the prediction."""
    return jnp.asarray(np.eye(classes, dtype=np.float32)[np.asarray(predictions)])


class Counts(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_accuracy_counts_weighted_hits(self):
        labels, weights = jnp.array([[0, 2, 1, 1]]), jnp.array([[1.0, 1.0, 1.0, 0.0]])
        hits, count = self.variant(metrics.accuracy)(logits_of([[0, 2, 0, 1]], 3), labels, weights)
        assert (float(hits), float(count)) == (2.0, 3.0)

    @chex.variants(with_jit=True, without_jit=True)
    def test_macro_f1_of_a_confusion_matrix(self):
        # rows true, columns predicted:   a b c      class d never occurs and doesn't count
        #                               a 2 1 0
        #                               b 0 1 0
        #                               c 1 0 0
        labels, predicted = jnp.array([0, 0, 0, 1, 2, 3]), [0, 0, 1, 1, 0, 3]
        weights = jnp.array([1.0, 1, 1, 1, 1, 0])
        pair = self.variant(metrics.f1)(logits_of(predicted, 4), labels, weights)
        chex.assert_trees_all_equal(pair, (jnp.array([4.0, 2, 0, 0]), jnp.array([6.0, 3, 1, 0])))
        precision, recall = np.array([2 / 3, 1 / 2]), np.array([2 / 3, 1.0])
        wanted = np.mean([*(2 * precision * recall / (precision + recall)), 0.0])
        np.testing.assert_allclose(metrics.divide({"f1": pair})["f1"], wanted, rtol=1e-7)


def test_untrained_logits_are_not_all_right():
    assert float(metrics.accuracy(jnp.zeros((4, 3)), jnp.array([0, 1, 2, 2]), jnp.ones(4))[0]) == 1.0


def test_labels_without_weight_count_for_no_class():
    pair = metrics.f1(logits_of([0, 1], 2), jnp.array([0, -100]), jnp.array([1.0, 0.0]))
    chex.assert_trees_all_equal(pair, (jnp.array([2.0, 0.0]), jnp.array([2.0, 0.0])))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_parts_of_a_corpus_add_up(seed):
    rng = np.random.default_rng(seed)
    predicted, labels = rng.integers(3, size=(2, 8))
    weights = (rng.random(8) > 0.3).astype(np.float32)

    def sums(part):
        given_ = (logits_of(predicted[part], 3), jnp.asarray(labels[part]), jnp.asarray(weights[part]))
        return jax.device_get({"accuracy": metrics.accuracy(*given_), "f1": metrics.f1(*given_)})

    parts = metrics.add(sums(slice(4)), sums(slice(4, None)))
    whole = sums(slice(None))
    chex.assert_trees_all_equal(jax.tree.map(np.float64, parts), jax.tree.map(np.float64, whole))
    np.testing.assert_equal(metrics.divide(parts), metrics.divide(whole))


def test_counts_beyond_float32_stay_exact():
    much, one = np.float32(2**24), np.float32(1)
    total = metrics.add({"loss": (much, much)}, {"loss": (one, one)})
    assert [int(part) for part in total["loss"]] == [2**24 + 1, 2**24 + 1]


def test_sums_of_different_measures_do_not_add():
    with pytest.raises(ValueError, match=r"sums: got \['b'\], expected \['a'\]"):
        metrics.add({"a": (1.0, 1.0)}, {"b": (1.0, 1.0)})


def test_division_happens_once():
    sums = {"loss": (np.array(3.0), np.array(4.0)), "none": (np.array(0.0), np.array(0.0))}
    values = metrics.divide(sums)
    assert values["loss"] == 0.75
    assert math.isnan(values["none"])


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=12))
def test_correlations_are_scipys_ties_included(pairs):
    x, y = np.array(pairs, float).T / 2
    for ours, theirs in ((metrics.pearson, scipy.stats.pearsonr), (metrics.spearman, scipy.stats.spearmanr)):
        if np.ptp(x) and np.ptp(y):
            assert ours(x, y) == pytest.approx(theirs(x, y).statistic, abs=1e-12)
        else:
            assert math.isnan(ours(x, y))
    assert metrics.ranks(x).tolist() == scipy.stats.rankdata(x).tolist()


def test_ties_share_their_ranks():
    assert metrics.ranks(np.array([0.5, 0.1, 0.5, 0.9, 0.5])).tolist() == [3, 1, 3, 5, 3]
    rise, swap = np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4])
    assert metrics.spearman(rise, 10**rise) == pytest.approx(1.0)
    assert metrics.spearman(rise, swap) == pytest.approx(0.8)  # 1 - 6 (1 + 1) / (4 (16 - 1))
    assert math.isnan(metrics.spearman(rise[:0], rise[:0]))
    assert math.isnan(metrics.pearson(rise[:1], rise[:1]))
    with pytest.raises(ValueError, match="got 2 numbers, expected 4"):
        metrics.pearson(rise[:2], rise)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", []),
        ("B-a I-a O B-a", [("a", 0, 2), ("a", 3, 4)]),
        ("B-a B-a I-a", [("a", 0, 1), ("a", 1, 3)]),
        ("I-a I-a O I-b", [("a", 0, 2), ("b", 3, 4)]),  # IOB1
        ("B-a I-b I-b", [("a", 0, 1), ("b", 1, 3)]),
        ("B-a O I-a", [("a", 0, 1), ("a", 2, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 2)]),
        ("S-a B-a I-a E-a S-b", [("a", 0, 1), ("a", 1, 4), ("b", 4, 5)]),  # BIOES
        ("S-a I-a E-a", [("a", 0, 1), ("a", 1, 3)]),
        ("B-a E-a E-a", [("a", 0, 2), ("a", 2, 3)]),
        ("", []),
    ],
)
def test_spans_as_the_shared_tasks_read_tags(tags, found):
    assert metrics.entity_spans(tags.split()) == found


def conlleval(tags):
    """Spans by the two questions that the shared tasks' script asks of every pair of neighbours: slow, and its own."""
    padded = [("O", "")] + [(tag[0], tag[2:]) for tag in tags] + [("O", "")]
    starts, ends = [], []
    for place in range(1, len(padded)):
        (before, old), (now, new) = padded[place - 1], padded[place]
        pair = before + now
        changed = old != new
        if before != "O" and (before in "ES" or pair in ("BB", "BS", "BO", "IB", "IS", "IO") or changed):
            ends.append(place - 1)
        if now != "O" and (now in "BS" or pair in ("EE", "EI", "SE", "SI", "OE", "OI") or changed):
            starts.append(place - 1)
    return [(tags[first][2:], first, last) for first, last in zip(starts, ends, strict=True)]


TAGS = ["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("a", "b"))]


@given(st.lists(st.sampled_from(TAGS), max_size=12))
def test_spans_are_those_of_a_slow_reference_whatever_the_tags(tags):
    assert metrics.entity_spans(tags) == conlleval(tags)


def written(spans, count, scheme):
    """The tags of `spans` in IOB1, IOB2 or BIOES."""
    tags = ["O"] * count
    for number, (kind, first, end) in enumerate(spans):
        touches = number > 0 and spans[number - 1][0] == kind and spans[number - 1][2] == first
        for place in range(first, end):
            if scheme == "BIOES":
                mark = "S" if end - first == 1 else "B" if place == first else "E" if place == end - 1 else "I"
            else:
                mark = "B" if place == first and (scheme == "IOB2" or touches) else "I"
            tags[place] = f"{mark}-{kind}"
    return tags


@pytest.mark.parametrize("scheme", ["IOB1", "IOB2", "BIOES"])
@given(gaps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 3)), max_size=5))
def test_every_scheme_says_the_same_spans(scheme, gaps):
    spans, place = [], 0
    for kind, gap, size in gaps:
        spans.append((kind, place + gap, place + gap + size))
        place += gap + size
    assert metrics.entity_spans(written(spans, place + 1, scheme)) == spans


def test_an_entity_is_right_in_place_and_kind_or_wrong():
    true = [["B-a", "I-a", "O", "B-b"], ["B-a"], ["O"]]
    found = [["B-a", "O", "O", "B-b"], ["B-b"], ["O"]]  # one too short, one right, one of another kind
    assert metrics.entity_scores(found, true) == (1 / 3, 1 / 3, 1 / 3)
    assert metrics.entity_scores(true, true) == (1.0, 1.0, 1.0)
    assert metrics.entity_scores([["B-a"], ["O"]], [["B-a"], ["B-b"]]) == (1.0, 1 / 2, 2 / 3)
    nothing = metrics.entity_scores([["O"] * len(line) for line in true], true)
    assert math.isnan(nothing.precision)
    assert nothing[1:] == (0.0, 0.0)
    assert all(map(math.isnan, metrics.entity_scores([["O"]], [["O"]])))
    assert all(map(math.isnan, metrics.entity_scores([], [])))
    with pytest.raises(ValueError):
        metrics.entity_scores([["O"]], true)


def test_which_tags_mark_spans():
    assert metrics.are_span_tags(("O", "B-a", "I-a"))
    assert metrics.are_span_tags(("O", "B-a", "I-a", "S-a"))
    assert not metrics.are_span_tags(("NN", "O"))
    assert not metrics.are_span_tags(("O",))
    assert metrics.unknown_marks(("O", "B-a", "U-b", "L-b", "S")) == ["L-b", "S", "U-b"]
    for tags in (("O", "B-a", "S-a"), ("NN", "O", "VB"), ("NN", "S-BAR", "B-x"), ("O",)):
        assert metrics.unknown_marks(tags) == []


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat,", "cat"),
        ("a-b an 'end' theme", "ab end theme"),
        ("U.S.A.", "usa"),
        ("$12.50", "1250"),
        ("the", ""),
        (
            "\u201cna\u00efve\u201d \u2013 \u00c9cole",
            "\u201cna\u00efve\u201d \u2013 \u00e9cole",
        ),  # ASCII punctuation only
        ("an\u00e9e the\tend\n", "an\u00e9e end"),
    ],
)
def test_answers_are_compared_without_case_punctuation_and_articles(text, normal):
    assert metrics.normal_answer(text) == normal


@pytest.mark.parametrize(
    ("found", "right", "exact", "f1"),
    [
        ("the Eiffel Tower", ["Eiffel tower."], 1.0, 1.0),
        ("Eiffel", ["the Eiffel Tower", "Paris"], 0.0, 2 / 3),
        ("Gustave Eiffel", ["Eiffel Gustave", "a Gustave"], 0.0, 1.0),
        ("to to be", ["to be to be or"], 0.0, 2 * 3 / (3 + 5)),
        ("cat", ["dog"], 0.0, 0.0),
        ("", ["dog"], 0.0, 0.0),
        ("the", ["dog"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("dog", [], 0.0, 0.0),
        ("", ["a", "."], 1.0, 1.0),
        ("\u6771\u4eac", ["\u6771\u4eac\u3002", "\u6771\u4eac"], 1.0, 1.0),
    ],
)
def test_an_answer_is_as_good_as_its_best_reference(found, right, exact, f1):
    assert metrics.answer_scores([found], [right]) == {"exact_match": exact, "f1": pytest.approx(f1)}


def test_answers_are_averaged_over_questions():
    scores = metrics.answer_scores(["a cat", "grey cat", "x"], [["cat"], ["the cat", "mouse"], ["y"]])
    assert scores == {"exact_match": 1 / 3, "f1": pytest.approx((1 + 2 / 3 + 0) / 3)}
    assert all(map(math.isnan, metrics.answer_scores([], []).values()))
    with pytest.raises(ValueError, match="got 1 hypotheses, expected 0"):
        metrics.answer_scores(["a"], [])


def test_perplexities_and_bits():
    assert metrics.perplexity(math.log(8.0)) == pytest.approx(8.0)
    assert metrics.perplexity(6 * math.log(2.0), 3) == pytest.approx(4.0)
    assert metrics.perplexity(1e6) == math.inf
    assert math.isnan(metrics.perplexity(1.0, 0))
    assert metrics.bits_per_byte(10 * math.log(2.0), 5) == pytest.approx(2.0)


def test_a_uniform_model_over_bytes_needs_eight_bits():
    assert metrics.bits_per_byte(100 * math.log(256), 100) == pytest.approx(8.0)


HYPOTHESES = ["the cat sat on the mat .", "a dog runs"]
REFERENCES = ["The cat sat on a mat .", "a dog runs"]


def test_bleu_by_hand():
    # Matches of orders 1 to 4: 8 of 10, 5 of 8, 2 of 6, 0 of 4 -> smoothed to 1/2 of 4 ("exp"); equal lengths.
    precisions = [8 / 10, 5 / 8, 2 / 6, 0.5 / 4]
    score = metrics.bleu(HYPOTHESES, REFERENCES)
    assert score.value == pytest.approx(100 * math.prod(precisions) ** 0.25)


def test_bleu_is_perfect_for_equal_text_and_penalises_brevity():
    text = ["one two three four five six"]
    assert metrics.bleu(text, text).value == pytest.approx(100.0)
    assert metrics.bleu(["one two three four"], text).value == pytest.approx(100 * math.exp(1 - 6 / 4))


def test_signatures_say_what_was_computed():
    import sacrebleu

    version = f"version:{sacrebleu.__version__}"
    assert metrics.bleu(HYPOTHESES, REFERENCES).signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert metrics.chrf(HYPOTHESES, REFERENCES).signature == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}"
    tokenised = metrics.bleu_tokenised(HYPOTHESES, REFERENCES, "en").signature
    assert tokenised.startswith("nrefs:1|case:mixed|eff:no|tok:none|smooth:exp")
    assert tokenised.endswith("lc.norm.tok.en(sacremoses)")


def test_tokenised_bleu_ignores_case_and_splits_words_as_moses_does():
    assert metrics.moses(["Er sagte: »Hallo«,  dann  ging's los."], "de") == [
        'er sagte : " hallo " , dann ging \' s los .'
    ]
    assert metrics.moses(["Er rasiert den Bart."], "de") == ["er rasiert den bart ."]
    assert metrics.bleu(["EIN HUND LÄUFT IM PARK."], ["ein hund läuft im park."]).value < 20
    assert metrics.bleu_tokenised(["EIN HUND LÄUFT IM PARK."], ["ein hund läuft im park."], "de").value > 99.99


def test_chrf_of_equal_and_of_disjoint_text():
    assert metrics.chrf(["abc def"], ["abc def"]).value == pytest.approx(100.0)
    assert metrics.chrf(["xyz"], ["abc"]).value == 0.0


def test_rouge_by_hand():
    found = metrics.rouge(["The cats, sat on mats", "x"], ["a cat sat on the mat", "y"])
    # Stemmed: the cat sat on mat / a cat sat on the mat. 5 words of 5 and 6 are shared, 2 pairs (cat sat, sat on) of 4
    # and 5, and the longest common subsequence is cat sat on mat. The second pair of texts shares nothing.
    expected = {"rouge1": 2 * 5 / 11, "rouge2": 2 * 2 / 9, "rouge_l": 2 * 4 / 11}
    assert {name: score.value for name, score in found.items()} == pytest.approx(
        {name: 100 * value / 2 for name, value in expected.items()}
    )
    assert found["rouge1"].signature.startswith("f1|stem:porter|mean|version:rouge-score ")
    assert all(math.isnan(score.value) for score in metrics.rouge([], []).values())
    with pytest.raises(ValueError, match="got 1 hypotheses, expected 2"):
        metrics.rouge(["a"], ["a", "b"])


def test_rouge_of_other_scripts_counts_their_words():
    """rouge-score's own words are of a to z and digits: a perfect Russian text has none, and an F1 of 0."""

    def values(hypothesis, reference):
        return [score.value for score in metrics.rouge([hypothesis], [reference]).values()]

    assert values("Кот сидел, на ковре.", "кот сидел на ковре") == [100.0] * 3
    # 3 words of 4 and 4, a pair of 3 and 3; the common subsequence has 3.
    assert values("кот спал на ковре", "Кот сидел на ковре") == pytest.approx([75.0, 100 / 3, 75.0])
    # Characters where no blanks divide words, with their vowel signs: 2 of 3 and 3. Latin words and digits stay whole.
    assert values("猫が好", "猫が犬")[0] == pytest.approx(200 / 3)
    assert metrics._UnicodeWords().tokenize("GPT-2は猫123 กี่") == ["gpt", "2", "は", "猫", "123", "กี่"]
    assert metrics._UnicodeWords().tokenize("हिन्दी Ünder") == ["हिन्दी", "ünder"]
    # Most letters are a to z: as published figures count.
    assert values("Die Tür", "die tur")[0] == pytest.approx(40.0)  # die t r; die tur


def test_bleu_counts_the_characters_of_chinese():
    text, other = "猫坐在垫子上", "猫坐在椅子上"
    assert metrics.bleu_is_defined([text], "zh") and not metrics.bleu_is_defined([text])
    score = metrics.bleu([text, other], [text, text], "zh")
    assert "tok:zh" in score.signature and "tok:13a" in metrics.bleu(["a"], ["a"], "de").signature
    # 11 of 12 characters, 8 of 10 pairs, 5 of 8, 3 of 6.
    assert score.value == pytest.approx(100 * (11 / 12 * 8 / 10 * 5 / 8 * 3 / 6) ** 0.25)


def test_exact_match_is_a_share():
    assert metrics.exact_match(["a b ", "c", "D"], ["a b", "c", "d"]) == pytest.approx(2 / 3)
    assert math.isnan(metrics.exact_match([], []))


@pytest.mark.parametrize("score", [metrics.bleu, metrics.chrf, metrics.exact_match])
def test_every_reference_needs_a_hypothesis(score):
    with pytest.raises(ValueError, match="got 1 hypotheses, expected 2"):
        score(["a"], ["a", "b"])


@pytest.mark.skipif(not MULTI30K.exists(), reason="needs the Multi30k data")
def test_multi30k_reference_length_is_the_literatures():
    """12103 is the reference length in the log of Wu et al. 2021: the tokenised scores compare."""
    lines = (MULTI30K / "test_2016_flickr.de").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 1000
    assert sum(len(line.split()) for line in metrics.moses(lines, "de")) == 12103
