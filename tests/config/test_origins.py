"""Where values come from, against recipes that say; what None stands for, against what models make of it."""

from __future__ import annotations

import dataclasses

import pytest

from jaxformer import cli
from jaxformer.config import ConfigError, StackConfig, origins, overrides, recipes
from jaxformer.models import build
from jaxformer.nn import stack as stacks
from jaxformer.nn.attention import head_shape
from jaxformer.plan import program

RECIPE = '''"""A recipe of a test: first line.

Command: none
"""
from jaxformer.config import NormConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("small", "large")

def get_config(variant=""):
    config = defaults()
    config.model.encoder = section(StackConfig, layers=3, attention=dict(heads=8))
    config.model.decoder = section(StackConfig, width=256 if variant == "large" else 128)
    config.data.splits = {"train": ["a.txt"]}
    config.schedule.peak = 1e-3  # the default
    config.train.steps = 500
    config.optimizer.clip = None
    return config
'''


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "toy.py"
    path.write_text(RECIPE)
    return path


def test_every_value_has_its_origin(recipe):
    argv = [f"--config={recipe}:large", "--config.train.seed=0", "--config.data.splits.test=b.txt"]
    argv += ["--config.model.decoder.ffn.width=64", "--config.train.steps=7"]
    found = {value.path: value for value in origins.trace(argv)}
    expected = {
        "model.encoder.layers": (3, "recipe"),
        "model.encoder.width": (128, "default"),
        "model.encoder.attention.heads": (8, "recipe"),
        "model.decoder.width": (256, "variant large"),
        "model.decoder.layers": (4, "default"),
        "model.decoder.ffn.width": (64, "command line"),
        "model.head.kind": ("tokens", "default"),
        "model.recurrent_encoder": (None, "default"),
        "data.splits.train": (("a.txt",), "recipe"),
        "data.splits.test": (("b.txt",), "command line"),
        "schedule.peak": (1e-3, "default"),
        "optimizer.clip": (None, "recipe"),
        "train.steps": (7, "command line"),
        "train.seed": (0, "command line"),
    }
    assert {path: (found[path].value, found[path].origin) for path in expected} == expected
    assert not [path for path in found if path.startswith("model.encoder.attention.norm.")], "it has none"
    config = overrides.parse(argv)
    flat = dict(flatten(dataclasses.asdict(config)))
    assert {path for path in flat if not path.startswith("data.splits")} <= set(found)
    assert all(found[path].value == value for path, value in flat.items() if path in found)


def flatten(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield f"{prefix}{name}", value


def test_without_a_variant_nothing_comes_from_one(recipe):
    values = {value.path: value.origin for value in origins.trace([f"--config={recipe}"])}
    assert set(values.values()) == {"default", "recipe"}
    values = {value.path: value.origin for value in origins.trace([f"--config={recipe}:small"])}
    assert set(values.values()) == {"default", "recipe"}, "small is as without a variant"


def test_what_none_stands_for_is_what_the_model_makes_of_it(recipe):
    argv = [f"--config={recipe}"]
    found = {value.path: value.derived for value in origins.trace(argv) if value.derived}
    config = overrides.parse(argv)
    stack = config.model.encoder
    heads, groups, width = head_shape(stack.attention, stack.width)
    resolved = program.resolve(config).model
    assert found["model.encoder.attention.kv_heads"] == f"{groups} (heads)"
    assert (heads, found["model.encoder.attention.head_width"]) == (8, f"{width} (width // heads)")
    assert found["model.encoder.embed.vocab"].startswith(f"{resolved.encoder.embed.vocab} (data.tokenizer.vocab")
    final = str(stacks.has_final_norm(stack)).lower()
    assert found["model.encoder.norm.final"] == f"{final} (norm.order is not post)"
    causal = {side: build.is_causal(getattr(config.model, side), side) for side in ("encoder", "decoder")}
    assert found["model.decoder.causal"] == f"{str(causal['decoder']).lower()} (a decoder)"
    assert found["model.encoder.causal"] == f"{str(causal['encoder']).lower()} (an encoder)"
    post = origins.trace([*argv, "--config.model.encoder.norm.order=post"])
    assert next(v.derived for v in post if v.path == "model.encoder.norm.final").startswith("false")
    bytes_ = origins.trace([*argv, "--config.data.tokenizer.kind=byte"])
    assert next(v.derived for v in bytes_ if v.path == "model.encoder.embed.vocab") == "what the tokenizer has"
    assert StackConfig().ffn.width is None
    assert "4 * width" in found["model.encoder.ffn.width"]


def test_every_line_can_be_an_edit(recipe, capsys):
    assert cli.main(["config", f"--config={recipe}:large", "--config.train.steps=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train.steps = 7" in lines[[line.startswith("train.steps ") for line in lines].index(True)]
    ends = {line.rpartition("  # ")[2].partition(";")[0] for line in lines}
    assert ends == {"default", "recipe", "variant large", "command line"}
    for line in lines:
        path, _, value = line.rpartition("  # ")[0].rstrip().partition(" = ")
        if path in (
            "train.steps",
            "model.decoder.width",
            "data.tokenizer.kind",
            "optimizer.decay_exclude",
            "train.ema",
        ):
            edit = f"--config.{path}={value.strip(chr(39))}"
            assert overrides.parse([f"--config={recipe}:large", "--config.train.steps=7", edit])


def test_recipes_are_listed_and_broken_ones_with_their_error(recipe, tmp_path, capsys, monkeypatch):
    (tmp_path / "a_toy.py").write_text(RECIPE)
    (tmp_path / "broken.py").write_text('"""Broken."""\nimport nothing_of_that_name\n')
    (tmp_path / "torn.py").write_text("def get_config(:\n")
    (tmp_path / "fails.py").write_text("def get_config():\n    raise ValueError('no such thing')\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "_private.py").write_text("1 / 0\n")
    (tmp_path / "notes.txt").write_text("no recipe\n")
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["recipes", f"--dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/a_toy.py\n    A recipe of a test: first line.\n    variants: small, large\n" in out
    assert "broken.py\n    error: " in out
    assert "broken.py:2: got ModuleNotFoundError: No module named 'nothing_of_that_name'" in out
    assert "torn.py:1: got SyntaxError" in out
    assert "fails.py:2: got ValueError: no such thing" in out
    assert "got no get_config" in out
    assert "_private" not in out
    assert "notes" not in out
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["recipes", f"--dir={tmp_path}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ") and "/" not in line]
    assert lines
    assert max(map(len, lines)) <= 40


def test_a_recipe_is_described_without_its_config():
    with pytest.raises(ConfigError):
        overrides.load("nowhere.py")
    assert recipes.describe("nowhere.py").error.startswith("'nowhere.py': no such file")
