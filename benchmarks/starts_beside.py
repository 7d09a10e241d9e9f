"""The second start of a recipe to its first loss, and `decode` of one line, beside another working tree by turns.

    python benchmarks/starts_beside.py --beside=TREE [--data=DIR] [--jobs=quickstart,shakespeare,decode] [--rounds=5]

Each tree has a cache of its own, which a first start fills; that start is not counted. A train job begins in a new
workdir each time and is killed at the line of its first loss. Prints medians of seconds and of processor seconds (all
threads; other programs on the machine disturb them less), and the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "quickstart": ["--config=configs/quickstart.py"],
    "shakespeare": ["--config=configs/shakespeare_char.py:cpu", "--config.data.dir={data}/tiny_shakespeare"],
}
SHORT_RUN = [*JOBS["quickstart"], "--config.train.steps=20", "--config.evaluate.decode_examples=0"]
"""The run that `decode` reads."""


def start(tree: Path, cache: Path, arguments: Sequence[str], line: str = "") -> tuple[float, float]:
    """Seconds and processor seconds of a command to its first loss, or to its end if it decodes `line`.

    Raises:
      RuntimeError: the command failed.
    """
    environment = {**os.environ, "JAXFORMER_CACHE": str(cache), "PYTHONPATH": str(tree)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    begun, said = perf_counter(), []
    program = subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxformer", *arguments], cwd=tree, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    program.stdin.write(line)
    program.stdin.close()
    for text in program.stdout:
        said.append(text)
        if text.startswith("step 1/"):
            fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
            seconds, cpu = perf_counter() - begun, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            program.kill()
            program.wait()
            return seconds, cpu
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = status
    if status or arguments[0] == "train":
        raise RuntimeError(f"{' '.join(arguments)}: ended with {status}: {''.join(said[-3:])}")
    return perf_counter() - begun, usage.ru_utime + usage.ru_stime


def compare(job: str, trees: Sequence[Path], data: str, rounds: int, folder: Path) -> str:
    """One line: medians for the trees, and of their ratios."""
    found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
    caches = {tree: folder / f"cache-{number}" for number, tree in enumerate(trees)}
    for turn in range(rounds + 1):
        for tree, times in found.items():
            if job == "decode":
                times.append(
                    start(tree, caches[tree], ["decode", f"--workdir={folder}/run"], "three hundred and five\n")
                )
            else:
                edits = [each.format(data=data) for each in JOBS[job]]
                workdir = folder / f"{job}-{turn}-{trees.index(tree)}"
                times.append(start(tree, caches[tree], ["train", f"--workdir={workdir}", *edits]))
    words = []
    for name, tree in zip(("beside", "here"), trees, strict=True):
        seconds, cpu = (statistics.median(times[which] for times in found[tree][1:]) for which in (0, 1))
        words.append(f"{name} {seconds:.2f} s, processor {cpu:.2f} s")
    for name, which in (("seconds", 0), ("processor", 1)):
        pairs = zip(*(found[tree][1:] for tree in trees), strict=True)
        words.append(f"{name} {statistics.median(a[which] / b[which] for a, b in pairs):.2f} times")
    return f"{job}: " + "; ".join(words)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--jobs", default="quickstart,shakespeare,decode")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args(argv)
    trees = (flags.beside.resolve(), ROOT)
    with tempfile.TemporaryDirectory() as name:
        for job in flags.jobs.split(","):
            if job == "decode":
                command = [sys.executable, "-m", "jaxformer", "train", f"--workdir={name}/run", *SHORT_RUN]
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXFORMER_CACHE": f"{name}/cache-1"}
                subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
            print(compare(job, trees, str(Path(flags.data).resolve()), flags.rounds, Path(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
