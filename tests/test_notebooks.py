"""The notebooks of the documentation run, at toy size, and hold the outputs of a whole run."""

import json
from pathlib import Path

import builders
import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
TOYS = {
    "train_and_look": {
        "STEPS = 300": "STEPS = 2",
        'evaluate_every=100",': 'evaluate_every=0", "--config.optimizer.name=sgd", "--config.optimizer.momentum=0",',
        "data.examples=8000": "data.examples=200",
        "data.batch=64": "data.batch=16",
        "width=64": "width=16",
        "decode_examples=32": "decode_examples=0",
        '["seven", "forty-two", "two hundred and five"]': '["forty-two"]',  # as many as below: the same program
        '"--config.evaluate.examples=256",': '"--config.evaluate.examples=16", "--config.data.buckets=40", '
        '"--config.model.encoder.layers=1", "--config.model.decoder.layers=1", "--config.decode.max_length=8", '
        + ", ".join(  # without biases: compiling takes time by the parameter
            f'"--config.model.{part}.{edit}"'
            for part in ("encoder", "decoder")
            for edit in ("norm.kind=rms", "attention.bias=false", "ffn.bias=false")
        ),
    },
    "fine_tune": {
        "PRETRAIN, FINE_TUNE = 60, 60": "PRETRAIN, FINE_TUNE = 2, 2",
        "data.examples=2000": "data.examples=60",
        "data.length=64": "data.length=16",
        '"--config.evaluate.examples=64",': '"--config.evaluate.examples=16", "--config.data.tokenizer.vocab=400", '
        '"--config.optimizer.name=sgd", "--config.optimizer.momentum=0", '
        '"--config.model.encoder.layers=1", "--config.model.encoder.width=16"',
        "recipe.schedule.peak,": "recipe.optimizer.name, recipe.optimizer.momentum = 'sgd', 0.0\nrecipe.schedule.peak,",
    },
    "attention": {},
}
"""Notebook -> what is replaced in its code, so that it runs in seconds."""


def code(name: str) -> list[dict]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", TOYS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", plt.close)
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    (tmp_path / "configs").symlink_to(FOLDER.parents[1] / "configs")
    source = "\n".join("".join(cell["source"]) for cell in code(name))
    for full, toy in TOYS[name].items():
        assert source.count(full), f"{name}: {full} is not in the notebook any more"
        source = source.replace(full, toy)
    exec(compile(source, f"{name}.ipynb", "exec"), {})


@pytest.mark.parametrize("name", TOYS)
def test_a_notebook_holds_the_outputs_of_one_run(name):
    cells = code(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert (
        any(output.get("data", {}).get("image/png") for cell in cells for output in cell["outputs"])
        or name == "fine_tune"
    )
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(TOYS)
