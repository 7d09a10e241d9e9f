"""The words of a command line: what a command takes, sorted from what it was given, and its help."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

from jaxformer import __version__, files
from jaxformer.config import Config, ConfigError
from jaxformer.registry import nearest
from jaxformer.schema import fields

RECIPES = ("recipe", "optional")
"""What `Command.config` says of commands that take `--config=FILE`."""


@dataclass(frozen=True)
class Flag:
    """`--name=VALUE`. `default` None: it must be given, at least once where it repeats. A switch takes no value.

    Attributes:
      folder: what is done with the folder that it names: "" (it names none), "read", "write" (into one that is there),
        "make" (where it is missing).
    """

    meaning: str
    default: str | None = None
    repeats: bool = False
    switch: bool = False
    choices: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class Arguments:
    """What a command was given: flags by name (all values of one in `every`), words, config arguments."""

    flags: dict[str, str]
    every: dict[str, list[str]]
    words: list[str]
    config: list[str]


@dataclass(frozen=True)
class Command:
    """A word of the command line.

    Attributes:
      run: called with the `Arguments`; returns the exit code.
      config: which config arguments it takes: "" none, "recipe" --config=FILE and edits, "optional" the same or none,
        "edits" only edits.
      words: names of positional arguments.
      prints: its result is what it prints; else files are, and its stdout is a log.
    """

    summary: str
    run: Callable[[Arguments], int]
    flags: dict[str, Flag]
    config: str = ""
    words: tuple[str, ...] = ()
    prints: bool = False


def read(name: str, command: Command, argv: Sequence[str]) -> Arguments:
    """Sorts `argv` into the command's flags, words and config arguments.

    Raises:
      ConfigError: something is unknown, missing, or given where it does not belong.
    """
    every: dict[str, list[str]] = {flag: [] for flag in command.flags}
    words: list[str] = []
    config: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            words.append(argument)
            continue
        flag, equals, value = argument[2:].partition("=")
        switch = flag in command.flags and command.flags[flag].switch
        if switch and equals:
            raise ConfigError(f"--{flag}: got a value, expected --{flag} alone")
        edit = flag.startswith("config.") and bool(command.config)
        takes_value = not switch and (flag in command.flags or flag == "config" or edit)
        if takes_value and not equals:
            if not rest or (edit and rest[0].startswith("--")):
                raise ConfigError(f"--{flag}: got no value, expected --{flag}=VALUE")
            value = rest.pop(0)
        if flag == "config" and command.config in RECIPES:
            config.append(f"--config={value}")
        elif edit:
            config.append(f"--{flag}={value}")
        elif flag in command.flags:
            every[flag].append("yes" if switch else value)
        else:
            known = [*command.flags, *(["config"] if command.config in RECIPES else [])]
            meant = _meant(argument, command)
            hint = f"; write {meant}" if meant else nearest(flag, known).replace("'", "").replace("mean ", "mean --")
            expected = ", ".join("--" + k for k in known) or "none"
            raise ConfigError(f"jaxformer {name}: got --{ascii(flag)[1:-1]}, expected {expected}{hint}")
    if len(words) != len(command.words):
        meant = next(filter(None, (_meant(word, command) for word in words)), "")
        if meant:
            raise ConfigError(f"jaxformer {name}: got {' '.join(words)!a}, expected flags; write {meant}")
        got = " ".join(words) or "nothing"
        expected = " ".join(command.words) or "only flags"
        raise ConfigError(f"jaxformer {name}: got {got!a}, expected {expected}; see jaxformer {name} --help")
    return Arguments(_filled(name, command, every), every, words, config)


def _meant(word: str, command: Command) -> str:
    """The flag that a word with another beginning stands for: `data.dir`, `-config.data.dir`, `workdir=`; "" if none.

    Its value is left out: what follows is the reader's to say again.
    """
    flag = word.lstrip("-").partition("=")[0]
    if not flag.isascii() or not flag.replace(".", "").replace("_", "").isalnum():
        return ""
    section = flag.removeprefix("config.").partition(".")
    if command.config and section[0] in fields(Config) and section[2]:
        return f"--config.{flag.removeprefix('config.')}=VALUE"
    known = flag in command.flags or (flag == "config" and command.config in RECIPES)
    return f"--{flag}=VALUE" if known and (word.startswith("-") or "=" in word) else ""


def _filled(name: str, command: Command, every: dict[str, list[str]]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for flag, about in command.flags.items():
        given = every[flag]
        if len(given) > 1 and not about.repeats:
            raise ConfigError(f"jaxformer {name}: got --{flag} {len(given)} times, expected it once")
        if about.default is None and not any(given):
            raise ConfigError(f"jaxformer {name}: got no --{flag}, expected --{flag}=VALUE ({about.meaning})")
        flags[flag] = given[-1] if given else about.default or ""
        address = next((value for value in given if "://" in value), None) if flag == "workdir" else None
        if address is not None:
            raise ConfigError(
                f"--workdir: got {address!a}, expected a folder of a file system that every host of the run has; "
                "mount the bucket or a shared disk, and name the folder there"
            )
        for value in given if about.folder else ():
            files.check_folder(f"--{flag}", value, about.folder == "write", about.folder == "make")
        if about.choices and flags[flag] not in about.choices:
            hint = nearest(flags[flag], about.choices)
            raise ConfigError(f"--{flag}: got {flags[flag]!a}, expected one of {', '.join(about.choices)}{hint}")
    return flags


def usage(commands: Mapping[str, Command], name: str = "") -> str:
    """The help of one of the commands, or of all."""
    if name:
        command = commands[name]
        flags = {f"--{flag}{'' if about.switch else '=VALUE'}": about for flag, about in command.flags.items()}
        rows = [
            (flag, about.meaning + (f" [{about.default}]" if about.default else "")) for flag, about in flags.items()
        ]
        if command.config in RECIPES:
            rows.insert(0, ("--config=FILE.py[:variant]", "the recipe"))
        if command.config:
            where = "" if command.config in RECIPES else " of the run, where it does not change the model"
            rows.append(("--config.a.b=VALUE", f"an edit of the config{where}, as often as wanted"))
        words = " ".join([name, *command.words])
        return f"usage: jaxformer {words}{' [flags]' if rows else ''}\n\n{_wrap(command.summary)}\n\n{_rows(rows)}"
    rows = [(word, command.summary) for word, command in commands.items()]
    return (
        f"jaxformer {__version__}\n\nusage: jaxformer COMMAND [flags]      jaxformer COMMAND --help\n\n"
        f"{_rows(rows)}\n\n"
        "exit codes: 0 done, 2 wrong config or input, 143 preempted and saved, 75 hung, 1 crash"
    )


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100)


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max((len(left) for left, _ in rows), default=0)
    texts = (textwrap.fill(right, 100, subsequent_indent=" " * (width + 4)) for _, right in rows)
    return "\n".join(f"  {left:<{width}}  {text}" for (left, _), text in zip(rows, texts))
