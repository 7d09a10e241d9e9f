"""The lock file of a workdir, for the run that holds it (`train.lock`) and for those that only look."""

FILE_NAME = "lock"
LEASE_SECONDS = 120.0
"""Seconds without renewal of the file's time stamp after which an owner on another host counts as dead."""
