"""Joining the other processes of a run, and meeting them: bounded, by name, never a silent hang.

A launcher says so in the environment; without it a process is alone, so that a shell on a SLURM or TPU machine does
not wait for partners that nobody started.

    JAXFORMER_DISTRIBUTED=auto            address, count and index come from SLURM, the TPU VM, Kubernetes or Open MPI 4
    JAXFORMER_DISTRIBUTED=host:port       the coordinator's address; count and index from MPI's or SLURM's variables
    JAXFORMER_DISTRIBUTED=host:port/4/0   the coordinator's address, the number of processes, this one's index
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
from typing import Any

import jax
from jax._src import distributed as internal  # the key-value store of the coordinator has no public name

from jaxformer.config import ConfigError
from jaxformer.parallel import rollcall

VARIABLE = "JAXFORMER_DISTRIBUTED"
PATIENCE = 300.0
"""Seconds that processes wait for each other to start, or to arrive at a barrier."""
LISTEN = 2.0
"""Seconds between two looks at whether another process asks for the stacks of this one."""
STACKS = "jaxformer/stacks"

# The variables by which launchers tell a process its place: count, index, and the same on its machine.
LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "MPICH, Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
}  # fmt: skip


class Stalled(RuntimeError):
    """Some processes did not come to a barrier in time."""


# --- joining ----------------------------------------------------------------------------------------------------------


def arguments(value: str) -> dict[str, str | int]:
    """The coordinator, count and index that a value of the variable asks for; nothing where JAX finds them itself.

    Raises:
      ConfigError: it is none of the three forms, or the launcher has set no count and index.
    """
    if value == "auto":
        return {}
    address, *rest = value.split("/")
    if not rest and re.fullmatch(r"\S+:\d+", address):
        rest = list(_placed()[:2])
    if len(rest) != 2 or not re.fullmatch(r"\S+:\d+", address) or not all(number.isdecimal() for number in rest):
        raise ConfigError(
            f"{VARIABLE}: got {value!r}, expected auto, host:port or host:port/count/index; unset it to run alone"
        )
    count, index = map(int, rest)
    if index >= count:
        raise ConfigError(f"{VARIABLE}: got index {index} of {count} processes, expected less than the count")
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def _placed() -> tuple[str, str, str, str]:
    """Count, index, count on this machine and index on it, as a launcher says ("" where it does not).

    Raises:
      ConfigError: no launcher says it.
    """
    for names in LAUNCHERS.values():
        if names[0] in os.environ and names[1] in os.environ:
            return tuple(os.environ.get(name, "") for name in names)
    raise ConfigError(
        f"{VARIABLE}: got an address alone, expected the variables of mpirun or srun with it "
        f"({', '.join(' and '.join(names[:2]) for names in LAUNCHERS.values())}); or give host:port/count/index"
    )


def visible() -> str:
    """Which GPUs of its machine this process may use: "all", or the number of one.

    One each where a machine has several processes, unless each was given its own by CUDA_VISIBLE_DEVICES. (JAX alone
    would take one in any case, also where a machine has one process for all of its GPUs.)
    """
    try:
        _, _, here, own = _placed()
    except ConfigError:
        return "all"
    found = re.match(r"\d+", here)  # SLURM writes 8(x2): 8 on each of two nodes
    several = found is not None and int(found[0]) > 1
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return own if several and own and given.count(",") + bool(given) != 1 else "all"


def join(seconds: float = PATIENCE) -> None:
    """Joins the run that the environment names, if it names one.

    Raises:
      ConfigError: the processes did not all come within `seconds`, or disagree about how many they are.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return
    given = arguments(value)
    if given:
        rollcall.call(given["coordinator_address"], given["num_processes"], given["process_id"], seconds)
        jax.distributed.initialize(**given, cluster_detection_method="deactivate", initialization_timeout=int(seconds))
    else:
        _found(seconds)
    if "/" not in value:  # else whoever gave each process its index has given it its devices too
        jax.config.update("jax_cuda_visible_devices", visible())
    if internal.global_state.client is not None:
        threading.Thread(target=_listen, daemon=True).start()


def _found(seconds: float) -> None:
    """Joins by what JAX finds in the environment, and says in one line if it finds nothing or nobody."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(max(seconds - 5.0, 1.0)):
            print(
                f"error: processes: waited {seconds:.0f} s for all of them; see which do not say this", file=sys.stderr
            )
            os._exit(2)  # what JAX would do five seconds later, with a stack trace of C++

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


def index() -> int:
    """The number of this process, without asking for devices."""
    return internal.global_state.process_id


def first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0


# --- meeting ----------------------------------------------------------------------------------------------------------


def barrier(name: str, seconds: float = PATIENCE) -> None:
    """Returns when all processes have called it with this `name`; at once in a run of one process.

    Raises:
      Stalled: some did not come in time; says which. All processes then print where their threads stand.
    """
    exchange(name, None, seconds)


def exchange(name: str, fact: Any, seconds: float = PATIENCE) -> list[Any]:
    """What every process gave under this `name`, in the order of their numbers. A barrier with luggage.

    Args:
      name: of its own: a second meeting of the same name would find what the first one left.
      fact: anything that JSON takes.

    Raises:
      Stalled: as `barrier`.
    """
    client, count, own = internal.global_state.client, internal.global_state.num_processes, index()
    if client is None:
        return [fact]
    folder = f"jaxformer/meeting/{name}"
    client.key_value_set(f"{folder}/{own}", json.dumps(fact))
    try:
        client.wait_at_barrier(f"jaxformer/{name}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        came = _came(client, folder)
        missing = [number for number in range(count) if number not in came]
        _ask_for_stacks(client, name)
        who = f"number {', '.join(map(str, missing))} did not come" if missing else " ".join(str(error).split())[:160]
        raise Stalled(
            f"barrier {name!r}: got {len(came)} of {count} processes within {seconds:.0f} s, expected all; {who}; "
            "their stacks are on their standard error"
        ) from None
    came = _came(client, folder)
    return [came[number] for number in range(count)]


def _came(client: Any, folder: str) -> dict[int, Any]:
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in client.key_value_dir_get(folder)}


def _ask_for_stacks(client: Any, name: str) -> None:
    """Prints the stacks of this process and has the others print theirs."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may be the coordinator that is missing
        client.key_value_set(STACKS, name, allow_overwrite=True)
    _dump(name)
    time.sleep(LISTEN + 0.5)  # who asked ends now, and would take the store with it


def _dump(name: str) -> None:
    print(
        f"process {index()}: a process waits at barrier {name!r}; the threads here are at:", file=sys.stderr, flush=True
    )
    faulthandler.dump_traceback(all_threads=True)


def _listen() -> None:
    """Prints this process's stacks when another one has waited for it in vain. A thread, so that a hang has no say."""
    client = internal.global_state.client
    while internal.global_state.client is client:
        time.sleep(LISTEN)
        try:
            _dump(client.key_value_try_get(STACKS))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
        return


def agree(name: str, facts: Mapping[str, str], remedies: Mapping[str, str], seconds: float = PATIENCE) -> None:
    """Checks that all processes have the same `facts`.

    Raises:
      ConfigError: the first fact in which they differ, who differs from process 0, and its remedy.
    """
    everyone = exchange(name, dict(facts), seconds)
    for key in facts:
        words = differing([each[key] for each in everyone])
        if words:
            raise ConfigError(f"{key}: got {words}, expected one for all processes; {remedies[key]}")


def differing(values: list[Any]) -> str:
    """Who has what, if not all have the same: "a on 0, 2 and b on 1"; else ""."""
    holders: dict[str, list[str]] = {}
    for index, value in enumerate(values):
        holders.setdefault(str(value), []).append(str(index))
    if len(holders) < 2:
        return ""
    return " and ".join(f"{value} on {', '.join(numbers)}" for value, numbers in holders.items())
