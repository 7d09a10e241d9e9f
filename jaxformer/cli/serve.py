"""`jaxformer serve`: a run behind HTTP on this machine, until it is told to stop."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.cli.arguments import CHECKPOINT, Command, Flag, port, positive
from jaxformer.cli.decode import DRAFT, add_draft, print_edits
from jaxformer.config import saved_edits

if TYPE_CHECKING:
    from jaxformer.serving import Server

PORT = 8000
MAX_SECONDS = 1e6


def run(arguments: Namespace) -> int:
    saved_edits.refuse_uneditable(arguments.config, "serve")

    from jaxformer.hf import workdirs
    from jaxformer.serving import Limits, Server

    limits = Limits(
        rows=arguments.rows,
        max_queue=arguments.max_queue,
        max_tokens=arguments.max_tokens,
        max_prompt=arguments.max_prompt,
        request_timeout=arguments.request_timeout,
    )
    model = workdirs.load(arguments.workdir, arguments.checkpoint)
    if model.weights is not None:
        print(f"weights: {model.weights.describe()}", file=sys.stderr)
    edited = saved_edits.apply_edits(model.config, arguments.config, saved_edits.DECODE_FIELDS, "serve")
    print_edits(edited, "serve")
    name = arguments.name or Path(arguments.workdir).absolute().name
    model = add_draft(dataclasses.replace(model, config=edited.config), arguments.draft)
    server = Server(model, name, arguments.port, limits)
    return _serve(server, name)


def _serve(server: Server, name: str) -> int:
    """Answers until SIGTERM or Ctrl-C, and then ends what runs. A second signal ends at once."""
    ends = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if ends.is_set():
            raise KeyboardInterrupt
        ends.set()

    begun = time.monotonic()
    warm = server.api.warm_up()
    print(f"warm-up: {warm}, {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.start()
        routes = ", ".join(server.api.routes)
        print(f"serving {name} at {server.url} ({routes}; Ctrl-C ends it)", flush=True)
        ends.wait()
        print("stopping: new requests are refused, running ones end first", file=sys.stderr, flush=True)
        server.stop()
    finally:
        server.server_close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _seconds(text: str) -> float:
    """Type of a flag whose value is a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise ArgumentTypeError(f"got {text!a}, expected seconds above 0")
    return value


COMMAND = Command(
    "answer requests to a run over HTTP, on this machine, as OpenAI's interface",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "port": Flag("port; 0 for any that is free", default=PORT, type=port),
        "name": Flag("name of the model in requests; without it the folder's", default=""),
        "rows": Flag("outputs that are decoded together", default=8, type=positive),
        "max-queue": Flag("outputs that may wait; more are refused (429)", default=64, type=positive),
        "max-tokens": Flag("most new tokens of an output", default=256, type=positive),
        "max-prompt": Flag("most tokens of a prompt; without it the model's length", default=None, type=positive),
        "request-timeout": Flag("seconds that a request may take (504)", default=60.0, type=_seconds),
        "checkpoint": CHECKPOINT,
        "draft": DRAFT,
    },
    config="edits",
    example="jaxformer serve --workdir=runs/shakespeare --port=8000",
)
