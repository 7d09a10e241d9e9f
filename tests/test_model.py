import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    RecurrentConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.decode.batching import pad_batch
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.tasks import answering

STACK = StackConfig(
    layers=1,
    width=8,
    embed=EmbedConfig(vocab=264),
    attention=AttentionConfig(heads=2, bias=False),
    ffn=FeedForwardConfig(width=8, bias=False),
    norm=NormConfig(kind="rms"),  # few parameters: compiling takes time by their number
    encoding=EncodingConfig(kind="learned", max_length=32),
)
PARTS = {
    "translation": ModelConfig(encoder=STACK, decoder=STACK),
    "language_modelling": ModelConfig(decoder=STACK),
    "masked_lm": ModelConfig(encoder=STACK),
    "classification": ModelConfig(encoder=STACK, head=HeadConfig(kind="classes", classes=3)),
    "tagging": ModelConfig(encoder=STACK, head=HeadConfig(kind="slots", classes=3)),
    "answering": ModelConfig(encoder=STACK, head=HeadConfig(kind="slots", classes=2)),
    "similarity": ModelConfig(encoder=STACK, head=HeadConfig(kind="pair", pooling="mean", width=6)),
}
LSTM = ModelConfig(recurrent_decoder=RecurrentConfig(cell="lstm", width=8, embed=EmbedConfig(vocab=264)))
DATA = DataConfig(tokenizer=TokenizerConfig(kind="byte"), length=24, buckets=(24,))
LINES = ["ab", "a longer line", "x"]


@functools.lru_cache
def model(task, parts=None) -> Model:
    parts, decode = parts or PARTS[task], DecodeConfig(max_length=6)
    config = Config(model=parts, data=DATA, task=TaskConfig(name=task), decode=decode)
    module, rng = build.build(config.model), np.random.default_rng(7)
    shapes = nn.meta.unbox(build.shapes(module))["params"]
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    return Model(module, params, {}, config, Tokenizers.build(config.data, [], ("text",)))


THREE = {"beams": 3, "hypotheses": 3}


def test_translate_is_one_line_for_each_and_empty_stays_empty():
    german = model("translation").translate([*LINES, "", "  "], **THREE)
    assert len(german) == 5
    assert all(isinstance(line, str) for line in german)
    assert german[3:] == ["", ""]
    assert model("translation").translate([]) == []


def test_outputs_are_the_hypotheses_with_scores():
    found = model("translation").outputs(["", *LINES], **THREE)
    assert [len(outputs) for outputs in found] == [0, 3, 3, 3]
    assert [outputs[0].text for outputs in found[1:]] == model("translation").translate(LINES, **THREE)
    for outputs in found[1:]:
        assert [o.score for o in outputs] == sorted((o.score for o in outputs), reverse=True)
        decode = model("translation").tokenizers.target.decode
        assert all(o.text == decode(o.tokens) for o in outputs)


def test_options_choose_the_method_and_the_task_hands_over_the_config():
    lm = model("language_modelling")
    greedy = lm.generate(LINES)
    assert lm.generate(LINES, top_k=1) == greedy  # sampling from one token
    assert lm.generate(LINES, beams=1) == greedy
    assert tasks.get("language_modelling").predict(lm.predictor, LINES, DecodeConfig(max_length=6)) == greedy
    with pytest.raises(ConfigError, match="expected one method's"):
        lm.generate(LINES, beams=2, top_p=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 5}, r"decode\.beam: got an unknown key.*did you mean 'beams'"),
        ({"beams": "five"}, r"decode\.beams: got 'five'.*expected int"),
        ({"beams": 0}, r"decode\.beams: got 0, expected at least 1"),
        ({"top_p": 1.5}, r"decode\.top_p: got 1\.5"),
        ({"method": "beem"}, r"decode\.method: got 'beem'.*did you mean 'beam'"),
        ({"beams": 2, "hypotheses": 3}, r"decode\.hypotheses: got 3, expected at most decode\.beams"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        model("translation").translate(LINES, **options)
    assert "\n" not in str(error.value)


def test_generate_continues_the_prompt_without_repeating_it():
    lm = model("language_modelling")
    texts = lm.generate([*LINES, ""])
    outputs = {line: found[0] for line, found in zip([*LINES, ""], lm.outputs([*LINES, ""]), strict=True)}
    for prompt, text in zip([*LINES, ""], texts, strict=True):
        ids = lm.tokenizers.target.encode(prompt)
        out = outputs[prompt]
        assert text == out.text
        assert lm.tokenizers.target.decode([*ids, *out.tokens]) == prompt + text
    assert lm.generate([]) == []


def test_generate_goes_on_or_stops_where_the_positions_end():
    lm = model("language_modelling")
    texts = ["y" * size for size in (29, 31, 60)]
    assert [len(found[0].tokens) for found in lm.outputs(texts)] == [6, 6, 6]
    assert [len(found[0].tokens) for found in lm.outputs(texts[:2], past_positions="stop")] == [3, 1]
    with pytest.raises(ConfigError, match="got 33 tokens, expected at most the model's 32 positions; shorten it"):
        lm.generate(["y" * 32], past_positions="stop")


@pytest.mark.parametrize("family", ["language_modelling", "translation", "recurrent"])
def test_streamed_text_adds_up_to_what_is_generated(family):
    """Of prompts within the positions, past them while they grow (29), and longer than them (60)."""
    sizes = (29, 60) if family == "language_modelling" else ()
    lm = model("language_modelling", LSTM) if family == "recurrent" else model(family)
    whole = lm.translate if family == "translation" else lm.generate
    for line in ["ab", "", *("y" * size for size in sizes)]:
        pieces = list(lm.stream(line))
        assert "".join(pieces) == whole([line])[0]
        assert all(pieces)
    with pytest.raises(ConfigError, match="got beam, expected greedy or sample to stream"):
        lm.stream("ab", beams=2)
    expected = "an encoder and a decoder" if family == "translation" else "history, turn 1: got str, expected role"
    with pytest.raises(ConfigError, match=expected):
        lm.stream(["ab"])


def test_classify_gives_probabilities_by_name():
    classifier = model("classification")
    named = Model(classifier.module, classifier.params, {}, classifier.config, classifier.tokenizers, ("a", "b", "c"))
    batch = pad_batch([tasks.get("classification").prompt(named.config, named.tokenizers, LINES[1])], 1, (0, 0), (24,))
    probs = np.asarray(jax.nn.softmax(named(batch)))[0]
    for found in (named.classify(LINES)[1], named.classify(LINES[1:2])[0]):
        np.testing.assert_allclose(list(found["probabilities"].values()), probs, rtol=1e-5)
        assert found["label"] == "abc"[probs.argmax()]
        assert found["probability"] == pytest.approx(probs.max(), rel=1e-5)
    assert list(classifier.classify([""])[0]["probabilities"]) == ["0", "1", "2"]
    assert classifier.classify([]) == []


@pytest.mark.parametrize(
    "parts", [None, ModelConfig(decoder=STACK, head=PARTS["tagging"].head)], ids=["encoder", "decoder"]
)
def test_tag_judges_tokens_or_words(parts):
    tagger, lines = model("tagging", parts), ["ab c", "", "one more than there is room for here"]
    tokens, words = tagger.tag(lines), tagger.tag(lines, words=True)
    assert ["".join(each["token"] for each in line) for line in tokens] == ["ab c", "", lines[2][:22]]  # bytes
    probabilities = [each["probability"] for line in tokens for each in line]
    assert {each["label"] for line in tokens for each in line} <= {"0", "1", "2"}
    assert all(1 / 3 <= p <= 1 for p in probabilities)
    assert len(set(probabilities)) > 10
    assert [[each["word"] for each in line] for line in words] == [line.split() for line in lines]
    # A word's first token is the blank before it.
    expected = [tokens[0][0], tokens[0][2]]
    assert words[0] == [{"word": word, **decision(each)} for word, each in zip(("ab", "c"), expected, strict=True)]
    assert words[2][5:] == [{"word": word, "label": "O", "probability": 0.0} for word in ("room", "for", "here")]


def decision(tag):
    return {name: tag[name] for name in ("label", "probability")}


def test_answer_reads_long_contexts_in_windows():
    """Every answer is a span of its own context, whatever else is asked, and the best that any window has."""
    reader = model("answering")
    questions, contexts = ["who?", "a", "who?", "b"], ["one of these words, caf\u00e9", "ab", "", "b" * 60]
    found = reader.answer(questions, contexts, longest=3)
    for answer, context in zip(found, contexts, strict=True):
        assert answer["answer"] == context[answer["start"] : answer["end"]]
        assert len(answer["answer"].encode()) <= 3
        assert 0 <= answer["score"] <= 1
    assert found[2] == {"answer": "", "start": 0, "end": 0, "score": 0.0}
    assert [reader.answer([q], [c], 3)[0]["answer"] for q, c in zip(questions, contexts, strict=True)] == [
        answer["answer"] for answer in found
    ]
    settings, tokenizer = reader.config, reader.tokenizers.source
    reading = answering.encode_question(settings, tokenizer, questions[0], contexts[0])
    spans = []
    windows = list(answering.context_windows(settings, reading))
    for window in windows:
        batch = pad_batch([answering.window_features(settings, reading, window)], 1, (0, 0), (24,))
        spans.append(answering.best_span(reading, window, np.asarray(reader(batch))[0], 3)[0])
    assert len(windows) > 1
    best = max(spans)
    assert (found[0]["start"], found[0]["end"]) == best[1:]
    assert found[0]["score"] == pytest.approx(np.exp(best.log_prob), rel=1e-4)
    assert reader.answer([], []) == []
    with pytest.raises(
        ConfigError, match="answer: got 1 questions, 2 contexts and longest 6, expected a context a quest"
    ):
        reader.answer(["a"], ["b", "c"])


def test_fill_mask_ranks_every_mask():
    bert = model("masked_lm")
    found = bert.fill_mask(["a <mask> b<mask>", "<mask>"], top=3)
    assert [[len(candidates) for candidates in masks] for masks in found] == [[3, 3], [3]]
    prompt = tasks.get("masked_lm").prompt(bert.config, bert.tokenizers, "a <mask> b<mask>")["source"]
    slots = np.flatnonzero(prompt == bert.tokenizers.source.mask)
    logits = np.asarray(bert(pad_batch([{"source": prompt}], 1, (0, 0), (24,))))[0, :, : bert.tokenizers.source.size]
    for slot, candidates in zip(slots, found[0], strict=True):
        probs = np.asarray(jax.nn.softmax(logits[slot]))
        assert [c["id"] for c in candidates] == np.argsort(-probs)[:3].tolist()
        np.testing.assert_allclose([c["probability"] for c in candidates], np.sort(probs)[::-1][:3], rtol=1e-4)
        assert candidates[0]["token"] == bert.tokenizers.source.decode([candidates[0]["id"]])
    with pytest.raises(ConfigError, match="got 'no gap', expected <mask> in it"):
        bert.fill_mask(["<mask>", "no gap"])
    assert bert.fill_mask([]) == []


@pytest.mark.parametrize("task", [name for name in PARTS if name != "similarity"])
def test_embed_pools_the_real_tokens(task):
    it = model(task)
    vectors = it.embed(LINES)
    assert vectors.shape == (3, 8)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(it.embed(LINES[:1]), vectors[:1], rtol=1e-4, atol=1e-5)  # other padding, other mates
    assert it.embed([]).shape == (0, 8)


def test_a_model_of_sentences_embeds_them_as_its_head_does():
    it = model("similarity")
    vectors = it.embed([*LINES, "a\tb"])
    assert vectors.shape == (4, 6)
    pair = tasks.get("similarity").prompt(it.config, it.tokenizers, "ab\tx")
    np.testing.assert_allclose(it(pad_batch([pair], 1, (0, 0), (24,)))[0], vectors[[0, 2]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        it.embed(["a b"])[0], vectors[3], rtol=1e-4, atol=1e-5
    )  # a tab in a sentence parts nothing
    assert it.embed(LINES, "mean").shape == (3, 8)  # below the head
    assert it.embed([]).shape == (0, 6)


@pytest.mark.parametrize("task", ["similarity", "masked_lm"])
def test_similarity_is_the_cosine_of_embeddings(task):
    it = model(task)
    a, b, c = it.embed(LINES).astype(np.float64)
    cosine = lambda x, y: x @ y / np.sqrt((x @ x) * (y @ y))  # noqa: E731
    found = it.similarity([(LINES[0], LINES[1]), [LINES[2], LINES[0]], (LINES[1], LINES[1])])
    assert found == pytest.approx([cosine(a, b), cosine(c, a), 1.0], abs=1e-5)
    assert it.similarity([]) == []
    for wrong in (["ab"], [("a", "b", "c")], [("a", 1)]):
        with pytest.raises(ConfigError, match="expected two strings; give a list of pairs of sentences"):
            it.similarity(wrong)


def test_a_recurrent_language_model_embeds_too():
    it = model("language_modelling", LSTM)
    vectors = it.embed(LINES, "last")
    assert vectors.shape == (3, 8)
    np.testing.assert_allclose(it.embed(LINES[:1], "last"), vectors[:1], rtol=1e-4, atol=1e-5)


def test_poolings_are_what_they_say():
    it = model("masked_lm")
    prompt = tasks.get("masked_lm").prompt(it.config, it.tokenizers, "abc")["source"]
    run = jax.jit(lambda params, batch: it.module.apply({"params": params}, batch, method="hidden"))
    hidden = np.asarray(run(it.params, pad_batch([{"source": prompt}], 1, (0, 0))))[0]
    wanted = {"first": hidden[0], "last": hidden[len(prompt) - 1], "mean": hidden[: len(prompt)].mean(axis=0)}
    for pooling, vector in wanted.items():
        np.testing.assert_allclose(it.embed(["abc"], pooling)[0], vector, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        it.embed(["abc"], "means")


@pytest.mark.parametrize("task", ["translation", "language_modelling"])
def test_score_is_the_log_likelihood(task):
    it = model(task)
    examples = [{"source": "ab", "target": "longer"}, {"source": "a longer one", "target": "x"}]
    examples = [{"text": e["target"]} for e in examples] if task == "language_modelling" else examples
    arguments = [[e[role] for e in examples] for role in tasks.get(task).roles]
    for score, example in zip(it.score(*arguments), examples, strict=True):
        features = tasks.get(task).encode(it.config, it.tokenizers, example, None)
        logits = np.asarray(it(pad_batch([features], 1, (0, 0), (24,)))[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert score == pytest.approx(sum(log_probs[t, label] for t, label in enumerate(features["labels"])), rel=1e-4)


def test_a_long_line_is_scored_to_its_end():
    it = model("language_modelling")
    line = "a line of more bytes than there are slots: two rows and a bit"
    parts = tasks.get("language_modelling").encode_windows(it.config, it.tokenizers, {"text": line}, None)
    assert len(parts) == 3
    whole = 0.0
    for part in parts:
        logits = np.asarray(it(pad_batch([part], 1, (0, 0), (24,)))[0], np.float64)[: len(part["labels"])]
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        whole += np.take_along_axis(log_probs, part["labels"][:, None], -1).sum()
    assert it.score([line, "ab"]) == pytest.approx([whole, it.score(["ab"])[0]], rel=1e-4)
    with pytest.raises(ConfigError, match="score: got a target of 25 tokens, its end included .*, expected at most 24"):
        model("translation").score(["a", "b"], ["c", "x" * 24])


def test_lines_that_are_not_read_to_their_ends_are_counted():
    lines = ["ab", "x" * 23, "x" * 24, "y" * 90]
    assert model("translation").too_long(lines) == 2
    assert model("tagging").too_long(lines) == 3, "<cls> and <sep> take two slots"
    assert model("language_modelling").too_long(lines) == 0


def test_score_wants_what_the_model_reads():
    with pytest.raises(ConfigError, match="as many targets as lines"):
        model("translation").score(["a"])
    with pytest.raises(ConfigError, match="none: a language model reads lines only"):
        model("language_modelling").score(["a"], ["b"])


@pytest.mark.parametrize(
    ("task", "method", "fits"),
    [
        ("translation", "generate", "translate"),
        ("language_modelling", "translate", "generate"),
        ("masked_lm", "classify", "fill_mask"),
        ("classification", "fill_mask", "classify"),
        ("classification", "score", "classify"),
        ("similarity", "classify", "embed"),
    ],
)
def test_a_method_that_does_not_fit_names_the_one_that_does(task, method, fits):
    with pytest.raises(ConfigError, match=f"use model.{fits}$"):
        getattr(model(task), method)(LINES)


@pytest.mark.parametrize("lines", ["a line", b"bytes", [1, 2]])
def test_lines_must_be_a_list_of_strings(lines):
    with pytest.raises(ConfigError, match="expected a list of strings"):
        model("classification").classify(lines)


def lines_for(name):
    return {"span_corruption": "a <extra_id_0> c <extra_id_1>", "denoising": "a <mask> c"}[name]


@pytest.mark.parametrize("name", ["span_corruption", "denoising"])
def test_predict_fills_spans_or_repairs_the_line(name):
    """The line is read with its sentinels or masks as tokens, and answered as the search over its prompt does."""
    data = dataclasses.replace(DATA, tokenizer=TokenizerConfig(kind="byte", sentinels=2))
    stack = dataclasses.replace(STACK, embed=EmbedConfig(vocab=272))
    base = model("translation", ModelConfig(encoder=stack, decoder=stack))
    config = dataclasses.replace(base.config, data=data, task=TaskConfig(name=name))
    it = dataclasses.replace(base, config=config, tokenizers=Tokenizers.build(data, [], ("text",)))
    tokenizer = it.tokenizers.source
    prompt = tasks.get(name).prompt(config, it.tokenizers, lines_for(name))
    assert {tokenizer.mask, *tokenizer.sentinels} & set(prompt["source"].tolist())
    ((hypothesis,),) = it.predictor.runner.generate([prompt], config.decode)
    read = tokenizer.decode_with_sentinels if name == "span_corruption" else tokenizer.decode
    assert it.predict([lines_for(name), ""]) == [read(hypothesis.tokens), ""]
    with pytest.raises(ConfigError, match="use model.predict"):
        it.translate(["a"])


def test_a_prefix_language_model_reads_prompts_in_both_directions_and_scores_whole_lines():
    base = model("language_modelling", ModelConfig(decoder=dataclasses.replace(STACK, layers=2, unroll=1)))
    it = dataclasses.replace(base, config=dataclasses.replace(base.config, task=TaskConfig(name="prefix_lm")))
    both = it.outputs(["abcd"])[0][0]
    prompt = {"target": np.asarray([1, *it.tokenizers.target.encode("abcd")]), "prefix": 5}
    ((expected,),) = it.predictor.runner.generate([prompt], it.config.decode)
    np.testing.assert_array_equal(both.tokens, expected.tokens)
    assert both.score == pytest.approx(expected.score)
    assert base.outputs(["abcd"])[0][0].score != pytest.approx(expected.score)
    assert it.score(LINES) == base.score(LINES)
    interface = HuggingFace(head="causal_lm")
    ids = it.tokenizers.target.encode("abcd")
    options = {"input_ids": np.asarray([[1, *ids]]), "max_new_tokens": 6, "eos_token_id": 2}
    generated = interface.generate(it, options)[0, 5:]
    np.testing.assert_array_equal(generated[: len(both.tokens)], both.tokens)
    with pytest.raises(ConfigError, match="call: got a prefix language model"):
        interface.call(it, None, None, {"input_ids": np.asarray([ids])})
    with pytest.raises(ConfigError, match="export: got a model of task prefix_lm, expected language_modelling"):
        interface.save_pretrained(it, "nowhere", None, None)


def test_fill_mask_reads_two_parts_of_a_text():
    """A model with a second output ranks the tokens as one without, whose input has the same frame and types."""
    stack = dataclasses.replace(STACK, embed=EmbedConfig(vocab=264, kinds=2))
    head = HeadConfig(relation=True, width=8)
    it = model("masked_lm", ModelConfig(encoder=stack, head=head))
    task = TaskConfig(name="masked_lm", relation="next_sentence")
    it = dataclasses.replace(it, config=dataclasses.replace(it.config, task=task))
    prompt = tasks.get("masked_lm").prompt(it.config, it.tokenizers, "a<mask>\tb")
    output = it(pad_batch([prompt], 1, (0, 0), (24,)))
    assert output.relation.shape == (1, 2)
    (((best, *others),),) = it.fill_mask(["a<mask>\tb"], top=264)
    logits = np.asarray(output.tokens)[0, prompt["source"].tolist().index(it.tokenizers.source.mask)]
    assert best["id"] == logits[: it.tokenizers.source.size].argmax()
    assert sum(each["probability"] for each in (best, *others)) == pytest.approx(1.0, rel=1e-4)
    assert it.predict(["a<mask>\tb"])[0]["text"].startswith("a") and "\t" in it.predict(["a<mask>\tb"])[0]["text"]
