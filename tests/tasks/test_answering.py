"""Question answering: which slots an answer becomes, windows of a long context, the loss, spans of a model's scores."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from task_toys import config, encoded, learned, without, words

from jaxformer import metrics, tasks
from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.tasks import answering
from jaxformer.tasks.answering import END, START
from jaxformer.train import setup
from jaxformer.types import Batch

TASK = tasks.get("answering")
CONTEXT = "the cat sat on the mat while a dog ran after some other cats in our garden"
LONG = {"question": "a dog", "context": CONTEXT, "answers": ("some other cats",), "starts": (CONTEXT.index("some"),)}


def example(answer, **fields):
    start = (CONTEXT.index(answer),) if answer else ()
    return {"question": "a dog", "context": CONTEXT, "answers": (answer,) if answer else (), "starts": start, **fields}


def slots(features, bit):
    return np.flatnonzero(features["labels"] & bit).tolist()


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe", "unigram"])
def test_an_answer_is_the_tokens_that_hold_it_with_every_tokenizer(kind):
    both = learned(TokenizerConfig(kind=kind, vocab=280))
    features = encoded(config("answering", length=128), both, **example("the mat"))
    tokens, side = features["source"], both.source
    begin, end = slots(features, START)[0], slots(features, END)[0]
    assert side.decode(tokens[begin : end + 1]).strip() == "the mat"
    context = np.flatnonzero(features["weights"])[1:]
    assert (tokens[0], tokens[context[0] - 1], tokens[-1]) == (side.cls, side.sep, side.sep)
    assert np.flatnonzero(features["weights"])[0] == 0
    assert side.decode(tokens[context]) == CONTEXT
    assert side.decode(tokens[1 : context[0] - 1]) == "a dog"


def test_an_answer_inside_of_a_word_is_that_word():
    features = encoded(config("answering"), words(), **example("ile a d"))
    assert words().source.decode(features["source"][slots(features, START)[0] : slots(features, END)[0] + 1]) == (
        "while a dog"
    )


def test_kinds_tell_question_and_context_apart():
    features = encoded(config("answering", kinds=2), words(), **example("cat"))
    assert features["token_type"].tolist() == [0] * 4 + [1] * (len(features["source"]) - 4)
    assert set(encoded(config("answering", side="decoder"), words(), **example("cat"))) == {
        "target",
        "labels",
        "weights",
    }


def test_the_first_answer_whose_place_is_known_is_learned():
    several = example("cat", answers=("dog", "cat", "mat"), starts=(-1, 4, 19))
    features = encoded(config("answering"), words(), **several)
    assert words().source.decode([features["source"][slots(features, START)[0]]]) == "cat"
    unknown = encoded(config("answering"), words(), **example("cat", starts=(-1,)))
    assert not unknown["labels"].any()
    assert unknown["weights"].any()


def test_no_answer_is_at_cls_and_only_where_the_task_expects_it():
    features = encoded(config("answering", unanswerable=True), words(), **example(""))
    assert slots(features, START) == slots(features, END) == [0]
    with pytest.raises(ConfigError, match="got a question without an answer, 'a dog', expected .*unanswerable=True"):
        encoded(config("answering"), words(), **example(""))


def test_training_sees_every_window_of_a_long_context():
    """Where the answer is whole in a window it is marked there, else <cls> is; without <cls>, nothing."""
    for both, none in ((words(), [0]), (without(words(), "cls"), [])):
        settings = config("answering", length=12, stride=3)
        drawn = [encoded(settings, both, seed=seed, **LONG) for seed in range(40)]
        seen = set()
        for features in drawn:
            assert len(features["source"]) <= 12
            text = both.source.decode(features["source"][features["weights"] > 0])
            begin, end = slots(features, START), slots(features, END)
            seen.add(text)
            if "some other cats" in text:
                assert both.source.decode(features["source"][begin[0] : end[0] + 1]) == "some other cats"
            else:
                assert begin == end == none
        reading = answering.encode_question(settings, both.source, LONG["question"], LONG["context"])
        every = [
            both.source.decode(reading.context[w.start : w.stop]) for w in answering.context_windows(settings, reading)
        ]
        assert seen == set(every)
        assert any("some other cats" in text for text in every)


@pytest.mark.parametrize(("length", "stride"), [(12, 3), (12, 128), (9, 1), (6, 2)])
def test_windows_cover_the_context_and_overlap_by_half(length, stride):
    settings = config("answering", length=length, stride=stride)
    reading = answering.encode_question(settings, words().source, "a dog", CONTEXT)
    found = list(answering.context_windows(settings, reading))
    room = length - len(reading.prefix) - len(reading.suffix)
    assert {slot for window in found for slot in window} == set(range(17))
    assert all(len(window) <= room for window in found)
    steps = np.diff([window.start for window in found])
    assert (steps == min(stride, max(room // 2, 1))).all()
    assert all(begin.stop - end.start >= room // 2 for begin, end in itertools.pairwise(found))
    whole = config("answering", length=100)
    assert list(
        answering.context_windows(whole, answering.encode_question(whole, words().source, "a dog", CONTEXT))
    ) == [range(17)]


def test_a_question_gives_way_to_its_context_or_is_refused():
    settings = config("answering", length=12)
    reading = answering.encode_question(settings, words().source, CONTEXT, CONTEXT)
    assert len(reading.prefix) == 2 + 4
    with pytest.raises(ConfigError, match=r"got a question of 6 tokens.* expected fewer than data.length \(7\)"):
        list(answering.context_windows(config("answering", length=7), reading))


def test_a_prompt_is_read_as_in_training():
    settings = config("answering", kinds=2)
    trained = encoded(settings, words(), **example("cat"))
    prompt = TASK.prompt(settings, words(), TASK.input_line(example("cat")))
    for name in prompt:
        np.testing.assert_array_equal(prompt[name], trained[name])
    side = words().source
    assert TASK.prompt(settings, words(), "a cat")["source"].tolist() == [side.cls, *side.encode("a cat"), side.sep]
    with pytest.raises(ConfigError, match="got a line without a tab, 'who', expected question, tab, context"):
        TASK.predict(None, ["who"], settings.decode)


def test_a_line_is_one_line_with_the_same_characters():
    context = "two\nlines\tand\r\na tab"
    line = TASK.input_line(example("cat", context=context, question="what\tis?"))
    question, context_ = answering.split_line(line)
    assert (question, context_) == ("what is?", "two lines and  a tab")
    assert TASK.output_line({"answer": "a\nb"}) == "a b"
    assert TASK.reference_line(config("answering"), example("", answers=("a", "b", "a"))) == "a | b"


def test_measures_of_parts_add_up_and_are_means_of_start_and_end():
    rng = np.random.default_rng(0)
    answers = ("cat", "the mat", "our garden")
    rows = [encoded(config("answering", length=24), words(), **example(answer)) for answer in answers]
    empty = {name: np.zeros_like(value) for name, value in rows[0].items()}
    labels, weights = (np.stack([row[name] for row in [*rows, empty]]) for name in ("labels", "weights"))
    logits = rng.standard_normal((*labels.shape, 2)).astype(np.float32)
    settings = config("answering", label_smoothing=0.2, z_loss=0.1)
    both = jax.jit(lambda x, b: (TASK.loss(settings, x, b), TASK.metrics(settings, x, b)))
    halves = [both(logits[i], Batch(None, None, labels[i], weights[i])) for i in (slice(2), slice(2, None))]
    smooth, bare = (metrics.divide(metrics.add(*sums)) for sums in zip(*halves, strict=True))

    nll, even, normaliser, right = [], [], [], []
    for row, features in enumerate(rows):
        allowed = np.flatnonzero(features["weights"])
        for column, bit in enumerate((START, END)):
            gain = logits[row, allowed, column] - np.log(np.exp(logits[row, allowed, column]).sum())
            place = allowed.tolist().index(slots(features, bit)[0])
            nll.append(-gain[place])
            even.append(-gain.mean())
            normaliser.append(np.log(np.exp(logits[row, allowed, column]).sum()) ** 2)
            right.append(gain.argmax() == place)
    np.testing.assert_allclose(bare["loss"], np.mean(nll), rtol=1e-5)
    np.testing.assert_allclose(bare["accuracy"], np.mean(right))
    wanted = 0.8 * np.mean(nll) + 0.2 * np.mean(even) + 0.1 * np.mean(normaliser)
    np.testing.assert_allclose(smooth["loss"], wanted, rtol=1e-5)
    assert TASK.derived_metrics(settings, bare, {}) == bare


def brute(reading, window, logits, longest):
    """All spans, one after the other."""
    first, none = len(reading.prefix), reading.no_answer_slot
    allowed = [*range(first, first + len(window)), *([] if none is None else [none % len(logits)])]
    gains = logits - np.log(np.exp(logits[allowed]).sum(0))
    places = reading.spans[window.start : window.stop]
    found = [
        (gains[first + a, 0] + gains[first + b, 1], places[a][0], places[b][1])
        for a in range(len(window))
        for b in range(a, min(a + longest, len(window)))
    ]
    return max(found), -np.inf if none is None else gains[none].sum()


@pytest.mark.parametrize("none", [0, -1, None])
def test_the_best_span_of_a_window_is_that_of_all_spans(none):
    settings, rng = config("answering", length=14, stride=4), np.random.default_rng(1)
    reading = answering.encode_question(settings, words().source, "a dog", CONTEXT)._replace(no_answer_slot=none)
    for window in answering.context_windows(settings, reading):
        size = len(reading.prefix) + len(window) + len(reading.suffix)
        for longest in (1, 3, 99):
            logits = 2 * rng.standard_normal((size, 2))
            best, absent = answering.best_span(reading, window, logits.astype(np.float32), longest)
            wanted, nothing = brute(reading, window, logits, longest)
            np.testing.assert_allclose(best, wanted, rtol=1e-5)
            np.testing.assert_allclose(absent, nothing, rtol=1e-5)


def test_the_answer_is_the_best_of_all_windows_and_may_be_none():
    spans = [(answering.Span(-2.0, 4, 7), -0.5), (answering.Span(-1.0, 8, 11), -1.5)]
    best = answering.best_answer(spans, CONTEXT, unanswerable=False)
    assert (best["answer"], best["start"], best["end"]) == ("sat", 8, 11)
    assert best["score"] == pytest.approx(np.exp(-1.0))
    assert answering.best_answer(spans, CONTEXT, unanswerable=True) == best, (
        "one window does not say that there is none"
    )
    sure = [(span, -0.5) for span, _ in spans]
    assert answering.best_answer(sure, CONTEXT, unanswerable=True)["answer"] == ""
    assert answering.best_answer(sure, CONTEXT, unanswerable=False)["answer"] == "sat"


def test_a_score_is_exact_match_and_f1():
    results = [{"answer": "The cat!"}, {"answer": "a dog ran"}]
    score = TASK.score(config("answering"), results, [example("cat"), example("dog")])
    assert score == {"exact_match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}


def test_longer_examples_can_be_left_out_of_training():
    """With `skip_long` the pipeline asks for what is uncut."""
    settings = config("answering", length=8)
    uncut = dataclasses.replace(settings, data=dataclasses.replace(settings.data, length=2**30))
    assert len(encoded(uncut, words(), **LONG)["source"]) == 2 + 3 + 17


def test_special_tokens_match_nothing_unless_the_config_says_otherwise():
    tokenizer, settings = words().source, config("answering", kinds=2).model

    def with_embed(**edits):
        stack = dataclasses.replace(
            settings.encoder, embed=dataclasses.replace(settings.encoder.embed, matches=True, **edits)
        )
        return setup.with_unmatched(dataclasses.replace(settings, encoder=stack), tokenizer).encoder.embed.unmatched

    found = with_embed()
    assert {tokenizer.pad, tokenizer.sep, tokenizer.cls, tokenizer.unk, *tokenizer.sentinels} <= set(found)
    assert not set(tokenizer.encode("the cat sat")) & set(found)
    assert with_embed(unmatched=()) == ()
    assert setup.with_unmatched(settings, tokenizer) == settings
