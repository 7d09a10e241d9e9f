"""Tasks, encodings, kernels and data sources from modules outside the package."""

import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import builders
import numpy as np
import pytest

from jaxformer import cli, registry
from jaxformer.config import ConfigError, overrides

ROOT = Path(__file__).resolve().parents[2]

TASK = """
import dataclasses
from typing import Annotated, Literal

from jaxformer.config.constraints import Probability, Range
from jaxformer.tasks import language_modelling


@dataclasses.dataclass(frozen=True)
class Nested:
    depth: Annotated[int, Range(1, 3)] = 1


@dataclasses.dataclass(frozen=True)
class Options:
    alpha: Probability = 0.5
    mode: Literal["sum", "scaled"] = "scaled"
    names: tuple[str, ...] = ()
    nested: Nested = dataclasses.field(default_factory=Nested)


def loss(config, logits, batch):
    sums = language_modelling.TASK.loss(config, logits, batch)
    total, count = sums["loss"]
    return sums | {"loss": (total * config.task.options.alpha, count)}


TASK = dataclasses.replace(language_modelling.TASK, loss=loss, options=Options)
"""

SOURCE = """
from jaxformer.data.sources import Dataset, text


def SOURCE(config):
    return text.SOURCE(config)
"""

RECIPE = """
from jaxformer.config import StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    config.model.decoder = section(StackConfig, layers=1, width=16, attention=dict(heads=2))
    config.task.name = "mine.task"
    config.task.options.alpha = 0.1
    config.data.source = "mine.source"
    config.data.dir = {directory!r}
    config.data.splits = dict(train=("text.txt",), validation=("text.txt",), test=("text.txt",))
    config.data.tokenizer.kind = "byte"
    config.data.length = 16
    config.data.batch = 4
    config.evaluate.batch = 4
    config.evaluate.samples = 0
    config.decode.max_length = 2
    config.train.steps = 2
    config.train.log_every = 1
    config.schedule.kind = "constant"  # a longer run has the same program
    config.optimizer.name = "sgd"
    config.optimizer.momentum = 0.0
    config.mesh.data = 1
    return config
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the package `mine` and a recipe that uses it, searched for modules."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").write_text(TASK)
    (tmp_path / "mine" / "source.py").write_text(SOURCE)
    (tmp_path / "text.txt").write_text("a line of text\n" * 40)
    (tmp_path / "recipe.py").write_text(RECIPE.format(directory=str(tmp_path)))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_search_directories", [])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "alone", "broken", "other"):
            del sys.modules[name]
    importlib.invalidate_caches()


def parse(directory, *edits):
    return overrides.parse([f"--config={directory / 'recipe.py'}", *(f"--config.{edit}" for edit in edits)])


def refused(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options_are_typed_by_the_modules_dataclass(directory):
    options = parse(directory).task.options
    assert (type(options).__name__, options.alpha, options.mode, options.names) == ("Options", 0.1, "scaled", ())
    edits = ("task.options.alpha=1", "task.options.names=a,b", "task.options.nested.depth=2")
    config = parse(directory, *edits)
    options = config.task.options
    assert (options.alpha, options.names, options.nested.depth) == (1.0, ("a", "b"), 2)
    assert isinstance(options.alpha, float)
    assert overrides.from_json(overrides.to_json(config)) == config
    assert json.loads(overrides.to_json(config))["task"]["options"]["alpha"] == 1.0
    assert overrides.resume_conflicts(parse(directory), config) == [
        "task.options.alpha", "task.options.names", "task.options.nested.depth"
    ]  # fmt: skip
    assert overrides.fingerprint(config) != overrides.fingerprint(parse(directory))


def test_options_may_precede_the_name_of_their_task(directory):
    recipe = directory / "recipe.py"
    lines = recipe.read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if "config.task" not in line))
    assert parse(directory, "task.options.alpha=0.2", "task.name=mine.task").task.options.alpha == 0.2


WRONG_OPTIONS = [
    ("task.options.alpha=2", "config.task.options.alpha: got 2.0, expected at least 0 and at most 1"),
    ("task.options.alpha=x", "config.task.options.alpha: got 'x', expected float"),
    ("task.options.alhpa=1", "config.task.options.alhpa: got an unknown key, expected one of alpha, mode, names"),
    ("task.options.mode=sun", "config.task.options.mode: got 'sun', expected one of sum, scaled; did you mean 'sum'?"),
    ("task.options.nested.depth=4", "config.task.options.nested.depth: got 4, expected at least 1 and at most 3"),
    ("task.options=1", "config.task.options: got '1' for a section, expected one of its fields (alpha, mode"),
    ("task.name=language_modelling", "config.task.options: got a section"),
    ("task.name=mine.taks", "config.task.name: got 'mine.taks', but there is no module mine.taks, expected an"),
    ("task.name=mine.source", "config.task.name: got 'mine.source', which defines no TASK"),
    ("data.source=nowhere.at_all", "config.data.source: got 'nowhere.at_all', but there is no module nowhere,"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "expected"), WRONG_OPTIONS)
def test_wrong_options_and_modules_are_refused(directory, edit, expected):
    assert expected in refused(parse, directory, edit)


def test_options_of_a_task_without_any_are_refused(directory):
    edits = ("task.name=language_modelling", "task.options.alpha=0.2")
    assert "expected no options: the task 'language_modelling' declares none" in refused(parse, directory, *edits)


MODULES = [
    ("1/0", "config.task.name: got 'broken', whose import fails ("),
    ("1/0", "broken.py:1: ZeroDivisionError: division by zero)"),
    ("TASK = (", "broken.py:1: SyntaxError:"),
    ("import nothing_of_that_name", "broken.py:1: ModuleNotFoundError: No module named 'nothing_of_that_name')"),
    ("import sys; sys.exit(3)", "broken.py:1: SystemExit: 3)"),
    ("TASK = 3", "got 'broken', whose TASK is of type int, expected a jaxformer.tasks.Task"),
]


@pytest.mark.parametrize(("text", "expected"), MODULES)
def test_modules_that_are_wrong_are_refused_in_one_line(directory, text, expected):
    (directory / "broken.py").write_text(text)
    assert expected in refused(parse, directory, "task.name=broken")


OPTIONS = [
    ("class Options:\n    pass", "expected a frozen dataclass"),
    ("@dataclass\nclass Options:\n    a: int = 1", "expected a frozen dataclass"),
    ("@dataclass(frozen=True)\nclass Options:\n    a: int", "broken.TASK.options.a: got no default"),
    ("@dataclass(frozen=True)\nclass Options:\n    a: list[int] = ()", "broken.TASK.options.a: got type list[int]"),
    ("@dataclass(frozen=True)\nclass Options:\n    a: 'Unknown' = 1", "got a type that cannot be read"),
]


@pytest.mark.parametrize(("text", "expected"), OPTIONS)
def test_options_that_cannot_be_config_fields_are_refused(directory, text, expected):
    head = "import dataclasses\nfrom dataclasses import dataclass\nfrom jaxformer.tasks import language_modelling\n"
    tail = "\nTASK = dataclasses.replace(language_modelling.TASK, options=Options)\n"
    (directory / "broken.py").write_text(head + text + tail)
    recipe = directory / "recipe.py"
    recipe.write_text(recipe.read_text().replace("    config.task.options.alpha = 0.1\n", ""))
    assert expected in refused(parse, directory, "task.name=broken")


def test_a_module_beside_the_recipe_and_one_in_the_working_directory_are_found(
    directory, tmp_path_factory, monkeypatch
):
    (directory / "alone.py").write_text(TASK)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "other.py").write_text(TASK)
    monkeypatch.chdir(elsewhere)
    assert parse(directory, "task.name=alone").task.options.alpha == 0.1
    assert parse(directory, "task.name=other").task.options.alpha == 0.1


def test_a_plain_name_of_no_module_is_refused_with_the_nearest(directory):
    assert refused(parse, directory, "task.name=language_modeling").endswith("did you mean 'language_modelling'?")
    assert "expected one of none, answering" in refused(parse, directory, "task.name=json")  # the standard library's


def test_an_encoding_and_a_kernel_from_outside(directory):
    from jaxformer.models import build

    (directory / "mine" / "encoding.py").write_text("from jaxformer.nn.encodings.rope import ENCODING\n")
    (directory / "mine" / "kernel.py").write_text("from jaxformer.nn.kernels.dense import KERNEL\n")
    logits = {}
    for encoding, kernel in (("rope", "dense"), ("mine.encoding", "mine.kernel")):
        edits = (f"model.decoder.encoding.kind={encoding}", f"model.decoder.attention.kernel={kernel}")
        config = parse(directory, *edits, "model.decoder.embed.vocab=32").model
        module, variables = builders.make(config)
        logits[encoding] = np.asarray(builders.apply(module)(variables, build.example_batch(config, 2, 8)))
    np.testing.assert_array_equal(logits["rope"], logits["mine.encoding"])
    for name in ("mine.encoding", "mine.kernel"):
        (directory / "mine" / f"{name[5:]}.py").write_text("ENCODING = KERNEL = 3\n")
        del sys.modules[name]
    assert "expected a jaxformer.nn.encodings.Encoding" in refused(
        parse, directory, "model.decoder.encoding.kind=mine.encoding"
    )
    assert "expected a jaxformer.nn.kernels.Kernel" in refused(
        parse, directory, "model.decoder.attention.kernel=mine.kernel"
    )


def test_an_attention_kernel_with_weights_of_its_own_is_used_and_shown_everywhere(directory):
    """The one of the guide: no other takes its place against a cache, its weights are sown, and export is refused."""
    from jaxformer import testing
    from jaxformer.analysis import layers
    from jaxformer.hf import export
    from jaxformer.nn import kernels
    from jaxformer.nn.attention import Attention
    from jaxformer.nn.masks import Mask, slots_from_segments

    (directory / "mine" / "sigmoid.py").write_text(own_kernel())
    edits = ("model.decoder.attention.kernel=mine.sigmoid", "model.decoder.embed.vocab=32")
    config = parse(directory, *edits, "model.decoder.attention.dropout=0.0")
    site = kernels.CallSite("cpu", "float32", 2, 2, 8, queries=1, keys=8, causal=True, same_slots=False)
    attention = config.model.decoder.attention
    assert kernels.choose_kernel(attention, site)[0] == "mine.sigmoid"
    module, variables = builders.make(config.model)
    batch = testing.random_batch(config.model, lengths=[4, 4])
    testing.assert_steps_equal_forward(module, variables, batch, prompt=2)

    slots = slots_from_segments(np.ones((1, 3), np.int32))
    layer = Attention(attention, config.model.decoder.encoding, width=4)
    mask = Mask(slots, slots, causal=True, same_slots=True)
    params = {name: {"kernel": np.zeros((4, 2, 2)), "bias": np.zeros((2, 2))} for name in ("query", "key", "value")}
    params["out"] = {"kernel": np.zeros((2, 2, 4)), "bias": np.zeros(4)}
    _, sown = layer.apply({"params": params}, np.ones((1, 3, 4), np.float32), mask, mutable=["intermediates"])
    expected = [[1 / 2, 0, 0], [1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4]]  # sigmoid(0 - log n) = 1 / (1 + n)
    np.testing.assert_allclose(sown["intermediates"]["probabilities"][0][0, 1], expected, rtol=1e-5)

    read = types.SimpleNamespace(module=layer.copy(name="attention"), method_name="apply_kernel")
    q, v = np.zeros((1, 3, 2, 2), np.float32), np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    o = layers.add_probes({"attention": np.zeros((1, 2, 3, 3))}, None, (q, q, v, mask), {}, read)
    np.testing.assert_allclose(o, np.einsum("ts,bshk->bthk", expected, v), rtol=1e-5)  # the forward pass of gradients
    capped = refused(parse, directory, *edits, "model.decoder.attention.soft_cap=50.0")
    assert "attention.soft_cap None" in capped
    assert "which defines weights of its own" in refused(export._check_objective, config)


def own_kernel() -> str:
    """The attention variant of the guide."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "KERNEL" in code]
    return code


def test_a_hugging_face_family_from_outside(directory, monkeypatch):
    from jaxformer.hf import table

    family = "import dataclasses\nfrom jaxformer.hf.families import gpt2\n"
    family += 'FAMILY = dataclasses.replace(gpt2.FAMILY, model_types=("mine",))\n'
    (directory / "mine" / "family.py").write_text(family)
    monkeypatch.syspath_prepend(str(directory))
    settings = table.Settings({"model_type": "mine"})
    assert "got model_type 'mine'" in refused(table.family_of, settings)
    monkeypatch.setenv("JAXFORMER_FAMILIES", "mine.family")
    assert table.family_of(settings).model_types == ("mine",)
    monkeypatch.setenv("JAXFORMER_FAMILIES", "mine.no_family")
    assert "got 'mine.no_family', but there is no module" in refused(table.family_of, settings)


def test_a_task_with_options_trains_resumes_evaluates_and_decodes_from_the_command_line(directory, monkeypatch, capsys):
    (directory / "lines.txt").write_text("a li\n")
    monkeypatch.chdir(directory)
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    before = list(sys.path)

    def jaxformer(*words):
        """Exit code and what was printed of a command that has to find the modules itself, as a new process does."""
        registry._search_directories.clear()
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
            del sys.modules[name]
        code = cli.main([*words, "--workdir=run"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    (directory / "mine" / "sigmoid.py").write_text(own_kernel())
    kernel = "--config.model.decoder.attention.kernel=mine.sigmoid"
    train = ("train", "--config=recipe.py", "--config.task.options.alpha=0.2", kernel)
    code, printed = jaxformer(*train)
    assert code == 0, printed
    config = json.loads((directory / "run" / "config.json").read_text())
    assert config["task"]["options"]["alpha"] == 0.2
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    loss = next(row["loss"] for row in rows if row["split"] == "train")
    assert loss < 2.0  # a fifth of log(256) and more
    code, printed = jaxformer("train", "--config=recipe.py", kernel)
    assert code == 2 and "task.options.alpha: here 0.1, there 0.2" in printed
    code, printed = jaxformer(*train, "--config.train.steps=3")
    assert code == 0 and "resumed at step 2" in printed
    code, printed = jaxformer("evaluate", "--split=test")
    assert code == 0, printed
    # The one process of its own: the name of the task comes from the workdir, the module from the working directory.
    command = [sys.executable, "-m", "jaxformer", "decode", "--workdir=run", "--input=lines.txt"]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags)}
    decoded = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert decoded.returncode == 0, decoded.stderr
    assert len(decoded.stdout.splitlines()) == 1


def test_a_process_knows_that_it_has_code_from_outside(tmp_path, monkeypatch):
    """Results that depend on the project's own code alone may then not be read from the cache."""
    monkeypatch.setattr(registry, "_external_names", set())
    (tmp_path / "code_of_a_user.py").write_text("KERNEL = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.member("jaxformer.nn.kernels", "dense", "KERNEL") and not registry.has_external_members()
    assert registry.member("jaxformer.nn.kernels", "code_of_a_user", "KERNEL") == 3
    assert registry.has_external_members()
