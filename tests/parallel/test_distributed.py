"""Processes that find each other, or say in one line and in time who is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxformer.config import ConfigError
from jaxformer.parallel import distributed, startup_check
from launch.local import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare(monkeypatch):
    """An environment in which no launcher says anything."""
    for names in distributed.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


PLACES = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9"},
    "MPICH": {"PMI_SIZE": "16", "PMI_RANK": "9"},
    "SLURM": {"SLURM_NTASKS": "16", "SLURM_PROCID": "9"},
}


@pytest.mark.parametrize("place", PLACES)
def test_an_address_alone_takes_count_and_index_from_the_launcher(place, bare):
    for name, value in PLACES[place].items():
        bare.setenv(name, value)
    expected = distributed.Coordinator("node1:7000", 16, 9)
    assert distributed.coordinator_arguments("node1:7000") == expected
    assert distributed.coordinator_arguments("node1:7000/4/2") == expected._replace(count=4, index=2)
    assert distributed.coordinator_arguments("auto") is None


@pytest.mark.parametrize("value", ["node1:7000", "node1", "node1:x/2/0", "node1:7000/2", "node1:7000/2/2", "a:1/b/0"])
def test_values_that_say_nothing_are_refused_in_one_line(value, bare):
    with pytest.raises(ConfigError, match=r"JAXFORMER_DISTRIBUTED: got .*, expected") as caught:
        distributed.coordinator_arguments(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("here", "own", "given", "expected"),
    [
        ("1(x2)", "0", "", "all"),  # a process a node: it has all of its GPUs
        ("8(x2)", "3", "", "3"),  # a process a GPU
        ("8(x2)", "3", "5", "all"),  # and the launcher has already chosen it
        ("4(x2)", "3", "0,1,2,3", "3"),
        ("", "", "", "all"),
    ],
)
def test_which_gpus_a_process_may_use(here, own, given, expected, bare):
    for name, value in zip(distributed.LAUNCHERS["SLURM"], ("16", "3", here, own), strict=True):
        bare.setenv(name, value)
    if given:
        bare.setenv("CUDA_VISIBLE_DEVICES", given)
    assert distributed.visible_gpus() == expected


def roll(members: list[tuple[int, int]], seconds: float) -> dict[tuple[int, int, int], str]:
    """What each of several (index, count) hears, called at the same time."""
    address, heard = f"127.0.0.1:{free_port()}", {}

    def member(place: int, index: int, count: int) -> None:
        try:
            startup_check.wait_for_processes(address, count, index, seconds)
            heard[place, index, count] = ""
        except ConfigError as error:
            heard[place, index, count] = str(error)

    threads = [threading.Thread(target=member, args=(i, *each)) for i, each in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_all_are_there():
    assert set(roll([(0, 3), (2, 3), (1, 3)], 20).values()) == {""}


def test_who_did_not_come_is_named_to_those_who_did():
    heard = roll([(0, 4), (2, 4)], 1)
    assert all("got 2, expected 4; number 1, 3 did not come" in words for words in heard.values()), heard


def test_other_counts_and_double_numbers_are_told():
    assert all("expects 3 of them; start all with one count" in words for words in roll([(0, 2), (1, 3)], 20).values())
    assert all("two are number 1" in words for words in roll([(0, 3), (1, 3), (1, 3)], 20).values())


def test_without_the_first_process_the_others_say_so():
    ((words),) = roll([(1, 2)], 0.3).values()
    assert "got no connection to number 0" in words


def test_an_occupied_port_is_told():
    import socket

    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError, match="expected it free"):
        startup_check.wait_for_processes(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0, 1)


MEMBER = """
import sys, time
from jaxformer.config import ConfigError
from jaxformer.parallel import distributed

distributed.join(60)
own = distributed.process_index()
print(distributed.all_gather_host_value("facts", {"own": own}, 60))
try:
    distributed.check_agreement("same", {"code": f"v{own}"}, {"code": "bring the same"}, 60)
except ConfigError as error:
    print(error)
distributed.barrier("all", 60)
if own == 0:
    try:
        distributed.barrier("late", 1)
    except distributed.BarrierTimeout as error:
        print(error)
else:
    def dawdling():
        time.sleep(7)
    dawdling()
"""


def test_two_processes_meet_compare_and_tell_of_the_one_that_hangs(tmp_path):
    port = free_port()
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAXFORMER_DISTRIBUTED": f"127.0.0.1:{port}/2/{index}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        (first, first_error), (second, second_error) = (member.communicate(timeout=120) for member in members)
    finally:
        for member in members:
            member.kill()
    for out in (first, second):
        assert "[{'own': 0}, {'own': 1}]" in out, first_error + second_error
        assert "code: got v0 on 0 and v1 on 1, expected one for all processes; bring the same" in out
    assert "barrier 'late': got 1 of 2 processes within 1 s, expected all; number 1 did not come" in first
    assert "process 1: a process waits at barrier 'late'" in second_error
    assert "dawdling" in second_error
    assert "process 0: a process waits" in first_error
