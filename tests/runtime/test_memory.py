"""Allocator settings: a command that computes is restarted once, and settings of the user are kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.runtime import memory

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_user_set_is_kept():
    assert memory.tunables({}) == ":".join(f"{name}={value}" for name, value in memory.SETTINGS.items())
    given = {memory.VARIABLE: "glibc.malloc.hugetlb=2:glibc.malloc.check=1"}
    value = memory.tunables(given)
    assert value.startswith("glibc.malloc.hugetlb=2:glibc.malloc.check=1:glibc.malloc.mmap_threshold=")
    assert memory.tunables({memory.VARIABLE: value}) == value


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
@pytest.mark.parametrize(
    ("command", "starts", "first"),
    [
        ("train", 2, ""),
        ("decode", 2, ""),
        ("inspect", 1, ""),
        ("--help", 1, ""),
        # What a container, or a program with the rights of another user, does to the environment.
        ("train", 2, "import os; os.environ.pop('GLIBC_TUNABLES', None)\n"),
        ("train", 2, "import os; os.environ.clear()\n"),
        ("train", 1, "import os; os.execve = lambda *_: open('/nowhere/at/all')\n"),
    ],
)
def test_a_command_is_started_again_once(command, starts, first, tmp_path):
    """Every start of the interpreter leaves a line in a file; process id and arguments are the same in all."""
    code = (
        f"{first}import os, sys; sys.path.append({str(ROOT)!r}); from jaxformer.runtime import memory\n"
        f"file = open({str(tmp_path / 'starts')!r}, 'a+'); file.seek(0)\n"
        "len(file.readlines()) > 3 and sys.exit('started again and again')\n"
        "file.write(f'{os.getpid()} {sys.argv[1:]}\\n'); file.close()\n"
        "memory.restart_with_tunables()\n"
    )
    script = tmp_path / "program.py"
    script.write_text(code)
    environment = {k: v for k, v in os.environ.items() if k != memory.VARIABLE} | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), command, "--x=1"], check=True, env=environment, timeout=60)
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == starts
    assert len(set(lines)) == 1
