"""What is saved comes back exactly, on any mesh; the right checkpoints are kept; damage is survived or said."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxformer import checkpoint
from jaxformer.checkpoint import Checkpoints, reading, saving
from jaxformer.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    overrides,
)
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim
from jaxformer.types import TrainState


@pytest.fixture
def compilations():
    """A context in which programs are compiled, as a list of how long each took."""

    @contextlib.contextmanager
    def counted():
        found = []

        def heard(event, seconds, **_):
            if event == "/jax/core/compile/backend_compile_duration":
                found.append(seconds)

        jax.monitoring.register_event_duration_secs_listener(heard)
        try:
            yield found
        finally:
            jax.monitoring.unregister_event_duration_listener(heard)

    return counted


RULE = optim.optimizer(OptimizerConfig(), lambda n: 0.1, {"block": {"kernel": jnp.zeros((8, 4))}})
DATA = {"epoch": 2, "block": 0, "batch": 7, "more": {"rows": [1, 2.5, None], "text": "ä"}}


def state_at(step, ema=False):
    params = {"block": {"kernel": jnp.arange(32.0).reshape(8, 4) + step, "bias": jnp.full((4,), step / 3)}}
    opt_state = jax.tree.map(lambda x: x + step, RULE.init(params))
    variables = {"batch_stats": {"mean": jnp.full((4,), step * 2.0)}}
    if ema:
        variables["ema"] = jax.tree.map(lambda x: -x, params)
    return TrainState(jnp.int32(step), params, opt_state, jax.random.key(7), variables)


def abstract(state, place=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x) if place else x.sharding), state
    )


def same(restored, state):
    unkeyed = [each.replace(key=jax.random.key_data(each.key)) for each in (restored, state)]
    chex.assert_trees_all_equal(*unkeyed)
    assert restored.key.dtype == state.key.dtype


def opened(path, **fields):
    return Checkpoints(path, CheckpointConfig(**fields))


def save_all(checkpoints, losses, **fields):
    for step, loss in losses:
        checkpoints.save(state_at(step, **fields), {"position": step}, {"loss": loss} if loss is not None else {})
    checkpoints.wait()


def kept(path, part):
    return sorted(checkpoint.list_steps(path / "checkpoints" / part))


def damage(directory):
    """Cuts every file of the arrays in half."""
    for file in (directory / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_save_and_restore_are_exact(tmp_path):
    state = state_at(3, ema=True)
    checkpoints = opened(tmp_path)
    assert checkpoints.restore(abstract(state)) is None
    assert checkpoints.save(state, DATA, {"loss": 1.0})
    checkpoints.close()

    again = opened(tmp_path)
    restored, data, _ = again.restore(abstract(state))
    same(restored, state)
    assert jax.random.bits(restored.key) == jax.random.bits(state.key)
    assert data == DATA
    again.close()


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    checkpoints = opened(tmp_path)
    state = TrainState(jnp.int32(1), {"w": jnp.arange(300_000.0)}, (), jax.random.key(0), {})
    target = abstract(state)
    checkpoints.save(state, {}, {"loss": 1.0})
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(bump(state.params))
    checkpoints.wait()
    chex.assert_trees_all_equal(checkpoints.restore(target)[0].params["w"], jnp.arange(300_000.0))
    checkpoints.close()


def test_keeps_the_last_n_and_the_best_k_also_after_reopening(tmp_path):
    fields = {"keep_last": 2, "keep_best": 2}
    first = opened(tmp_path, **fields)
    save_all(first, [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan"))])
    first.close()
    assert kept(tmp_path, "last") == [4, 5]
    assert kept(tmp_path, "best") == [2, 3]
    second = opened(tmp_path, **fields)
    save_all(second, [(6, 2.5), (7, 2.0), (8, 1.5)])
    second.close()
    assert kept(tmp_path, "last") == [7, 8]
    assert kept(tmp_path, "best") == [2, 8]
    ranked = checkpoint.list_ranked(tmp_path, "best", CheckpointConfig(**fields))
    assert [directory.name for directory in ranked] == ["2", "8"]


def test_what_a_kill_left_undeleted_goes_when_the_run_goes_on(tmp_path):
    """Between the naming of a checkpoint and the deletion of an old one; the last save of a run has no successor."""
    killed = opened(tmp_path, keep_last=3)
    save_all(killed, [(1, None), (2, None), (3, None)])
    killed.close()
    again = opened(tmp_path, keep_last=2)
    assert again.restore(abstract(state_at(0))).about["step"] == 3
    again.close()
    assert kept(tmp_path, "last") == [2, 3]


def test_best_may_mean_most_and_nothing(tmp_path):
    most = opened(tmp_path / "most", metric="bleu", mode="max")
    for step, bleu in [(1, 20.0), (2, 30.0), (3, 25.0)]:
        most.save(state_at(step), {}, {"bleu": bleu})
    most.close()
    assert kept(tmp_path / "most", "best") == [2]
    none = opened(tmp_path / "none", keep_best=0)
    save_all(none, [(1, 1.0)])
    none.close()
    assert not (tmp_path / "none" / "checkpoints" / "best").exists()


def test_an_unknown_metric_is_said_and_the_state_saved(tmp_path):
    checkpoints = opened(tmp_path, metric="bleu")
    with pytest.raises(ConfigError, match=r"metric: got 'bleu'.*\(loss\)"):
        checkpoints.save(state_at(1), {}, {"loss": 1.0})
    checkpoints.close()
    assert kept(tmp_path, "last") == [1]


def test_a_step_is_saved_once_unless_forced(tmp_path):
    checkpoints = opened(tmp_path)
    save_all(checkpoints, [(1, 1.0)])
    other = state_at(1).replace(params=state_at(2).params)
    assert not checkpoints.save(other, {"position": 9}, {"loss": 1.0})
    assert checkpoints.restore(abstract(other))[1] == {"position": 1}
    assert checkpoints.save(other, {"position": 9}, {"loss": 1.0}, force=True)
    checkpoints.wait()
    restored, data, _ = checkpoints.restore(abstract(other))
    same(restored, other)
    assert data == {"position": 9}
    checkpoints.close()


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program runs after it."""


@contextlib.contextmanager
def killed_at(monkeypatch, number):
    """Ends the process at the given call that changes the file system: half done where it can be. Yields the count."""
    calls = []

    def patch(owner, name, begin=lambda *arguments: None):
        act = getattr(owner, name)

        def call(*arguments, **options):
            if len(calls) == number - 1:
                begin(*arguments)
                calls.append(name)
                raise Killed
            calls.append(name)
            return act(*arguments, **options)

        patched.setattr(owner, name, call)

    with monkeypatch.context() as patched:
        remove = lambda path, *_: [f.unlink() for f in sorted(path.rglob("*")) if f.is_file()][:1]  # noqa: E731
        for name in ("rename", "replace", "mkdir"):
            patch(pathlib.Path, name)
        patch(shutil, "rmtree", remove)
        patch(shutil, "copytree")
        try:
            yield calls
        except Killed:
            calls.append("killed")


def whole(workdir, fields):
    """The steps that a new process finds whole, by part, once it has cleaned up."""
    opened(workdir, **fields).close()
    found = [(part, step) for part in ("last", "best") for step in kept(workdir, part)]
    for part, step in found:
        checkpoint.verify(workdir / "checkpoints" / part / str(step))
    return found


@pytest.mark.parametrize("step", [1, 2], ids=["forced", "next"])
def test_a_kill_at_any_point_of_publishing_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    """The only checkpoint, of step 1, is replaced by another of its step, or followed by one of the next."""
    fields = {"keep_last": 1, "keep_best": 1}
    first = opened(tmp_path / "first", **fields)
    save_all(first, [(1, 2.0)])
    first.close()
    place = tmp_path / "first" / "checkpoints" / "saving" / str(step)
    about = {"format": 2, "step": step, "values": {"loss": 1.0}}
    seen, number = [], 0
    while not seen or seen[-1] == "killed":
        number += 1
        workdir = shutil.copytree(tmp_path / "first", tmp_path / f"kill-{number}")
        checkpoints = opened(workdir, **fields)
        new = workdir / "checkpoints" / "saving" / place.name
        new.mkdir(parents=True, exist_ok=True)
        shutil.copytree(workdir / "checkpoints" / "last" / "1", new, dirs_exist_ok=True)
        (new / "about" / "metadata").write_text(json.dumps(about))
        saving.manifest.write(new)
        with killed_at(monkeypatch, number) as seen:
            checkpoints._publish(new, workdir / "checkpoints" / "last" / str(step))
            checkpoints._update_best(step, about["values"])
            checkpoints._delete_old()
        checkpoints.close()
        # The process that cleans up may be killed too.
        for again in range(1, 4):
            copy = shutil.copytree(workdir, tmp_path / f"kill-{number}-{again}")
            with killed_at(monkeypatch, again):
                opened(copy, **fields).close()
            # Before any run takes it up again: what evaluates and decodes finds both parts.
            seen_by_readers = {
                part: checkpoint.list_checkpoints(copy / "checkpoints" / part) for part in ("last", "best")
            }
            for part, found in seen_by_readers.items():
                assert found, (number, again, part)
                checkpoint.verify(found[0])
            assert ("last", 1) in whole(copy, fields) or ("last", step) in whole(copy, fields)
        found = whole(workdir, fields)
        assert [each for each in found if each[0] == "last"], seen
        assert [each for each in found if each[0] == "best"], seen
    assert number > 5


def test_restores_on_another_mesh(tmp_path):
    mesh = meshes.make(MeshConfig(data=1, fsdp=4, tensor=2))

    def split(x):
        matrix = x.shape == (8, 4)
        return NamedSharding(mesh, PartitionSpec("fsdp", "tensor") if matrix else PartitionSpec())

    state = state_at(5)
    spread = jax.tree.map(lambda x: jax.device_put(x, split(x)), state)
    checkpoints = opened(tmp_path)
    checkpoints.save(spread, {}, {"loss": 1.0})
    one = SingleDeviceSharding(jax.devices()[0])
    alone, *_ = checkpoints.restore(abstract(state, lambda x: one))
    same(alone, state)
    assert {x.sharding for x in jax.tree.leaves(alone)} == {one}
    small = meshes.make(MeshConfig(data=1, tensor=2), jax.devices()[:2])
    two, *_ = checkpoints.restore(abstract(state, lambda x: NamedSharding(small, PartitionSpec())))
    same(two, state)
    assert all(x.sharding.mesh.size == 2 for x in jax.tree.leaves(two))
    layout = jax.tree.map(split, state.params)
    params = checkpoints.average(1, shardings=layout)
    chex.assert_trees_all_equal(params, state.params)
    assert params["block"]["kernel"].sharding == layout["block"]["kernel"]
    checkpoints.close()


def test_small_arrays_that_all_devices_hold_are_written_by_one_and_large_ones_by_all(tmp_path, compilations):
    whole = NamedSharding(meshes.make(MeshConfig(data=8)), PartitionSpec())
    state = jax.device_put(state_at(5), whole)
    large = jnp.arange(8 * saving.MIN_REPLICA_PARALLEL_BYTES // 4, dtype=jnp.float32).reshape(16, -1)
    with_large = state.replace(params={"large": jax.device_put(large, whole)})
    checkpoints = opened(tmp_path)
    with compilations() as programs:
        checkpoints.save(state, {}, {"loss": 1.0})
    assert programs == []
    with compilations() as programs:
        checkpoints.save(with_large.replace(step=jax.device_put(jnp.int32(6), whole)), {}, {"loss": 1.0})
    assert len(programs) == 8  # a part for every device
    restored, *_ = checkpoints.restore(abstract(with_large))
    chex.assert_trees_all_equal(restored.params, with_large.params)
    checkpoints.close()


def test_a_damaged_checkpoint_is_named_set_aside_and_passed_over(tmp_path, caplog):
    fields = {"keep_last": 3, "keep_best": 1}
    checkpoints = opened(tmp_path, **fields)
    save_all(checkpoints, [(1, 1.0), (2, 2.0), (3, 3.0)])
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "last" / "3")
    (tmp_path / "checkpoints" / "last" / "2" / "data" / "metadata").unlink()

    again = opened(tmp_path, **fields)
    with caplog.at_level(logging.WARNING, "jaxformer"):
        restored, data, _ = again.restore(abstract(state_at(1)))
    same(restored, state_at(1))
    assert data == {"position": 1}
    messages = [record.getMessage() for record in caplog.records if record.name == "jaxformer"]
    assert ["last/3 cannot be used" in messages[0], "last/2 cannot be used" in messages[1]] == [True, True]
    assert all("going back to" in message and "\n" not in message for message in messages)
    assert sorted(x.name for x in (tmp_path / "checkpoints" / "damaged").iterdir()) == ["last-2", "last-3"]
    assert again.save(state_at(2), {"position": 22}, {})
    again.wait()
    assert again.restore(abstract(state_at(1)))[1] == {"position": 22}
    again.close()


def swapped(directory, other):
    """The arrays of another checkpoint in place of its own: readable, and not what was written."""
    shutil.rmtree(directory / "state")
    shutil.copytree(other / "state", directory / "state")


def digit(directory):
    path = directory / "data" / "metadata"
    path.write_text(path.read_text().replace('"position": 2', '"position": 3'))


@pytest.mark.parametrize("part", ["state", "data"])
def test_bytes_that_can_be_read_and_are_not_what_was_written_are_noticed(tmp_path, caplog, part):
    """Nothing but the manifest can tell: on the way of a resumed run, and on that of evaluation and decoding."""
    run = tmp_path / "run" / "checkpoints" / "last"
    for name in ("run", "other"):
        checkpoints = opened(tmp_path / name)
        save_all(checkpoints, [(1, 1.0), (2, 2.0)] if name == "run" else [(2, 2.0)])
        if name == "other":
            state = state_at(2).replace(params=state_at(7).params)
            checkpoints.save(state, {"position": 2}, {"loss": 2.0}, force=True)
        checkpoints.close()
    if part == "state":
        swapped(run / "2", tmp_path / "other" / "checkpoints" / "last" / "2")
    else:
        digit(run / "2")
    read = checkpoint.read_state(run / "2", abstract(state_at(2)))
    assert int(read.step) == 2, "it must be readable for this test to mean anything"
    found = checkpoint.average_weights(checkpoint.list_ranked(tmp_path / "run", "last", CheckpointConfig()), 1)
    chex.assert_trees_all_equal(found.params, state_at(1).params)
    again = opened(tmp_path / "run")
    restored, data, _ = again.restore(abstract(state_at(1)))
    again.close()
    same(restored, state_at(1))
    assert data == {"position": 1}
    assert kept(tmp_path / "run", "last") == [1]
    assert (
        "differs from its checksum" in caplog.text or "bytes, not the" in caplog.text or " No such file" in caplog.text
    )


def test_goes_back_to_the_best_and_never_to_zero(tmp_path):
    checkpoints = opened(tmp_path, keep_last=1)
    save_all(checkpoints, [(1, 1.0), (2, 2.0)])
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "last" / "2")
    again = opened(tmp_path, keep_last=1)
    same(again.restore(abstract(state_at(1)))[0], state_at(1))
    again.close()
    damage(tmp_path / "checkpoints" / "best" / "1")
    last = opened(tmp_path, keep_last=1)
    with pytest.raises(
        ConfigError, match=r"none of which can be read \(newest 1: .*expected one to resume from"
    ) as error:
        last.restore(abstract(state_at(1)))
    assert "\n" not in str(error.value)
    last.close()


def test_checkpoints_that_vanished_are_no_fresh_start(tmp_path):
    checkpoints = opened(tmp_path, keep_best=0)
    save_all(checkpoints, [(1, 1.0)])
    shutil.rmtree(tmp_path / "checkpoints" / "last" / "1")
    with pytest.raises(ConfigError, match=r"got none in .*, where there was one, expected one to resume from"):
        checkpoints.restore(abstract(state_at(1)))
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused_not_passed_over(tmp_path):
    checkpoints = opened(tmp_path, keep_last=2)
    save_all(checkpoints, [(1, 1.0), (2, 2.0)])
    target = abstract(state_at(2))
    wide = {"block": target.params["block"] | {"kernel": jax.ShapeDtypeStruct((8, 6), jnp.float32)}}
    with pytest.raises(ConfigError, match=r"params/block/kernel float32\[8, 4\], expected float32\[8, 6\]"):
        checkpoints.restore(target.replace(params=wide))
    half = {"block": target.params["block"] | {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}}
    with pytest.raises(ConfigError, match=r"float32\[8, 4\], expected bfloat16\[8, 4\]"):
        checkpoints.restore(target.replace(params=half))
    with pytest.raises(ConfigError, match=r"variables/batch_stats/mean float32\[4\], expected no such array"):
        checkpoints.restore(target.replace(variables={}))
    assert not (tmp_path / "checkpoints" / "damaged").exists()
    checkpoints.close()


def test_average_is_the_mean(tmp_path, caplog):
    checkpoints = opened(tmp_path, keep_last=3, keep_best=2)
    save_all(checkpoints, [(1, 1.0), (2, 4.0), (4, 2.0), (9, 3.0)])
    chex.assert_trees_all_close(checkpoints.average(2), state_at(6.5).params, rtol=1e-6)
    chex.assert_trees_all_close(checkpoints.average(3), state_at(5).params, rtol=1e-6)
    chex.assert_trees_all_close(checkpoints.average(2, of="best"), state_at(2.5).params, rtol=1e-6)
    chex.assert_trees_all_close(checkpoints.average(99), state_at(5).params, rtol=1e-6)
    damage(tmp_path / "checkpoints" / "last" / "4")
    chex.assert_trees_all_close(checkpoints.average(2), state_at(5.5).params, rtol=1e-6)
    assert "last/4 cannot be read" in caplog.text
    checkpoints.close()


def test_average_prefers_the_running_average(tmp_path):
    checkpoints = opened(tmp_path, keep_last=2)
    save_all(checkpoints, [(2, None), (4, None)], ema=True)
    expected = jax.tree.map(lambda x: -x, state_at(3).params)
    chex.assert_trees_all_close(checkpoints.average(2), expected, rtol=1e-6)
    checkpoints.close()
    newest = tmp_path / "checkpoints" / "last" / "4"
    params, variables = checkpoint.read_weights(newest)
    chex.assert_trees_all_equal(params, jax.tree.map(lambda x: -x, state_at(4).params))
    chex.assert_trees_all_equal(variables, {"batch_stats": {"mean": np.full((4,), 8.0, np.float32)}})


def test_weights_are_read_as_orbax_reads_them(tmp_path, monkeypatch):
    """Of every dtype, shape and mesh, with an average of some parameters, and without the memories of rows."""
    mesh = meshes.make(MeshConfig(data=1, fsdp=8))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    kernel = jnp.arange(64.0).reshape(16, 4)
    params = {
        "block": {"kernel": jax.device_put(kernel, split), "bias": jnp.full((4,), 1 / 3)},
        "half": jnp.full((3, 1), 1 / 3, jnp.bfloat16), "flags": jnp.asarray([True, False]),
        "number": jnp.float32(2.5), "int8": jnp.arange(-3, 3, dtype=jnp.int8),
    }  # fmt: skip
    variables = {"ema": {"block": {"kernel": -kernel}}, "memory": {"rows": kernel}, "batch_stats": {"n": jnp.int32(7)}}
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(1).replace(params=params, variables=variables), {}, {})
    checkpoints.close()
    directory = tmp_path / "checkpoints" / "last" / "1"

    def refuse(*_):
        raise AssertionError("Orbax was asked")

    with monkeypatch.context() as without:
        without.setattr(reading, "array_metadata", refuse)
        ours = reading.read_weights(directory)
    with monkeypatch.context() as without:
        without.setattr(reading.arrays, "read", lambda *_: None)
        theirs = reading.read_weights(directory)
    chex.assert_trees_all_equal(ours, theirs)
    chex.assert_trees_all_equal_dtypes(ours, theirs)
    expected = {**params, "block": {**params["block"], "kernel": -kernel}}
    chex.assert_trees_all_equal(ours.params, jax.tree.map(np.asarray, expected))
    assert ours.params["half"].dtype == jnp.bfloat16 and ours.variables == {"batch_stats": {"n": 7}}


def test_what_is_stored_in_another_way_is_left_to_orbax(tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(1), {}, {})
    checkpoints.close()
    state = tmp_path / "checkpoints" / "last" / "1" / "state"
    everything = lambda paths: list(paths)  # noqa: E731
    assert len(reading.arrays.read(state.parent, everything)) > 5
    written = (state / "_METADATA").read_text()
    for text in (
        written.replace('"use_zarr3": false', '"use_zarr3": true'),
        written.replace("jax.Array", "scalar"),
        "{",
    ):
        assert text != written
        (state / "_METADATA").write_text(text)
        assert reading.arrays.read(state.parent, everything) is None
    (state / "_METADATA").write_text(written)
    (state / "manifest.ocdbt").unlink()
    assert reading.arrays.read(state.parent, everything) is None


def test_checkpoints_describe_themselves_and_a_relative_workdir_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model": {"width": 8}}')
    checkpoints = opened("run")
    save_all(checkpoints, [(1, 0.5)])
    checkpoints.close()
    about = checkpoint.read_about(tmp_path / "run" / "checkpoints" / "last" / "1")
    assert about["step"] == 1
    assert about["values"] == {"loss": 0.5}
    assert about["config"] == {"model": {"width": 8}}
    assert about["key"] == "threefry2x32"


# Arrays whose writing ends after Orbax has given up report to an event loop that is closed.
@pytest.mark.filterwarnings(r"ignore:(?s).*Event loop is closed:pytest.PytestUnraisableExceptionWarning")
def test_failed_saves_surface_and_leave_the_earlier_checkpoint(tmp_path):
    """A limit on file sizes stands in for a full disk."""
    resource = pytest.importorskip("resource")
    checkpoints = opened(tmp_path, keep_best=0)
    state = TrainState(jnp.int32(1), {"w": jax.random.normal(jax.random.key(0), (250_000,))}, (), jax.random.key(0), {})
    checkpoints.save(state, {}, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(Exception, match=r"(?i)too large"):  # noqa: PT012
            checkpoints.save(state.replace(step=jnp.int32(2)), {}, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept(tmp_path, "last") == [1]
    again = opened(tmp_path, keep_best=0)
    same(again.restore(abstract(state))[0], state)
    again.close()


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import CheckpointConfig
from jaxformer.types import TrainState

checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep_best=0))
at = lambda step: TrainState(jnp.int32(step), {"w": jnp.full((1 << 22,), float(step))}, (), jax.random.key(0), {})
checkpoints.save(at(1), {"position": 1}, {})
checkpoints.wait()
checkpoints.save(at(2), {"position": 2}, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_of_others_is_filtered_only_while_checkpoints_are_open(tmp_path):
    before = list(logging.getLogger("absl").filters)
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    first.close()
    assert len(logging.getLogger("absl").filters) == len(before) + 1
    second.close()
    assert logging.getLogger("absl").filters == before


LOGGING = """
import logging, pkgutil, importlib
import absl.logging, jax, flax.linen, optax, orbax.checkpoint, grain.python, numpy, ml_collections

def state():
    names = [None, *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names]
    # Loggers made since have nothing of their own; those of before are as they were.
    own = {n: (x.level, list(x.filters), list(x.handlers), x.propagate) for n, x in zip(names, loggers)}
    return {n: each for n, each in own.items() if each != (0, [], [], True)}, logging.root.manager.disable

before = state()
import jaxformer
for module in pkgutil.walk_packages(jaxformer.__path__, "jaxformer."):
    if module.name != "jaxformer.__main__":
        importlib.import_module(module.name)
after = state()
assert before == after, (before, after)
"""


def test_importing_everything_changes_no_log():
    root = pathlib.Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", LOGGING], check=True, timeout=120, cwd=root)


def test_a_killed_save_leaves_the_earlier_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    checkpoints = opened(tmp_path, keep_best=0)
    target = abstract(TrainState(jnp.int32(0), {"w": jnp.zeros(1 << 22)}, (), jax.random.key(0), {}))
    restored, data, _ = checkpoints.restore(target)
    assert data["position"] == restored.step == restored.params["w"][0] == restored.params["w"][-1]
    assert checkpoints.save(restored.replace(step=jnp.int32(3)), {}, {})
    checkpoints.close()
    assert kept(tmp_path, "last") == [restored.step, 3]
    assert not list((tmp_path / "checkpoints" / "saving").iterdir())


def test_load_says_what_is_wrong_with_a_path(tmp_path):
    with pytest.raises(ConfigError, match="got nothing there, expected a workdir"):
        checkpoint.load_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"without a config\.json"):
        checkpoint.load_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no checkpoints, expected a trained run"):
        checkpoint.load_run(tmp_path)
    save_all(checkpoints := opened(tmp_path), [(1, 1.0)])
    checkpoints.close()
    with pytest.raises(ConfigError, match="inside the run"):
        checkpoint.load_run(tmp_path / "checkpoints" / "last" / "1" / "state")
    root = tmp_path / "checkpoints"
    for path, chosen in [(tmp_path, ""), (root, ""), (root / "best", "best"), (root / "last" / "1", "last/1")]:
        assert checkpoint.find_run(path) == (tmp_path, chosen)


def test_load_rebuilds_the_model(tmp_path):
    config = Config(
        model=ModelConfig(decoder=StackConfig(layers=2, width=8, embed=EmbedConfig(vocab=264), unroll=1)),
        data=DataConfig(source="pylib", tokenizer=TokenizerConfig(kind="byte")),
        task=TaskConfig(name="language_modelling"),
        checkpoint=CheckpointConfig(keep_last=2),
    )
    Tokenizers.build(config.data, [{"text": "abc"}], ("text",)).save(tmp_path)
    (tmp_path / "config.json").write_text(overrides.to_json(config))
    module, variables = builders.make(config.model)
    params = variables["params"]
    at = lambda step: TrainState(jnp.int32(step), jax.tree.map(lambda x: x + step, params), (), jax.random.key(0), {})  # noqa: E731
    checkpoints = Checkpoints(tmp_path, config.checkpoint)
    for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0)]:
        checkpoints.save(at(step), {}, {"loss": loss})
    checkpoints.close()

    def loaded(path=tmp_path):
        return checkpoint.load_run(path).params

    chex.assert_trees_all_equal(loaded(), at(1).params)
    chex.assert_trees_all_equal(loaded(tmp_path / "checkpoints" / "last"), at(3).params)
    chex.assert_trees_all_equal(loaded(tmp_path / "checkpoints" / "last" / "2"), at(2).params)
    model = checkpoint.load_run(tmp_path)
    assert model.config == config
    assert model.weights == ("best", (1,), "loss", 1.0, False)
    for which, step, said in [
        ("best", 1, "best by loss (1), step 1"),
        ("last", 3, "last, step 3"),
        ("2", 2, "as chosen, step 2"),
        ("1", 1, "as chosen, step 1"),
    ]:
        chosen = checkpoint.load_run(tmp_path, which)
        chex.assert_trees_all_equal(chosen.params, at(step).params)
        assert chosen.weights.describe() == said
    assert checkpoint.load_run(tmp_path / "checkpoints" / "last").weights.describe() == "last, step 3"
    for which in ("4", "newest", "01x", "last/2"):
        with pytest.raises(
            ConfigError, match=rf"--checkpoint: got '{which}', expected best, last or a step .*last: 2, 3"
        ):
            checkpoint.load_run(tmp_path, which)
    with pytest.raises(ConfigError, match="give one of them"):
        checkpoint.load_run(tmp_path / "checkpoints" / "last", "best")
    batch = build.example_batch(config.model)
    out = builders.apply(model.module)({"params": model.params, **model.variables}, batch)
    chex.assert_trees_all_equal(out, builders.apply(module)({"params": at(1).params}, batch))

    damage(tmp_path / "checkpoints" / "best" / "1")
    chex.assert_trees_all_equal(loaded(), at(3).params)
    with pytest.raises(ConfigError, match="none that can be read"):
        checkpoint.load_run(tmp_path / "checkpoints" / "best" / "1")
    assert checkpoint.load_run(tmp_path).weights.describe() == "last, step 3", "the best is damaged"
    averaging = dataclasses.replace(config, checkpoint=CheckpointConfig(keep_last=2, average=2))
    (tmp_path / "config.json").write_text(overrides.to_json(averaging))
    chex.assert_trees_all_close(loaded(), at(2.5).params, rtol=1e-6)
    assert checkpoint.load_run(tmp_path).weights.describe() == "last, mean of the steps 3, 2"
    wider = dataclasses.replace(config, model=ModelConfig(decoder=dataclasses.replace(config.model.decoder, layers=4)))
    (tmp_path / "config.json").write_text(overrides.to_json(wider))
    with pytest.raises(ConfigError, match=r"decoder/blocks/.* float32\[2, .*expected float32\[4, "):
        loaded()


def test_a_measure_that_is_no_number_never_ranks_and_of_equals_the_earlier_stays(tmp_path):
    config = CheckpointConfig(keep_best=1)
    assert checkpoint.ranking_score({"values": {"loss": float("nan")}}, config) == -float("inf")
    checkpoints = opened(tmp_path, keep_last=3, keep_best=1)
    for number in (1, 2):
        checkpoints.save(state_at(number), {}, {"loss": 1.0})
    checkpoints.close()
    assert kept(tmp_path, "best") == [1]
