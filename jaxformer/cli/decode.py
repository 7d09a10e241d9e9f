"""`jaxformer decode`: the output of a run for each line of input, or for the whole of it if it is a table."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from jaxformer.cli import lines
from jaxformer.cli.arguments import CHECKPOINT, Command, Flag
from jaxformer.config import saved_edits
from jaxformer.errors import ConfigError

if TYPE_CHECKING:
    from jaxformer.model import Model

DRAFT = Flag("smaller run of the same tokenizer, which proposes tokens", default="", directory="read", bucket="copy")

BATCHES_PER_CHUNK = 32
"""Batches of lines read at a time: enough to sort lines by length, few enough to see output soon."""


def run(arguments: Namespace) -> int:
    saved_edits.refuse_uneditable(arguments.config, "decode")
    with lines.open_input(arguments.input) as source, lines.open_output(arguments.output) as output:
        from jaxformer import tasks
        from jaxformer.hf import workdirs

        model = workdirs.load(arguments.workdir, arguments.checkpoint)
        if model.weights is not None:
            print(f"weights: {model.weights.describe()}", file=sys.stderr)
        task = tasks.get(model.config.task.name)
        edited = saved_edits.apply_edits(model.config, arguments.config, saved_edits.DECODE_FIELDS, "decode")
        print_edits(edited, "decode")
        if arguments.draft or edited.config.data != model.config.data:
            model = add_draft(dataclasses.replace(model, config=edited.config), arguments.draft)
        config = edited.config.decode
        size = 1 if source.isatty() else BATCHES_PER_CHUNK * config.batch
        truncated = 0
        chunks = lines.read_chunks(source, size, arguments.input or "stdin")
        if task.reads_document:
            chunks = iter([["\n".join(line for chunk in chunks for line in chunk)]])
        for chunk in chunks:
            truncated += model.too_long(chunk)
            for result in task.predict(model.predictor, chunk, config):
                text = task.output_line(result)
                output.write((text if task.reads_document else lines.escape_line_ends(text)) + "\n")
            output.flush()
    if truncated:
        length = model.config.data.length
        print(
            f"warning: {truncated:,} lines are longer than data.length ({length}), their ends not read", file=sys.stderr
        )
    return 0


def add_draft(model: Model, directory: str) -> Model:
    """The model with the draft in `directory`, which proposes `config.decode.speculate` tokens; "": without.

    Raises:
      ConfigError: the draft does not fit, or nothing says how many tokens it proposes.
    """
    if not directory:
        return model
    from jaxformer.hf import workdirs

    proposals = model.config.decode.speculate
    if not proposals:
        raise ConfigError(
            "--draft: got a draft and config.decode.speculate 0, expected the number of tokens that it proposes at a "
            "time; add --config.decode.speculate=4"
        )
    return model.with_draft(workdirs.load(directory), proposals)


def print_edits(edited: saved_edits.AppliedEdits, command: str) -> None:
    """Prints to stderr which settings differ from the run's, and which edits have no effect."""
    words = [f"changed: {json.dumps(edited.changed)}"] if edited.changed else []
    words += [edited.warning(command)] if edited.unused else []
    if words:
        print("; ".join(words), file=sys.stderr)


COMMAND = Command(
    "one line in, one line out",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "input": Flag("text file; without it stdin", default=""),
        "output": Flag("text file, written completely or not at all; without it stdout", default=""),
        "checkpoint": CHECKPOINT,
        "draft": DRAFT,
    },
    config="edits",
    prints=True,
    details="of a forecast, a table in and a table out",
    example='echo "three hundred and five" | jaxformer decode --workdir=runs/quickstart',
)
