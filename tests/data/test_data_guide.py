"""The how-to for parallel text of docs/data.md, command by command, at toy size."""

import json
import shlex
import subprocess
from pathlib import Path

import builders
import test_docs

from jaxformer import cli
from jaxformer.config import components, overrides
from jaxformer.tasks import _datasets

PAIRS = {"jump twice": "I_JUMP I_JUMP", "walk left": "I_TURN_LEFT I_WALK", "run": "I_RUN", "look": "I_LOOK"}


def test_marked_lines_become_columns_and_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    builders.one_device(monkeypatch)
    (tmp_path / "configs").symlink_to(test_docs.ROOT / "configs")
    lines = [f"IN: {source} OUT: {target}\n" for source, target in PAIRS.items()]
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "tasks_train.txt").write_text("".join(lines * 5))
    (tmp_path / "DIR" / "tasks_test.txt").write_text("".join(lines))
    page = Path(test_docs.ROOT / "docs" / "data.md")
    awk = [line for block in test_docs.blocks(page, "bash") for line in block.splitlines() if line.startswith("awk")]
    assert len(awk) == 2
    for line in awk:
        subprocess.run(line, shell=True, check=True)
    assert (tmp_path / "DIR" / "test.tsv").read_text() == "".join(f"{a}\t{b}\n" for a, b in PAIRS.items())
    commands = [words for name, words in test_docs.commands() if name == "data.md" and "runs/scan" in shlex.join(words)]
    assert [words[0] for words in commands] == ["train", "evaluate"]
    for words in commands:
        words = [word.replace("runs/scan", str(tmp_path / "run")) for word in words]
        assert cli.main(words + (test_docs.TOY if words[0] == "train" else [])) == 0, capsys.readouterr().err
    measured = json.loads((tmp_path / "run" / "eval-test.json").read_text())
    assert measured["examples"] == len(PAIRS) and "exact_match" in measured
    assert "exact_match" in capsys.readouterr().out


def test_the_mixture_of_the_guide_is_read_as_it_says(tmp_path):
    """Its Python in a recipe, on files of its names: both tasks as text, from folders below data.dir."""
    page = Path(test_docs.ROOT / "docs" / "data.md")
    (block,) = [each for each in test_docs.blocks(page, "python") if "MixtureConfig" in each]
    config = overrides.load(str(test_docs.ROOT / "configs" / "quickstart.py"))
    for field in ("source", "splits", "columns", "name", "examples"):
        config.data[field] = overrides.defaults().data[field]
    exec(compile(block, "data.md", "exec"), {"config": config})
    config.data.dir, config.data.cache = str(tmp_path), str(tmp_path / "cache")
    frozen = overrides.freeze(config)
    (tmp_path / "sst2").mkdir()
    for name, rows in (("train", "a fine film\tgood\nno\tbad\n"), ("dev", "no\tbad\n")):
        (tmp_path / "sst2" / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}")
    for name in ("train", "val"):
        (tmp_path / "multi30k_en_de").mkdir(exist_ok=True)
        (tmp_path / "multi30k_en_de" / f"{name}.en").write_text("a dog\n")
        (tmp_path / "multi30k_en_de" / f"{name}.de").write_text("ein Hund\n")
    dataset = _datasets.build(frozen)
    texts = [(example["source"], example["target"]) for example in map(dataset.splits["train"].__getitem__, range(3))]
    assert texts == [
        ("translate to german: a dog", "ein Hund"),
        ("sst2 sentence: a fine film", "good"),
        ("sst2 sentence: no", "bad"),
    ]
    assert list(components.views(frozen)) == list(dataset.components) == ["german", "sst2"]
