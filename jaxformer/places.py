"""Folders that belong to nobody's run."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """Where things are kept that can be made again: $JAXFORMER_CACHE, or ~/.cache/jaxformer."""
    return Path(os.environ.get("JAXFORMER_CACHE") or "~/.cache/jaxformer").expanduser().absolute()
