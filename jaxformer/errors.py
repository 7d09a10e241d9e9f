"""Errors whose message is for the person who typed the command: one line, no traceback."""

from __future__ import annotations


class ConfigError(ValueError):
    """The user's config or input is wrong. The message is one line: `what: got X, expected Y; do Z`."""


class StorageError(Exception):
    """Reading or writing failed: the disk is full, read-only or gone. The message is one line and says what is safe."""
