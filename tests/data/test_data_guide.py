"""The how-to for parallel text of docs/data.md, command by command, at toy size."""

import json
import shlex
import subprocess
from pathlib import Path

import builders
import test_docs

from jaxformer import cli

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
