"""Locks, signals, the watchdog, steps that are not finite, rows of metrics, and secrets: each by itself."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import socket
import sys
import time
import types

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_step import NO_LAYERS, begin

from jaxformer import tasks
from jaxformer.config import (
    Config,
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    StackConfig,
    StorageError,
    TaskConfig,
    TrainConfig,
    overrides,
)
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import secrets
from jaxformer.train import lock, loop, optim, preemption, skip_guard, step
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.preemption import PreemptionListener, Watchdog
from jaxformer.train.reporting import MetricsFile, ProgressLine
from jaxformer.train.timing import Clock
from jaxformer.train.workdir import describe_changes, environment

# --- the lock


def test_a_second_run_is_refused_and_told_whose_the_first_is(tmp_path):
    owner = rf"process {os.getpid()} on {socket.gethostname()} since \d.*wait for it"
    with WorkdirLock(tmp_path), pytest.raises(ConfigError, match=owner), WorkdirLock(tmp_path):
        pass
    with WorkdirLock(tmp_path):  # freed
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22, "started": "then"}))
    with WorkdirLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


OTHERS = ['{"host": "elsewhere", "pid": 1, "started": "then"}', "torn"]


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)


@pytest.mark.parametrize("text", OTHERS)
def test_the_lease_of_the_dead_on_another_host_is_waited_for(tmp_path, short_lease, text, capsys):
    path = tmp_path / "lock"
    path.write_text(text)
    begun = time.monotonic()
    with WorkdirLock(tmp_path):
        assert 0.3 < time.monotonic() - begun < 5
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert f"waiting 0 s for the next time (delete {path} if it is dead)" in capsys.readouterr().err
    path.write_text(text)
    os.utime(path, (time.time() - 2 * lock.LEASE_SECONDS,) * 2)
    with WorkdirLock(tmp_path):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", OTHERS)
def test_a_sign_of_life_on_another_host_refuses_the_second_run(tmp_path, monkeypatch, short_lease, text):
    path = tmp_path / "lock"
    path.write_text(text)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.utime(path, (time.time() + 1,) * 2))
    with (
        pytest.raises(ConfigError, match="got a run that is training in it .*; wait for it or stop it"),
        WorkdirLock(tmp_path),
    ):
        pass
    assert path.read_text() == text


@pytest.mark.parametrize("end", [lambda path: os.truncate(path, 0), os.unlink], ids=["emptied", "deleted"])
def test_a_run_on_another_host_that_ends_makes_room_at_once(tmp_path, monkeypatch, short_lease, end):
    path = tmp_path / "lock"
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1000.0)
    path.write_text(OTHERS[0])
    monkeypatch.setattr(lock.time, "sleep", lambda _: end(path))
    with WorkdirLock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.fixture
def held(monkeypatch):
    """A file server that holds the kernel's lock for another process, whoever that is; counts how often it is asked."""
    asked = []

    def refuse(handle, operation):
        asked.append(handle)
        raise BlockingIOError

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    return asked


def test_a_dead_host_whose_lock_the_file_server_still_holds_is_waited_for(tmp_path, short_lease, held):
    path = tmp_path / "lock"
    path.write_text(OTHERS[0])
    begun = time.monotonic()
    with WorkdirLock(tmp_path):
        assert time.monotonic() - begun > 0.3
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert len(held) == 2


def test_a_lock_that_is_held_on_this_host_is_refused_at_once(tmp_path, monkeypatch, held):
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 1, "started": "then"}))
    os.utime(tmp_path / "lock", (0, 0))  # however long it has not been renewed, as by a stopped process
    monkeypatch.setattr(lock.time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(ConfigError, match="process 1 on"), WorkdirLock(tmp_path):
        pass


def test_of_two_that_waited_for_a_dead_host_one_gets_the_lock(tmp_path, monkeypatch, short_lease, held):
    path = tmp_path / "lock"
    path.write_text(OTHERS[0])
    winner = '{"host": "third", "pid": 3, "started": "now"}'
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.1)

    def refuse(handle, operation):
        held.append(handle)
        if len(held) == 2:  # the other one has been faster
            path.write_text(winner)
            monkeypatch.setattr(lock.time, "sleep", lambda _: os.utime(path, (time.time() + 1,) * 2))
        raise BlockingIOError

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="process 3 on third"), WorkdirLock(tmp_path):
        pass
    assert path.read_text() == winner


def test_every_host_must_see_the_same_workdir(tmp_path, monkeypatch):
    said = iter([["", ""], ["", "host2"]])  # nobody else trains there; the second host does not find the lock
    monkeypatch.setattr(lock, "allgather_text", lambda text: next(said))
    with pytest.raises(ConfigError, match="not the same on host2, expected one that all hosts"), WorkdirLock(tmp_path):
        pass


# --- stopping


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_the_first_signal_asks_and_the_second_ends(monkeypatch, number):
    ended = []
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    before = signal.signal(number, signal.SIG_DFL)  # tests that nohup started ignore SIGHUP
    try:
        with PreemptionListener(None) as stop:
            assert not stop.should_stop(1)
            signal.raise_signal(number)
            assert stop.should_stop(2)
            assert not ended
            signal.raise_signal(signal.SIGINT)
            assert ended == [130]
    finally:
        signal.signal(number, before)


def test_a_terminal_that_is_gone_is_ignored_where_it_was_before():
    """nohup starts a command with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with PreemptionListener(None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.should_stop(1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("session", ["prompt", "notebook"])
def test_a_second_interrupt_ends_the_run_and_not_an_interactive_session(monkeypatch, session):
    ended, shell = [], types.SimpleNamespace(get_ipython=object)
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    if session == "prompt":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", shell)
    with PreemptionListener(None) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.should_stop(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert ended == [143]


def test_a_reader_that_is_gone_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    (closed := io.StringIO()).close()
    for stream in (Gone(), closed):
        progress = ProgressLine(Clock(TrainConfig(steps=10)), stream)
        progress.log("resumed")
        progress.write(1, "validation", {"loss": 1.0})
        progress.close()


def test_the_deadline_asks_too():
    with PreemptionListener(0.001) as stop:
        assert not stop.should_stop(1)
        time.sleep(0.07)
        assert stop.should_stop(2)


def test_processes_ask_each_other_at_steps_agreed_on(monkeypatch):
    """Two processes, of which the other is asked to stop after step 40; the first's clock sets the pace."""
    monkeypatch.setattr(preemption.jax, "process_count", lambda: 2)
    asked = []

    def gather(mine):
        asked.append(at)
        return np.array([mine, [at >= 40, 1]])

    monkeypatch.setattr(preemption.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(preemption, "AGREEMENT_SECONDS", 0.05)
    with PreemptionListener(None) as stop:
        for at in range(1, 500):
            time.sleep(0.002)
            if stop.should_stop(at):
                break
    assert at >= 40
    assert 2 < len(asked) < at
    assert asked[:2] == [1, 2]


def test_the_watchdog_writes_stacks_and_ends_with_75(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    with Watchdog(0.1 / 60, tmp_path) as watchdog:
        for _ in range(8):
            watchdog.heartbeat()
            time.sleep(0.02)
        assert not ended
        deadline = time.monotonic() + 5
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
    assert ended[0] == 75
    assert "test_the_watchdog_writes_stacks" in (tmp_path / "stalled.txt").read_text()


# --- steps that are not finite


def averaged(old, params, decay):
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * np.asarray(b), old, jax.device_get(params))


def test_a_step_that_is_not_finite_changes_the_step_number_only():
    model = builders.decoder(**NO_LAYERS)
    config = Config(
        model=model,
        task=TaskConfig(name="language_modelling"),
        optimizer=OptimizerConfig(name="adamw"),
        schedule=ScheduleConfig(kind="linear", peak=0.1, warmup=5),
        train=TrainConfig(steps=10, ema=0.9, ema_warmup=True),
    )
    mesh = meshes.make(MeshConfig(data=1), jax.devices()[:1])
    module = build.build(model)
    schedule = optim.schedule(config.schedule, 10, 8)
    good = builders.batch(model, [3, 5, 2, 4])
    bad = good._replace(weights=jnp.asarray(good.weights).at[0, 0].set(jnp.inf))
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = begin(config, module, optimizer, mesh)
        update = step.make_train_step(config, module, tasks.get("language_modelling"), optimizer, schedule, mesh)
        average = jax.device_get(state.variables["ema"])
        state, first = update(state, step.shard_batch(good, mesh))
        average = averaged(average, state.params, 1 / 10)
        before = jax.device_get(state.replace(key=0))
        state, second = update(state, step.shard_batch(bad, mesh))
        after = jax.device_get(state.replace(key=0))
        state, third = update(state, step.shard_batch(good, mesh))
    assert (before.step, after.step) == (1, 2)
    chex.assert_trees_all_equal(after.replace(step=1), before.replace(step=1))
    assert [float(each["skipped"][0]) for each in (first, second, third)] == [0.0, 1.0, 0.0]
    assert all(float(part) == 0.0 for name, pair in second.items() if name != "skipped" for part in pair)
    # The rate and the average's warm-up go by updates, in the report as in the optimizer.
    average = averaged(average, state.params, 2 / 11)
    chex.assert_trees_all_close(jax.device_get(state.variables["ema"]), average, rtol=1e-5, atol=1e-7)
    rates = [float(each["learning_rate"][0]) for each in (first, third)]
    np.testing.assert_allclose(rates, [float(schedule(0)), float(schedule(1))], rtol=1e-6)


def test_a_spike_is_told_once_there_are_norms_to_compare_with():
    rule = skip_guard.track_gradient_norm()
    state, norms = rule.init({}), 1.0 + np.random.default_rng(0).random(130)
    for norm in norms[:99]:
        _, state = rule.update({}, state, norm=jnp.float32(norm))
    assert not skip_guard.is_spike((state,), jnp.float32(1e9), 3.0)
    _, state = rule.update({}, state, norm=jnp.float32(norms[99]))
    np.testing.assert_allclose([state.mean, state.variance], [norms[:100].mean(), norms[:100].var()], rtol=1e-5)
    bound = norms[:100].mean() + 3.0 * norms[:100].std()
    assert [bool(skip_guard.is_spike((state,), jnp.float32(bound * share), 3.0)) for share in (0.999, 1.001)] == [
        False,
        True,
    ]
    for norm in norms[100:]:
        _, state = rule.update({}, state, norm=jnp.float32(norm))
    weights = np.r_[np.full(100, 0.01 * 0.99**30), 0.01 * 0.99 ** np.arange(29, -1, -1)]
    mean = (weights * norms).sum()
    np.testing.assert_allclose([state.mean, state.variance], [mean, (weights * (norms - mean) ** 2).sum()], rtol=1e-5)


@pytest.mark.parametrize(("spike", "words"), [(0, "loss or gradient is not finite"), (1, "gradient is a spike")])
def test_a_step_left_out_is_said_with_its_reason_and_its_batch(spike, words):
    stream = io.StringIO()
    ProgressLine(Clock(TrainConfig(steps=10)), stream).write(
        3, "skipped", {"epoch": 0, "block": 1, "batch": 2, "in_a_row": 1, "spike": spike}
    )
    assert stream.getvalue().strip() == f"step 3  skipped: its {words} (epoch 0, block 1, batch 2)"


# --- rows


def test_rows_after_the_restored_step_go_and_torn_ones_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written = [(4, "train"), (5, "train"), (5, "validation"), (6, "train")]
    rows = [{"step": step, "wall_time": 0.0, "split": split} for step, split in written]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 7, "sp'
    for measured, kept in ((True, 3), (False, 2)):
        path.write_text(text)
        MetricsFile(path, 5, measured).close()
        assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:kept]


# --- what changed at a resume


def changes(kind, steps, updates=60, **train):
    old = Config(
        model=ModelConfig(decoder=StackConfig(width=8)),
        task=TaskConfig(name="language_modelling"),
        schedule=ScheduleConfig(kind=kind, peak=1e-3, warmup=10),
        train=TrainConfig(steps=100),
    )
    new = dataclasses.replace(old, train=TrainConfig(steps=steps, **train))
    return describe_changes(json.loads(overrides.to_json(old)), new, updates, 8)


def test_a_rate_that_another_number_of_steps_moves_is_said_with_both_values():
    # Linear from step 10 on: 1e-3 x (1 - 50/90) of 100 steps, 1e-3 x (1 - 50/190) of 200.
    said = changes("linear", 200)
    assert said[0] == "changed since the checkpoint: train.steps 100 -> 200"
    jump = "the learning rate jumps: 7.368e-04 in the next step, 4.444e-04 with train.steps=100; the linear schedule"
    assert said[1].startswith(jump)
    assert "jumps" in changes("cosine", 200)[1]
    assert changes("wsd", 200)[1].startswith("the learning rate goes on at 1.000e-03; the wsd schedule ends at")
    assert "jumps" in changes("wsd", 200, updates=90)[1]
    for kind in ("constant", "inverse_sqrt", "noam"):
        assert changes(kind, 200) == said[:1]
    assert changes("linear", 100) == []
    assert changes("linear", 100, log_every=3) == ["changed since the checkpoint: train.log_every 20 -> 3"]
    assert describe_changes({"model": 3}, Config(), 0, 8) == describe_changes(None, Config(), 0, 8) == []


# --- the disk, and secrets


def test_a_disk_that_refuses_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_train", lambda *_: (tmp_path / "none" / "file").write_text(""))
    with pytest.raises(
        StorageError, match=r"got No such file or directory \(.*none/file\), expected to .* are complete"
    ):
        loop.train(Config(), tmp_path)


def test_a_machine_without_git_trains_and_names_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["commit"] is None
    (tmp_path / "git").write_text("not a program")
    assert environment()["commit"] is None


def test_secrets_stay_out_of_the_recorded_command():
    variables = {
        "HF_TOKEN": "hf_abcdefgh",
        "PATH": "/usr/bin",
        "SECRET_ACCESS_KEY": "sesame-open",
        "SHORT_KEY": "a",
    }
    command = [
        "jaxformer", "train", "--config.data.tokens=4096", "--config.data.tokenizer.kind=byte", "--api-key", "mine",
        "--token=abc", "--config.data.dir=https://me:pass@host/x", "--note=hf_abcdefgh/usr/bin", "--x=sesame-open",
    ]  # fmt: skip
    assert secrets.redact_command(command, variables) == [
        "jaxformer", "train", "--config.data.tokens=4096", "--config.data.tokenizer.kind=byte", "--api-key", "***",
        "--token=***", "--config.data.dir=https://***@host/x", "--note=***/usr/bin", "--x=***",
    ]  # fmt: skip
