"""Mixtures in a config: edits by path, views of the components, and what is refused."""

import dataclasses
import json

import pytest

from jaxformer.config import (
    ConfigError,
    MixtureConfig,
    StackConfig,
    TaskConfig,
    components,
    overrides,
    saved_edits,
)
from jaxformer.config.checks import mixture, sections


def recipe(**mixture):
    config = overrides.defaults()
    config.model.encoder, config.model.decoder = overrides.section(StackConfig), overrides.section(StackConfig)
    template = dict(source="x {source}")
    parts = dict(
        b=dict(weight=2, dir="below", task=dict(name="text_to_text", template=template)),
        a=dict(name="de", examples=3, dir="/there"),
    )
    config.data.mixture = overrides.section(MixtureConfig, **({"components": parts} | mixture))
    config.data.dir = "/data"
    return config


def edited(*edits, **mixture):
    config = recipe(**mixture)
    for edit in edits:
        path, _, text = edit.partition("=")
        overrides.override(config, path.replace("PARTS", "data.mixture.components"), text)
    return overrides.freeze(config)


def test_components_are_edited_by_path_and_survive_json():
    config = edited(
        "data.mixture.components.b.weight=3",
        "data.mixture.components.b.task.template.words.1=yes",
        "data.mixture.components.a.splits.train=x,y",
        "data.mixture.temperature=2",
    )
    b, a = (config.data.mixture.components[name] for name in "ba")
    assert (b.weight, b.task.template.words, b.task.template.source) == (3.0, {"1": "yes"}, "x {source}")
    assert (a.splits, a.task, config.data.mixture.temperature) == ({"train": ("x", "y")}, None, 2.0)
    assert overrides.from_json(overrides.to_json(config)) == config
    assert list(edited("data.mixture.components.a=").data.mixture.components) == ["b"]
    other = overrides.edit(config, ["--config.data.mixture.components.a.examples=4"])
    assert overrides.diff(config, other) == {"data.mixture.components.a.examples": (3, 4)}
    assert overrides.resume_conflicts(other, config) == ["data.mixture.components.a.examples"]
    fingerprints = {overrides.fingerprint(each) for each in (config, other, edited())}
    assert len(fingerprints) == 3


def test_an_evaluation_may_take_components_away_and_says_so_in_json():
    path = "data.mixture.components"
    edits = [f"--config.{path}.a=", f"--config.{path}.b.splits.test=new.tsv"]
    found = saved_edits.apply_edits(edited(), edits, saved_edits.EVALUATE_FIELDS, "evaluate")
    assert list(found.config.data.mixture.components) == ["b"] and found.unused == ()
    assert set(json.loads(json.dumps(found.changed))) == {f"{path}.a", f"{path}.b"}
    one = saved_edits.apply_edits(edited(), edits[1:], saved_edits.EVALUATE_FIELDS, "evaluate")
    assert one.changed == {f"{path}.b.splits.test": {"run": None, "here": ("new.tsv",)}}


def test_names_of_classes_are_filled_in_by_a_run():
    config = edited()
    saved = overrides.edit(config, ["--config.data.mixture.components.b.classes=no,yes"])
    assert overrides.resume_conflicts(config, saved) == [] == overrides.result_conflicts(config, saved)


def test_a_view_is_a_run_on_the_component_alone():
    config = edited("train.seed=5", "data.length=64", "task.vocab=9")
    views = components.views(config)
    assert list(views) == ["a", "b"] == list(components.names(config))
    a, b = views.values()
    assert (a.data.dir, b.data.dir) == ("/there", "/data/below")
    assert (a.data.name, a.data.examples, b.data.examples) == ("de", 3, None)
    assert (a.task.name, b.task.name, b.task.template.source) == ("translation", "text_to_text", "x {source}")
    assert {view.data.mixture for view in (a, b)} == {None} and {view.data.length for view in (a, b)} == {64}
    assert (a.task.vocab, b.task.vocab) == (9, 9)
    seeds = [view.train.seed for view in (a, b)]
    assert len({*seeds, 5}) == 3 and [view.train.seed for view in components.views(edited()).values()] != seeds


REFUSED = {
    "unknown component": (
        ["PARTS.c.weight=3"],
        "components.c.weight: this recipe has no 'c', expected",
    ),
    "a section as text": (["PARTS.b=3"], "components.b: got '3' for a section, expected one of its"),
    "a negative weight": (
        ["PARTS.b.weight=-1"],
        "components.b.weight: got -1.0, expected at least 0",
    ),
    "no number": (["PARTS.b.weight=nan"], "components.b.weight: got 'nan', expected float"),
    "no weight": (
        ["PARTS.a.weight=0", "PARTS.b.weight=0"],
        "components: got 'weights that sum to 0', expected a sum above 0",
    ),
    "no components": (["PARTS.a=", "PARTS.b="], "components: got 'none', expected"),
    "a source of its own": (["data.source=pylib"], "config.data.source: got 'pylib', expected its default beside"),
    "splits of its own": (
        ["data.splits.train=x"],
        "config.data.splits: got .*expected its default",
    ),
    "a limit alone": (["data.mixture.limit=9"], "limit: got 9, expected None without mixture.temperature"),
    "a low temperature": (["data.mixture.temperature=0.5"], "temperature: got 0.5, expected at least 1"),
    "a task that does not fit": (
        [
            "PARTS.b.task.name=classification",
            "PARTS.b.task.template.source={source}",
        ],
        "components.b: config.task.name: got 'classification', expected an encoder or a decoder, not both",
    ),
    "a template": (
        ["PARTS.b.task.template.source=x {"],
        "components.b: config.task.template.source: got 'x {'",
    ),
    "a vocabulary": (["PARTS.b.task.vocab=9"], "b.task.vocab: got 9, expected None"),
    "a whole dict": (["PARTS=b"], "components: got 'b' for a dict, expected entries"),
    "bins of lengths": (
        ["evaluate.length_bins=8,16"],
        r"config.evaluate.length_bins: got \(8, 16\), expected \(\) with",
    ),
    "a relation of sentences": (
        ["PARTS.b.task.relation=next_sentence"],
        "components.b: config.task.relation: got 'next_sentence', expected none with data.mixture",
    ),
    "classes that are counted": (
        ["PARTS.b.task.class_weights=balanced"],
        "components.b: config.task.class_weights: got 'balanced', expected CLASS=WEIGHT with data.mixture",
    ),
    "an unknown field": (["PARTS.b.weigth=1"], "did you mean 'weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_mixture_cannot_be_is_refused_in_one_line(name):
    edits, expected = REFUSED[name]
    with pytest.raises(ConfigError, match=expected) as refusal:
        edited(*edits)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("task", sorted(set(sections.TASK_MODELS) - set(mixture.MIXED_TASKS)))
def test_tasks_whose_batches_have_other_arrays_are_refused(task):
    """As the task of the run, which components without one have, and as that of a component."""
    config = edited()
    parts = dict(config.data.mixture.components)
    parts["a"] = dataclasses.replace(parts["a"], task=TaskConfig(task))
    data = dataclasses.replace(config.data, mixture=dataclasses.replace(config.data.mixture, components=parts))
    for changed, where in (
        (dataclasses.replace(config, task=TaskConfig(task)), "config.task.name"),
        (dataclasses.replace(config, data=data), "config.data.mixture.components.a: config.task.name"),
    ):
        with pytest.raises(ConfigError, match=f"{where}: got '{task}', expected with data.mixture one of") as refusal:
            mixture.check_mixture(changed)
        assert "\n" not in str(refusal.value)


def test_components_of_a_recipe_are_checked():
    with pytest.raises(ConfigError, match=r"components: got 'a/b', expected names of letters"):
        edited(components={"a/b": {}})
    with pytest.raises(ConfigError, match=r"components.a: got 3 \(int\), expected a section \(ComponentConfig\)"):
        edited(components={"a": 3})
    with pytest.raises(ConfigError, match="MixtureConfig.components.a.sorce: got an unknown key"):
        edited(components={"a": {"sorce": "text"}})
    repeated = overrides.to_json(edited()).replace('"b": {', '"a": {')
    with pytest.raises(ConfigError, match="got key 'a' twice"):
        overrides.from_json(repeated)
