"""Workdirs in a bucket: a local mirror in which a run works, and what is fetched to it and published from it.

One run at a time writes to a workdir: it holds a lease (`jaxformer.runtime.lease`).

    mirror       the folder on this host, made equal to the bucket when a command starts
    publishing   new files and checkpoints to the bucket, in an order in which a kill at any moment loses nothing
    sessions     both together: for a run that trains, and for commands that read a run

docs/object_storage.md has the design.
"""

from jaxformer.storage.sessions import NONE, TrainingSession, fetched, opened

__all__ = ["NONE", "TrainingSession", "fetched", "opened"]
