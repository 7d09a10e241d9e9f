"""Evaluation: every measure is over all of the text, or over what it says, and with the weights that it names."""

from __future__ import annotations

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.config import (
    ComponentConfig,
    Config,
    DataConfig,
    EmbedConfig,
    EvaluateConfig,
    MeshConfig,
    MixtureConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.parallel import mesh as meshes
from jaxformer.train import evaluate as evaluation
from jaxformer.train.run import Run
from jaxformer.types import TrainState

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
TEXTS = [
    "abc def",
    "x",
    "a much longer text than a row, of many words",
    "tail end",
    "ää öö üü",
    "four more words here now",
]


def text_pipeline(examples=None, **data):
    """Lines of bytes for a language model, most of them longer than a row."""
    config = Config(
        model=ModelConfig(decoder=StackConfig(embed=EmbedConfig(vocab=264))),
        data=DataConfig(**{"length": 8, "batch": 4} | data),
        task=TaskConfig(name="language_modelling"),
        evaluate=EvaluateConfig(batch=4, examples=examples),
    )
    texts = [{"text": text} for text in TEXTS]
    dataset = Dataset({"train": texts, "validation": texts}, "key")
    return config, lambda **hosts: Pipeline(config, dataset, BYTES, tasks.get("language_modelling"), **hosts)


def uniform(variables, batch):
    """Sums of a model to which all 256 bytes are equally likely."""
    count = np.float32(batch.weights.sum())
    return {"loss": (np.float32(math.log(256) * count), count), "accuracy": (np.float32(0), count)}


def measured(config, batches, size, cut=None):
    mesh = meshes.make(MeshConfig(), jax.devices()[:1])
    return evaluation.evaluate_batches(config, uniform, {}, batches, size, mesh, cut)


PACKINGS = [
    {"packing": "none"},
    {"packing": "none", "buckets": (4,)},
    {"packing": "first_fit"},
    {"packing": "concat"},
    {"packing": "none", "skip_long": True},
]


@pytest.mark.parametrize("examples", [None, 3])
@pytest.mark.parametrize("data", PACKINGS, ids=lambda data: "-".join(map(str, data.values())))
def test_a_uniform_model_needs_eight_bits_a_byte_however_rows_are_made(data, examples, tmp_path):
    config, make = text_pipeline(examples, cache=str(tmp_path), **data)
    pipeline = make()
    part = ("validation", examples)
    values = measured(config, pipeline.evaluate(*part), pipeline.size(*part), pipeline.truncated(*part))
    texts = TEXTS[:examples]
    size = sum(len(text.encode()) + 1 for text in texts)
    words = sum(len(text.split()) + 1 for text in texts)
    assert values["bits_per_byte"] == pytest.approx(8.0)
    assert values["word_perplexity"] == pytest.approx(256.0 ** (size / words))
    assert not [name for name in values if name.startswith("cut")], "all of the text was read"


@pytest.mark.parametrize("data", [{"packing": "none", "buckets": (4,)}, {"packing": "first_fit"}])
def test_hosts_measure_every_byte_once(data):
    config, make = text_pipeline(**data)
    halves = [make(process_index=index, process_count=2) for index in range(2)]
    batches = [batch for half in halves for batch in half.evaluate("validation")]
    assert measured(config, batches, halves[0].size("validation"))["bits_per_byte"] == pytest.approx(8.0)


def test_windows_are_the_rows_of_the_text_and_a_text_that_fits_is_one():
    config, _ = text_pipeline()
    task, rng = tasks.get("language_modelling"), np.random.default_rng(0)
    for text in ("seven..", "eight...", "more than eight"):
        example = {"text": text}
        parts = task.encode_windows(config, BYTES, example, rng)
        assert len(parts) == (1 if len(text) < 8 else 2)
        labels = np.concatenate([part["labels"] for part in parts]).tolist()
        assert labels == [*BYTES.target.encode(text), BYTES.target.eos]
        assert np.concatenate([part["target"] for part in parts]).tolist() == [BYTES.target.bos, *labels[:-1]]
        encoded = task.encode(config, BYTES, example, rng)
        assert int(encoded.get("cut", 0)) == max(len(text) + 1 - 8, 0)
        for name in ("target", "labels", "weights"):
            np.testing.assert_array_equal(parts[0][name], encoded[name])


def a_run(config, pipeline, seen):
    """As much of a run as its evaluation needs; `seen` gets the variables it evaluates."""

    def function(variables, batch):
        seen.append(variables)
        return uniform(variables, batch)

    averaged = {} if config.train.ema is None else {"ema": "average"}
    return types.SimpleNamespace(
        config=config,
        dataset=pipeline.dataset,
        pipeline=pipeline,
        task=pipeline.task,
        mesh=meshes.make(MeshConfig(), jax.devices()[:1]),
        state=TrainState(0, "now", None, None, averaged | {"statistics": 3}),
        eval_steps={"": function},
        pipelines={"": pipeline},
        timed_batches=lambda batches: batches,
        clock=types.SimpleNamespace(lap=lambda: None, record_part=lambda name, compiling: None),
        compile_seconds=0.0,
        reporter=types.SimpleNamespace(write=lambda *row: None),
        step=5,
        patience=types.SimpleNamespace(add=lambda values: None),
    )


def test_part_of_a_split_is_measured_by_its_own_bytes_during_training():
    config, make = text_pipeline(examples=3, packing="first_fit")
    run, counts = a_run(config, make(), []), []
    run.timed_batches = lambda batches: (counts.append(batch.weights.sum()) or batch for batch in batches)
    assert Run.evaluate(run)["bits_per_byte"] == pytest.approx(8.0)
    assert sum(counts) == sum(len(text.encode()) + 1 for text in TEXTS[:3])
    assert run.values["loss"] == pytest.approx(math.log(256)) and run.evaluated_at == 5


@pytest.mark.parametrize(("ema", "expected"), [(None, "now"), (0.9, "average")])
def test_evaluation_during_training_reads_the_average_where_there_is_one(ema, expected):
    config, make = text_pipeline()
    config, seen = dataclasses.replace(config, train=TrainConfig(ema=ema)), []
    Run.evaluate(a_run(config, make(), seen))
    assert seen and all(each == {"params": expected, "statistics": 3} for each in seen)


def test_components_are_decoded_by_their_own_tasks_and_those_without_scores_are_shown(monkeypatch):
    parts = {
        "texts": ComponentConfig(task=TaskConfig("span_corruption")),
        "pairs": ComponentConfig(task=TaskConfig("summarisation")),
        "other": ComponentConfig(task=TaskConfig("summarisation")),
    }
    config = Config(data=DataConfig(mixture=MixtureConfig(parts)), task=TaskConfig("summarisation"))
    examples = [{"source": "a b", "target": "b"}, {"source": "c", "target": "d"}]
    data = {name: Dataset({"test" if name == "other" else "validation": examples}, name) for name in parts}

    def decode(view, dataset, split, limit):
        records = [{"input": view.task.name, "output": "b", "reference": "b"}] * limit
        return evaluation.Decoded(["a"] * limit, ["b"] * limit, dataset.splits[split][:limit], records)

    monkeypatch.setattr(evaluation, "decode", decode)
    decoded = evaluation.decode_components(lambda view: view, config, data, "validation", 1)
    assert set(decoded) == {"texts", "pairs"}
    scores = evaluation.score_components(config, decoded)
    assert set(scores) == {f"{name}/pairs" for name in tasks.get("summarisation").score_names}
    assert scores["rouge1/pairs"] == 100.0
    assert [(record["component"], record["input"]) for record in evaluation.records_of(decoded)] == [
        ("pairs", "summarisation"),
        ("texts", "span_corruption"),
    ]


# --- what is cut ------------------------------------------------------------------------------------------------------


def tagging(length, classes=("O", "B-x", "I-x"), tags=((1, 2, 0, 0), (0, 1))):
    texts = ["aa bb cc dd", "ee ff"]
    config = Config(
        model=ModelConfig(encoder=StackConfig(embed=EmbedConfig(vocab=264))),
        data=DataConfig(length=length, batch=2),
        task=TaskConfig(name="tagging", classes=classes),
    )
    examples = [{"text": text, "tags": each} for text, each in zip(texts, tags, strict=True)]
    dataset = Dataset({"train": examples, "validation": examples}, "key", classes)
    return config, Pipeline(config, dataset, BYTES, tasks.get("tagging"))


def tagged(config, pipeline, answer):
    """The measures where the model's class for a word is `answer`'s next one."""
    task = tasks.get("tagging")

    def function(variables, batch):
        logits = np.full((*batch.labels.shape, len(config.task.classes)), -9.0, np.float32)
        weights = np.asarray(batch.weights)
        guesses = iter(answer)
        for place in np.argwhere(weights):
            logits[*place, next(guesses)] = 9.0
        return task.metrics(config, logits, batch)

    mesh = meshes.make(MeshConfig(), jax.devices()[:1])
    split = ("validation", None)
    batches, size, cut = pipeline.evaluate(*split), pipeline.size(*split), pipeline.truncated(*split)
    return evaluation.evaluate_batches(config, function, {}, batches, size, mesh, cut)


def by_hand(found, true, classes):
    """Accuracy and macro-F1 of class names, one word after the other."""
    scores = []
    for name in classes:
        both = sum(a == b == name for a, b in zip(found, true, strict=True))
        count = sum(a == name for a in found) + sum(b == name for b in true)
        scores += [2 * both / count] if count else []
    return sum(a == b for a, b in zip(found, true, strict=True)) / len(true), sum(scores) / len(scores)


@pytest.mark.parametrize(
    ("length", "classes"), [(32, ("O", "B-x", "I-x")), (8, ("O", "B-x", "I-x")), (8, ("ADJ", "NOUN", "VERB"))]
)
def test_words_that_were_cut_off_count_as_outside(length, classes):
    config, pipeline = tagging(length, classes)
    cut = pipeline.truncated("validation")
    found, true = [], [classes[tag] for tag in (1, 2, 0, 0, 0, 1)]
    answer = [1, 1, 0, 2, 0, 1]
    kept = [place is not None for text in ("aa bb cc dd", "ee ff") for place in places(config, text)]
    found = [classes[guess] if there else "O" for guess, there in zip(answer, kept, strict=True)]
    values = tagged(config, pipeline, [guess for guess, there in zip(answer, kept, strict=True) if there])
    accuracy, macro = by_hand(found, true, classes)
    assert (values["accuracy"], values["macro_f1"]) == pytest.approx((accuracy, macro))
    assert (len(cut.unread_labels), cut.words) == (kept.count(False), 6)
    assert values.get("cut_words", 0) == kept.count(False) and (length == 32) == (kept.count(False) == 0)


def places(config, text):
    from jaxformer.tasks import tagging as task

    return task.encode_words(config, BYTES.source, text)[1]
