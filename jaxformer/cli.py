"""The command line: which words there are, what they take, and whom they call. No logic of its own.

Exit codes: 0 done; 2 the user's config or input is wrong (one line); 143 preempted and saved; 75 hung, ended by
`config.train.watchdog`; 1 crash, or the disk refused (one line). Modules that need jax are imported by the command that
needs them, so `--help` and refusals are instant.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Sequence

from jaxformer import __version__, compilation, files, lines, memory, overrides, redaction, reuse, streams
from jaxformer.arguments import Arguments, Command, Flag, read, usage
from jaxformer.config import ConfigError, StorageError
from jaxformer.registry import nearest

DECODE_CHUNK = 32
"""Lines read at a time by `decode`, in batches of `config.decode.batch`: enough to sort by length, little to wait."""


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
    workdir, split, which = (arguments.flags[name] for name in ("workdir", "split", "checkpoint"))
    overrides.read(workdir)
    from jaxformer.train import evaluate as evaluation

    values = evaluation.evaluate(workdir, split, which, arguments.config)
    _table({name: value for name, value in values.items() if name != "checkpoint"})  # which "weights" says in words
    print(f"written to {Path(workdir) / f'eval-{split}.json'}")
    from jaxformer import report as reports

    reports.finish(workdir)
    return 0


def decode(arguments: Arguments) -> int:
    path = arguments.flags["workdir"]
    reuse.refuse_others(arguments.config, "decode")
    with lines.source(arguments.flags["input"]) as source, lines.sink(arguments.flags["output"]) as sink:
        from jaxformer import checkpoint, tasks

        model = checkpoint.load(path, arguments.flags["checkpoint"])
        if model.weights is not None:
            print(f"weights: {model.weights.sentence()}", file=sys.stderr)
        task = tasks.get(model.config.task.name)
        if task.decode is None:
            raise ConfigError(f"task {model.config.task.name}: got decode, expected a task that makes output of lines")
        edited = reuse.edited(model.config, arguments.config, reuse.DECODING, "decode")
        said = [f"changed: {json.dumps(edited.changed)}"] if edited.changed else []
        said += [edited.complaint("decode")] if edited.unread else []
        if said:
            print("; ".join(said), file=sys.stderr)
        if edited.config.data != model.config.data:
            model = dataclasses.replace(model, config=edited.config)
        config = edited.config.decode
        size = 1 if source.isatty() else DECODE_CHUNK * config.batch
        cut = 0
        for chunk in lines.chunks(source, size, arguments.flags["input"] or "stdin"):
            cut += model.too_long(chunk)
            for result in task.decode(model, chunk, config):
                sink.write(lines.one_line(task.line(result)) + "\n")
            sink.flush()
        if cut:
            length = model.config.data.length
            print(
                f"warning: {cut:,} lines are longer than data.length ({length}), their ends not read", file=sys.stderr
            )
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

    print(f"written to {reports.write(arguments.every['workdir'], arguments.flags['output'])}")
    return 0


def plan(arguments: Arguments) -> int:
    from jaxformer import plan as plans
    from jaxformer.plan import chips

    flags = arguments.flags
    devices = _count("devices", flags["devices"]) if flags["devices"] else None
    config = overrides.parse(arguments.config)
    place = chips.place(flags["topology"], flags["chip"], devices, config.mesh.slices)
    title = next(argument for argument in arguments.config if argument.startswith("--config=")).removeprefix(
        "--config="
    )
    plans.run(config, title, place, bool(flags["search"]))
    return 0


def config(arguments: Arguments) -> int:
    if not arguments.flags["fields"]:
        print(overrides.to_json(overrides.parse(arguments.config)), end="")
        return 0
    if arguments.config:
        raise ConfigError(f"jaxformer config: got --fields and {arguments.config[0]!a}, expected one of them")
    from jaxformer import fields

    print(fields.text())
    return 0


def inspect(arguments: Arguments) -> int:
    from jaxformer import inspection

    print(redaction.text(inspection.describe(arguments.flags["workdir"])))
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


MADE = Flag("folder of the run", folder="make")
MEASURED = Flag("folder of the run", folder="write")
CHECKPOINT = Flag("best, last or a step; without it the best (or the mean that config.checkpoint.average says)", "")

COMMANDS: dict[str, Command] = {
    "train": Command("start a run, or resume it", train, {"workdir": MADE}, config="recipe"),
    "evaluate": Command(
        "measure a run on a split, print and write eval-<split>.json",
        evaluate,
        {"workdir": MEASURED, "split": Flag("split of the data", "test"), "checkpoint": CHECKPOINT},
        config="edits",
    ),
    "decode": Command(
        "one line in, one line out",
        decode,
        {
            "workdir": Flag("folder of the run, or one of its checkpoints", folder="read"),
            "input": Flag("text file; without it stdin", ""),
            "output": Flag("text file, written whole or not at all; without it stdout", ""),
            "checkpoint": CHECKPOINT,
        },
        config="edits",
        prints=True,
    ),
    "sweep": Command(
        "run a list of edits of one recipe, and rank the runs",
        sweep,
        {
            "sweep": Flag("file that defines SWEEP"),
            "workdir": Flag("folder of the sweep; each run has its own below it", folder="make"),
            "executor": Flag("local, slurm or print", "local", choices=("local", "slurm", "print")),
            "workers": Flag("runs at the same time", "1"),
        },
        config="recipe",
    ),
    "experiment": Command(
        "test one claim: experiments/NAME.py",
        experiment,
        {
            "scale": Flag("smoke or full", "smoke", choices=("smoke", "full")),
            "workdir": Flag("folder of its results", folder="make"),
        },
        words=("NAME",),
    ),
    "report": Command(
        "one HTML page of one run, or of several compared",
        report,
        {
            "workdir": Flag("folder of a run", repeats=True, folder="write"),
            "output": Flag(
                "page to write, FILE.html; without it report.html of one run, and of several comparison.html in the "
                "folder that holds them",
                "",
            ),
        },
    ),
    "plan": Command(
        "what a training step needs: memory, FLOPs, traffic and time, by compiling it for devices that are not here",
        plan,
        {
            "devices": Flag("how many; without it those of config.mesh", ""),
            "topology": Flag("TPU slice (one of several) to compile for with libtpu: v5e:16x16, v5p:4x4x8", ""),
            "chip": Flag("without a topology: whose figures are used, h100 if none is named", ""),
            "search": Flag("try the meshes of that many devices and rank them", "", switch=True),
        },
        config="recipe",
        prints=True,
    ),
    "config": Command(
        "print every value of a recipe with its edits as JSON, or list all fields of configs with what they mean",
        config,
        {"fields": Flag("list the fields, with type, default and meaning (docs/config.md)", "", switch=True)},
        config="optional",
        prints=True,
    ),
    "inspect": Command(
        "what a run is: config, parameters, checkpoints, last figures",
        inspect,
        {"workdir": Flag("folder of the run, or one of its checkpoints", folder="read")},
        prints=True,
    ),
    "import": Command(
        "make a run of a Hugging Face directory (config.json, model.safetensors)",
        bring,
        {"source": Flag("the directory", folder="read"), "workdir": Flag("new folder of the run", folder="make")},
    ),
    "export": Command(
        "write a run as a Hugging Face directory",
        send,
        {
            "workdir": Flag("folder of the run, or one of its checkpoints", folder="read"),
            "target": Flag("new folder", folder="make"),
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
        prints=True,
    ),
    "data": Command(
        "prepare NAME: make a stock tfds data set readable without TensorFlow (this step needs it: extra [prepare])",
        data,
        {"dir": Flag("tfds data_dir to prepare into", folder="make")},
        words=("prepare", "NAME"),
    ),
}


# --- all of them ------------------------------------------------------------------------------------------------------


def _table(values: dict[str, object]) -> None:
    width = max(len(name) for name in values)
    for name, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        print(f"{name:<{width}}  {shown}")


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name}: got {text!a}, expected a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Wrong input is one line on stderr; crashes keep their traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage(COMMANDS))
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name = argv.pop(0)
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command: got {name!a}, expected one of {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
        if "--help" in argv or "-h" in argv:
            print(usage(COMMANDS, name))
            return 0
        return COMMANDS[name].run(read(name, COMMANDS[name], argv))
    except ConfigError as error:
        return _refuse(error, 2)
    except StorageError as error:
        return _refuse(error, 1)
    except OSError as error:
        refusal = files.refusal(error)
        if refusal is None:
            raise
        return _refuse(refusal, 1)


def _refuse(error: Exception, code: int) -> int:
    print("error: " + redaction.text(" ".join(str(error).split("\n"))), file=sys.stderr)
    return code


def prints(argv: Sequence[str]) -> bool:
    """True if what the command writes to stdout is its result; else the result is files, and stdout is a log."""
    if not argv or argv[0] not in COMMANDS or "--help" in argv or "-h" in argv:
        return True
    if argv[0] == "sweep":
        return "--executor=print" in argv or "print" in argv
    return COMMANDS[argv[0]].prints and not any(word.partition("=")[0] == "--output" for word in argv)


def console() -> None:
    """The program: `main`, with the ways a shell ends one."""
    try:
        compilation.keep_programs()
        memory.keep_pages()
        streams.install(prints(sys.argv[1:]))
        code = main()
        sys.stdout.flush()
    except files.ReaderLeft:  # head or less has seen enough: no failure
        code = 0
    except StorageError as error:
        code = _refuse(error, 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
