"""What holds for any task: a file dropped into the folder is tested here."""

import jax
import numpy as np
import pytest
from task_toys import TEXT, config, encoded, words

from jaxformer import metrics, registry, tasks
from jaxformer.config import (
    Config,
    ConfigError,
    HeadConfig,
    ModelConfig,
    SeriesConfig,
    StackConfig,
    TaskConfig,
    TemplateConfig,
)
from jaxformer.config.checks import sections
from jaxformer.tasks import _words, masked_lm
from jaxformer.types import Batch

NAMES = registry.names("jaxformer.tasks")
UNLIKE = (
    *("answering", "similarity", "replaced_tokens", "skip_gram", "cbow"),
    *("forecasting", "multi_label", "regression", "preference"),
)
"""Tasks whose loss is not the cross-entropy of a label for every slot or text: theirs are in tests of their own."""
EXAMPLE = {
    **{role: TEXT for role in ("source", "target", "text", "pair", "question", "context")},
    "label": 2,
    "labels": (0, 2),
    "score": 0.5,
    "tags": tuple(range(len(TEXT.split()))),
    "answers": ("cat", "the cat"),
    "starts": (-1, 0),
    "values": np.arange(80.0).reshape(40, 2),
    "future": np.arange(6.0).reshape(3, 2),
    "messages": ({"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}),
    "chosen": TEXT,
    "rejected": "the cat",
}


def example_of(name):
    """What the task must have, and a score, which some objectives need."""
    found = {role: EXAMPLE[role] for role in (*tasks.get(name).roles, "score")}
    return found | ({"messages": EXAMPLE["messages"][:1]} if "chosen" in found else {})


def test_the_folder_holds_the_tasks():
    named = (
        "translation summarisation language_modelling dialogue masked_lm classification tagging answering similarity "
        "permutation_lm replaced_tokens"
    )
    named += " skip_gram cbow"
    assert set(NAMES) >= set(named.split())
    with pytest.raises(ValueError, match="did you mean 'translation'"):
        tasks.get("translate")


@pytest.mark.parametrize("name", NAMES)
def test_features_are_int32_aligned_and_cut(name):
    floats = {"similarity": ("weights", "labels"), "forecasting": ("source", "labels")}
    floats |= {"multi_label": ("labels",), "regression": ("labels",)}
    floats = floats.get(name, ("weights", "source") if "values" in tasks.get(name).roles else ("weights",))
    features = encoded(config(name, length=6), words(), **example_of(name))
    assert features.pop("cut", 0) > 0 or name == "forecasting"  # which reads the last steps, and no others
    assert features.pop("empty", 0) == (name in ("dialogue", "preference"))  # no reply is left
    assert all(0 < len(features.pop(key)) < 16 for key in ("unread",) if key in features)
    if "targets" in features:  # tests of their own say which slots these are
        targets, shapes = features.pop("targets"), {features.pop(key).shape for key in ("labels", "weights")}
        assert shapes == {targets.shape} and targets.dtype == np.int32 and targets.max() < 6
    drops_text = name in ("span_corruption", "denoising")  # their sides have lengths of their own
    for key, value in features.items():
        assert value.dtype == (np.float32 if key in floats else np.int32)
        of_rows = name in ("forecasting", "multi_label") and key == "labels"
        assert value.shape[:1] in ((6,), ()) or of_rows or (drops_text and 0 < value.shape[0] <= 6)
    assert set(features) <= {"source", "target", "token_type", "segment", "labels", "weights", "prefix", "order"}
    if "weights" in features:
        assert features["weights"].shape == features["labels"].shape


@pytest.mark.parametrize("name", NAMES)
def test_the_same_generator_gives_the_same_features(name):
    first, second = (encoded(config(name), words(), seed=7, **example_of(name)) for _ in range(2))
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_array_equal(first[key], second[key])


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_has_the_streams_of_training(name):
    task = tasks.get(name)
    example = example_of(name)
    trained = encoded(config(name), words(), **example)
    prompt = task.prompt(config(name), words(), task.input_line(example))
    of_pair = {"segment"} if name == "preference" else set()  # a prompt waits for one reply
    assert set(prompt) == set(trained) - {"labels", "weights", "unread", "empty"} - of_pair
    for key, value in prompt.items():
        assert value.dtype == (np.float32 if "values" in task.roles and key == "source" else np.int32)
    if "values" in task.roles:
        np.testing.assert_array_equal(prompt["source"], trained["source"])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNLIKE])
def test_measures_of_parts_add_up_and_leave_out_smoothing(name):
    task, settings = tasks.get(name), config(name, label_smoothing=0.2, z_loss=0.1)
    rng = np.random.default_rng(0)
    shape = (4,) if "label" in task.roles else (4, 3)
    logits = rng.standard_normal((*shape, 5)).astype(np.float32)
    labels, weights = rng.integers(5, size=shape).astype(np.int32), np.float32(rng.random(shape) > 0.4)
    both = jax.jit(lambda x, b: (task.loss(settings, x, b), task.metrics(settings, x, b)))
    halves = [both(logits[i], Batch(None, None, labels[i], weights[i])) for i in (slice(2), slice(2, None))]
    smooth, bare = (metrics.divide(metrics.add(*sums)) for sums in zip(*halves, strict=True))

    gain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(gain, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(bare["loss"], (nll * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(bare["accuracy"], ((logits.argmax(-1) == labels) * weights).sum() / weights.sum())
    extra = 0.2 * (nll + gain.mean(-1)) - 0.1 * np.log(np.exp(logits).sum(-1)) ** 2
    np.testing.assert_allclose(smooth["loss"], ((nll - extra) * weights).sum() / weights.sum(), rtol=1e-5)

    size = {"examples": 4, "lines": 4, "bytes": 4, "words": 4, "labels": weights.sum()}
    values = task.derived_metrics(settings, bare, size)
    assert values["loss"] == bare["loss"]
    assert all(np.isfinite(value) for value in values.values())


RESULTS = {
    "tagging": ([[{"label": "x"}], [{"label": "O"}]], [{"tags": (1,)}, {"tags": (0,)}]),
    "answering": ([{"answer": "a"}], [{"answers": ("a",)}]),
    "regression": ([0.5, 0.1], [{"score": 0.3}, {"score": 0.4}]),
    "similarity": ([0.5, 0.1], [{"score": 0.3}, {"score": 0.4}]),
    "dialogue": (["a b"], [{"messages": EXAMPLE["messages"]}]),
}


@pytest.mark.parametrize("name", [name for name in NAMES if tasks.get(name).score is not None])
def test_a_task_names_all_of_its_scores(name):
    results, examples = RESULTS.get(name, (["a b c d"], [{"target": "a b c d"}]))
    found = set()
    templates = [TemplateConfig(scores=each) for each in (("squad",), ("bleu", "chrf", "rouge"))]
    for options in (
        {"classes": ("O", "x")},
        {"classes": ("O", "B-x"), "language": "de"},
        *({"classes": ("O", "x"), "template": template} for template in templates),
    ):
        found |= set(tasks.get(name).score(config(name, **options), results, examples))
    assert found == set(tasks.get(name).score_names)


def test_smoothing_spreads_over_the_real_vocabulary():
    logits = np.random.default_rng(0).standard_normal((1, 2, 8)).astype(np.float32)
    batch = Batch(None, None, np.array([[1, 3]]), np.ones((1, 2), np.float32))
    settings = config("translation", label_smoothing=0.5, vocab=5)
    loss = jax.jit(lambda x: tasks.get("translation").loss(settings, x, batch)["loss"][0])(logits)
    gain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(gain, batch.labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -(0.5 * picked + 0.5 * gain[..., :5].mean(-1)).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "result", "output"),
    [
        ("translation", "eine Katze", "eine Katze"),
        ("summarisation", "a cat", "a cat"),
        ("text_to_text", "positive", "positive"),
        ("language_modelling", " sat\non it", " sat\\non it"),
        ("dialogue", " sat\non it", " sat\\non it"),
        ("preference", " sat\non it", " sat\\non it"),
        ("masked_lm", {"text": "the cat sat on it"}, "the cat sat on it"),
        ("permutation_lm", {"text": "the cat sat on it"}, "the cat sat on it"),
        ("replaced_tokens", [{"token": " cat", "replaced": 0.25}, {"token": " ", "replaced": 1}], "cat/0.250  /1.000"),
        ("tagging", [{"label": "O"}, {"label": "B-place"}, {"label": "I-place"}], "O B-place I-place"),
        ("answering", {"answer": "the cat", "score": 0.5}, "the cat"),
        ("classification", {"label": "positive", "probability": 0.75}, "positive\t0.7500"),
        ("similarity", 0.5, "0.5000"),
        ("skip_gram", _words.Neighbours(["cat", "dog"], [0.5, 0.25]), "cat 0.500\tdog 0.250"),
        ("captioning", "a two above a six", "a two above a six"),
        ("multi_label", {"labels": ["joy", "fear"]}, "joy,fear"),
        ("regression", 2.5, "2.5000"),
        ("series_classification", {"label": "7", "probability": 0.75}, "7\t0.7500"),
    ],
)
def test_a_result_becomes_one_line(name, result, output):
    assert tasks.get(name).output_line(result) == output


def test_masks_are_filled_in_their_order():
    candidates = [[{"token": " cat"}, {"token": "dog"}], [{"token": "it"}]]
    assert masked_lm.fill("the <mask> sat on <mask>", "<mask>", candidates) == "the cat sat on it"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_fits_the_task_that_trained_it(name):
    """Its own where several have the head and sides; then any of the head, as for imported models of two sides."""
    task = tasks.get(name)
    for sides in task.sides:
        parts = {side: StackConfig(layers=4 * task.has_layers) for side in sides.split(", ")}
        parts |= {"series": SeriesConfig()} if "values" in task.roles else {}
        model = ModelConfig(**parts, head=HeadConfig(kind=task.head))
        assert tasks.fitting(Config(model=model, task=TaskConfig(name=name))) is task
    both = ModelConfig(**{"encoder": StackConfig(), "decoder": StackConfig(), **parts}, head=HeadConfig(kind=task.head))
    assert tasks.fitting(Config(model=both, task=TaskConfig(name="none"))).head == task.head


@pytest.mark.parametrize("name", NAMES)
def test_the_config_refuses_models_by_what_the_task_says(name):
    """The table stands in config too, where it is read without jax."""
    task = tasks.get(name)
    assert sections.TASK_MODELS[name] == (task.sides, task.head)


def test_a_model_without_a_tasks_head_fits_none():
    settings = Config(model=ModelConfig(encoder=StackConfig(), head=HeadConfig(kind="none")), task=TaskConfig("none"))
    assert tasks.fitting(settings) is None
    with pytest.raises(ConfigError, match="got no head for a task, expected a head of classes for this .*model.embed"):
        tasks.require(settings, "classify")
