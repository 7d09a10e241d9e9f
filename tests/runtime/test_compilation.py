"""The cache of compiled programs: its directory, who may use it, and that a second process loads from it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.runtime import compilation, directories

ROOT = Path(__file__).resolve().parents[2]
AMD, INTEL = "Linux x86_64 vendor_id : AuthenticAMD", "Linux x86_64 vendor_id : GenuineIntel"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path))
    return tmp_path


def added(kind, accelerator=False, **environment):
    before = dict(environment)
    compilation.configure(environment, kind, accelerator)
    assert before.items() <= environment.items(), "what the user set was changed"
    return environment


def test_kinds_of_processors_have_folders_of_their_own(home):
    one, other = (added(f"{AMD} flags : {flags}")[compilation.DIRECTORY_VARIABLE] for flags in ("avx2", "avx2 avx512f"))
    assert one != other
    assert Path(one).parent == home / "programs" == directories.cache() / "programs"
    assert added(f"{AMD} flags : avx2")[compilation.DIRECTORY_VARIABLE] == one


def test_what_the_user_chose_stays(home):
    assert added(AMD, JAX_COMPILATION_CACHE_DIR="mine") == {"JAX_COMPILATION_CACHE_DIR": "mine"}
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    assert added(AMD, **{name: "7"})[name] == "7"


def test_processors_whose_programs_are_refused_keep_none_unless_an_accelerator_has_the_work(home):
    assert added(INTEL) == {} == added("Darwin arm64")
    assert compilation.DIRECTORY_VARIABLE in added(INTEL, accelerator=True)
    names = {model: f"{INTEL} cpu family\t: 6 model\t\t: {model} model name\t: Xeon" for model in (85, 106, 207)}
    assert [model for model, name in names.items() if compilation.DIRECTORY_VARIABLE in added(name)] == [207]


def test_a_processor_is_described_by_what_decides_its_code(tmp_path):
    text = "processor\t: 0\nvendor_id\t: A\nmodel\t\t: 7\ncpu MHz\t: 2596.1\nflags\t\t: fpu avx2\n\n"
    text += "processor\t: 1\nvendor_id\t: A\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert compilation._cpuinfo_lines(tmp_path / "cpuinfo") == [
        "vendor_id\t: A",
        "model\t\t: 7",
        "flags\t\t: fpu avx2",
    ]
    assert compilation._cpuinfo_lines(tmp_path / "none") == []
    assert compilation.processor_id() == compilation.processor_id()


PROGRAM = """
import sys
from jaxformer.runtime import compilation
compilation.processor_id = lambda: "Linux test"
compilation.enable_cache()
import jax
import numpy as np
from jax import monitoring
counts = dict.fromkeys(("hits", "misses"), 0)
prefix = "/jax/compilation_cache/cache_"
def count(event, **more):
    if event.startswith(prefix):
        counts[event.removeprefix(prefix)] += 1
monitoring.register_event_listener(count)
def f(x):
    for i in range(30):
        x = jax.numpy.sin(x @ x + i)
    return x
# Nothing but f is compiled: on a busy machine any other program may take long enough to be kept, too.
print(np.asarray(jax.jit(f)(np.ones((4, 4), np.float32))).sum(), *counts.values())
"""


def run(home, command="train"):
    dropped = ("XLA_FLAGS", compilation.DIRECTORY_VARIABLE, *compilation.SETTINGS)
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"JAXFORMER_CACHE": str(home), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-c", PROGRAM, command]
    done = subprocess.run(script, check=True, env=environment, timeout=120, capture_output=True, text=True)
    return *done.stdout.split(), done.stderr


def test_a_second_process_loads_what_the_first_compiled_unless_that_was_killed_while_it_wrote(tmp_path):
    value, *_ = first = run(tmp_path)
    assert first == (value, "0", "1", "")
    assert run(tmp_path) == (value, "1", "0", "")
    (program,) = (tmp_path / "programs").glob("*/jit_f-*-cache")
    program.write_bytes(program.read_bytes()[:1000])
    program.with_name(program.name.replace("-cache", "-atime")).unlink()  # which is written last
    with open(program.parent / ".lockfile", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compilation.remove_partial_programs(program.parent)
        assert program.exists(), "somebody is writing it"
    assert run(tmp_path) == (value, "0", "1", "")
    compilation.remove_partial_programs(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("command", "loaded", "keeps"), [("train", False, True), ("inspect", False, False), ("train", True, False)]
)
def test_only_commands_that_compute_keep_programs_and_only_before_jax_is_there(
    command, loaded, keeps, home, monkeypatch
):
    for name in (compilation.DIRECTORY_VARIABLE, *compilation.SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilation, "processor_id", lambda: AMD)
    monkeypatch.setattr(compilation, "ready_directory", None)
    monkeypatch.setattr(compilation.sys, "argv", ["jaxformer", command])
    monkeypatch.setattr(compilation.sys, "modules", {"jax": None} if loaded else {})
    with monkeypatch.context() as context:
        context.setattr(compilation.os, "environ", dict(os.environ))
        compilation.enable_cache()
        assert (compilation.DIRECTORY_VARIABLE in compilation.os.environ) == keeps


def test_programs_of_a_folder_that_others_can_write_to_are_not_run(home, capsys):
    (home / "programs").mkdir(mode=0o755)
    (home / "programs").chmod(0o777)
    environment = added(AMD)
    assert environment == {compilation.ENABLED_VARIABLE: "0"}, (
        "off for JAX, and for the process that takes this one's place"
    )
    err = capsys.readouterr().err
    assert f"{home}/programs can be written by others (mode 777)" in err and err.count("\n") == 1
    assert added(AMD, **environment) == environment
    assert capsys.readouterr().err == "", "said once"
    (home / "programs").chmod(0o700)
    assert compilation.DIRECTORY_VARIABLE in added(AMD)
    assert compilation.DIRECTORY_VARIABLE not in added(AMD, **{compilation.ENABLED_VARIABLE: "false"})
    assert added(AMD, **{compilation.DIRECTORY_VARIABLE: "/anybody/s"}) == {
        compilation.DIRECTORY_VARIABLE: "/anybody/s"
    }, "the user vouches"


def test_a_cache_that_nobody_can_name_costs_the_programs_only(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", "~nobody-of-that-name/x")
    for name in (compilation.DIRECTORY_VARIABLE, compilation.ENABLED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilation, "processor_id", lambda: AMD)
    monkeypatch.setattr(compilation.sys, "argv", ["jaxformer", "train"])
    monkeypatch.setattr(compilation.sys, "modules", {})
    with monkeypatch.context() as context:
        context.setattr(compilation.os, "environ", dict(os.environ))
        compilation.enable_cache()
        assert compilation.os.environ[compilation.ENABLED_VARIABLE] == "0"


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_run(tmp_path):
    (tmp_path / "programs").write_text("in the way")
    _, hits, _, complaints = run(tmp_path)
    assert hits == "0"
    assert "Traceback" not in complaints
