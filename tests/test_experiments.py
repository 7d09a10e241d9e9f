"""The runner, and every file of experiments/: adding one there tests it here at smoke scale."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import builders
import pytest

from jaxformer import cli, experiment
from jaxformer.config import ConfigError, OptimizerConfig
from jaxformer.experiment import Result
from jaxformer.train import in_memory

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "experiments").glob("[!_]*.py"))
SURE = ("cost_of_length", "permutation", "score_scaling", "sinusoid_shift")  # mathematics: no training, so no luck

TOY = """
from jaxformer.experiment import Result, curves, figure, verdict

CLAIM = "Two and two is four."
RULE = "Supported if it is."

def run(scale):
    rows = [{"size": n, "seed": s, "sum": n + n + 0.1 * s} for n in (1, 2) for s in (0, 1)]
    return Result(("size",), tuple(rows), verdict(True, False), "It is.")

def plot(result):
    made, (panel,) = figure("sums")
    panel.plot(result.levels("size"), [sum(result.values("sum", size=n)) for n in result.levels("size")])
    return made
"""


def load(name: str):
    """An experiment's module, for its own functions."""
    spec = importlib.util.spec_from_file_location(f"tested_{name}", ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


# --- every experiment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path, capsys, monkeypatch):
    # Initialisation and Adam are half of the compiled operations: they are tested where they are.
    builders.drawn_parameters(monkeypatch)
    small, descent = in_memory.small_config, OptimizerConfig(name="sgd", momentum=0.0)
    monkeypatch.setattr(in_memory, "small_config", lambda *given: dataclasses.replace(small(*given), optimizer=descent))
    figures, figure = [], experiment.figure
    monkeypatch.setattr(experiment, "figure", lambda *panels: figures.append(figure(*panels)) or figures[-1])
    assert experiment.run(name, "smoke", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    found = experiment.get(name)
    held = json.loads((tmp_path / "out" / "result.json").read_text())
    result = experiment.read(tmp_path / "out" / "result.json")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["figure.png", "result.json", "result.md"]
    assert (tmp_path / "out" / "figure.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "out" / "result.md").read_text()
    for text in (found.claim, found.rule, result.verdict, result.reason):
        assert text in page
        assert text in printed
    assert (held["experiment"], held["scale"], held["claim"]) == (name, "smoke", found.claim)

    assert len(result.levels("seed")) >= 2
    assert result.measures
    by_condition = experiment.rows_by_condition(result)
    assert len(by_condition) >= 2
    for condition, rows in by_condition.items():
        assert [row["seed"] for row in rows] == result.levels("seed"), condition
        assert all(math.isfinite(row[measure]) for row in rows for measure in result.measures), condition
    assert len(experiment.table(result)) == 1 + len(by_condition)
    assert re.search(r"\d", result.reason), "a verdict without a number"
    ((made, _),) = figures
    assert all(panel.get_xlabel() and panel.get_title(loc="left") for panel in made.axes)
    if name in SURE:
        assert result.verdict == "supported"


def test_repeating_a_trial_repeats_its_numbers():
    scaling, recall = load("score_scaling"), load("recall")
    assert scaling.run("smoke") == scaling.run("smoke")
    scale = recall.SCALES["smoke"]
    trainer = recall.trainer_of("LSTM", scale)
    first, again, other = (recall.trial(trainer, 4, seed, scale) for seed in (0, 0, 1))
    assert first == again != other


def test_recall_models_have_about_as_many_parameters():
    from flax import linen as nn

    from jaxformer.models import build

    recall = load("recall")
    for scale in recall.SCALES.values():
        configs = [recall.model(*pair, max(scale.lengths)) for pair in scale.widths.items()]
        counts = [build.count_params(nn.meta.unbox(build.shapes(build.build(config)))["params"]) for config in configs]
        assert max(counts) < 1.05 * min(counts)


def test_recall_questions_are_about_what_was_read():
    import numpy as np

    batch = load("recall").draw(np.random.default_rng(0), 5, 6, 16, slots=9)
    np.testing.assert_array_equal(batch.source.slots.segment, [[1] * 6 + [0] * 3] * 5)
    for row in range(5):
        values = dict(zip(batch.source.token_type[row, :6], batch.source.tokens[row, :6], strict=True))
        assert len(values) == 6  # names are distinct
        assert [values[name] for name in batch.target.token_type[row]] == list(batch.labels[row])


# --- verdicts follow the numbers --------------------------------------------------------------------------------------


def recalled(**accuracy: float) -> list[dict]:
    names = {"rnn": "RNN", "lstm": "LSTM", "gru": "GRU", "attention": "LSTM + attention", "transformer": "transformer"}
    return [
        {"model": names[key], "length": length, "seed": seed, "accuracy": value + 0.01 * seed, "parameters": 9}
        for key, value in accuracy.items()
        for length in (8, 64)
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("attention", "transformer", "expected"),
    [(0.9, 0.9, "supported"), (0.9, 0.35, "not supported"), (0.2, 0.9, "not supported"), (0.55, 0.9, "unclear")],
)
def test_recall_verdict(attention, transformer, expected):
    rows = recalled(rnn=0.2, lstm=0.3, gru=0.25, attention=attention, transformer=transformer)
    assert load("recall").judge(rows).verdict == expected


@pytest.mark.parametrize(
    ("plain", "rope", "expected"),
    [(1e-7, 0.3, "supported"), (1e-2, 0.3, "not supported"), (1e-7, 1e-6, "not supported"), (1e-4, 0.3, "unclear")],
)
def test_permutation_verdict(plain, rope, expected):
    rows = [
        {"positions": name, "seed": seed, "equivariance_error": error, "invariance_error": error}
        for name, error in (("none", plain), ("rope", rope), ("none, causal mask", 0.4))
        for seed in (0, 1)
    ]
    rows[0] |= {"equivariance_error": 1e-7, "invariance_error": 1e-7}  # one good seed saves nothing
    result = load("permutation").judge(rows)
    assert result.verdict == expected
    assert "rope" in result.reason


def test_score_scaling_verdict_turns_with_the_labels():
    scaling = load("score_scaling")
    ideal = {
        "head width": lambda k: 1.0,
        "none": float,
        "sequence length": lambda k: k / 64,
        "model width": lambda k: k / 512,
    }

    def rows(swap: dict[str, str]) -> list[dict]:
        return [
            {
                "scaling": name,
                "head_width": k,
                "seed": seed,
                "variance": ideal[swap.get(name, name)](k),
                "entropy_share": 1.0 / (1.0 + 0.1 * ideal[swap.get(name, name)](k)),
                "gradient": 1.0 / ideal[swap.get(name, name)](k) ** 2,
            }
            for seed in (0, 1)
            for k in scaling.HEAD_WIDTHS
            for name in scaling.DIVISORS
        ]

    assert scaling.judge(rows({})).verdict == "supported"
    assert scaling.judge(rows({"head width": "none", "none": "head width"})).verdict == "not supported"
    assert scaling.judge(rows({"head width": "sequence length"})).verdict == "unclear"


def test_verdict_words():
    assert experiment.verdict(True, False) == "supported"
    assert experiment.verdict(False, True) == "not supported"
    assert experiment.verdict(False, False) == experiment.verdict(True, True) == "unclear"


# --- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with an experiment of its own."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "toy.py").write_text(TOY)
    (tmp_path / "experiments" / "_helper.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_in_the_folder_is_an_experiment(here, capsys):
    assert "_helper" not in experiment.experiment_files()
    assert {"toy", *NAMES} <= set(experiment.experiment_files())
    assert cli.main(["experiment", "toy", "--scale=full", "--workdir=out"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["claim    Two and two is four.", "rule     Supported if it is."]
    assert [line.split() for line in out[3:6]] == [
        ["size", "seeds", "sum"], ["1", "2", "2.05", "[2,", "2.1]"], ["2", "2", "4.05", "[4,", "4.1]"]
    ]  # fmt: skip
    assert "verdict  supported: It is." in out
    assert "| 2 | 2 | 4.05 [4, 4.1] |" in (here / "out" / "result.md").read_text()


def test_running_again_replaces_and_another_run_is_refused(here, capsys):
    for _ in range(2):
        assert cli.main(["experiment", "toy", "--workdir=out"]) == 0
    before = (here / "out" / "result.json").read_bytes()
    assert cli.main(["experiment", "toy", "--scale=full", "--workdir=out"]) == 2
    assert "got toy at scale smoke, expected toy at scale full or no file" in capsys.readouterr().err
    (here / "experiments" / "other.py").write_text(TOY)
    assert cli.main(["experiment", "other", "--workdir=out"]) == 2
    assert (here / "out" / "result.json").read_bytes() == before
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text("{}")
    assert cli.main(["experiment", "toy", "--workdir=run"]) == 2
    assert cli.main(["experiment", "toy", "--workdir=experiments/toy.py"]) == 2
    (here / "odd").mkdir()
    (here / "odd" / "result.json").write_text("[")
    assert cli.main(["experiment", "toy", "--workdir=odd"]) == 2


def test_unknown_names_and_scales_name_the_nearest(here, capsys):
    assert cli.main(["experiment", "toi", "--workdir=out"]) == 2
    assert "did you mean 'toy'?" in capsys.readouterr().err
    assert cli.main(["experiment", "permutatoin", "--workdir=out"]) == 2
    assert "did you mean 'permutation'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        experiment.run("toy", "smok", here / "out")
    (here / "experiments" / "half.py").write_text("CLAIM = 'x'\n")
    with pytest.raises(ConfigError, match=r"half.py: got no RULE, expected CLAIM, RULE, run, plot"):
        experiment.run("half", "smoke", here / "out")
    assert not (here / "out").exists()


@pytest.mark.parametrize("part", ["def run(scale):", "def plot(result):"])
def test_a_crash_leaves_no_result_and_is_not_swallowed(here, part):
    (here / "experiments" / "toy.py").write_text(TOY.replace(part, part + "\n    1 / 0"))
    with pytest.raises(ZeroDivisionError):
        experiment.run("toy", "smoke", here / "out")
    assert list((here / "out").iterdir()) == []


def test_numbers_that_are_none_survive_the_file(here):
    (here / "experiments" / "toy.py").write_text(TOY.replace('"sum": n + n + 0.1 * s', '"sum": float("nan")'))
    experiment.run("toy", "smoke", "out")
    assert json.loads((here / "out" / "result.json").read_text())["rows"][0] == {"size": 1, "seed": 0, "sum": None}
    result = experiment.read(here / "out" / "result.json")
    assert all(math.isnan(value) for value in result.values("sum"))
    assert experiment.table(result)[1].split() == ["1", "2", "nan"]


def test_a_result_is_refused_if_its_rows_do_not_fit():
    good = {"size": 1, "seed": 0, "sum": 2.0}
    assert Result(("size",), (good,), "unclear", "").measures == ("sum",)
    for rows in ((), (good, {"size": 2, "seed": 0}), ({"size": 1, "sum": 2.0},), ({"size": 1, "seed": 0},)):
        with pytest.raises(ValueError, match="rows: got"):
            Result(("size",), rows, "unclear", "")
    with pytest.raises(ValueError, match="verdict: got 'proven'"):
        Result(("size",), (good,), "proven", "")


def test_the_example_of_the_guide_runs(here, capsys):
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (here / "experiments" / "softmax_shift.py").write_text(code)
    assert cli.main(["experiment", "softmax_shift", "--workdir=out"]) == 0
    assert "verdict  supported" in capsys.readouterr().out
