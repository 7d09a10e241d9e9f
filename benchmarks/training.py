"""Training steps beside torch's on this CPU: the same models, batches and optimizer, in processes that take turns.

    python benchmarks/training.py --peer=PYTHON [--models=gpt,bert] [--dtypes=float32] [--rounds=6] [--plain]
    python benchmarks/training.py --page            only writes the table of docs/measurements/training.md
    python benchmarks/training.py --smoke           toy sizes, without a peer

PYTHON is an interpreter with torch and transformers. After `--warm` steps of each, in which heaps get their size, every
process does a few steps in every round while the others wait. What other processes of the machine did meanwhile is
read from /proc/stat: a window in which they had more than QUIET of a core does not count, and a model without three
windows that do has no ratio. (Torch's threads wait for each other, so others slow them more than XLA's: disturbed
ratios are wrong in our favour.) A virtual machine's host can take free pages back while a process waits, and fetching
them again is the kernel's time: its share of each process's processor time is printed. Exits with 1 where a ratio fell
below the recorded one by more than both spreads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402
import training_shared as shared  # noqa: E402

from jaxformer.runtime import memory  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "training.jsonl"
PAGE = ROOT / "docs" / "measurements" / "training.md"
STEPS, QUIET, ENOUGH = 2, 0.25, 3
"""Steps of one process in one round; the cores that others may have meanwhile; windows that a ratio needs."""
TORCH = ("eager", "compiled")
SYSTEMS: dict[str, dict] = {
    "jaxformer": {"plain": False, "products": False},
    "plain": {"plain": True, "products": False},  # without jaxformer/nn/cpu.py
    "products": {"plain": False, "products": True},
    "eager": {"compile": False, "products": False},
    "compiled": {"compile": True, "products": False},
    "torch products": {"compile": False, "products": True},
}


class Child:
    """A process that does steps when asked."""

    def __init__(self, system: str, shape: shared.Shape, dtype: str, peer: str, caches: str) -> None:
        ours = system in ("jaxformer", "plain", "products")
        script = ROOT / "benchmarks" / ("training_jax.py" if ours else "training_torch.py")
        environment = {
            **os.environ,
            memory.VARIABLE: memory.tunables(os.environ),
            "JAX_COMPILATION_CACHE_DIR": f"{caches}/{system}",
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{system}",
        }
        request = shared.request(shape, dtype=dtype, **SYSTEMS[system])
        self.process = subprocess.Popen(
            [sys.executable if ours else peer, str(script), request],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.about = self.read()
        self.processor_seconds = self.kernel_seconds = 0.0

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("ROW "):
                return json.loads(line[4:])
        raise RuntimeError(f"{self.process.args[1]}: ended with {self.process.wait()}")

    def window(self, steps: int = STEPS) -> tuple[float, float]:
        """Seconds of a step, a mean over a round's, and the cores that other processes had meanwhile."""
        begun, busy = time.perf_counter(), processor_seconds()
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        row = self.read()
        self.processor_seconds += row["processor_seconds"]
        self.kernel_seconds += row["kernel_seconds"]
        others = processor_seconds() - busy - row["processor_seconds"]
        return statistics.fmean(row["seconds"]), max(0.0, others / (time.perf_counter() - begun))

    def end(self) -> dict:
        self.process.stdin.close()
        last = self.read()
        self.process.stdout.close()
        self.process.wait()
        return last


def processor_seconds() -> float:
    """That all processes of the machine had since it was started, but for those that only take what is idle."""
    user, _, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def measure(name: str, shape: shared.Shape, dtype: str, systems: list[str], flags: argparse.Namespace) -> dict:
    """The row of a model in a precision."""
    taken: dict[str, list[tuple[float, float]]] = {system: [] for system in systems}
    first: dict[str, list[float]] = {system: [] for system in systems}
    about: dict[str, dict] = {}
    kernel: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as caches:
        for _ in range(flags.starts):
            children: dict[str, Child] = {}
            try:
                for system in systems:
                    children[system] = child = Child(system, shape, dtype, flags.peer, caches)
                    first[system].append(child.about["first_step_seconds"])
                    child.window(flags.warm)
                    child.processor_seconds = child.kernel_seconds = 0.0
                for _ in range(flags.rounds):
                    for system, child in children.items():
                        taken[system].append(child.window())
                about = {system: child.about | child.end() for system, child in children.items()}
                kernel = {name: child.kernel_seconds / child.processor_seconds for name, child in children.items()}
            finally:
                for child in children.values():
                    child.process.kill()
    versions = {}
    for each in about.values():
        versions |= each["versions"]
    row = {
        "model": name, "dtype": dtype, "date": datetime.date.today().isoformat(), "versions": versions,
        "command": command(),
        "hardware": hardware(), "parameters": about["jaxformer"]["parameters"], "tokens": shared.positions(shape),
        "windows": taken, "peak_bytes": {system: each["peak_bytes"] for system, each in about.items()},
        "first_step_seconds": first, "overhead_seconds": about["jaxformer"]["overhead_seconds"],
        "kernel_share": kernel,
    }  # fmt: skip
    return row | judged(taken)


def judged(taken: dict[str, list[tuple[float, float]]]) -> dict:
    """The ratios of a row, each `[low, median, high]`: of quartiles, and of medians. Above 1, we are faster."""
    found = {}
    peers = [system for system in TORCH if quiet(taken.get(system, []))]
    if peers:
        best = min(peers, key=lambda system: statistics.median(quiet(taken[system])))
        found |= {"best_peer": best, "ratio": ratio(taken[best], taken["jaxformer"])}
    if "plain" in taken:
        found["over_plain"] = ratio(taken["plain"], taken["jaxformer"])
    if "products" in taken and "torch products" in taken:
        found["products"] = ratio(taken["torch products"], taken["products"])
    return {name: value for name, value in found.items() if value is not None}


def quiet(windows: list[tuple[float, float]]) -> list[float]:
    """Seconds of the windows in which nobody else did much."""
    return [seconds for seconds, others in windows if others < QUIET]


def ratio(theirs: list[tuple[float, float]], ours: list[tuple[float, float]]) -> list[float] | None:
    """None where too few windows were quiet."""
    if min(len(quiet(theirs)), len(quiet(ours))) < ENOUGH:
        return None
    a, b = (statistics.quantiles(quiet(each), n=4, method="inclusive") for each in (theirs, ours))
    return [a[0] / b[2], a[1] / b[1], a[2] / b[0]]


def command() -> str:
    """What was typed, whoever's interpreter it named and wherever the row went."""
    given = [word for word in sys.argv[1:] if not word.startswith("--output=")]
    words = ["--peer=PYTHON" if word.startswith("--peer=") else word for word in given]
    return " ".join(["python benchmarks/training.py", *words])


def hardware() -> str:
    """Words for this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{os.cpu_count()} cores of {name}"


def key(row: dict) -> tuple[str, str, str]:
    return row["model"], row["dtype"], row["versions"]["jax"]


def rows() -> dict[tuple[str, str, str], dict]:
    """The newest row of every model, precision and version of jax."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {key(row): row for row in map(json.loads, lines)}


def fell(row: dict, before: dict | None) -> bool:
    """Whether a row's ratio lies below the recorded one's by more than the distances of their quartiles."""
    if before is None or "ratio" not in row or "ratio" not in before:
        return False
    noise = sum(each["ratio"][2] - each["ratio"][0] for each in (row, before))
    return row["ratio"][1] < before["ratio"][1] - noise


def rate(row: dict, system: str) -> float:
    """Tokens a second."""
    return row["tokens"] / statistics.median(quiet(row["windows"][system]))


def cells(row: dict) -> list[str]:
    tell = lambda system: f"{rate(row, system):,.0f}" if quiet(row["windows"].get(system, [])) else ""  # noqa: E731

    def spread(name: str, *systems: str) -> str:
        """A ratio; nothing where not all of what it needs was run."""
        if name in row:
            return "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[name])
        return "disturbed" if all(system in row["windows"] for system in systems) else ""

    held = lambda system: f"{row['peak_bytes'][system] / 1e9:.1f}" if system in row.get("peak_bytes", {}) else ""  # noqa: E731
    start = lambda system: " / ".join(f"{x:.0f}" for x in row["first_step_seconds"].get(system, []))  # noqa: E731
    return [
        row["model"], row["dtype"], row["versions"]["jax"], tell("plain"), tell("jaxformer"), tell("eager"),
        tell("compiled"), spread("ratio", *TORCH), spread("over_plain", "plain"),
        spread("products", "products", "torch products"), start("jaxformer"),
        start("compiled"), f"{1e3 * row['overhead_seconds']:.1f}", held("jaxformer"), held("eager"), held("compiled"),
    ]  # fmt: skip


COLUMNS = [
    "model", "precision", "jax", "plain products", "jaxformer", "torch eager", "torch compiled",
    "over best torch", "over plain", "bare products over torch's", "start, s", "torch compiled start, s",
    "overhead, ms", "memory, GB", "torch eager's", "torch compiled's",
]  # fmt: skip


def across(found: list[dict]) -> list[str]:
    """The best of ours over the best of theirs, of either precision, for models measured in both."""
    words = []
    for model, _, version in dict.fromkeys((row["model"], "", row["versions"]["jax"]) for row in found):
        both = [row for row in found if row["model"] == model and row["versions"]["jax"] == version]
        if len(both) == 2 and all("ratio" in row for row in both):
            ours = max(rate(row, "jaxformer") for row in both)
            theirs = max(rate(row, system) for row in both for system in TORCH if quiet(row["windows"].get(system, [])))
            words.append(f"{model} (jax {version}) {ours / theirs:.2f}")
    return ["", f"Best of ours over best of theirs, whatever the precision: {', '.join(words)}."] if words else []


def write_page() -> None:
    """Puts the table between its marks."""
    order = [*shared.SHAPES]
    found = sorted(rows().values(), key=lambda row: (order.index(row["model"]), row["dtype"], row["versions"]["jax"]))
    pages.put(PAGE, "training", [*pages.table(COLUMNS, [cells(row) for row in found]), *across(found)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="an interpreter with torch and transformers; without it: ours alone")
    parser.add_argument("--models", default=",".join(shared.SHAPES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm", type=int, default=16, help="steps before the first round")
    parser.add_argument("--starts", type=int, default=1, help="2: the second with the programs the first one compiled")
    parser.add_argument("--plain", action="store_true", help="also without the products of jaxformer/nn/cpu.py")
    parser.add_argument("--products", action="store_true", help="also the matrix products of the layers alone")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--output", default=str(RESULTS))
    flags = parser.parse_args(argv)
    if flags.page:
        write_page()
        return 0
    systems = ["jaxformer", *(["plain"] if flags.plain else []), *(TORCH if flags.peer else [])]
    if flags.products:
        systems += ["products", *(["torch products"] if flags.peer else [])]
    known, failed = rows(), 0
    print(" | ".join(COLUMNS))
    for name in flags.models.split(","):
        for dtype in flags.dtypes.split(","):
            shape = (shared.TOYS if flags.smoke else shared.SHAPES)[name]
            row = measure(name, shape, dtype, systems, flags)
            print(" | ".join(cells(row)))
            shares = (f"{system} {share:.1%}" for system, share in row["kernel_share"].items())
            print("the kernel's share of the processor time:", ", ".join(shares), flush=True)
            failed += not flags.smoke and fell(row, known.get(key(row)))
            with open(flags.output, "a") as file:
                file.write(json.dumps(row) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
