"""A run on conversations from a file, from training to talking; and what runs show of decoded text."""

import dataclasses
import io
import json

import builders
import numpy as np
import pytest
from test_model import LINES, model

from jaxformer import cli, tasks
from jaxformer.config import Config, ConfigError, EvaluateConfig, StackConfig, TaskConfig, overrides
from jaxformer.data.sources import Dataset
from jaxformer.tasks import Sample
from jaxformer.train import evaluate, loop, metric_settings


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_a_run_on_conversations_from_training_to_talking(tmp_path, monkeypatch, capsys, caplog):
    builders.one_device(monkeypatch)
    lines = [{"messages": turns("a b", "c d", "b", "a")}, {"messages": turns("c", "d" * 40)}]
    (tmp_path / "all.jsonl").write_text("\n".join(json.dumps(line) for line in lines * 4))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<s>{{ m.role }}<sep>{{ m.content }}</s>{% endfor %}"
                                        "{% if add_generation_prompt %}<s>assistant<sep>{% endif %}")  # fmt: skip
    config = overrides.defaults()
    config.task.name, config.data.source, config.data.dir = "dialogue", "dialogues", str(tmp_path)
    config.data.splits = {"train": ("all.jsonl",), "validation": ("all.jsonl[:2]",)}
    config.data.tokenizer.kind, config.data.tokenizer.chat_template = "character", str(tmp_path / "own.jinja")
    config.data.batch, config.data.length, config.data.packing = 2, 48, "first_fit"
    config.data.cache = str(tmp_path / "cache")
    config.model.decoder = overrides.section(
        StackConfig, layers=1, width=8, attention=dict(heads=1, bias=False), ffn=dict(width=8, bias=False), unroll=1
    )
    config.train.steps, config.evaluate.decode_examples, config.decode.max_length = 2, 2, 4
    config.evaluate.batch = 2
    workdir = tmp_path / "run"
    assert loop.train(overrides.freeze(config), workdir) == 0
    err = capsys.readouterr().err
    assert "train: 4 of 8 examples are longer than data.length (48)" in err
    assert {"loss", "perplexity", "exact_match", "cut_tokens"} <= json.loads(
        (workdir / "result.json").read_text()
    ).keys()
    assert (workdir / "chat_template.jinja").read_text() == (tmp_path / "own.jinja").read_text()
    samples = json.loads((workdir / "samples" / "step-2.json").read_text())
    assert json.loads(samples[0]["input"]) == {"messages": turns("a b", "c d", "b")}
    assert [sample["reference"] for sample in samples] == ["a", "d" * 40]

    (tmp_path / "own.jinja").write_text("changed")  # the run has its own
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\n" * 3 + "b </s>\n"))
    assert cli.main(["chat", f"--workdir={workdir}", "--system=d"]) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "oldest turns are not read" in caplog.text
    assert "got '</s>' in a turn of the user, which the tokenizer reads as a special token" in err
    assert cli.main(["evaluate", f"--workdir={workdir}", "--split=validation"]) == 0
    assert {"perplexity", "exact_match"} <= json.loads((workdir / "eval-validation.json").read_text()).keys()


# --- samples of tasks without scores ----------------------------------------------------------------------------------


def decoded(task, *examples):
    predictor = model(task).predictor
    scores, records = evaluate.decode_and_score(predictor, Dataset({"validation": examples}, "x"), "validation", None)
    assert scores == {}
    return records


def test_a_language_model_continues_the_beginnings_of_texts():
    text = "one two three four five six"
    records = decoded("language_modelling", {"text": text}, {"text": "ab"})
    assert [record["note"] for record in records] == ["the first 3 of 6 words", "the first 1 of 2 characters"]
    assert [record["input"] for record in records] == ["one two three", "a"]
    assert records[0]["reference"] == " four five six"
    line = tasks.get("language_modelling").output_line
    assert [record["output"] for record in records] == list(
        map(line, model("language_modelling").generate(["one two three", "a"]))
    )


def test_a_masked_model_shows_masked_and_filled_lines():
    text = "abcdefghijklmno"
    first, second = decoded("masked_lm", {"text": text}), decoded("masked_lm", {"text": text})
    assert first == second, "the same in every evaluation"
    record = first[0]
    kept = record["input"].split("<mask>")
    assert len(kept) == 1 + 2, "15 % of 15 tokens"
    assert record["reference"] == text
    assert record["output"] == model("masked_lm").predict([record["input"]])[0]["text"]
    assert "<mask>" not in record["output"]
    shown = decoded("masked_lm", {"text": "x" * 100}, {"text": ""})
    assert len(shown[0]["reference"]) == 22, "what fits beside the two special tokens"
    assert "<mask>" in shown[1]["input"]


def test_a_classifier_shows_its_class_and_the_true_one():
    (record,) = decoded("classification", {"text": LINES[1], "label": 2})
    found = model("classification").classify([LINES[1]])[0]
    assert record == {"input": LINES[1], "output": f"{found['label']}\t{found['probability']:.4f}", "reference": "2"}
    named = tasks.get("classification").sample(
        dataclasses.replace(model("classification").config, task=TaskConfig("classification", classes=("a", "b", "c"))),
        model("classification").tokenizers,
        {"text": "t", "pair": "p", "label": 2},
        np.random.default_rng(0),
    )
    assert named == Sample("t\tp", "c")


def test_a_task_that_shows_nothing_is_refused_at_the_start(monkeypatch):
    for name in ("language_modelling", "masked_lm", "classification", "dialogue"):
        config = Config(task=TaskConfig(name=name), evaluate=EvaluateConfig(decode_examples=8))
        metric_settings.check_samples_exist(config)
    bare = dataclasses.replace(tasks.get("classification"), sample=None)
    monkeypatch.setattr(tasks, "get", lambda name: bare)
    config = dataclasses.replace(config, task=TaskConfig(name="classification"))
    with pytest.raises(ConfigError, match="decode_examples: got 8, expected 0 for the task classification"):
        metric_settings.check_samples_exist(config)
    metric_settings.check_samples_exist(dataclasses.replace(config, evaluate=EvaluateConfig()))
