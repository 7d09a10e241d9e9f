"""`jaxformer serve`: a run behind HTTP, until it is told to stop."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from jaxformer.cli.arguments import CHECKPOINT, Command, Flag, port, positive
from jaxformer.cli.decode import print_edits
from jaxformer.config import saved_edits
from jaxformer.errors import ConfigError

KEY_VARIABLE = "JAXFORMER_API_KEY"
"""Environment variable with the key that requests need."""
LOOPBACK = "127.0.0.1"
PORT = 8000


def run(arguments: Namespace) -> int:
    saved_edits.refuse_uneditable(arguments.config, "serve")
    key = os.environ.get(KEY_VARIABLE) or None
    is_local = arguments.host in (LOOPBACK, "localhost")
    if not is_local and not arguments.remote:
        got = f"--host: got {arguments.host!a}, which other machines reach"
        raise ConfigError(f"{got}, expected {LOOPBACK}; add --remote, and set ${KEY_VARIABLE} to ask for a key")

    from jaxformer.hf import workdirs
    from jaxformer.serving import Limits, Server

    limits = Limits(
        arguments.__dict__["max-queue"],
        arguments.__dict__["max-tokens"],
        arguments.__dict__["max-prompt"],
        arguments.__dict__["request-timeout"],
        grace=arguments.grace,
    )
    model = workdirs.load(arguments.workdir, arguments.checkpoint)
    if model.weights is not None:
        print(f"weights: {model.weights.describe()}", file=sys.stderr)
    edited = saved_edits.apply_edits(model.config, arguments.config, saved_edits.DECODE_FIELDS, "serve")
    print_edits(edited, "serve")
    name = arguments.name or Path(arguments.workdir).absolute().name
    if not is_local and key is None:
        print(f"warning: every machine that reaches {arguments.host} may use it; set ${KEY_VARIABLE}", file=sys.stderr)
    address = LOOPBACK if is_local else arguments.host
    model = dataclasses.replace(model, config=edited.config)
    server = Server(model, name, arguments.port, limits, address=address, key=key)
    return _serve(server, name)


def _serve(server: Any, name: str) -> int:
    """Answers until SIGTERM or ctrl-C, and then ends what runs. A second signal ends at once."""
    ends = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if ends.is_set():
            raise KeyboardInterrupt
        ends.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.start()
        routes = ", ".join(server.api.routes)
        print(f"serving {name} at {server.url} ({routes}; Ctrl-C ends it)", flush=True)
        ends.wait()
        print(f"stopping: running requests have {server.limits.grace:g} seconds", file=sys.stderr, flush=True)
        server.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"got {text!a}, expected seconds above 0")
    return value


COMMAND = Command(
    "answer requests to a run over HTTP, as OpenAI's interface",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read"),
        "port": Flag("port; 0 for any that is free", default=PORT, type=port),
        "name": Flag("name of the model in requests; without it the folder's", default=""),
        "max-queue": Flag("outputs that may wait; more are refused (429)", default=64, type=positive),
        "max-tokens": Flag("most new tokens of an output", default=512, type=positive),
        "max-prompt": Flag("most tokens of a prompt", default=4096, type=positive),
        "request-timeout": Flag("seconds that a request may take", default=60.0, type=_seconds),
        "grace": Flag("seconds that running requests have to end after SIGTERM", default=10.0, type=_seconds),
        "host": Flag("address to listen on; others than this need --remote", default=LOOPBACK),
        "remote": Flag("let other machines reach it", default=False, switch=True),
        "checkpoint": CHECKPOINT,
    },
    config="edits",
    prints=True,
    details=f"config.decode.batch outputs are decoded together; a key in ${KEY_VARIABLE} is asked for",
    example="jaxformer serve --workdir=runs/shakespeare --port=8000 --config.decode.batch=16",
)
