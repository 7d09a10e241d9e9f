"""`jaxformer chat`: a conversation with a run, a line of input a turn."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from jaxformer.cli import lines
from jaxformer.cli.arguments import CHECKPOINT, Command, Flag
from jaxformer.cli.decode import print_edits
from jaxformer.config import saved_edits
from jaxformer.errors import ConfigError

if TYPE_CHECKING:
    from jaxformer.conversation import Conversation

HELP = "/reset forgets the conversation, /quit ends; ctrl-C stops an answer, twice it ends"


def run(arguments: Namespace) -> int:
    saved_edits.refuse_uneditable(arguments.config, "chat")
    with lines.open_input("") as source:
        from jaxformer.conversation import Conversation
        from jaxformer.hf import workdirs

        model = workdirs.load(arguments.workdir, arguments.checkpoint)
        edited = saved_edits.apply_edits(model.config, arguments.config, saved_edits.CHAT_FIELDS, "chat")
        print_edits(edited, "chat")
        conversation = Conversation(dataclasses.replace(model, config=edited.config), arguments.system)
        interactive = source.isatty()
        if model.weights is not None:
            _note(f"weights: {model.weights.describe()}")
        if interactive:
            _note(HELP)
        reader, interrupted = lines.read_chunks(source, 1, "stdin"), False
        while True:
            try:
                if interactive:
                    print("> ", end="", file=sys.stderr, flush=True)
                line = next(reader, [None])[0]
                if line is None or line == "/quit":
                    return 0
                interrupted = False
                if line == "/reset":
                    conversation.reset()
                else:
                    _answer(conversation, line, interactive)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                _note("\nstopped; ctrl-C again ends")
                reader = lines.read_chunks(source, 1, "stdin")  # an exception ends a generator


def _answer(conversation: Conversation, line: str, interactive: bool) -> None:
    """Prints the reply to a line as it comes. On a pipe it is one line, whatever it holds."""
    try:
        pieces = conversation.reply(line) if line.strip() else iter(())
    except ConfigError as error:
        if not interactive:
            raise
        _note(f"error: {error}")
        return
    try:
        for piece in pieces:
            sys.stdout.write(piece if interactive else lines.escape_line_ends(piece))
            sys.stdout.flush()
    finally:
        if line.strip() or not interactive:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(
    "talk to a run: a line in, its answer out",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "system": Flag("text of the system's turn, before all others", default=""),
        "checkpoint": CHECKPOINT,
    },
    config="edits",
    prints=True,
    example='jaxformer chat --workdir=runs/orders --system="tea 3 soup 5 cake 2"',
)
