"""Serving: a trained model behind HTTP, with OpenAI's public schema for text, and routes for other tasks.

`server.py` is the HTTP side. It reads requests (`requests.py`), which `api.py` hands to the one thread that computes
(`worker.py`), and writes `answers.py`. The engine that decodes them together is `decode/engine.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxformer.hf import workdirs
from jaxformer.model import Model
from jaxformer.serving.limits import Limits
from jaxformer.serving.server import Server

__all__ = ["Limits", "Server", "serve"]


def serve(
    model: Model | str | os.PathLike[str],
    port: int = 0,
    name: str = "",
    limits: Limits | None = None,
    rows: int | None = None,
) -> Server:
    """A server of a model on the loopback address, which has started; see `Server`.

    Args:
      model: a model, or the workdir of a run.
      port: 0: any that is free; `Server.url` has it.
      name: the model's name in requests; "": that of the workdir, or "model".
      limits: what it refuses; None: the defaults of `Limits`.
      rows: outputs that are decoded together; None: as the run's `decode.batch`.

    Raises:
      ConfigError: there is no such run, the port is taken, or the model cannot be served.
    """
    if not isinstance(model, Model):
        name = name or Path(model).absolute().name
        model = workdirs.load(model)
    return Server(model, name or "model", port, limits, rows).start()
