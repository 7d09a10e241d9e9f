"""Labels that are sets, and labels that are numbers: sums by hand, tables, and runs from the command line."""

import dataclasses
import json
import types

import builders
import jax
import numpy as np
import pytest
from task_toys import config, encoded, words

from jaxformer import cli, from_pretrained, load, metrics, tasks
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import sources
from jaxformer.types import Batch

SETS, NUMBERS = tasks.get("multi_label"), tasks.get("regression")

RECIPE = """
from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

def get_config(variant="multi_label"):
    config = defaults()
    variant = variant or "multi_label"
    config.task.name = variant
    config.data.source = "table"
    config.data.cache = "cache"
    config.data.columns = {"text": "text", "labels": "labels"} if variant == "multi_label" else {
        "text": "text", "score": "stars"}
    config.data.score_range = (1.0, 5.0)
    config.data.splits = {"train": ("x.tsv[:40]",), "validation": ("x.tsv[40:]",), "test": ("x.tsv[40:]",)}
    config.data.tokenizer.kind, config.data.tokenizer.vocab = "bpe", 300
    config.data.length, config.data.batch = 8, 8
    config.model.encoder = section(
        StackConfig, layers=1, width=16, attention=dict(heads=2), ffn=dict(width=16), embed=dict(norm=True),
        norm=dict(order="post"), encoding=dict(kind="learned", max_length=8))
    config.model.head.kind, config.model.head.pooling = "classes", "first"
    config.model.head.width, config.model.head.tied = 16, False
    config.train.steps, config.train.evaluate_every = 4, 0
    config.train.checkpoint_every = 0
    return config
"""


def draw(rows=5, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, classes)).astype(np.float32)
    labels = (rng.random((rows, classes)) > 0.5).astype(np.float32)
    return logits, labels, np.float32([1, 1, 0, 1, 1][:rows])


def test_scores_of_sets_are_those_of_loops():
    logits, labels, weights = draw()
    logits[3] = np.where(labels[3] == 1, 2.0, -2.0)  # one set is right
    settings = config("multi_label")
    measure = jax.jit(lambda x, y, w: SETS.metrics(settings, x, Batch(None, None, y, w)))
    halves = [measure(logits[i], labels[i], weights[i]) for i in (slice(2), slice(2, None))]
    found = metrics.divide(metrics.add(*halves))

    hits = [[0, 0, 0] for _ in range(3)]  # of each class: true positives, predicted, true
    right = total = 0.0
    for row in np.flatnonzero(weights):
        for c in range(3):
            p = 1 / (1 + np.exp(-float(logits[row, c])))
            total -= np.log(p if labels[row, c] else 1 - p)
            hits[c][0] += p > 0.5 and labels[row, c] == 1
            hits[c][1] += p > 0.5
            hits[c][2] += labels[row, c] == 1
        right += all((logits[row, c] > 0) == (labels[row, c] == 1) for c in range(3))
    assert found["loss"] == pytest.approx(total / (4 * 3), rel=1e-5)
    assert found["subset_accuracy"] == pytest.approx(right / 4)
    assert found["micro_f1"] == pytest.approx(2 * sum(h[0] for h in hits) / sum(h[1] + h[2] for h in hits))
    assert found["macro_f1"] == pytest.approx(np.mean([2 * h[0] / (h[1] + h[2]) for h in hits if h[1] + h[2]]))
    np.testing.assert_allclose(
        SETS.loss(settings, logits, Batch(None, None, labels, weights))["loss"][0], total, rtol=1e-5
    )


def test_a_set_is_a_row_of_zeros_and_ones():
    features = encoded(config("multi_label"), words(), text="the cat", labels=(0, 2))
    assert features["labels"].tolist() == [1.0, 0.0, 1.0]
    assert encoded(config("multi_label"), words(), text="the cat", labels=())["labels"].tolist() == [0.0] * 3
    assert SETS.reference_line(config("multi_label"), {"labels": (2, 0)}) == "joy,fear"


def test_numbers_are_measured_between_0_and_1_and_given_in_units():
    outputs, labels = np.float32([[0.5], [0.25], [9.0]]), np.float32([0.25, 0.5, 0.0])
    batch = Batch(None, None, labels, np.float32([1, 1, 0]))
    sums = NUMBERS.metrics(config("regression"), outputs, batch)
    np.testing.assert_allclose(sums["loss"], (0.125, 2))
    np.testing.assert_allclose(sums["mae"], (0.5, 2))
    np.testing.assert_allclose(NUMBERS.loss(config("regression"), outputs, batch)["loss"], sums["loss"])


@pytest.fixture
def write(tmp_path):
    def write(name, content, **columns):
        (tmp_path / name).write_text(content)
        splits = {"train": (f"{name}[:2]",), "test": (f"{name}[2:]",)}
        return DataConfig(source="table", dir=str(tmp_path), cache=str(tmp_path / "c"), splits=splits, columns=columns)

    return write


def test_tables_hold_sets_as_names_with_commas_or_lists(write):
    for name, content in (
        ("x.tsv", "t\tl\na\tjoy,fear\nb\t\nc\tfear\n"),
        ("x.jsonl", '{"t": "a", "l": ["joy", "fear"]}\n{"t": "b", "l": []}\n{"t": "c", "l": "fear"}\n'),
    ):
        data = sources.build(write(name, content, text="t", labels="l"), ("text", "labels"))
        assert data.classes == ("fear", "joy")
        assert [data.splits["train"][i]["labels"] for i in range(2)] == [(0, 1), ()]
        assert data.splits["test"][0]["labels"] == (0,)
        other = sources.with_classes(data, ("joy", "love", "fear"))
        assert other.splits["train"][0]["labels"] == (0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("t\tl\na\tjoy\nb\tjoy\nc\tfear\n", r"x.tsv:4: got label 'fear', expected one of the training split's: joy"),
        ("t\tl\na\tjoy,joy\nb\tjoy\nc\tjoy\n", r"x.tsv:2: got the labels 'joy,joy', expected names .* each once"),
        ("t\tl\na\tjoy,,fear\nb\tjoy\nc\tjoy\n", r"x.tsv:2: got the labels 'joy,,fear'"),
    ],
)
def test_labels_outside_the_set_are_one_line(write, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        sources.build(write("x.tsv", content, text="t", labels="l"), ("text", "labels"))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="got label and labels, expected one of them"):
        sources.build(write("x.tsv", content, text="t", labels="l", label="l"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    builders.one_device(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    kinds = [("a good film", "joy,love", 5), ("a bad film", "anger", 1), ("a film", "", 3)]
    rows = ["\t".join(map(str, kinds[i % 3])) for i in range(50)]
    (tmp_path / "x.tsv").write_text("\n".join(["text\tlabels\tstars", *rows]) + "\n")
    (tmp_path / "in.txt").write_text("a good film\na film\n")
    return tmp_path


def test_a_run_of_sets_is_measured_decoded_exported_and_read_again(folder, capsys):
    assert cli.main(["train", "--config=recipe.py", f"--config.data.dir={folder}", "--workdir=run"]) == 0
    assert cli.main(["evaluate", "--workdir=run", "--split=test"]) == 0
    result = json.loads((folder / "run" / "eval-test.json").read_text())
    assert {"micro_f1", "macro_f1", "subset_accuracy"} <= set(result)
    capsys.readouterr()
    assert cli.main(["decode", "--workdir=run", "--input=in.txt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model = load("run")
    found = model.classify(["a good film", "a film"])
    assert lines == [",".join(each["labels"]) for each in found]
    assert set(found[0]["probabilities"]) == {"anger", "joy", "love"}
    model.save_pretrained("out", "bert")
    assert json.loads((folder / "out" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    again = from_pretrained("out")
    assert again.config.task.name == "multi_label"
    for one, other in zip(found, again.classify(["a good film", "a film"]), strict=True):
        assert other["probabilities"] == pytest.approx(one["probabilities"], abs=1e-5)
    with pytest.raises(ConfigError, match="expected a head of one number.*use model.classify"):
        model.regress(["a"])


class Outputs:
    """Stands for a runner: the outputs of the prompts in a batch each, the last prompt first."""

    def forward(self, prompts):
        for index in reversed(range(len(prompts))):
            yield np.array([index]), None, np.float32([[len(prompts[index]["source"]) / 8]])


def test_numbers_are_predicted_in_units_and_in_order():
    settings, both = config("regression"), words()
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, score_range=(1.0, 5.0)))
    framing = types.SimpleNamespace(prompt=lambda line: NUMBERS.prompt(settings, both, line))
    predictor = tasks.Predictor(settings, Outputs(), framing)
    found = NUMBERS.predict(predictor, ["the", "the cat sat"], settings.decode)
    assert found == [1 + 4 * 3 / 8, 1 + 4 * 5 / 8]  # with two special tokens
    examples = [{"score": 0.5}, {"score": 0.25}]
    scores = NUMBERS.score(settings, found, examples)
    assert scores["squared_error"] == pytest.approx(((2.5 - 3) ** 2 + (3.5 - 2) ** 2) / 2)
    assert scores["pearson"] == scores["spearman"] == pytest.approx(-1.0)
    assert NUMBERS.reference_line(settings, examples[0]) == "3.0000"


def test_the_problem_of_a_checkpoint_is_known_or_refused(folder):
    from jaxformer.config import HeadConfig, ModelConfig
    from jaxformer.hf import loading
    from jaxformer.hf.table import Settings

    def task(problem, classes):
        model = ModelConfig(encoder=builders.stack(), head=HeadConfig(kind="classes", classes=classes))
        return loading._task_name(model, "sequence", Settings({"problem_type": problem}, "config.json"))

    assert [task(None, 1), task(None, 3), task("regression", 1)] == ["regression", "classification", "regression"]
    assert task("multi_label_classification", 3) == "multi_label"
    assert task("regression", 3) == task("single_label_classification", 1) == "none"
    with pytest.raises(ConfigError, match="config.json: got problem_type 'ranking', expected one of single_label"):
        task("ranking", 3)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("regression", "model.head.classes=2", "config.model.head.classes: got 2, expected 1 or None"),
        ("multi_label", "task.label_smoothing=0.1", "config.task.label_smoothing: got 0.1, expected 0"),
        ("multi_label", "data.packing=first_fit", "config.data.packing"),
        ("multi_label", "data.columns.labels=", "whose examples have text, expected text, labels for the task"),
    ],
)
def test_what_does_not_fit_is_one_line(name, edit, message, folder, capsys):
    words = [f"--config=recipe.py:{name}", f"--config.data.dir={folder}", "--workdir=no", f"--config.{edit}"]
    assert cli.main(["train", *words]) == 2
    assert message in capsys.readouterr().err
