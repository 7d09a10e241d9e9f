"""Declaration and parsing of a command's arguments, on top of argparse.

argparse parses; this module adds what it lacks: edits of the config (`--config.a.b=VALUE`), flags that may be given
only once, checks of directories, and errors of one line with the nearest known name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from jaxformer import __version__
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest
from jaxformer.runtime import files, object_store, terminal

REQUIRED = object()
"""Default of a flag that must be given."""

EXAMPLE = "example:\n  "
"""Begins the end of a command's help."""

MIN_HELP_COLUMNS = 30
"""Width of a help text in a terminal that is narrower."""

MAX_PORT = 65535

EXIT_CODES = "exit codes: 0 done, 2 wrong config or input, 143 preempted and saved, 75 hung, 1 crash"


@dataclass(frozen=True)
class Flag:
    """One flag of a command, `--name=VALUE`.

    Attributes:
      help: meaning of the value.
      default: value if the flag is not given; REQUIRED: it must be given and must not be empty.
      type: converts the text; raises `argparse.ArgumentTypeError` if it cannot.
      repeats: the flag may be given several times; its value is then a list.
      switch: the flag takes no value, and is True if it is given.
      directory: what the command does with the directory that the value names: read it, write into it if it exists,
        or create it.
      bucket: how the directory may be an address in a bucket: the command gets a copy of the run there, or a copy for a
        page, without the arrays of checkpoints, or uses the address itself; "": it may not.
    """

    help: str
    default: Any = REQUIRED
    type: Callable[[str], Any] = str
    repeats: bool = False
    switch: bool = False
    directory: Literal["", "read", "write", "create"] = ""
    bucket: Literal["", "copy", "page", "itself"] = ""


CHECKPOINT = Flag(
    "best, last or a step; without it the best (or the mean that config.checkpoint.average says)", default=""
)


@dataclass(frozen=True)
class Command:
    """One command of the program.

    Attributes:
      help: a few words for the list of commands.
      run: executes the command and returns the exit code. Its argument has an attribute for each flag (with _ for -)
        and positional argument, and `config`: the list of `--config=FILE` and edits.
      flags: by name, without the dashes.
      config: accepted config arguments: "recipe": --config=FILE (required) and edits; "optional": the same, or none;
        "edits": edits only; "": none.
      positionals: positional arguments as the help shows them; their attributes have the names in lower case.
      choices: what the first positional can be, for shell completion; the command itself refuses others.
      prints: the command's result is its stdout; else files are the result, and stdout is a log.
      example: a whole command line, for the end of the help.
      details: sentences for the command's own help, after `help`.
      actions: commands of their own by the word after this one's name (`jaxformer data build`).
    """

    help: str
    run: Callable[[argparse.Namespace], int]
    flags: Mapping[str, Flag]
    config: Literal["", "recipe", "optional", "edits"] = ""
    positionals: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    prints: bool = False
    example: str = ""
    details: str = ""
    actions: Mapping[str, Command] = field(default_factory=dict)

    @property
    def takes_recipe(self) -> bool:
        """True if the command accepts --config=FILE."""
        return self.config in ("recipe", "optional")

    @property
    def flag_names(self) -> list[str]:
        """Names of all flags, without edits of the config."""
        return [*self.flags, *(["config"] if self.takes_recipe else [])]


def one_of(*choices: str) -> Callable[[str], str]:
    """Type of a flag that takes one of a few values."""

    def convert(text: str) -> str:
        if text not in choices:
            expected = f"expected one of {', '.join(choices)}{nearest(text, choices)}"
            raise argparse.ArgumentTypeError(f"got {text!a}, {expected}")
        return text

    return convert


def positive(text: str) -> int:
    """Type of a flag whose value is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!a}, expected a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """Type of a flag whose value is a port number; 0 stands for any that is free."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"got {text!a}, expected a number from 0 to {MAX_PORT}")
    return int(text)


# --- parsers ----------------------------------------------------------------------------------------------------------


class _HelpFormatter(argparse.HelpFormatter):
    """Formats flags as `--flag=VALUE`, as wide as the terminal but in at most 100 columns."""

    def __init__(self, prog: str) -> None:
        width = max(min(terminal.columns() - 1, 100), MIN_HELP_COLUMNS)
        super().__init__(prog, max_help_position=min(30, width // 3), width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLE):  # one line however long, so that it can be copied
            return text
        return super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.option_strings and action.nargs is None:
            return f"{action.option_strings[0]}={action.metavar}"
        return super()._format_action_invocation(action)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `ConfigError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, exit_on_error=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def program_parser(commands: Mapping[str, Command], fields: bool = False) -> argparse.ArgumentParser:
    """The parser of the whole program: its help lists the commands, and shell completion reads it.

    Args:
      fields: every field of the config is a flag of the commands that take edits, as completion needs it.
    """
    title = f"jaxformer {__version__}"
    parser = _Parser(prog="jaxformer", usage="jaxformer COMMAND [flags]", description=title, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=__version__, help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="jaxformer COMMAND --help")
    for name, command in commands.items():
        usage, description = _usage(name, command), _description(command)
        subparser = subparsers.add_parser(
            name, help=command.help, usage=usage, description=description, epilog=_epilog(command)
        )
        _add_arguments(subparser, command)
        for path in _field_paths() if fields and command.config else ():
            subparser.add_argument(f"--config.{path}", metavar="VALUE", help="a field of the config")
    return parser


def _field_paths() -> list[str]:
    """Paths of all fields of the config, of optional sections too."""
    from jaxformer.config import Config
    from jaxformer.config.hints import field_types, section_type

    def paths(section: type, prefix: str) -> list[str]:
        found = []
        for name, hint in field_types(section).items():
            part = section_type(hint)
            found += [f"{prefix}{name}"] if part is None else paths(part, f"{prefix}{name}.")
        return found

    return paths(Config, "")


def command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of one command."""
    usage, description = _usage(name, command), _description(command)
    parser = _Parser(prog=f"jaxformer {name}", usage=usage, description=description, epilog=_epilog(command))
    return _add_arguments(parser, command)


def _description(command: Command) -> str:
    return f"{command.help}; {command.details}" if command.details else command.help


def _epilog(command: Command) -> str:
    """The end of a command's help."""
    return f"{EXAMPLE}{command.example}" if command.example else ""


def _usage(name: str, command: Command) -> str:
    return " ".join(["jaxformer", name, *command.positionals, "[flags]"])


def _add_arguments(parser: argparse.ArgumentParser, command: Command) -> argparse.ArgumentParser:
    for word in command.positionals:
        action = parser.add_argument(word.lower(), metavar=word)
        action.required = False  # `parse` words the error
        if command.choices:
            action.completer = lambda **_: command.choices  # ty: ignore[missing-attribute]
    if command.takes_recipe:
        parser.add_argument("--config", metavar="FILE.py[:variant]", action="append", default=[], help="the recipe")
    for name, flag in command.flags.items():
        if flag.switch:
            parser.add_argument(f"--{name}", action="append_const", const=True, default=[], help=flag.help)
            continue
        default = "" if flag.default in (REQUIRED, None, "") else f" [{flag.default}]"
        parser.add_argument(
            f"--{name}", metavar="VALUE", action="append", default=[], type=flag.type, help=flag.help + default
        )
    if command.config:
        # For the help only: `_split_edits` takes the edits out before the parser sees them.
        scope = "the config" if command.takes_recipe else "the run's config, for fields that do not change the model"
        help = f"an edit of {scope}; may be repeated"
        parser.add_argument("--config.a.b", metavar="VALUE", default=argparse.SUPPRESS, help=help)
    return parser


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse(name: str, command: Command, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command. `--help` prints the help and exits.

    Raises:
      ConfigError: an argument is unknown, missing, repeated, or has a wrong value.
    """
    edits, others = _split_edits(command, argv)
    try:
        arguments, extras = command_parser(name, command).parse_known_args(others)
    except argparse.ArgumentError as error:
        raise ConfigError(_describe_error(error, command)) from None
    flag = next((extra for extra in extras if extra.startswith("--")), None)
    if flag is not None:
        raise _unknown_flag(name, command, flag)
    values = (getattr(arguments, positional.lower()) for positional in command.positionals)
    words = [value for value in values if value is not None] + extras
    if len(words) != len(command.positionals):
        raise _wrong_positionals(name, command, words)
    for flag_name, flag in command.flags.items():
        attribute = flag_name.replace("-", "_")
        setattr(arguments, attribute, _value(name, flag_name, flag, getattr(arguments, attribute)))
    arguments.config = [*(f"--config={path}" for path in getattr(arguments, "config", [])), *edits]
    return arguments


def _split_edits(command: Command, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates edits of the config, as `--config.a.b=VALUE`, from all other arguments."""
    edits: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not command.config or not argument.startswith("--config."):
            others.append(argument)
        elif "=" in argument:
            edits.append(argument)
        elif rest and not rest[0].startswith("--"):
            edits.append(f"{argument}={rest.pop(0)}")
        else:
            raise ConfigError(f"{argument}: got no value, expected {argument}=VALUE")
    return edits, others


def _value(command_name: str, flag_name: str, flag: Flag, values: list[Any]) -> Any:
    """The value of a flag from all values that were given."""
    if len(values) > 1 and not flag.repeats:
        raise ConfigError(f"jaxformer {command_name}: got --{flag_name} {len(values)} times, expected it once")
    if flag.default is REQUIRED and not any(values):
        expected = f"expected --{flag_name}=VALUE ({flag.help})"
        raise ConfigError(f"jaxformer {command_name}: got no --{flag_name}, {expected}")
    if flag.switch:
        return bool(values)
    for value in values if flag.directory else ():
        if object_store.is_url(value):
            if not flag.bucket:
                raise ConfigError(
                    f"--{flag_name}: got {value!a}, expected a folder: jaxformer {command_name} does not use buckets; "
                    "name a folder, and copy it"
                )
            object_store.parse(f"--{flag_name}", value)
            continue
        files.check_directory(f"--{flag_name}", value, flag.directory == "write", flag.directory == "create")
    if flag.repeats:
        return values
    return values[0] if values else flag.default


# --- errors -----------------------------------------------------------------------------------------------------------


def _describe_error(error: argparse.ArgumentError, command: Command) -> str:
    name = (error.argument_name or "").partition("/")[0]
    flag = command.flags.get(name.removeprefix("--"))
    if flag is not None and flag.switch:
        return f"{name}: got a value, expected {name} alone"
    if error.message.startswith("expected one argument"):
        return f"{name}: got no value, expected {name}=VALUE"
    return f"{name}: {error.message}"


def _unknown_flag(name: str, command: Command, argument: str) -> ConfigError:
    flag = argument.removeprefix("--").partition("=")[0]
    correction = _correction(argument, command)
    expected = ", ".join(f"--{known}" for known in command.flag_names) or "none"
    if correction:
        hint = f"; write {correction}"
    else:
        hint = nearest(flag, command.flag_names).replace("'", "").replace("mean ", "mean --")
    return ConfigError(f"jaxformer {name}: got --{ascii(flag)[1:-1]}, expected {expected}{hint}")


def _wrong_positionals(name: str, command: Command, words: Sequence[str]) -> ConfigError:
    correction = next(filter(None, (_correction(word, command) for word in words)), "")
    if correction:
        return ConfigError(f"jaxformer {name}: got {' '.join(words)!a}, expected flags; write {correction}")
    got = " ".join(words) or "nothing"
    expected = " ".join(command.positionals) or "only flags"
    return ConfigError(f"jaxformer {name}: got {got!a}, expected {expected}; see jaxformer {name} --help")


def _correction(word: str, command: Command) -> str:
    """The flag meant by a misspelled word such as `data.dir`, `-config.data.dir` or `workdir=x`; empty if none is.

    The value is left out: it may be the following word.
    """
    from jaxformer.config import Config
    from jaxformer.config.hints import field_types

    flag = word.lstrip("-").partition("=")[0]
    if not flag.isascii() or not flag.replace(".", "").replace("_", "").isalnum():
        return ""
    path = flag.removeprefix("config.")
    section, _, field = path.partition(".")
    if command.config and section in field_types(Config) and field:
        return f"--config.{path}=VALUE"
    return f"--{flag}=VALUE" if flag in command.flag_names and (word.startswith("-") or "=" in word) else ""
