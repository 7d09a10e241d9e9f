"""Whole runs at toy size: a complete workdir, resuming bit for bit, refusing another config."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import builders
import chex
import jax
import numpy as np
import pytest

from jaxformer import checkpoint, cli
from jaxformer.config import ConfigError, DecodeConfig, EmbedConfig, HeadConfig, RecurrentConfig, StackConfig, overrides
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.evaluation import evaluate
from jaxformer.train import loop, metric_window, results

# Without biases: compiling takes time by the parameter.
TINY = dict(
    layers=1,
    width=16,
    attention=dict(heads=2, bias=False),
    ffn=dict(width=16, bias=False),
    norm=dict(kind="rms"),
    embed=dict(dropout=0.1),
    unroll=1,
)


def recipe(**edits):
    config = overrides.defaults()
    config.data.source, config.data.name = "algorithmic", "reverse/2"  # few examples of validation: all are decoded
    config.data.tokenizer.kind = "character"
    config.data.batch, config.data.length = 8, 8
    config.data.examples = 40  # five batches an epoch: the run below crosses two epochs
    config.model.encoder = overrides.section(StackConfig, **TINY)
    config.model.decoder = overrides.section(StackConfig, **TINY)
    config.model.share_embeddings = True
    config.mesh.data, config.mesh.fsdp = 1, 8  # whole copies would be saved in slices, each of them a program
    config.train.steps, config.train.log_every = 12, 1
    config.train.evaluate_every, config.train.checkpoint_every = 6, 4
    config.train.ema = 0.9
    config.evaluate.examples = 16
    config.decode.max_length, config.decode.batch = 8, 4
    for path, value in edits.items():
        overrides.override(config, path.replace("__", "."), str(value))
    return overrides.freeze(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, programs):
    workdir = tmp_path_factory.mktemp("run") / "whole"
    config = recipe()
    with pytest.MonkeyPatch.context() as patch:
        builders.drawn_parameters(patch)
        builders.share_programs(patch, programs)
        assert loop.train(config, workdir) == 0
    return config, workdir


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_complete_workdir(finished):
    _, workdir = finished
    assert {"config.json", "environment.json", "metrics.jsonl", "jaxformer_tokenizer.json", "result.json"} <= {
        path.name for path in workdir.iterdir()
    }
    assert list((workdir / "tensorboard").glob("events*"))
    train = [row for row in rows(workdir) if row["split"] == "train"]
    assert [row["step"] for row in train] == list(range(1, 13))
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "padding", "wall_time"} <= train[0].keys()
    result = json.loads((workdir / "result.json").read_text())
    measured = [row["loss"] for row in rows(workdir) if row["split"] == "validation"]
    assert result["step"] == 12 and result["loss"] == measured[-1] and len(set(measured)) > 1


def test_stopped_and_resumed_is_the_uninterrupted_run(finished, programs, tmp_path, monkeypatch, capsys):
    config, whole = finished
    calls = []
    add = metric_window.MetricWindow.add

    def interrupt(self, sums, batch):
        calls.append(None)
        if len(calls) == 7:  # inside the second epoch, between two checkpoints
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, sums, batch)

    monkeypatch.setattr(metric_window.MetricWindow, "add", interrupt)
    with monkeypatch.context() as patch:
        builders.drawn_parameters(patch)
        builders.share_programs(patch, programs)  # of the start alone: what is resumed makes its own
        assert loop.train(config, tmp_path) == loop.EXIT_PREEMPTED
    assert rows(tmp_path)[-1]["step"] == 7
    assert not (tmp_path / "result.json").exists()
    build = loop._datasets.build
    renamed = lambda *given: dataclasses.replace(build(*given), key="other files")  # noqa: E731
    monkeypatch.setattr(loop._datasets, "build", renamed)
    assert loop.train(dataclasses.replace(config, decode=DecodeConfig(max_length=7)), tmp_path) == 0
    said = capsys.readouterr().err
    assert "validation changes from here on, config.decode.max_length: 7, was 8" in said
    assert "the data changed since the run started" in said
    mine, theirs = checkpoint.load_run(tmp_path), checkpoint.load_run(whole)
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))
    measured = [(r["step"], r["split"], r["loss"]) for r in rows(tmp_path)]
    assert measured == [(r["step"], r["split"], r["loss"]) for r in rows(whole)]


def test_evaluation_of_a_finished_run(finished):
    _, workdir = finished
    result = evaluate(workdir, "validation")
    assert json.loads((workdir / "eval-validation.json").read_text()) == result
    assert 0.0 <= result["exact_match"] <= 1.0 and result["loss"] > 0.0
    assert (result["cut_examples"], result["cut_tokens"]) == (0, 0) and result["examples"] > 16
    used = result["checkpoint"]
    assert result["weights"].startswith("best by loss (") and result["weights"].endswith(
        "average of the weights (train.ema)"
    )
    assert (used["kind"], used["steps"], used["average"]) == ("best", [12], True)
    last = evaluate(workdir, "validation", "8", edits=["--config.evaluate.decode_examples=0"])
    assert last["checkpoint"]["steps"] == [8] and last["loss"] != result["loss"]
    with pytest.raises(ConfigError, match="split: got 'tests'.*did you mean 'test'"):
        evaluate(workdir, "tests")


def test_an_evaluation_decodes_as_many_examples_as_it_measures_unless_told(finished):
    _, workdir = finished
    five = evaluate(workdir, "validation", edits=["--config.evaluate.examples=5", "--config.evaluate.samples=2"])
    assert (five["examples"], five["decoded_examples"]) == (5, 5)
    assert len(json.loads((workdir / "samples" / "validation.json").read_text())) == 2
    none = evaluate(
        workdir, "validation", edits=["--config.evaluate.examples=5", "--config.evaluate.decode_examples=0"]
    )
    assert none["loss"] == five["loss"] and "decoded_examples" not in none and "exact_match" not in none


def test_a_finished_run_is_not_trained_again(finished, capsys):
    config, workdir = finished
    before = rows(workdir)
    assert loop.train(config, workdir) == 0
    assert rows(workdir) == before
    with ThreadPoolExecutor() as pool:  # off the main thread no signal can be heard
        assert pool.submit(loop.train, config, workdir).result() == 0
    said = capsys.readouterr().err
    assert said.count("not on the main thread: signals do not stop this run") == 1
    assert rows(workdir) == before


def test_a_result_of_other_measuring_settings_is_measured_again(finished, tmp_path, capsys):
    config, workdir = finished
    copy = shutil.copytree(workdir, tmp_path / "copy")
    decoded = config.evaluate.decode_examples + 3
    other = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, decode_examples=decoded))
    assert loop.train(other, copy) == 0
    assert (
        f"changed since the checkpoint: evaluate.decode_examples {decoded - 3} -> {decoded}\n"
        in capsys.readouterr().err
    )
    old, new = (json.loads((path / "result.json").read_text()) for path in (workdir, copy))
    assert old["step"] == new["step"] and old["loss"] == new["loss"] and old["config"] != new["config"]
    assert results.finished_result(copy, other) == new
    assert results.finished_result(copy, config) is None


def test_fewer_steps_than_were_done_are_refused_untouched(finished):
    config, workdir = finished
    before = sorted((p.name, p.stat().st_mtime_ns) for p in workdir.iterdir())
    fewer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=11))
    with pytest.raises(ConfigError, match="config.train.steps: got 11, expected at least 12, which the run"):
        loop.train(fewer, workdir)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in workdir.iterdir()) == before


def test_a_workdir_of_another_config_is_refused_untouched(finished):
    _, workdir = finished
    before = sorted((p.name, p.stat().st_mtime_ns) for p in workdir.iterdir())
    with pytest.raises(ConfigError, match="optimizer.beta1"):
        loop.train(recipe(optimizer__beta1=0.5), workdir)
    with pytest.raises(ConfigError, match="config.evaluate.examples: 8, was 16"):
        loop.train(recipe(evaluate__examples=8), workdir)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in workdir.iterdir()) == before


def test_a_run_can_start_from_another_ones_parameters(finished, tmp_path, monkeypatch):
    builders.drawn_parameters(monkeypatch)
    config, workdir = finished
    edited = dataclasses.replace(
        config,
        init=dataclasses.replace(config.init, directory=str(workdir)),
        train=dataclasses.replace(config.train, steps=1),
    )

    def still(state, batch):
        """A step that moves nothing: what it is told to save is what the run began with."""
        sums = dict.fromkeys(("loss", "learning_rate", "gradient_norm"), (np.ones(()), np.ones(())))
        return state.replace(step=state.step + 1), sums | {"skipped": (np.zeros(()), np.ones(()))}

    monkeypatch.setattr(loop.steps, "make_train_step", lambda *parts: still)
    assert loop.train(edited, tmp_path / "second") == 0
    mine, theirs = checkpoint.load_run(tmp_path / "second"), checkpoint.load_run(workdir)
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))


def test_the_recurrent_baseline_uses_the_same_trainer(tmp_path, monkeypatch):
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    config = overrides.defaults()
    config.data.source, config.data.name = "algorithmic", "copy/4"
    config.data.tokenizer.kind = "character"
    config.data.batch, config.data.length, config.data.examples = 8, 8, 16
    part = dict(cell="gru", width=8)
    config.model.recurrent_encoder = overrides.section(RecurrentConfig, **part)
    config.model.recurrent_decoder = overrides.section(RecurrentConfig, **part, attention="additive")
    config.train.steps, config.optimizer.name = 2, "sgd"
    config.evaluate.examples, config.evaluate.decode_examples, config.decode.max_length = 8, 4, 6
    assert loop.train(overrides.freeze(config), tmp_path) == 0
    assert "exact_match" in json.loads((tmp_path / "result.json").read_text())


def test_a_tagger_learns_names_and_is_judged_by_its_entities(tmp_path, monkeypatch):
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    rng, words = np.random.default_rng(0), ["a", "dog", "in", "New York", "the", "Rome", "sea"]
    tags = {"New": "B-place", "York": "I-place", "Rome": "B-place"}
    for split in ("train", "validation"):
        sentences = [" ".join(rng.choice(words, 5)).split() for _ in range(32)]
        text = "\n\n".join("\n".join(f"{word}\t{tags.get(word, 'O')}" for word in line) for line in sentences)
        (tmp_path / f"{split}.conll").write_text(text)
    config = overrides.defaults()
    config.data.source, config.data.dir, config.task.name = "conll", str(tmp_path), "tagging"
    config.data.splits = {split: (f"{split}.conll",) for split in ("train", "validation")}
    config.data.tokenizer.kind, config.data.batch, config.data.length = "word", 16, 16
    config.model.encoder = overrides.section(StackConfig, **TINY)
    config.model.head.kind = "slots"
    config.train.steps, config.train.log_every, config.schedule.warmup, config.schedule.peak = 25, 25, 0, 0.03
    config.train.evaluate_every = config.train.checkpoint_every = 25
    config.evaluate.decode_examples, config.checkpoint.metric, config.checkpoint.mode = 32, "f1", "max"
    assert loop.train(overrides.freeze(config), tmp_path / "run") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["precision"], result["recall"], result["f1"]) == (1.0, 1.0, 1.0)
    records = json.loads((tmp_path / "run" / "samples" / "step-25.json").read_text())
    assert len(records) == config.evaluate.samples
    assert any("B-place I-place" in record["output"] for record in records)
    assert all(record["output"] == record["reference"] for record in records)


def test_a_reader_learns_a_handful_of_questions(tmp_path, monkeypatch):
    """Their contexts are longer than a window, and some questions have no answer."""
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    texts = (["dark red", "light blue"], ["a cat", "the grey dog"], ["two", "six hundred"])
    kinds = dict(zip(("colour", "animal", "number"), texts, strict=True))
    rng, paragraphs = np.random.default_rng(0), []
    for number in range(8):
        parts, qas = list(rng.choice(["on", "in", "is", "of"], 12)), []
        for kind, texts in kinds.items():
            if rng.random() < 0.7:
                parts.insert(rng.integers(len(parts)), str(rng.choice(texts)))
            qas.append({"id": f"{number} {kind}", "question": f"what {kind}"})
        context = " ".join(parts)
        for each, texts in zip(qas, kinds.values(), strict=True):
            each["answers"] = [{"text": t, "answer_start": context.index(t)} for t in texts if t in parts]
            each["is_impossible"] = not each["answers"]
        paragraphs.append({"context": context, "qas": qas})
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"title": "A", "paragraphs": paragraphs}]}))
    config = overrides.defaults()
    config.data.source, config.data.dir, config.task.name = "squad", str(tmp_path), "answering"
    config.data.splits = {"train": ("a.json",), "validation": ("a.json",)}
    config.task.unanswerable, config.train.seed = True, 1
    config.data.tokenizer.kind, config.data.batch, config.data.length = "word", 24, 16
    config.model.encoder = overrides.section(StackConfig, **{**TINY, "width": 32, "embed": dict(kinds=2)})
    config.model.head.kind = "slots"
    config.train.steps, config.train.log_every, config.schedule.warmup, config.schedule.peak = 120, 120, 10, 0.015
    config.train.evaluate_every = config.train.checkpoint_every = 120
    assert loop.train(overrides.freeze(config), tmp_path / "run") == 0
    model = checkpoint.load_run(tmp_path / "run")
    assert (model.config.model.head.classes, model.config.task.classes) == (2, ("start", "end"))
    result = evaluate(tmp_path / "run", "validation")
    assert (result["exact_match"], result["f1"]) == (1.0, 1.0)
    records = json.loads((tmp_path / "run" / "samples" / "validation.json").read_text())
    assert all(record["output"] == record["reference"] for record in records)
    assert {"", "light blue", "the grey dog"} <= {record["output"] for record in records}


def test_sentences_learn_how_alike_they_are(tmp_path, monkeypatch, capsys):
    """Scores that say how many words two sentences share, and nothing else: learned to the last rank."""
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    rng, words = np.random.default_rng(0), ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    lines = []
    for _ in range(16):
        shared, *rest = (chunk.tolist() for chunk in np.split(rng.permutation(words), [2, 5]))
        count = int(rng.integers(4))
        lines.append((" ".join([*shared, *rest[0]]), " ".join([*shared, *rest[0][:count], *rest[1][count:]]), count))
    for split in ("train", "validation"):
        text = "\n".join(f"{a}\t{b}\t{count}" for a, b, count in lines)
        (tmp_path / f"{split}.tsv").write_text(f"a\tb\tscore\n{text}\n")
    config = overrides.defaults()
    config.data.source, config.data.dir, config.task.name = "table", str(tmp_path), "similarity"
    config.data.splits = {split: (f"{split}.tsv",) for split in ("train", "validation")}
    config.data.columns, config.data.score_range = {"text": "a", "pair": "b", "score": "score"}, (0.0, 3.0)
    config.data.tokenizer.kind, config.data.batch, config.data.length = "word", 16, 16
    config.model.encoder = overrides.section(StackConfig, **TINY)
    config.model.head.kind, config.model.head.pooling = "pair", "mean"
    config.train.steps, config.train.log_every, config.schedule.warmup, config.schedule.peak = 50, 50, 0, 0.03
    config.train.evaluate_every = config.train.checkpoint_every = 50
    assert loop.train(overrides.freeze(config), tmp_path / "run") == 0
    result = evaluate(tmp_path / "run", "validation")
    assert result["loss"] < 0.01
    assert result["spearman"] > 0.95 and result["pearson"] > 0.95
    records = json.loads((tmp_path / "run" / "samples" / "validation.json").read_text())
    assert [record["reference"] for record in records] == [f"{count / 3:.4f}" for *_, count in lines]
    (tmp_path / "lines").write_text("".join(f"{a}\t{b}\n" for a, b, _ in lines[:3]))
    capsys.readouterr()
    arguments = ["decode", f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'lines'}"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.split() == [record["output"] for record in records[:3]]
    (tmp_path / "lines").write_text("one two\n")
    assert cli.main(arguments) == 2
    assert "got 'one two', expected two sentences with a tab between them" in capsys.readouterr().err
    without = {"text": "a", "pair": "b"}
    config.data.columns = without
    with pytest.raises(ConfigError, match="got an example without a score .*set data.columns.score, or task.objective"):
        loop.train(overrides.freeze(config), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("task", "roles"), [("masked_lm", "text"), ("tagging", "text, tags"), ("similarity", "text, pair")]
)
def test_data_without_what_a_task_reads_is_refused(task, roles, tmp_path):
    config = recipe()
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, name=task))
    message = f"data.source: got 'algorithmic', whose examples have source, target, expected {roles} for the task"
    with pytest.raises(ConfigError, match=message):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_head_has_as_many_classes_as_the_data():
    head = HeadConfig(kind="classes", classes=3)
    config = dataclasses.replace(recipe(), model=dataclasses.replace(recipe().model, head=head))
    tokenizers = Tokenizers.build(config.data, [{"text": "ab"}], ("text",))
    dataset = Dataset({}, "", ("good", "bad"))
    with pytest.raises(ConfigError, match="config.model.head.classes: got 3, expected 2 .the data"):
        loop.resolve_config(config, dataset, tokenizers)
    three = Dataset({}, "", ("a", "b", "c"))
    assert loop.resolve_config(config, three, tokenizers).model.head.classes == 3


def test_what_cannot_be_judged_is_refused_before_anything_is_written():
    config = overrides.defaults()
    config.task.name, config.model.head.kind = "tagging", "slots"
    config.model.encoder = overrides.section(StackConfig, **TINY)
    tokenizers = Tokenizers.build(overrides.freeze(config).data, [{"text": "a b"}], ("text",))
    splits = {"train": [], "validation": []}
    with pytest.raises(ConfigError, match="got the tags U-x among tags of entities"):
        loop.resolve_config(overrides.freeze(config), Dataset(splits, "", ("O", "B-x", "U-x")), tokenizers)
    config.checkpoint.metric = "f1"
    with pytest.raises(ConfigError, match="got 'f1', a measure of decoded text, and config.evaluate.decode_examples 0"):
        loop.resolve_config(overrides.freeze(config), Dataset(splits, "", ("O", "B-x")), tokenizers)
    loop.resolve_config(overrides.freeze(config), Dataset({"train": []}, "", ("O", "B-x")), tokenizers)


def test_a_table_has_a_row_for_every_token():
    config, tokenizers = recipe(), Tokenizers.build(recipe().data, [{"text": "ab"}], ("text",))
    size = tokenizers.source.size

    def with_rows(count):
        encoder = dataclasses.replace(config.model.encoder, embed=EmbedConfig(vocab=count))
        return dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=encoder))

    assert loop.resolve_config(with_rows(size), Dataset({}, ""), tokenizers).model.encoder.embed.vocab == size
    message = f"config.model.encoder.embed.vocab: got {size - 1}, expected at least {size}, the tokenizer's tokens"
    with pytest.raises(ConfigError, match=message):
        loop.resolve_config(with_rows(size - 1), Dataset({}, ""), tokenizers)


def test_the_rate_leaves_out_what_is_not_training(monkeypatch):
    clock = iter([0.0, 10.0, 110.0, 115.0, 115.0])  # begun, paused, going on, read, begun anew
    monkeypatch.setattr(metric_window.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(metric_window.packing, "padding_counts", lambda batch: (1.0, 4.0))
    window = metric_window.MetricWindow(processes=10)  # processes that fill as many rows each
    window.add({"loss": (2.0, 30.0), "skipped": (0.0, 1.0)}, None)
    window.pause()
    window.resume()
    window.add({"loss": (1.0, 30.0), "skipped": (0.0, 1.0)}, None)
    values = window.flush()
    assert (values["tokens_per_second"], values["loss"], values["padding"]) == (4.0, 0.05, 0.25)
