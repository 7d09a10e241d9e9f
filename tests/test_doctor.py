"""The findings of `doctor` on simulated machines."""

import os
import sys
import tomllib
import types
from collections import namedtuple
from pathlib import Path

import jax
import pytest

from jaxformer import doctor


@pytest.fixture
def few(monkeypatch):
    """The doctor looks at two packages only; importing all would take seconds."""
    monkeypatch.setattr(doctor, "requirements", lambda: {"numpy": "2", "orbax-checkpoint": ""})


def examine(capsys):
    code = doctor.check()
    lines = capsys.readouterr().out.splitlines()
    return code, {line.split()[1]: line for line in lines[:-1]}, lines[-1]


def test_a_healthy_machine(few, capsys):
    code, lines, last = examine(capsys)
    assert code == 0
    assert last == "nothing wrong found"
    assert lines["numpy"].startswith("ok    numpy")
    assert f"{jax.device_count()} x cpu (backend cpu)" in lines["devices"]
    assert "compiled and computed" in lines["matrix"]
    assert "1, this is number 0" in lines["processes"]
    assert os.environ["JAXFORMER_CACHE"] in lines["cache"]


@pytest.mark.parametrize(
    ("name", "least", "words"),
    [("nothing-of-that-name", "", "not installed"), ("numpy", "99.1", "expected at least 99.1")],
)
def test_packages_that_are_missing_or_old(name, least, words):
    found = doctor.check_package(name, least)
    assert found.level == "FAIL"
    assert words in found.message
    assert "; install it with: pip install" in found.message


def test_a_package_that_does_not_import(few, monkeypatch, capsys):
    def broken(name):
        raise RuntimeError("libfoo.so:\nno such file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    code, lines, last = examine(capsys)
    assert code == 1
    assert last == "2 of these must be put right"
    assert "FAIL  numpy" in lines["numpy"]
    assert "RuntimeError: libfoo.so: no such file" in lines["numpy"]


def test_a_backend_that_computes_wrongly_or_not_at_all(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda f: lambda x: f(x) + 1)
    assert ("FAIL", "matrix product") in [found[:2] for found in doctor.check_devices()]

    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", none)
    (found,) = doctor.check_devices()
    assert found.level == "FAIL"
    assert "Unable to initialize backend" in found.message
    assert "JAX_PLATFORMS" in found.message


def test_an_accelerator_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: path == "/dev/nvidia0")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "install jaxformer[gpu]" in doctor.check_idle_accelerator("cpu").message
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "unset JAX_PLATFORMS" in doctor.check_idle_accelerator("cpu").message
    assert doctor.check_idle_accelerator("gpu").level == "ok"


def test_folders_that_cannot_be_written_or_are_full(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    cache, here = doctor.check_directories()
    assert cache.level == "FAIL"
    assert "is not writable" in cache.message
    assert here.name == "current folder"
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "new" / "cache"))
    usage = namedtuple("usage", "free")
    for free, level in ((1e8, "FAIL"), (1e9, "warn"), (1e12, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: usage(free))
        assert [found.level for found in doctor.check_directories()] == [level, level]
    assert not (tmp_path / "new").exists()


def test_other_frameworks_are_noticed(monkeypatch):
    assert doctor.check_frameworks().level == "ok"
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert doctor.check_frameworks()[:2] == ("warn", "frameworks")


def test_requirements_are_those_of_the_project():
    path = Path(doctor.__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["dependencies"]
    found = doctor.requirements()
    assert len(found) == len(declared)
    assert found["jax"] == "0.10"
    assert found["importlib_resources"] == ""
    assert not {"pytest", "tensorflow", "torch"} & set(found)


@pytest.mark.parametrize(
    ("older", "newer"), [("0.9.4", "0.10"), ("1.0", "1.0.1"), ("2", "2.0.1rc1"), ("", "0.1"), ("0.10", "0.10.0.dev3")]
)
def test_versions_are_compared_by_their_numbers(older, newer):
    assert doctor.release_numbers(older) <= doctor.release_numbers(newer)
    assert (doctor.release_numbers(older) == doctor.release_numbers(newer)) == (older == "0.10")
