"""The command line: which words there are, what they take, and whom they call. No logic of its own.

Exit codes: 0 done; 2 the user's config or input is wrong (one line); 143 preempted and saved; 75 hung, ended by
`config.train.watchdog`; 1 crash, or the disk refused (one line). Modules that need jax are imported by the command that
needs them, so `--help` and refusals are instant.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from jaxformer import __version__, lines, memory, overrides
from jaxformer.config import ConfigError, StorageError
from jaxformer.registry import nearest

DECODE_CHUNK = 32
"""Lines read at a time by `decode`, in batches of `config.decode.batch`: enough to sort by length, little to wait."""


@dataclass(frozen=True)
class Flag:
    """`--name=VALUE`. `default` None: it must be given, at least once where it repeats. A switch takes no value."""

    meaning: str
    default: str | None = None
    repeats: bool = False
    switch: bool = False
    choices: tuple[str, ...] = ()


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
    """

    summary: str
    run: Callable[[Arguments], int]
    flags: dict[str, Flag]
    config: str = ""
    words: tuple[str, ...] = ()


# --- commands ---------------------------------------------------------------------------------------------------------


def train(arguments: Arguments) -> int:
    config = overrides.parse(arguments.config)
    from jaxformer import preflight
    from jaxformer.parallel import distributed

    distributed.join()
    preflight.together(config)
    from jaxformer.hf import workdirs
    from jaxformer.train import loop

    workdir = arguments.flags["workdir"]
    code = loop.train(config, workdir, workdirs.ORIGIN)
    if code == 0:
        from jaxformer import report as reports

        reports.finish(workdir)
    return code


def evaluate(arguments: Arguments) -> int:
    workdir, split = arguments.flags["workdir"], arguments.flags["split"]
    overrides.read(workdir)
    from jaxformer.train import evaluate as evaluation

    values = evaluation.evaluate(workdir, split)
    _table(values)
    print(f"written to {Path(workdir) / f'eval-{split}.json'}")
    return 0


def decode(arguments: Arguments) -> int:
    path = arguments.flags["workdir"]
    for edit in arguments.config:
        if not edit.startswith("--config.decode."):
            raise ConfigError(f"argument {edit!a}: expected --config.decode.FIELD=VALUE; the rest comes with the run")
    with lines.source(arguments.flags["input"]) as source, lines.sink(arguments.flags["output"]) as sink:
        from jaxformer import checkpoint, tasks

        model = checkpoint.load(path)
        task = tasks.get(model.config.task.name)
        if task.decode is None:
            raise ConfigError(f"task {model.config.task.name}: got decode, expected a task that makes output of lines")
        config = overrides.edit(model.config, arguments.config).decode
        size = 1 if source.isatty() else DECODE_CHUNK * config.batch
        for chunk in lines.chunks(source, size, arguments.flags["input"] or "stdin"):
            for result in task.decode(model, chunk, config):
                sink.write(lines.one_line(task.line(result)) + "\n")
            sink.flush()
    return 0


def sweep(arguments: Arguments) -> int:
    from jaxformer import sweep as sweeps

    flags = arguments.flags
    plan = sweeps.plan(flags["sweep"], arguments.config, Path(flags["workdir"]))
    workers = _count("workers", flags["workers"])
    return {"local": sweeps.local, "slurm": sweeps.slurm, "print": sweeps.show}[flags["executor"]](plan, workers)


def experiment(arguments: Arguments) -> int:
    from jaxformer import experiment as experiments

    return experiments.run(arguments.words[0], arguments.flags["scale"], arguments.flags["workdir"]) or 0


def report(arguments: Arguments) -> int:
    for workdir in arguments.every["workdir"]:
        overrides.read(workdir)
    from jaxformer import report as reports

    print(f"written to {reports.write(arguments.every['workdir'])}")
    return 0


def plan(arguments: Arguments) -> int:
    from jaxformer import plan as plans
    from jaxformer.plan import chips

    flags = arguments.flags
    devices = _count("devices", flags["devices"]) if flags["devices"] else None
    place = chips.place(flags["topology"], flags["chip"], devices)
    config = overrides.parse(arguments.config)
    title = next(argument for argument in arguments.config if argument.startswith("--config=")).removeprefix(
        "--config="
    )
    plans.run(config, title, place, bool(flags["search"]))
    return 0


def inspect(arguments: Arguments) -> int:
    from jaxformer import inspection

    print(inspection.describe(arguments.flags["workdir"]))
    return 0


def doctor(arguments: Arguments) -> int:
    config = overrides.parse(arguments.config) if arguments.config else None
    flags = arguments.flags
    devices = _count("devices", flags["devices"]) if flags["devices"] else None
    seconds = _count("timeout", flags["timeout"])
    if os.environ.get("JAXFORMER_DISTRIBUTED"):
        from jaxformer.parallel import distributed

        distributed.join(seconds)
    from jaxformer import inspection

    return inspection.doctor(config, devices, seconds)


def data(arguments: Arguments) -> int:
    if arguments.words[0] != "prepare":
        raise ConfigError(f"data: got {arguments.words[0]!a}, expected prepare; give jaxformer data prepare NAME")
    from jaxformer.data import prepare

    print(f"prepared in {prepare.prepare(arguments.words[1], arguments.flags['dir'])}")
    return 0


def bring(arguments: Arguments) -> int:
    from jaxformer.hf import workdirs

    flags = arguments.flags
    model = workdirs.bring(flags["source"], flags["workdir"])
    print(f"{flags['source']}: {model.family.heads[model.head]}, imported into {flags['workdir']}")
    return 0


def send(arguments: Arguments) -> int:
    from jaxformer.hf import workdirs

    flags = arguments.flags
    workdirs.send(flags["workdir"], flags["target"], flags["family"] or None)
    print(f"written to {flags['target']}")
    return 0


WORKDIR = Flag("folder of the run")
RECIPES = ("recipe", "optional")

COMMANDS: dict[str, Command] = {
    "train": Command("start a run, or resume it", train, {"workdir": WORKDIR}, config="recipe"),
    "evaluate": Command(
        "measure a run on a split, print and write eval-<split>.json",
        evaluate,
        {"workdir": WORKDIR, "split": Flag("split of the data", "test")},
    ),
    "decode": Command(
        "one line in, one line out",
        decode,
        {
            "workdir": Flag("folder of the run, or one of its checkpoints"),
            "input": Flag("text file; without it stdin", ""),
            "output": Flag("text file, written whole or not at all; without it stdout", ""),
        },
        config="edits",
    ),
    "sweep": Command(
        "run a list of edits of one recipe, and rank the runs",
        sweep,
        {
            "sweep": Flag("file that defines SWEEP"),
            "workdir": Flag("folder of the sweep; each run has its own below it"),
            "executor": Flag("local, slurm or print", "local", choices=("local", "slurm", "print")),
            "workers": Flag("runs at the same time", "1"),
        },
        config="recipe",
    ),
    "experiment": Command(
        "test one claim: experiments/NAME.py",
        experiment,
        {"scale": Flag("smoke or full", "smoke", choices=("smoke", "full")), "workdir": Flag("folder of its results")},
        words=("NAME",),
    ),
    "report": Command(
        "one HTML page of one run, or of several compared",
        report,
        {"workdir": Flag("folder of a run", repeats=True)},
    ),
    "plan": Command(
        "what a training step needs: memory, FLOPs, traffic and time, by compiling it for devices that are not here",
        plan,
        {
            "devices": Flag("how many; without it those of config.mesh", ""),
            "topology": Flag("TPU slice to compile for with libtpu: v5e:16x16, v5p:4x4x8, v6e:16x16", ""),
            "chip": Flag("without a topology: whose figures are used, h100 if none is named", ""),
            "search": Flag("try the meshes of that many devices and rank them", "", switch=True),
        },
        config="recipe",
    ),
    "inspect": Command(
        "what a run is: config, parameters, checkpoints, last figures",
        inspect,
        {"workdir": Flag("folder of the run, or one of its checkpoints")},
    ),
    "import": Command(
        "make a run of a Hugging Face directory (config.json, model.safetensors)",
        bring,
        {"source": Flag("the directory"), "workdir": Flag("new folder of the run")},
    ),
    "export": Command(
        "write a run as a Hugging Face directory",
        send,
        {
            "workdir": Flag("folder of the run, or one of its checkpoints"),
            "target": Flag("new folder"),
            "family": Flag("architecture to write; without it the first that computes the same", ""),
        },
    ),
    "doctor": Command(
        "check this machine and installation; started by a launcher, that the processes of a run belong together; "
        "with a config, its devices and data",
        doctor,
        {
            "devices": Flag("how many there must be, of all processes", ""),
            "timeout": Flag("seconds that the processes wait for each other", "60"),
        },
        config="optional",
    ),
    "data": Command(
        "prepare NAME: make a stock tfds data set readable without TensorFlow (this step needs it: extra [prepare])",
        data,
        {"dir": Flag("tfds data_dir to prepare into")},
        words=("prepare", "NAME"),
    ),
}


# --- arguments --------------------------------------------------------------------------------------------------------


def _table(values: dict[str, object]) -> None:
    width = max(len(name) for name in values)
    for name, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        print(f"{name:<{width}}  {shown}")


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name}: got {text!a}, expected a whole number of at least 1")
    return int(text)


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
        takes_value = not switch and (flag in command.flags or flag == "config")
        if takes_value and not equals:
            if not rest:
                raise ConfigError(f"--{flag}: got no value, expected --{flag}=VALUE")
            value = rest.pop(0)
        if flag == "config" and command.config in RECIPES:
            config.append(f"--config={value}")
        elif flag.startswith("config.") and command.config:
            config.append(argument)
        elif flag in command.flags:
            every[flag].append("yes" if switch else value)
        else:
            known = [*command.flags, *(["config"] if command.config in RECIPES else [])]
            hint = nearest(flag, known).replace("'", "").replace("mean ", "mean --")
            expected = ", ".join("--" + k for k in known) or "none"
            raise ConfigError(f"jaxformer {name}: got --{ascii(flag)[1:-1]}, expected {expected}{hint}")
    if len(words) != len(command.words):
        got = " ".join(words) or "nothing"
        expected = " ".join(command.words) or "only flags"
        raise ConfigError(f"jaxformer {name}: got {got!a}, expected {expected}; see jaxformer {name} --help")
    return Arguments(_filled(name, command, every), every, words, config)


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
        if about.choices and flags[flag] not in about.choices:
            hint = nearest(flags[flag], about.choices)
            raise ConfigError(f"--{flag}: got {flags[flag]!a}, expected one of {', '.join(about.choices)}{hint}")
    return flags


def usage(name: str = "") -> str:
    """The help of one command, or of all."""
    if name:
        command = COMMANDS[name]
        flags = {f"--{flag}{'' if about.switch else '=VALUE'}": about for flag, about in command.flags.items()}
        rows = [
            (flag, about.meaning + (f" [{about.default}]" if about.default else "")) for flag, about in flags.items()
        ]
        if command.config in RECIPES:
            rows.insert(0, ("--config=FILE.py[:variant]", "the recipe"))
        if command.config:
            what = "a.b" if command.config in RECIPES else "decode.b"
            rows.append((f"--config.{what}=VALUE", "an edit of the config, as often as wanted"))
        words = " ".join([name, *command.words])
        return f"usage: jaxformer {words}{' [flags]' if rows else ''}\n\n{_wrap(command.summary)}\n\n{_rows(rows)}"
    rows = [(word, command.summary) for word, command in COMMANDS.items()]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Wrong input is one line on stderr; crashes keep their traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name = argv.pop(0)
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command: got {name!a}, expected one of {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
        if "--help" in argv or "-h" in argv:
            print(usage(name))
            return 0
        return COMMANDS[name].run(read(name, COMMANDS[name], argv))
    except ConfigError as error:
        print("error: " + " ".join(str(error).split("\n")), file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def console() -> None:
    """The program: `main`, with the ways a shell ends one."""
    memory.keep_pages()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) left: no complaint, and none at shutdown either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
