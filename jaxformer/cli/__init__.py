"""The command line: `main` finds the command and runs it, `console` does so with guarded streams.

Each command is a file that defines `COMMAND`: its flags, its help, and the function that calls the library. Modules
that need jax are imported when a command runs, so that help and refusals are instant.

Exit codes: 0 done; 2 the user's config or input is wrong (one line); 143 preempted and saved; 130 interrupted with
nothing to save; 75 hung and ended by `config.train.watchdog`; 1 crash, or the disk refused (one line).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxformer import __version__
from jaxformer.cli import (
    buckets,
    chat,
    config,
    data,
    decode,
    doctor,
    draw,
    evaluate,
    experiment,
    explore,
    export_checkpoint,
    import_checkpoint,
    inspect,
    plan,
    recipes,
    report,
    serve,
    sweep,
    train,
)
from jaxformer.cli.arguments import Command, parse, program_parser
from jaxformer.errors import ConfigError, StorageError
from jaxformer.registry import nearest
from jaxformer.runtime import exit_codes, files, interrupts, secrets, streams, terminal, threads

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "evaluate": evaluate.COMMAND,
    "decode": decode.COMMAND,
    "chat": chat.COMMAND,
    "serve": serve.COMMAND,
    "sweep": sweep.COMMAND,
    "experiment": experiment.COMMAND,
    "report": report.COMMAND,
    "explore": explore.COMMAND,
    "plan": plan.COMMAND,
    "draw": draw.COMMAND,
    "config": config.COMMAND,
    "recipes": recipes.COMMAND,
    "inspect": inspect.COMMAND,
    "import": import_checkpoint.COMMAND,
    "export": export_checkpoint.COMMAND,
    "doctor": doctor.COMMAND,
    "data": data.COMMAND,
}
"""All commands, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Wrong input is one line on stderr; crashes keep their traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "help"
    try:
        if name in ("help", "-h", "--help"):
            program_parser(COMMANDS).print_help()
            return 0
        if name == "--version":
            print(__version__)
            return 0
        if name not in COMMANDS:
            hint = nearest(name, list(COMMANDS))
            raise ConfigError(f"command: got {name!a}, expected one of {', '.join(COMMANDS)}{hint}")
        name, command, rest = find(words)
        try:
            arguments = parse(name, command, rest)
        except SystemExit:  # --help has been printed
            return 0
        with buckets.local_copies(command, arguments):
            return command.run(arguments)
    except ConfigError as error:
        return _print_error(error, exit_codes.WRONG_INPUT)
    except StorageError as error:
        return _print_error(error, exit_codes.CRASHED)
    except OSError as error:
        storage_error = files.storage_error(error)
        if storage_error is None:
            raise
        return _print_error(storage_error, exit_codes.CRASHED)


def _print_error(error: Exception, code: int) -> int:
    mark = terminal.coloured("error:", terminal.RED, sys.stderr)
    print(f"{mark} " + secrets.redact(" ".join(str(error).split("\n"))), file=sys.stderr)
    return code


def find(words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """The command that `words` begin with, by its full name ("data build"), and the words after it."""
    name, command, rest = words[0], COMMANDS[words[0]], words[1:]
    if rest and rest[0] in command.actions:
        return f"{name} {rest[0]}", command.actions[rest[0]], rest[1:]
    return name, command, rest


def prints(argv: Sequence[str]) -> bool:
    """True if stdout is the result of the command; else files are the result, and stdout is a log."""
    if not argv or argv[0] not in COMMANDS or "--help" in argv or "-h" in argv:
        return True
    if argv[0] == "sweep":
        return "--executor=print" in argv or "print" in argv
    return COMMANDS[argv[0]].prints and not any(word.partition("=")[0] == "--output" for word in argv)


def console() -> None:
    """`main` with interrupts and streams that may fail. `jaxformer.__main__` sets up the process before."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    try:
        interrupts.install()
        streams.install(prints(sys.argv[1:]))
        code = main()
        sys.stdout.flush()
    except files.OutputClosed:  # the reader needs no more, as head: no failure
        code = exit_codes.DONE
    except StorageError as error:
        code = _print_error(error, exit_codes.CRASHED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = exit_codes.INTERRUPTED
    threads.exit_process(code)


def _complete() -> None:
    """Answers a shell that asks for completions, if argcomplete is installed, and exits.

    Set it up once: pip install argcomplete, then eval "$(register-python-argcomplete jaxformer)".
    """
    try:
        import argcomplete
    except ImportError:
        return
    # Fields of the config are hundreds of flags: they are added only where one is being typed.
    typed = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))].split(" ")[-1]
    argcomplete.autocomplete(program_parser(COMMANDS, fields=typed.startswith("--config.")))
