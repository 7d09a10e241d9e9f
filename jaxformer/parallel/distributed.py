"""Joining the other processes of a run: one call, before anything asks for devices.

A launcher says so in the environment; without it a process is alone, so that a shell on a SLURM or TPU machine does
not wait for partners that nobody started.

    JAXFORMER_DISTRIBUTED=auto               address, count and index come from SLURM, the TPU VM or Kubernetes
    JAXFORMER_DISTRIBUTED=host:port/4/0      the coordinator's address, the number of processes, this one's index
"""

from __future__ import annotations

import os

import jax

from jaxformer.config import ConfigError

VARIABLE = "JAXFORMER_DISTRIBUTED"


def arguments(value: str) -> dict[str, str | int]:
    """The arguments of `jax.distributed.initialize` that a value of the variable asks for.

    Raises:
      ConfigError: it is neither "auto" nor "address/count/index".
    """
    if value == "auto":
        return {}
    address, count, index = [*value.split("/"), "", ""][:3]
    if value.count("/") != 2 or ":" not in address or not count.isdecimal() or not index.isdecimal():
        raise ConfigError(f"{VARIABLE}: got {value!r}, expected auto or host:port/count/index; unset it to run alone")
    if int(index) >= int(count):
        raise ConfigError(f"{VARIABLE}: got index {index} of {count} processes, expected less than the count")
    return {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}


def join() -> None:
    """Joins the run that the environment names, if it names one."""
    value = os.environ.get(VARIABLE, "")
    if value:
        jax.distributed.initialize(**arguments(value))


def first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0
