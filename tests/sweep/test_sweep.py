"""Sweeps: lists of edits, plans, local runs with a stand-in for `train`, the SLURM script, and the ranking."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxformer import cli, sweep
from jaxformer.config import ConfigError, EmbedConfig, overrides
from jaxformer.sweep import planning, ranking
from jaxformer.sweep.executors import local, slurm
from jaxformer.sweep.executors import print as print_executor
from jaxformer.train import results, together

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import StackConfig
from jaxformer.config.overrides import section

def get_config():
    config = overrides.defaults()
    config.task.name = "language_modelling"
    config.model.decoder = section(StackConfig, width=32)
    return config
"""

TRAIN = """
import json, os, pathlib, shutil, signal, sys, time
flags = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
folder = pathlib.Path(flags["workdir"])
with open(folder / "starts", "a") as file:
    file.write("x")
seed = int(flags["config.train.seed"])
if (folder / "wait").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "ready").touch()
    time.sleep(60)
if seed == 13:
    print("error: an unlucky number")
    sys.exit(2)
value = float(flags["config.schedule.peak"]) + 0.01 * seed
shutil.copy(pathlib.Path(__file__).parent / "configs" / folder.name, folder / "config.json")
steps = json.loads((folder / "config.json").read_text())["train"]["steps"]
(folder / "result.json").write_text(json.dumps({"step": steps, "loss": None if seed == 99 else value}))
"""


@pytest.fixture
def planned(tmp_path):
    """A function from SWEEP (as text) to its plan, whose commands run the stand-in."""
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text(TRAIN)

    def make(text: str, *edits: str) -> planning.Plan:
        (tmp_path / "edits.py").write_text("from jaxformer.sweep import *\n" + text)
        made = planning.make_plan(str(tmp_path / "edits.py"), [f"--config={tmp_path}/toy.py", *edits], tmp_path / "out")
        stand_in = (sys.executable, str(tmp_path / "train.py"))
        assert all(run.command[:4] == (sys.executable, "-m", "jaxformer", "train") for run in made.runs)
        (tmp_path / "configs").mkdir(exist_ok=True)
        for run in made.runs:
            (tmp_path / "configs" / run.workdir.name).write_text(overrides.to_json(run.config))
        runs = [planning.Run(r.edits, r.config, r.workdir, stand_in + r.command[4:]) for r in made.runs]
        return planning.Plan(made.workdir, tuple(runs))

    return make


def readable(run):
    """The name of a run's folder without the fingerprint."""
    name, _, fingerprint = run.workdir.name.rpartition("-")
    assert re.fullmatch("[0-9a-f]{8}", fingerprint)
    return name


def finish(run, **values):
    """Makes a run's folder that of a run that has ended."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    (run.workdir / "config.json").write_text(overrides.to_json(run.config))
    result = results.to_record(run.config.train.steps, run.config, values)
    (run.workdir / "result.json").write_text(json.dumps(result))


# --- lists of edits ---------------------------------------------------------------------------------------------------


def test_grid_seeds_and_cross():
    rows = sweep.cross(sweep.grid({"a": [1, 2], "b": ["x"]}), sweep.seeds(2, first=5))
    assert rows == [
        {"a": 1, "b": "x", "train.seed": 5},
        {"a": 1, "b": "x", "train.seed": 6},
        {"a": 2, "b": "x", "train.seed": 5},
        {"a": 2, "b": "x", "train.seed": 6},
    ]


def test_random_rows_do_not_depend_on_their_number_or_on_other_axes():
    peak = {"schedule.peak": sweep.log_uniform(1e-4, 1e-2)}
    few = sweep.random(3, 0, peak)
    many = sweep.random(50, 0, peak | {"train.seed": sweep.integers(1, 3), "x": sweep.choice("a", "b")})
    assert [row["schedule.peak"] for row in few] == [row["schedule.peak"] for row in many[:3]]
    assert sweep.random(3, 1, peak) != few
    assert all(1e-4 <= row["schedule.peak"] <= 1e-2 for row in many)
    # Half of a log-uniform draw over two decades lies below the geometric mean.
    assert 10 < sum(row["schedule.peak"] < 1e-3 for row in many) < 40
    assert {row["train.seed"] for row in many} == {1, 2, 3}
    assert {row["x"] for row in many} == {"a", "b"}


def test_names_are_readable_safe_and_distinct():
    assert planning.run_name({"schedule.peak": 1e-3, "train.seed": 0}) == "schedule.peak=0.001,train.seed=0"
    assert planning.run_name({}) == "base"
    odd = [planning.run_name({"data.dir": text}) for text in ("a/b", "a b", "a:b", "x" * 300, "x" * 301)]
    assert len(set(odd)) == 5
    assert all("/" not in name and " " not in name and len(name) <= 150 for name in odd)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "None"), ((16, 32), "16,32"), (1e-4, "0.0001"), (1e-7, "1e-07"), ("x", "x")],
)
def test_values_as_command_line_text(value, text):
    assert planning.format_value(value) == text


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_checks_every_config_first(planned):
    plan = planned("SWEEP = grid({'schedule.peak': [0.1, 0.2], 'data.buckets': [(8, 16)]})", "--config.train.steps=7")
    assert [run.config.schedule.peak for run in plan.runs] == [0.1, 0.2]
    assert plan.runs[0].config.data.buckets == (8, 16)
    assert plan.runs[0].config.train.steps == 7
    assert readable(plan.runs[1]) == "schedule.peak=0.2,data.buckets=8,16"


def test_edits_may_hold_blanks_and_remove_splits(planned):
    text = "SWEEP = [{'data.splits.test': (), 'data.dir': 'a folder'}, {'data.splits.test': ('b c.txt[:90%]',)}]"
    plan = planned(text, "--config.data.splits.test=a", "--config.data.splits.train=a")
    first, second = plan.runs
    assert (first.config.data.splits, first.config.data.dir) == ({"train": ("a",)}, "a folder")
    assert second.config.data.splits == {"test": ("b c.txt[:90%]",), "train": ("a",)}
    for run in plan.runs:  # what is started has the config that was checked
        given = [argument for argument in run.command if argument.startswith("--config")]
        assert overrides.parse(given) == run.config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SWEEP = grid({'schedule.peek': [0.1]})", "did you mean 'peak'"),
        ("SWEEP = grid({'model.decoder.width': [32, 33]})", "run model.decoder.width=33: config.model.decoder.width"),
        ("SWEEP = [{'train.seed': 1}, {'train.seed': 1}]", "twice"),
        ("SWEEP = [{'train.seed': 0}, {}]", "got runs train.seed=0 and base with the same config"),
        ("SWEEP = []", "another form"),
        ("SWEEP = 3", "another form"),
        ("SWEEP = [{1: 2}]", "another form"),
        ("x = 1", "got no SWEEP"),
        ("SWEEP = 1 / 0", "ZeroDivisionError"),
    ],
)
def test_wrong_sweeps_are_refused(planned, text, expected):
    with pytest.raises(ConfigError, match="edits") as caught:
        planned(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


# --- which runs are done --------------------------------------------------------------------------------------------

ONE = "SWEEP = [{'schedule.peak': 0.1, 'train.seed': 0}]"


def test_a_changed_recipe_or_more_steps_is_another_run(planned, tmp_path):
    before = planned(ONE)
    assert local.execute(before, 1) == 0
    recipe = tmp_path / "toy.py"
    recipe.write_text(RECIPE.replace("width=32", "width=64"))
    wider, longer = planned(ONE), planned(ONE, "--config.train.steps=2000")
    recipe.write_text(RECIPE)
    again, shown = planned(ONE), planned(ONE, "--config.train.log_every=7", "--config.mesh.fsdp=2")
    assert [plan.runs[0].is_finished for plan in (before, wider, longer, again, shown)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert len({plan.runs[0].workdir for plan in (before, wider, longer)}) == 3
    assert {plan.runs[0].workdir for plan in (again, shown)} == {before.runs[0].workdir}


def test_a_result_counts_only_at_the_last_step_of_its_own_config(planned):
    (run,) = planned(ONE).runs
    assert not run.is_finished
    finish(run, loss=1.0)
    assert run.result["loss"] == 1.0
    path = run.workdir / "result.json"
    for step, config in ((run.config.train.steps - 1, None), (run.config.train.steps, "0" * 16)):
        path.write_text(json.dumps({"step": step, "loss": 1.0} | ({"config": config} if config else {})))
        assert not run.is_finished
    for text in ("{", "[]", "{}", '{"step": "1000"}', '{"step": true}'):
        path.write_text(text)
        assert not run.is_finished
    finish(run)
    (run.workdir / "config.json").unlink()
    assert not run.is_finished


def test_what_a_run_fills_in_does_not_make_it_another(planned):
    (run,) = planned(ONE).runs
    stack = dataclasses.replace(run.config.model.decoder, embed=EmbedConfig(vocab=48))
    resolved = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, decoder=stack))
    finish(planning.Run(run.edits, resolved, run.workdir, ()), loss=2.0)
    assert run.result["loss"] == 2.0


def test_a_sweep_of_an_earlier_version_is_read_where_it_is_the_same(planned, tmp_path, capsys):
    (run,) = planned(ONE).runs
    old = tmp_path / "out" / "schedule.peak=0.1,train.seed=0"
    finish(planning.Run(run.edits, run.config, old, ()))
    result = json.loads((old / "result.json").read_text())
    (old / "result.json").write_text(json.dumps({"step": result["step"], "loss": 3.0}))
    (same,) = planned(ONE).runs
    assert same.workdir == old and same.result["loss"] == 3.0
    assert capsys.readouterr().err == ""
    (other,) = planned(ONE, "--config.train.steps=2000", "--config.train.ema=0.5").runs
    assert other.workdir != old and not other.is_finished
    assert "a run of another config (train.steps, train.ema)" in capsys.readouterr().err
    (old / "config.json").write_text("{")
    assert planned(ONE).runs[0].workdir == run.workdir


def test_a_sweep_killed_in_the_middle_goes_on_with_what_is_open(planned):
    plan = planned("SWEEP = cross([{'schedule.peak': 0.1}], seeds(3))")
    finish(plan.runs[0], loss=0.1)
    plan.runs[1].workdir.mkdir(parents=True)  # killed while it trained: config and no result
    (plan.runs[1].workdir / "config.json").write_text(overrides.to_json(plan.runs[1].config))
    assert [run.workdir for run in planned("SWEEP = cross([{'schedule.peak': 0.1}], seeds(3))").unfinished] == [
        plan.runs[1].workdir, plan.runs[2].workdir,
    ]  # fmt: skip
    assert local.execute(plan, 2) == 0
    assert [(run.workdir / "starts").exists() for run in plan.runs] == [False, True, True]


# --- executors --------------------------------------------------------------------------------------------------------

SIX = "SWEEP = cross(grid({'schedule.peak': [0.3, 0.1, 0.2]}), seeds(2))"


def test_local_runs_everything_once_and_ranks(planned, capsys):
    plan = planned(SIX)
    assert local.execute(plan, 3) == 0
    assert all((run.workdir / "starts").read_text() == "x" for run in plan.runs)
    ranking = json.loads((plan.workdir / "ranking.json").read_text())
    assert [row["edits"] for row in ranking["rows"]] == [{"schedule.peak": p} for p in ("0.1", "0.2", "0.3")]
    assert ranking["rows"][0]["mean"] == pytest.approx(0.105)
    assert ranking["rows"][0]["deviation"] == pytest.approx(0.01 / 2**0.5)
    assert ranking["missing"] == []
    assert "| 1 | 0.105 | 0.0070711 | 0.041469 to 0.16853 | 2 | schedule.peak=0.1 |" in capsys.readouterr().out
    assert local.execute(plan, 3) == 0
    assert all((run.workdir / "starts").read_text() == "x" for run in plan.runs)


def test_a_failure_stops_no_other_run_and_is_tried_again(planned, capsys):
    plan = planned("SWEEP = cross([{'schedule.peak': 0.1}], seeds(1, 13) + seeds(1, 1))")
    assert local.execute(plan, 1) == 1
    out = capsys.readouterr().out
    assert f"failed    {plan.runs[0].workdir.name} (code 2): error: an unlucky number" in out
    assert [run.is_finished for run in plan.runs] == [False, True]
    local.execute(plan, 1)
    assert [(run.workdir / "starts").read_text() for run in plan.runs] == ["xx", "x"]


def test_a_diverged_run_ranks_last(planned):
    plan = planned("SWEEP = grid({'schedule.peak': [0.1, 0.2], 'train.seed': [0, 99]})")
    plan = planning.Plan(plan.workdir, plan.runs[:1] + plan.runs[2:])
    assert local.execute(plan, 2) == 0
    rows = ranking.write_ranking(plan)
    assert [row["name"] for row in rows] == ["schedule.peak=0.1", "schedule.peak=0.2"]
    assert rows[1]["mean"] is None


def test_a_metric_to_maximise_ranks_downwards(planned):
    plan = planned("SWEEP = grid({'schedule.peak': [0.1, 0.2], 'train.seed': [0]})", "--config.checkpoint.mode=max")
    local.execute(plan, 2)
    assert [row["mean"] for row in ranking.write_ranking(plan)] == [0.2, 0.1]


def test_stopping_a_sweep_stops_its_runs(planned):
    plan = planned("SWEEP = cross([{'schedule.peak': 0.1}], seeds(3))")
    for run in plan.runs:
        run.workdir.mkdir(parents=True)
        (run.workdir / "wait").touch()

    def interrupt():
        deadline = time.monotonic() + 20
        while not all((r.workdir / "ready").exists() for r in plan.runs[:2]) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    assert local.execute(plan, 2) == 143
    thread.join()
    assert time.monotonic() - begun < 30
    assert not (plan.runs[2].workdir / "starts").exists()


def test_each_worker_has_its_own_gpu(planned, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    plan = planned("SWEEP = seeds(2)")
    echo = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    runs = [planning.Run(r.edits, r.config, r.workdir, echo) for r in plan.runs]
    for slot, run in enumerate(runs):
        local.start(run, slot).wait()
    assert [(run.workdir / "log.txt").read_text().strip() for run in runs] == ["4", "7"]


def test_print_shows_commands_that_a_shell_takes_apart_again(planned, capsys):
    plan = planned("SWEEP = [{'data.dir': \"it's a folder\"}, {'data.dir': 'b'}]")
    finish(plan.runs[1])
    assert print_executor.execute(plan, 1) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "--config.data.dir=it's a folder" in subprocess.check_output(
        ["bash", "-c", f"printf '%s\\n' {line}"], text=True
    )


def test_slurm_submits_an_array_that_runs_each_open_run(planned, tmp_path, monkeypatch, capsys):
    plan = planned("SWEEP = cross([{'schedule.peak': 0.1, 'data.dir': \"it's\"}], seeds(3))")
    finish(plan.runs[0])
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/submitted\necho 4711\n')
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert slurm.execute(plan, 2) == 0
    assert "submitted 2 runs as job array 4711" in capsys.readouterr().out
    script = Path((tmp_path / "submitted").read_text().splitlines()[1])
    assert "#SBATCH --array=0-1%2" in script.read_text()
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1"}
    assert subprocess.run(["bash", str(script)], env=environment, check=False).returncode == 0
    assert [run.is_finished for run in plan.runs] == [True, False, True]


def test_slurm_requeues_a_run_that_was_preempted(planned, tmp_path, monkeypatch):
    plan = planned("SWEEP = cross([{'schedule.peak': 0.1}], seeds(1))")
    (run,) = plan.runs
    run.workdir.mkdir(parents=True)
    (run.workdir / "wait").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n')
    (programs / "scontrol").chmod(0o755)
    script = tmp_path / "array.sh"
    script.write_text(slurm.array_script(plan, 1))
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "47"}
    environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(["bash", str(script)], env=environment)
    deadline = time.monotonic() + 20
    while not (run.workdir / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 143
    assert (tmp_path / "requeued").read_text() == "requeue 47_0\n"


def test_slurm_without_slurm_is_refused(planned, monkeypatch):
    if shutil.which("sbatch"):
        pytest.skip("SLURM is here")
    with pytest.raises(ConfigError, match="use --executor=local or print"):
        slurm.execute(planned("SWEEP = seeds(1)"), 1)


def test_the_best_run_is_written_as_a_recipe_that_is_its_config(planned, capsys):
    plan = planned("SWEEP = cross(grid({'schedule.peak': [0.3, 0.1]}), seeds(2, 4))")
    for run, loss in zip(plan.runs, (3.0, 4.0, 2.0, 1.0)):
        finish(run, loss=loss)
    rows = ranking.write_ranking(plan)
    assert [row["interval"] for row in rows] == [
        pytest.approx((1.5 - 6.35310, 1.5 + 6.35310)),
        pytest.approx((-2.8531, 9.8531)),
    ]
    best = plan.workdir / "best.py"
    assert overrides.parse([f"--config={best}"]) == plan.runs[3].config
    assert overrides.parse([f"--config={best}", "--config.train.seed=4"]) == plan.runs[2].config
    assert best.read_text().startswith('"""The best run of a sweep: loss 1; the mean of its 2 seeds is 1.5. Written')


def test_one_run_has_no_interval_and_a_diverged_best_is_no_recipe(planned):
    plan = planned("SWEEP = [{'schedule.peak': 0.1, 'train.seed': 0}]")
    finish(plan.runs[0], loss=None)
    (row,) = ranking.write_ranking(plan)
    assert row["interval"] is None and not (plan.workdir / "best.py").exists()
    assert ranking.interval([1.0]) is None


# --- one program for all ----------------------------------------------------------------------------------------------


def command(tmp_path, text, *more):
    """Runs `jaxformer sweep` on the toy recipe. Returns the exit code."""
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "edits.py").write_text("from jaxformer.sweep import *\n" + text)
    flags = [f"--config={tmp_path}/toy.py", f"--sweep={tmp_path}/edits.py", f"--workdir={tmp_path}/out"]
    try:
        return cli.main(["sweep", *flags, *more])
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        ("{'optimizer.beta1': [0.9, 0.8]}", (), "config.optimizer.beta1: got 0.9 and 0.8 in runs of one program"),
        ("{'train.seed': [0, 1], 'data.batch': [8, 16]}", (), "config.data.batch: got 8 and 16"),
        ("{'train.seed': [0, 1]}", ("--config.mesh.tensor=2",), "config.mesh.tensor: got a mesh that divides a run"),
        ("{'train.seed': [0, 1]}", ("--workers=2",), "--workers: got 2, expected 1 with --executor=together"),
    ],
)
def test_what_one_program_cannot_train_is_refused_in_one_line(tmp_path, capsys, text, more, expected):
    assert command(tmp_path, f"SWEEP = grid({text})", "--executor=together", *more) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and expected in err
    assert not list(tmp_path.glob("out/*"))


def test_one_program_gets_all_runs_and_its_exit_code_is_the_command_s(tmp_path, capsys, monkeypatch):
    asked = []

    def train(runs, init_format, report):
        asked.extend(runs)
        (first, folder), (_, other) = runs
        finish(planning.Run({}, first, folder, ()), loss=1.0)
        report("failed", other, "too many steps were skipped")
        return 2

    monkeypatch.setattr(together, "train", train)
    text = "SWEEP = grid({'schedule.peak': [0.1, 0.2]})"
    assert command(tmp_path, text, "--executor=together") == 2
    assert [config.schedule.peak for config, _ in asked] == [0.1, 0.2]
    ranked = json.loads((tmp_path / "out" / "ranking.json").read_text())
    assert ranked["missing"] == [asked[1][1].name] and list(ranked["rows"][0]["runs"]) == [asked[0][1].name]
    out = capsys.readouterr().out
    assert "2 runs: 0 finished, one program for all\n" in out
    assert f"failed    {asked[1][1].name} (too many steps were skipped)\n" in out


def test_a_report_ranks_what_is_done_and_trains_nothing(tmp_path, capsys):
    text = "SWEEP = grid({'schedule.peak': [0.1, 0.2]})"
    assert command(tmp_path, text, "--report") == 0
    assert "schedule.peak" not in capsys.readouterr().out
    plan = planning.make_plan(str(tmp_path / "edits.py"), [f"--config={tmp_path}/toy.py"], tmp_path / "out")
    finish(plan.runs[1], loss=3.5)
    assert command(tmp_path, text, "--report") == 0
    assert "| 1 | 3.5 |  |  | 1 | schedule.peak=0.2 |" in capsys.readouterr().out
    assert not plan.runs[0].workdir.exists()
