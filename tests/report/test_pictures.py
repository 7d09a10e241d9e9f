"""Files of `jaxformer draw`: their formats, what stands in them, and the lines on the terminal."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxformer import cli
from jaxformer.analysis.draw import embeddings
from jaxformer.analysis.draw.diagram import Block, Column, Diagram, Group, Layers
from jaxformer.analysis.draw.panels import Bars, Curves, Heat, Picture
from jaxformer.config import ConfigError, StackConfig, overrides
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.data.vocabularies import LookupVocabulary
from jaxformer.hf import workdirs
from jaxformer.model import Model
from jaxformer.report import pictures, word_map
from jaxformer.report.pictures import diagram, neighbours, panels

RECIPE = """
from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section

def get_config():
    config = defaults()
    config.data.tokenizer.vocab = 60
    config.model.encoder = section(StackConfig, layers=2, width=16, encoding=dict(kind="alibi"))
    config.model.decoder = section(StackConfig, layers=2, width=16, attention=dict(window=5))
    return config
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(RECIPE)
    return "--config=toy.py"


def words_of(path) -> str:
    return " ".join(element.text or "" for element in ET.parse(path).iter() if element.tag.endswith("text"))


def words_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
LINES = {
    "positions": "encoder: alibi, 128 positions",
    "masks": "decoder, padded, causal, window 5: 1",
    "model": "all parameters ",
    "flops": "per token, forward and backward, length 128",
    "schedule": "cosine: highest rate 0.001 at step 100",
}


@pytest.mark.parametrize(("name", "suffix"), zip(LINES, ("", "svg", "svg", "png", "pdf"), strict=True))
def test_every_picture_is_a_file_and_lines(name, suffix, recipe, tmp_path, capsys):
    output = [f"--output=out.{suffix}"] if suffix else []
    assert cli.main(["draw", name, recipe, *output]) == 0
    out = capsys.readouterr().out
    assert LINES[name] in out
    path = tmp_path / (f"out.{suffix}" if suffix else f"toy-{name}.png")
    assert out.splitlines()[-1] == f"written to {path.name}"
    assert path.read_bytes().startswith(MAGIC[suffix or "png"])
    assert {file.name for file in tmp_path.iterdir()} == {"toy.py", path.name}


@pytest.mark.parametrize("output", ["x.jpg", "x", "folder.png", "nowhere/x.png"])
def test_other_files_are_refused_before_anything_is_drawn(output, recipe, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    assert cli.main(["draw", "masks", recipe, f"--output={output}"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: --output: got '{output}', ")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.svg"
    pictures.save(Figure(), path)
    before = path.read_bytes()
    pictures.save(Figure(), path)
    assert path.read_bytes() == before, "the same figure is the same file"
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ConfigError, match="No space left"):
        pictures.save(Figure(), path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_panels_show_their_values():
    values = np.array([[True, False], [True, True], [False, False]])
    heat = Heat("mask", values, "query", "key", scale="mask", boundaries=((2,), (1,)))
    curve = Curves("rate", np.arange(5), {"a": np.arange(5.0), "b": np.ones(5)}, "step", "lr", marks=((2.0, "here"),))
    bars = Bars("flops", {"one": 30.0, "two": 10.0}, "FLOPs")
    figure = panels.figure(Picture("a_$toy", [[heat, curve], [bars]]))
    shown = words_in(figure)
    assert {"mask", "rate", "flops", "query", "key", "a", "b", "here", "75.0%", "25.0%", "one", "visible"} <= set(shown)
    assert figure.get_suptitle() == r"a_\$toy"
    axes = {axes.get_title(): axes for axes in figure.axes}
    np.testing.assert_array_equal(axes["mask"].images[0].get_array(), values)
    assert [line.get_ydata()[0] for line in axes["mask"].lines] == [1.5, 0.0]
    np.testing.assert_array_equal(axes["rate"].lines[0].get_ydata(), np.arange(5))
    assert [patch.get_width() for patch in axes["flops"].patches] == [30, 10]
    figure.savefig(io.BytesIO())  # the layout has room for all of it


def test_a_diagram_shows_every_block_once_with_its_count():
    layer = (Group((Block("norm", "norm", 2), Block("self-attention", "attention", 30, ("2 heads",))), True),)
    cross = (*layer, Group((Block("cross-attention", "cross", 40),), False))
    columns = (
        Column("encoder", (Block("embedding", "embedding", 1000),), (Layers(layer, 3),), ()),
        Column("decoder", (Block("table", "embedding", 0),), (Layers(cross, 2),), (Block("head", "head", 7),)),
    )
    figure = diagram.figure(Diagram("toy", columns, "memory"))
    shown = words_in(figure)
    assert "toy: 1,247 parameters" in shown
    assert "encoder: 1,096" in shown
    assert "decoder: 151" in shown
    assert "x 3    32 in a layer" in shown
    assert "keys and values" in shown
    assert shown.count("self-attention") == 2
    assert shown.count("+") == 2, "a sum for each residual connection"
    (axes,) = figure.axes
    for text in axes.texts:
        x, y = text.get_position()
        assert axes.get_xlim()[0] < x < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < y < axes.get_ylim()[1]


# --- embeddings -------------------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<cls>", "<sep>", "a", "king", "queen", "man", "woman", "tree"]
PLACES = {"king": [3, 1], "queen": [3, -1], "man": [1, 1], "woman": [1, -1], "tree": [-4, 0], "a": [0, 9]}


@pytest.fixture(scope="module")
def model():
    config = overrides.defaults()
    config.data.tokenizer.kind = "word"
    config.model.encoder = overrides.section(StackConfig, width=2, attention=dict(heads=1))
    config.task.name = "masked_lm"
    tokenizer = Tokenizer(LookupVocabulary("word", WORDS, False))
    table = np.array([PLACES.get(word, [50.0, 50.0]) for word in WORDS], np.float32)
    params = {"source_embed": {"table": np.concatenate([table, np.zeros((3, 2), np.float32)])}}
    return Model(None, params, {}, overrides.freeze(config), Tokenizers(tokenizer, tokenizer))


def test_neighbours_are_the_nearest_ordinary_tokens(model):
    found = embeddings.neighbourhood(model.config.model, model.params, model.tokenizers, "toy", ["king", "woman"], 2)
    assert found.tokens[:2] == ["king", "woman"]
    near = [[(found.tokens[index], round(cosine, 4)) for index, cosine in each] for each in found.neighbours]
    assert near == [[("man", 0.8944), ("queen", 0.8)], [("queen", 0.8944), ("king", 0.4472)]]
    np.testing.assert_array_equal(found.vectors, [PLACES[token] for token in found.tokens])
    every = embeddings.neighbourhood(model.config.model, model.params, model.tokenizers, "toy")
    assert every.tokens == ["king", "queen", "man", "woman", "tree", "a"], "no special token; signs last"
    assert all(len(each) == 3 for each in every.neighbours)
    assert neighbours.lines(found)[0] == "king   man 0.89  queen 0.80"


def test_the_map_has_lines_to_the_neighbours(model):
    found = embeddings.neighbourhood(model.config.model, model.params, model.tokenizers, "toy", ["king", "woman"], 2)
    (axes,) = neighbours.figure(found).axes
    assert len(axes.lines) == 4
    places, _ = word_map.principal_components(found.vectors)
    np.testing.assert_allclose(np.stack(axes.lines[0].get_data(), 1), places[[0, found.tokens.index("man")]])
    assert axes.get_title().startswith("toy: 4 tokens, 100%")
    assert {text.get_text() for text in axes.texts} == set(found.tokens)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kind"], "got 'kind', which is 1 tokens .*did you mean 'king'"),
        (["king queen"], "expected one token of the vocabulary"),
    ],
)
def test_words_that_are_no_token_are_refused(model, words, expected):
    with pytest.raises(ConfigError, match=expected):
        embeddings.neighbourhood(model.config.model, model.params, model.tokenizers, "toy", words)


def test_the_command_loads_the_run(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(overrides.to_json(model.config))
    monkeypatch.setattr(workdirs, "load", lambda path, which: model)
    assert cli.main(["draw", "embeddings", "--workdir=run", "--tokens=king,man", "--output=x.svg"]) == 0
    assert "king  man 0.89" in capsys.readouterr().out
    assert (tmp_path / "x.svg").exists()
    assert "2 tokens" not in words_of(tmp_path / "x.svg")


def test_labels_avoid_each_other():
    points = np.array([[0.0, 0.0], [0.01, 0.0], [5.0, 5.0]])
    sides = word_map.label_places(word_map.SIZE, points, ["first", "second", "third"])
    assert sides[0] != sides[1]
