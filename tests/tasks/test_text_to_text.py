"""Text to text: templates, their fields and words, one stream for a decoder alone, choices, and scores."""

import dataclasses

import builders
import numpy as np
import pytest
from task_toys import config, encoded, words

from jaxformer import framing, tasks
from jaxformer.config import ConfigError, DecodeConfig, TemplateConfig, templates
from jaxformer.config.checks import sections
from jaxformer.data import templates as data_templates
from jaxformer.data.sources import Dataset
from jaxformer.models import build
from jaxformer.tasks import text_to_text

TASK = tasks.get("text_to_text")
EXAMPLES = {
    "text": "a {brace}", "pair": "the cat", "label": 1, "score": 0.25, "tags": (0, 1), "answers": ("cat", "The cat."),
    "starts": (0, 0),
}  # fmt: skip
CLASSES = ("0", "1")


def rendered(example=EXAMPLES, **template):
    dataset = Dataset({"train": [dict(example)]}, "key", CLASSES)
    return data_templates.rendered(dataset, TemplateConfig(**template)).splits["train"][0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("premise: {text} hypothesis: {pair}", "premise: a {brace} hypothesis: the cat"),
        ("{label}, {score:.1f}; {score}", "yes, 0.2; 0.25"),
        ("{{{tags}}}", "{0 yes}"),
        ("{answer}?", "cat?"),
    ],
)
def test_fields_of_the_example_fill_a_template(template, expected):
    example = rendered(source=template, target=template, words={"1": "yes"})
    assert example["source"] == example["target"] == expected
    assert {name: example[name] for name in EXAMPLES} == EXAMPLES


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"source": "{txet}"}, "source: got the field {txet}, expected one that the examples have: text,.*mean 'text'"),
        ({"target": "{answers}"}, "target: got the field {answers}, expected one .*did you mean 'answer'"),
        ({"source": "{text:.1f}"}, "source: got {text:.1f} .*expected a form of this value"),
        ({"source": "{text}", "words": {"2": "x"}}, "words: got a word for '2', expected a class of the data: 0, 1"),
    ],
)
def test_a_template_that_the_data_cannot_fill_is_refused(edit, expected):
    with pytest.raises(ConfigError, match=expected):
        rendered(**({"source": "{text}", "target": "{label}"} | edit))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"source": "{text"}, "source: got '{text' .expected '}' before end of string"),
        ({"source": "{text!r}"}, "source: got .* is no name of a field"),
        ({"source": "{}"}, "source: got .* is no name of a field"),
        ({"source": "{text.upper}"}, "source: got .* is no name of a field"),
        ({"source": "all alike"}, "source: got 'all alike', expected at least one field"),
        ({"scores": ("f1",)}, "scores: got 'f1', expected names among exact_match, squad"),
        ({"scores": ("squad", "exact_match")}, "scores: got .*expected exact_match or squad"),
        ({"choices": ("a", "b")}, r"choices: got .* expected \(\) without template.predict=rank"),
        ({"choices": ("a", "a"), "predict": "rank"}, "choices: got .* expected different choices"),
    ],
)
def test_a_malformed_template_is_refused_with_the_config(edit, expected):
    settings = config("text_to_text", template=TemplateConfig(**edit))
    with pytest.raises(ConfigError, match=f"config.task.template.{expected}"):
        sections.check_template(settings)


def test_templates_of_other_tasks_are_refused():
    with pytest.raises(ConfigError, match="config.task.template: got .* expected None for the task translation"):
        sections.check_template(config("translation", template=TemplateConfig(source="{text}")))


def test_a_decoder_alone_reads_the_source_and_learns_the_target():
    both = words()
    settings = config("text_to_text", side="decoder")
    features = encoded(settings, both, source="the cat sat", target="on it")
    source, target = both.target.encode("the cat sat"), both.target.encode("on it")
    assert features["target"].tolist() == [both.target.bos, *source, *target]
    assert features["labels"].tolist() == [*source, *target, both.target.eos]
    assert features["weights"].tolist() == [0.0] * 3 + [1.0] * 3
    prompt = TASK.prompt(settings, both, "the cat sat")
    assert prompt["target"].tolist() == features["target"].tolist()[:4]


@pytest.mark.parametrize(("length", "kept", "written", "cut"), [(6, 3, 3, 0), (5, 2, 3, 1), (3, 0, 3, 3), (2, 0, 2, 4)])
def test_a_stream_that_is_too_long_loses_its_source_first(length, kept, written, cut):
    both = words()
    features = encoded(config("text_to_text", length, side="decoder"), both, source="the cat sat", target="on it")
    assert len(features["target"]) == kept + written == min(length, 6)
    assert features["weights"].sum() == written
    assert int(features.get("cut", 0)) == cut
    assert (features["labels"][-1] == both.target.eos) == (length > 2)


def model(family, **template):
    """A predictor with a tiny model of this family."""
    parts = builders.FAMILIES[family]()
    stacks = {name: getattr(parts, name) for name in parts.parts}
    open_tables = {
        name: dataclasses.replace(stack, embed=dataclasses.replace(stack.embed, vocab=None))
        for name, stack in stacks.items()
    }
    parts = dataclasses.replace(parts, **open_tables)
    both = words("good bad film the")
    base = config("text_to_text", template=TemplateConfig(**template), classes=CLASSES)
    module, variables = builders.make(build.resolve(parts, both.source.vocab, both.target.vocab, None))
    base = dataclasses.replace(base, model=module.config)
    return framing.run_predictor(base, module, variables, both)


@pytest.mark.parametrize("family", ["seq2seq", "decoder"])
def test_the_likeliest_choice_is_that_of_the_model(family):
    predictor = model(family, target="{label}", words={"0": "bad", "1": "good film"}, predict="rank")
    lines, choices = ["the film", "good good film", "bad"], ["bad", "good film"]
    got = text_to_text.choice_log_likelihoods(predictor, lines, choices)
    tokenizer, rng = predictor.framing.tokenizers.target, np.random.default_rng(0)
    for row, line in enumerate(lines):
        for column, choice in enumerate(choices):
            features = TASK.encode(
                predictor.config, predictor.framing.tokenizers, {"source": line, "target": choice}, rng
            )
            (outputs,) = predictor.runner.forward([features])
            logits = np.asarray(outputs.outputs[0], np.float64)
            ids = [*tokenizer.encode(choice), tokenizer.eos]
            first = len(features["target"]) - len(ids)
            log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            expected = sum(log_probs[first + place, token] for place, token in enumerate(ids))
            assert got[row, column] == pytest.approx(expected, rel=1e-4)
    assert TASK.predict(predictor, lines, DecodeConfig()) == [choices[best] for best in got.argmax(1)]


def test_choices_come_from_the_classes_or_from_the_config():
    assert data_templates.choices(TemplateConfig(target="It is {label}.", words={"0": "bad"}), CLASSES) == [
        "It is bad.", "It is 1.",
    ]  # fmt: skip
    assert data_templates.choices(TemplateConfig(choices=("a", "b"), target="{text}"), ()) == ["a", "b"]
    for template, classes in (
        (TemplateConfig(target="{text} {label}"), CLASSES),
        (TemplateConfig(target="{label}"), ()),
    ):
        with pytest.raises(ConfigError, match=r"config.task.template\.(target|choices): got .* predict=rank"):
            data_templates.choices(template, classes)
    settings = config("text_to_text", template=TemplateConfig(target="{text}", predict="rank"))
    with pytest.raises(ConfigError, match="predict=rank"):
        TASK.check(settings)


def test_scores_are_those_that_the_config_names():
    template = {"source": "{text}", "target": "{answer}"}
    examples = [rendered(**template), rendered({**EXAMPLES, "answers": ()}, **template)]
    results = ["the Cat", ""]
    settings = config("text_to_text", template=TemplateConfig(target="{answer}", scores=("squad",)))
    assert TASK.score(settings, results, examples) == {"exact_match": 1.0, "f1": 1.0}
    assert TASK.reference_line(settings, examples[0]) == "cat | The cat."
    settings = config("text_to_text", template=TemplateConfig(target="{answer}"))
    assert TASK.score(settings, results, examples) == {"exact_match": 0.5}
    assert TASK.score(settings, [" The cat. ", "no"], examples) == {"exact_match": 0.5}
    settings = config("text_to_text", template=TemplateConfig(scores=("bleu", "chrf", "rouge")))
    scores = TASK.score(settings, ["a b c d e"], [{"target": "a b c d e"}])
    assert scores == pytest.approx({"bleu": 100, "chrf": 100, "rouge1": 100, "rouge2": 100, "rouge_l": 100})
    assert set(TASK.score_signatures(settings)) == set(scores)
    assert set(TASK.score(settings, ["a b c"], [{"target": "a b c"}])) == set(scores) - {"bleu"}  # no four words
    chinese = config("text_to_text", language="zh", template=TemplateConfig(scores=("bleu",)))
    assert TASK.score(chinese, ["猫坐在垫子上"], [{"target": "猫坐在垫子上"}]) == pytest.approx({"bleu": 100})


def test_names_of_fields_are_listed_once():
    assert templates.fields("{a} {b}{a:.1f} {{c}}") == ("a", "b")
