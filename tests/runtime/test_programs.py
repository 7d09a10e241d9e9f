"""Programs that are kept ready to run: what a second start traces, and when it may not use what is there."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.runtime import compilation, programs

ROOT = Path(__file__).resolve().parents[2]


def child(name, folder):
    """What a script saw, in a process with one device, beside JAX's own cache."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    environment |= {compilation.DIRECTORY_VARIABLE: f"{folder}/jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, str(Path(__file__).with_name(name)), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `kept_programs_child.py` saw."""
    return child("kept_programs_child.py", tmp_path_factory.mktemp("kept"))


EXPECTED = {
    "kept": [1, 0, 1, True, True],  # traces of the first and the second start, programs, the results are jit's
    "same module": [1, 0, 1],
    "other values": [1, True, 0],
    "shapes and dtypes": [1, 1, 1, 0],
    "static values": [1, 1, True, 0],
    "method": [[8.0, True, 1], [8.0, True, 0]],  # the argument is donated, by a kept program too
    "source": [1, 0, 0],  # traced again; the program of the same module is there
    "settings": [1, 0, 1],
    "back": [0],
    "warns": [1, 1, 2],
    "address": [1, 1],
    "once on the disk": [0],
    "calls Python": [1, 1, 0],
    "of jax's cache": [0, True],  # loaded programs cannot be written again
    "external": [1],
    "damaged": [1, True, True],
    "mended": [0, 0],
    "foreign": [1, True],
    "read-only": [1, 1, True],
    "values": [2, True],
    "damaged values": [True, True, True, True, 1],
    "limit": [0, 0],
    "untrusted": [1, 1, True],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_second_start(seen, name):
    assert seen[name] == EXPECTED[name]


def test_values_of_a_function_have_to_be_named():
    scale = 3
    for function in (functools.partial(max, 1), lambda x: x * scale):
        with pytest.raises(TypeError, match="depends_on"):
            programs.jit(function)


def test_other_processes_keep_nothing():
    assert compilation.ready_directory is None and programs.trusted_folder() is None


def test_an_experiment_keeps_none(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path))
    monkeypatch.setenv(compilation.DIRECTORY_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(compilation, "ready_directory", None)
    for command, expected in {"experiment": None, "decode": tmp_path / "programs"}.items():
        monkeypatch.setattr(sys, "argv", ["jaxformer", command])
        compilation.enable_cache()
        assert compilation.ready_directory == expected
    monkeypatch.setattr(compilation, "ready_directory", None)
    monkeypatch.setenv(compilation.ENABLED_VARIABLE, "0")
    compilation.enable_cache()
    assert compilation.ready_directory is None


def test_runs_and_outputs_are_the_same_to_the_bit_and_the_second_start_traces_nothing(tmp_path):
    runs = child("kept_runs_child.py", tmp_path)
    assert runs["trained"] == [True, True, False, True]  # equal; traced by the first, the second and without
    assert runs["beams"] == [True, True, False, True]
