"""One NVIDIA GPU: correctness, speed and memory of training and decoding, torch beside it. One command, 8 minutes.

    python benchmarks/gpu.py [--minutes=8] [--only=124M@1k,decode] [--torch=PYTHON] [--output=FILE.jsonl]
    python benchmarks/gpu.py --train --shakespeare=DIR --multi30k=DIR [--minutes=30]

Needs the extra [gpu]; torch with CUDA, in this Python or in that of `--torch`, for the peer. The parts run in order of
importance, each in a process of its own, whose memory is free again after it, and which is ended when the time is up.
What does not fit into the minutes is named; `--only` measures the rest in another call, since rows are appended.

Training: the step of `jaxformer/train/step.py` with the recipe's model, optimizer and clipping, donated state, batches
made on the host before and sent as a run sends them. 7 windows of 4 steps after one pass of warm-up, the device idle
before and after each: the step is the median window's, `spread` is slowest less fastest over it. Compilation is timed
apart. Tokens are positions that have a label. A run whose loss is not finite, or does not fall, has no figures.
MFU = tokens/s x model FLOPs a token / the chip's dense bfloat16 peak, with FLOPs as PaLM's appendix B counts them
(`jaxformer/plan/flops.py`): 6 x matmul parameters + 12 x layers x heads x head width x keys, masked ones too, so causal
attention counts whole. Rows hold the count over visible keys beside it, as `flops_token_visible`.
Memory is the most that the process held, by the allocator.
Decoding: greedy, random parameters, 16 + 256 tokens, median of 5 calls of `jaxformer/decode/generate.py`.
The peer: `gpu_torch.py`, the same model, batch, precision and optimizer; the ratio is ours over theirs, in tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu_shared as shared  # noqa: E402

Row = dict[str, Any]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
LATE = "the time was up"


# --- what is measured -------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A process: what kind of measurement, of which config, guessed seconds, and whether torch stands beside it."""

    name: str
    kind: str
    arguments: tuple[str, ...] = ()
    seconds: int = 60
    peer: bool = False


# Every run learns at once, so that a few steps show that the loss falls; speed does not depend on the rate.
LEARN = ("--config.schedule.kind=constant", "--config.schedule.peak=3e-4", "--config.schedule.warmup=4")
STACK = "--config.model.decoder"
SMALL = (f"--config={CONFIGS}/gpt2_124m.py",)
# GPT-3's shapes without its bands, for which torch's flash attention has no mask. The paper's table gives its model of
# 1.3B 24 heads of 128 at width 2048, which make 1.5B; 16 make 1.3B.
DENSE = (f"{STACK}.attention.window=none", f"{STACK}.attention.window_every=1")
MEDIUM = (f"--config={CONFIGS}/gpt3.py:medium", *DENSE)
LARGE = (f"--config={CONFIGS}/gpt3.py:xl", *DENSE, f"{STACK}.attention.heads=16")


def decoder(recipe: tuple[str, ...], length: int, rows: int) -> tuple[str, ...]:
    sizes = (f"--config.data.length={length}", f"{STACK}.encoding.max_length={length}", f"--config.data.batch={rows}")
    return (*recipe, *LEARN, *sizes, "--config.train.accumulation=1")


BASE = (f"--config={CONFIGS}/transformer_base.py", *LEARN, "--config.data.buckets=()", "--config.model.dtype=bfloat16")
STILL = tuple(f"--config.model.{side}.{part}dropout=0" for side in ("encoder", "decoder") for part in ("", "embed."))
CHUNK = ("--config.model.head.chunk=4096",)
# Saves what products give and nothing beside; the rest of a layer is computed again.
REMAT = (f"{STACK}.remat=minimal",)
# Of the loss curves: small, so that float32 without the fast units takes no time.
CURVE = decoder(SMALL, 256, 16) + (
    f"{STACK}.layers=4", f"{STACK}.width=256", f"{STACK}.attention.heads=4", "--config.data.tokenizer.vocab=1000",
)  # fmt: skip

PARTS = (
    Part("correct", "correct", CURVE, 90),
    Part("124M@1k", "train", decoder(SMALL, 1024, 32), 50, peer=True),
    Part("1.3B@1k", "train", decoder(LARGE, 1024, 8), 60, peer=True),
    Part("decode", "decode", decoder(SMALL, 1024, 1), 60),
    Part("350M@1k", "train", decoder(MEDIUM, 1024, 16), 50, peer=True),
    Part("124M@4k", "train", decoder(SMALL, 4096, 8), 50, peer=True),
    Part("1.3B@4k", "train", decoder(LARGE, 4096, 2), 60, peer=True),
    Part("350M@4k", "train", decoder(MEDIUM, 4096, 4), 50, peer=True),
    Part("124M@1k-chunked", "train", decoder(SMALL, 1024, 32) + CHUNK, 50),
    Part("1.3B@4k-chunked", "train", decoder(LARGE, 4096, 2) + CHUNK, 60),
    Part("350M@4k-chunked", "train", decoder(MEDIUM, 4096, 4) + CHUNK, 50),
    Part("seq2seq", "train", BASE, 50),
    Part("seq2seq-no-dropout", "train", BASE + STILL, 50),
    Part("attention", "attention", (), 60),
    Part("124M@1k-remat", "train", decoder(SMALL, 1024, 32) + REMAT, 50),
    Part("1.3B@1k-remat", "train", decoder(LARGE, 1024, 8) + REMAT, 60),
)
TOYS = ("correct", "124M@1k", "decode", "attention")
"""One part of each kind. The loss of the one that trains is chunked."""


def toy(part: Part) -> Part:
    """The part at a size that a CPU has done in a second."""
    sides = ("encoder", "decoder") if "transformer_base" in "".join(part.arguments) else ("decoder",)
    sizes = ("layers=1", "width=16", "attention.heads=2", "ffn.width=32")
    sizes += ("norm.kind=rms", "attention.bias=false", "ffn.bias=false")  # few parameters: fast to compile
    small = [f"--config.model.{side}.{size}" for side in sides for size in sizes]
    small += [
        f"--config.data.{size}" for size in ("tokenizer.vocab=60", "tokenizer.multiple=8", "length=16", "batch=4")
    ]
    small += ["--config.schedule.peak=3e-3", "--config.data.tokens=none"]
    small += ["--config.model.head.chunk=16"] if part.kind == "train" else []
    return Part(part.name, part.kind, (*part.arguments, *small) if part.arguments else (), 0, part.peer)


# --- processes --------------------------------------------------------------------------------------------------------


class Clock:
    """The minutes that are left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def child(command: Sequence[str], limit: float) -> tuple[str, str, str]:
    """What a command wrote to its two streams, and how it ended badly, or "". It ends with all it started."""
    # A process has the GPU to itself: JAX may take nearly all of the memory, not the three quarters of its default.
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & set(os.environ)
    environment = {**({} if given else {"XLA_CLIENT_MEM_FRACTION": "0.92"}), **os.environ}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, env=environment, process_group=0, **streams)
    try:
        out, error = process.communicate(timeout=max(limit, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return *process.communicate(), LATE
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    last = (error.strip().splitlines() or [""])[-1][:300]
    return out, error, f"exit code {process.returncode}: {last}" if process.returncode else ""


def asked(script: str, task: Row, python: str, limit: float) -> Iterator[Row]:
    """The rows of a script beside this one; the last says how it ended if it ended badly."""
    out, error, problem = child([python, f"benchmarks/{script}", json.dumps(task)], limit)
    for line in out.splitlines():
        if line.startswith(shared.MARK):
            yield json.loads(line.removeprefix(shared.MARK))
    if problem:
        yield {"skipped" if problem == LATE else "failed": problem, "message": error[-3000:]}


def ours(part: Part, small: bool, limit: float) -> Iterator[Row]:
    task = {"kind": part.kind, "arguments": list(part.arguments), "toy": small}
    if small:  # in this process: what costs a toy its time is starting one
        import gpu_jax

        return gpu_jax.rows(task)
    return asked("gpu_jax.py", task, sys.executable, limit)


def theirs(row: Row, small: bool, python: str, clock: Clock) -> Row:
    """The peer's row of the same shape, with the ratio of the two if both have figures."""
    if "tokens_per_second" not in row:
        return {"skipped": "ours has no figure"}
    if not small and clock.left < 60:
        return {"skipped": "no time left"}
    (found,) = list(asked("gpu_torch.py", {"shape": row["shape"], "toy": small}, python, clock.left))[-1:]
    if "tokens_per_second" in found:
        found["ratio"] = row["tokens_per_second"] / found["tokens_per_second"]
        found["mfu"] = row["mfu"] and row["mfu"] / found["ratio"]
    return found


# --- whole runs -------------------------------------------------------------------------------------------------------

SHAKESPEARE, MULTI30K = f"{CONFIGS}/shakespeare_char.py:gpu", f"{CONFIGS}/multi30k_tiny.py"
PUBLISHED = 1.4697
"""Best validation loss that nanoGPT's README reports for the budget of shakespeare_char:gpu."""
SHORT = (
    f"{STACK}.layers=1", f"{STACK}.width=16", f"{STACK}.attention.heads=2", "--config.train.steps=4",
    "--config.data.length=32", "--config.data.batch=4", "--config.evaluate.examples=8",
)  # fmt: skip


RUNS = ("shakespeare_char", *(f"multi30k_tiny-{seed}" for seed in range(3)))


def run_of(name: str, arguments: argparse.Namespace) -> tuple[list[str], float] | str:
    """Config arguments and guessed seconds of a whole run, or the option that says where its data is."""
    option = "shakespeare" if name == "shakespeare_char" else "multi30k"
    folder = getattr(arguments, option)
    if not folder:
        return f"--{option}=DIR"
    where = f"--config.data.dir={Path(folder).absolute()}"
    if option == "shakespeare":
        return [f"--config={SHAKESPEARE}", where, *(SHORT if arguments.toy else ())], 120
    return [f"--config={MULTI30K}", where, f"--config.train.seed={name[-1]}"], 240


def whole(name: str, config: list[str], folder: Path, clock: Clock) -> Row:
    """`jaxformer train` to its end, and for translation the scores of the test split."""
    workdir, command = folder / name, [sys.executable, "-m", "jaxformer"]
    begun = time.monotonic()
    train = [*command, "train", *config, f"--workdir={workdir}", f"--config.data.cache={folder / 'cache'}"]
    _, error, problem = child(train, clock.left)
    if problem:
        return {"skipped" if problem == LATE else "failed": problem, "message": error[-3000:]}
    row: Row = {"train_seconds": time.monotonic() - begun}
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    bad = shared.wrong([line["loss"] for line in lines if line["split"] == "train"], 1)
    if bad:
        return row | {"failed": bad}
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    row |= {"steps": lines[-1]["step"], "validation_loss": losses[-1], "best_validation_loss": min(losses)}
    row |= {key: json.loads((workdir / "environment.json").read_text())[key] for key in ("devices", "versions")}
    if name == "shakespeare_char":
        row["published_loss"] = PUBLISHED
    else:
        begun = time.monotonic()
        _, _, problem = child([*command, "evaluate", f"--workdir={workdir}", "--split=test"], clock.left)
        if problem:
            return row | {"skipped" if problem == LATE else "failed": f"evaluate: {problem}"}
        scores = json.loads((workdir / "eval-test.json").read_text())
        row |= scores | {"evaluate_seconds": time.monotonic() - begun}
    return row


# --- the table --------------------------------------------------------------------------------------------------------


COLUMNS = {"rows x length": 15, "tokens/s": 12, "ms": 10, "spread": 8, "GiB": 8, "MFU": 8, "compiled s": 12, "ratio": 7}


def header() -> str:
    return f"{'part':<24}{'of':<10}" + "".join(f"{name:>{size}}" for name, size in COLUMNS.items())


def line(part: str, system: str, row: Row) -> str:
    """A row as the table has it; what is no figure stands at its end."""
    size, memory = row.get("shape", row), row.get("memory_bytes", row.get("temporary_bytes"))
    cells = {
        "rows x length": f"{size['rows']} x {size['length']}" if "length" in size else "",
        "tokens/s": number(row, "tokens_per_second", ",.0f"),
        "ms": number(row, "step_ms", ".2f"),
        "spread": number(row, "spread", ".1%"),
        "GiB": f"{memory / 2**30:.2f}" if memory else "",
        "MFU": number(row, "mfu", ".1%"),
        "compiled s": number(row, "compile_seconds", ".1f"),
        "ratio": number(row, "ratio", ".2f"),
    }
    filled = "".join(f"{cells[name]:>{size}}" for name, size in COLUMNS.items())
    return f"{part:<24}{system:<10}{filled}  {note(row)}".rstrip()


def number(row: Row, name: str, form: str) -> str:
    return "" if row.get(name) is None else f"{row[name]:{form}}"


def note(row: Row) -> str:
    words = [row.get("check", ""), *sorted(set(row.get("kernels", {}).values()))]
    words += [f"{key} {row[key]:.1e}" for key in DIFFERENCES if key in row]
    words += [f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row]
    words += [f"{key} {row[key]:.5g}" for key in WHOLE if key in row]
    return ", ".join(filter(None, words))


DIFFERENCES = ("value", "dense_value", "gradient", "dense_gradient", "difference")
WHOLE = ("steps", "train_seconds", "validation_loss", "best_validation_loss", "published_loss", "bleu", "bleu_lc_tok")


class Report:
    """Prints rows and appends them to a file, each at once."""

    def __init__(self, output: str, command: Sequence[str]) -> None:
        self.output, self.command, self.bad, self.skipped = output, shlex.join(command), 0, []

    def add(self, part: str, row: Row, system: str = "jaxformer") -> None:
        self.bad += "failed" in row
        if "skipped" in row:
            self.skipped.append(f"{part} ({system}: {row['skipped']})")
        print(line(part, system, row), flush=True)
        if self.output:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            Path(self.output).parent.mkdir(parents=True, exist_ok=True)
            with open(self.output, "a", encoding="utf-8") as file:
                about = {"part": part, "system": system, "date": date, "command": self.command}
                file.write(json.dumps(about | row) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing runs any more")
    parser.add_argument("--only", default="", help="names of parts (with --train: of runs), separated by commas")
    parser.add_argument("--torch", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--train", action="store_true", help="whole runs in place of the table")
    parser.add_argument("--shakespeare", default="", help="folder that holds input.txt")
    parser.add_argument("--multi30k", default="", help="folder of the data set's files")
    parser.add_argument("--toy", action="store_true", help="every kind of part, tiny; the figures say nothing")
    parser.add_argument("--output", default=str(RESULTS))
    arguments = parser.parse_args(argv)
    known = RUNS if arguments.train else tuple(part.name for part in PARTS)
    unknown = [name for name in filter(None, arguments.only.split(",")) if name not in known]
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    clock = Clock(arguments.minutes)
    report = Report(arguments.output, [Path(__file__).name, *(sys.argv[1:] if argv is None else argv)])
    print(header())
    (whole_runs if arguments.train else table)(arguments, clock, report)
    print(f"skipped: {'; '.join(report.skipped)}" if report.skipped else "nothing was skipped")
    return 1 if report.bad else 0


def table(arguments: argparse.Namespace, clock: Clock, report: Report) -> None:
    names = arguments.only.split(",") if arguments.only else TOYS if arguments.toy else [part.name for part in PARTS]
    for part in [toy(part) if arguments.toy else part for part in PARTS if part.name in names]:
        if clock.left < part.seconds:
            report.add(part.name, {"skipped": "no time left"})
            continue
        for row in ours(part, arguments.toy, clock.left):
            report.add(part.name, row)
        if part.peer:
            report.add(part.name, theirs(row, arguments.toy, arguments.torch, clock), "torch")


def whole_runs(arguments: argparse.Namespace, clock: Clock, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in RUNS if not arguments.only or name in arguments.only.split(",")]:
            found = run_of(name, arguments)
            if isinstance(found, str):
                report.add(name, {"skipped": f"needs {found}"})
            elif clock.left < found[1]:
                report.add(name, {"skipped": "no time left"})
            else:
                report.add(name, whole(name, found[0], Path(folder), clock))


if __name__ == "__main__":
    sys.exit(main())
