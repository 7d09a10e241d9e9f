"""Joins the processes of a run, and exchanges small host values between them, with time limits and clear errors.

The variable JAXFORMER_DISTRIBUTED, which a launcher sets, says how. Without it a process runs alone, so that a shell on
a SLURM or TPU machine does not wait for processes that nobody started.

    JAXFORMER_DISTRIBUTED=auto            address, count and index from SLURM, the TPU VM, Kubernetes or Open MPI 4
    JAXFORMER_DISTRIBUTED=host:port       address of the coordinator; count and index from MPI's or SLURM's variables
    JAXFORMER_DISTRIBUTED=host:port/4/0   address of the coordinator, number of processes, index of this one
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax._src import distributed as internal  # the key-value store of the coordinator has no public name

from jaxformer.errors import ConfigError
from jaxformer.parallel import startup_check

VARIABLE = "JAXFORMER_DISTRIBUTED"
TIMEOUT_SECONDS = 300.0
"""Seconds that processes wait for each other at startup and at a barrier."""
POLL_SECONDS = 2.0
"""Seconds between polls for a request to print the stacks of this process."""
STACK_DUMP_KEY = "jaxformer/stacks"
"""Key in the coordinator's store that requests stacks; its value is the name of the barrier."""

# Variables in which launchers put the number of processes, the index of this one, and both within its machine.
LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "MPICH, Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
}  # fmt: skip


class Coordinator(NamedTuple):
    """Address (host:port) of process 0, number of processes, and index of this one."""

    address: str
    count: int
    index: int


class BarrierTimeout(RuntimeError):
    """Some processes did not reach a barrier in time."""


# --- joining ----------------------------------------------------------------------------------------------------------


def coordinator_arguments(value: str) -> Coordinator | None:
    """Arguments of `jax.distributed.initialize` for a value of the variable; None if JAX is to detect them ("auto").

    Raises:
      ConfigError: the value has none of the three forms, or the launcher has not set count and index.
    """
    if value == "auto":
        return None
    address, *rest = value.split("/")
    if not rest and re.fullmatch(r"\S+:\d+", address):
        rest = list(_launcher_variables()[:2])
    if len(rest) != 2 or not re.fullmatch(r"\S+:\d+", address) or not all(number.isdecimal() for number in rest):
        raise ConfigError(
            f"{VARIABLE}: got {value!r}, expected auto, host:port or host:port/count/index; unset it to run alone"
        )
    count, index = map(int, rest)
    if index >= count:
        raise ConfigError(f"{VARIABLE}: got index {index} of {count} processes, expected less than the count")
    return Coordinator(address, count, index)


def _launcher_variables() -> tuple[str, str, str, str]:
    """Count, index, count on this machine and index on it, from the launcher's variables ("" if not set).

    Raises:
      ConfigError: no launcher has set count and index.
    """
    for count, index, local_count, local_index in LAUNCHERS.values():
        if count in os.environ and index in os.environ:
            local = os.environ.get(local_count, ""), os.environ.get(local_index, "")
            return os.environ[count], os.environ[index], *local
    raise ConfigError(
        f"{VARIABLE}: got an address alone, expected the variables of mpirun or srun with it "
        f"({', '.join(' and '.join(names[:2]) for names in LAUNCHERS.values())}); or give host:port/count/index"
    )


def visible_gpus() -> str:
    """GPUs of its machine that this process may use: "all", or the number of one.

    One GPU per process if a machine has several processes, unless CUDA_VISIBLE_DEVICES gives each process its own. (JAX
    would always take one, even if a machine has a single process for all of its GPUs.)
    """
    try:
        _, _, local_count, local_index = _launcher_variables()
    except ConfigError:
        return "all"
    match = re.match(r"\d+", local_count)  # SLURM writes 8(x2): 8 on each of two nodes
    several = match is not None and int(match[0]) > 1
    assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return local_index if several and local_index and assigned.count(",") + bool(assigned) != 1 else "all"


def join(seconds: float = TIMEOUT_SECONDS) -> None:
    """Joins the run that the environment names, if it names one.

    Raises:
      ConfigError: some processes did not start within `seconds`, or their counts differ.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return
    coordinator = coordinator_arguments(value)
    if coordinator is not None:
        startup_check.wait_for_processes(*coordinator, seconds)
        jax.distributed.initialize(
            coordinator.address,
            coordinator.count,
            coordinator.index,
            cluster_detection_method="deactivate",
            initialization_timeout=int(seconds),
        )
    else:
        _join_detected(seconds)
    if "/" not in value:  # otherwise whoever set the index of each process has also set its devices
        jax.config.update("jax_cuda_visible_devices", visible_gpus())
    if internal.global_state.client is not None:
        threading.Thread(target=_dump_stacks_on_request, daemon=True).start()


def _join_detected(seconds: float) -> None:
    """Joins with the values that JAX detects in the environment.

    Raises:
      ConfigError: JAX detects none. If processes are missing, the process exits with one line instead.
    """
    done = threading.Event()

    def watch() -> None:
        if not done.wait(max(seconds - 5.0, 1.0)):
            print(
                f"error: processes: waited {seconds:.0f} s for all of them; see which do not say this", file=sys.stderr
            )
            os._exit(2)  # five seconds before JAX would exit with a C++ stack trace

    threading.Thread(target=watch, daemon=True).start()
    try:
        jax.distributed.initialize(initialization_timeout=int(seconds))
    except (ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"{VARIABLE}: got auto, but neither SLURM, a TPU VM, Kubernetes nor Open MPI 4 around it ({words}), "
            "expected one; give host:port/count/index"
        ) from None
    finally:
        done.set()


def process_index() -> int:
    """Index of this process; does not initialize devices, unlike `jax.process_index`."""
    return internal.global_state.process_id


def is_first_process() -> bool:
    """True in process 0, which writes files and logs."""
    return jax.process_index() == 0


# --- meeting ----------------------------------------------------------------------------------------------------------


def barrier(name: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Waits until all processes have called it with this `name`; returns at once in a run of one process.

    Raises:
      BarrierTimeout: some did not arrive in time (names them). All processes then print the stacks of their threads.
    """
    all_gather_host_value(name, None, seconds)


def all_gather_host_value(name: str, value: Any, seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """All-gather of a small host value across processes, in process order. Also a barrier.

    Args:
      name: name of the exchange, used once per run: a second exchange would read the values of the first.
      value: any JSON value.
      seconds: time limit.

    Returns:
      The value of each process; `[value]` in a run of one process.

    Raises:
      BarrierTimeout: as `barrier`.
    """
    client, count, index = internal.global_state.client, internal.global_state.num_processes, process_index()
    if client is None:
        return [value]
    folder = f"jaxformer/meeting/{name}"
    client.key_value_set(f"{folder}/{index}", json.dumps(value))
    try:
        client.wait_at_barrier(f"jaxformer/{name}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        values = _published_values(client, folder)
        missing = [number for number in range(count) if number not in values]
        _request_stacks(client, name)
        who = f"number {', '.join(map(str, missing))} did not come" if missing else " ".join(str(error).split())[:160]
        raise BarrierTimeout(
            f"barrier {name!r}: got {len(values)} of {count} processes within {seconds:.0f} s, expected all; {who}; "
            "their stacks are on their standard error"
        ) from None
    values = _published_values(client, folder)
    return [values[number] for number in range(count)]


def _published_values(client: Any, folder: str) -> dict[int, Any]:
    """Value of each process that has published one below `folder`, by process index."""
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in client.key_value_dir_get(folder)}


def _request_stacks(client: Any, name: str) -> None:
    """Prints the stacks of this process, and requests those of the others."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the missing process may be the coordinator
        client.key_value_set(STACK_DUMP_KEY, name, allow_overwrite=True)
    _dump_stacks(name)
    time.sleep(POLL_SECONDS + 0.5)  # this process ends next, and the store may end with it


def _dump_stacks(name: str) -> None:
    print(
        f"process {process_index()}: a process waits at barrier {name!r}; the threads here are at:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(all_threads=True)


def _dump_stacks_on_request() -> None:
    """Thread that prints the stacks of this process when another one requests them, even if the main thread hangs."""
    client = internal.global_state.client
    while client is not None and internal.global_state.client is client:
        time.sleep(POLL_SECONDS)
        try:
            _dump_stacks(client.key_value_try_get(STACK_DUMP_KEY))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
        return


def check_agreement(
    name: str, facts: Mapping[str, str], remedies: Mapping[str, str], seconds: float = TIMEOUT_SECONDS
) -> None:
    """Checks that all processes have the same `facts`.

    Args:
      name: name of the exchange, used once per run.
      facts: fact by name.
      remedies: what to do if a fact differs, by the same names.
      seconds: time limit.

    Raises:
      ConfigError: a fact differs between processes; says which have which value.
    """
    processes = all_gather_host_value(name, dict(facts), seconds)
    for key in facts:
        difference = describe_differences([process[key] for process in processes])
        if difference:
            raise ConfigError(f"{key}: got {difference}, expected one for all processes; {remedies[key]}")


def describe_differences(values: list[Any]) -> str:
    """The processes with each value, if the values differ: "a on 0, 2 and b on 1"; otherwise ""."""
    holders: dict[str, list[str]] = {}
    for index, value in enumerate(values):
        holders.setdefault(str(value), []).append(str(index))
    if len(holders) < 2:
        return ""
    return " and ".join(f"{value} on {', '.join(numbers)}" for value, numbers in holders.items())
