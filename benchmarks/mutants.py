"""Classic mistakes planted one by one, and whether the test suite notices.

    python benchmarks/mutants.py                       every mistake that was not caught yet, or was changed since,
                                                       or was caught by a test that is among the slow ones by now
    python benchmarks/mutants.py --only=beam,rope-sign-lost --again --jobs=2
    python benchmarks/mutants.py --check               without mistakes, the tests that noticed one: they must pass
    python benchmarks/mutants.py --page                only the page, from the results there are

A mistake is data, a table of a file in `benchmarks/mutants/` (the file's name is its category): `old` occurs exactly
once in `file` of the package, and `new` takes its place. It is planted in a temporary copy of the checkout, never in
the checkout, and its `tests` run there until one fails. Slow tests, which `make test` leaves out, are not run. That
every mistake still applies to today's code is a test itself (`tests/test_mutants.py`). Results go to
`benchmarks/results/mutants.json`, the table to `docs/mutants.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "benchmarks" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "mutants.md"
SLOW = ROOT / "tests" / "slow.txt"
LIMIT_SECONDS = 900
"""A mistake that makes its tests take longer than this is noticed by whoever waits for them."""
CAUGHT = ("caught", "too slow")
HEAVY = (
    "jax",
    "flax.linen",
    "optax",
    "orbax.checkpoint",
    "grain",
    "hypothesis",
    "beartype",
    "jaxtyping",
    "chex",
    "einops",
)
"""Imported once, before the processes that run the tests are forked."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake to plant.

    Attributes:
      category: the name of the table's file.
      slip: the mistake in words.
      file: of the package, relative to `jaxformer/`.
      tests: arguments of pytest, those that are likeliest to notice first.
      source: who made or warns of the mistake: repository and thread, a paper, or a contract of this project.
      goldens: "all" where the tests read more than the usual reference checkpoints.
      equivalent: why no test can notice, for one that changes no result; "": one can.
    """

    category: str
    id: str
    slip: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    source: str
    goldens: str = ""
    equivalent: str = ""

    @property
    def digest(self) -> str:
        """Changes when the mistake or its tests do."""
        parts = (self.file, self.old, self.new, *self.tests, self.goldens)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def planted(self, package: Path) -> str:
        """The text of the file with the mistake in it.

        Raises:
          ValueError: the mistake does not apply to `package`.
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.id}: got {text.count(self.old)} places in {self.file}, expected 1; change `old`")
        if self.old == self.new:
            raise ValueError(f"{self.id}: got the same text for old and new, expected a change")
        text = text.replace(self.old, self.new)
        compile(text, self.file, "exec")
        return text


def load(folder: Path = TABLES) -> list[Mutant]:
    """All mistakes, by category."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            found.append(Mutant(category=path.stem, **{**table, "tests": tuple(table["tests"])}))
    return found


def chosen(mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Those whose category or id is one of `only`, a list with commas; all if it is empty.

    Raises:
      SystemExit: one of the words is neither.
    """
    words = [word for word in only.split(",") if word]
    known = {name for mutant in mutants for name in (mutant.category, mutant.id)}
    for word in words:
        if word not in known:
            raise SystemExit(f"--only: got {word!r}, expected categories or ids of benchmarks/mutants/")
    if not words:
        return list(mutants)
    found = {mutant.id: mutant for word in words for mutant in mutants if word in (mutant.category, mutant.id)}
    return list(found.values())


class Tree:
    """A copy of the checkout to plant mistakes in, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        for name in listed:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        for shared in (ROOT.parent / "shared", ROOT.parents[1] / "shared"):
            if shared.is_dir() and not (folder / "shared").exists():  # reference checkpoints beside the checkout
                (folder / "shared").symlink_to(shared)
        self.held: tuple[Path, str, os.stat_result] | None = None

    def plant(self, mutant: Mutant) -> None:
        text, path = mutant.planted(self.root / "jaxformer"), self.root / "jaxformer" / mutant.file
        self.held = path, path.read_text(encoding="utf-8"), path.stat()
        path.write_text(text, encoding="utf-8")
        # Compiled files are known by time and size of their source: none of the sound text may stand for this one.
        os.utime(path, (0, 1_000_000_000 + int(mutant.digest[:6], 16)))

    def mend(self) -> None:
        if self.held is not None:
            path, text, stat = self.held
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            self.held = None


class Tally:
    """A pytest plugin: how many tests passed, and the first that failed."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"


def run_tests(tree: Path, scratch: Path, tests: Sequence[str], goldens: str, stop: bool) -> None:
    """In a forked process: runs tests in `tree`, writes the tally to `scratch`, and ends the process."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(scratch / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(tree)
        sys.dont_write_bytecode = stop  # the first run, of the sound code, leaves its compiled files for the others
        # Without the checkout, but with the packages of an environment that lies in it.
        kept = [place for place in sys.path if place.startswith(sys.prefix) or not place.startswith(str(ROOT))]
        sys.path[:] = [str(tree), *kept]
        for name in ("environment", "pages"):
            sys.modules.pop(name, None)
        # Of its own, since what a mistake writes there would be read later.
        os.environ |= {"PYTHONPATH": str(tree), "JAXFORMER_CACHE": str(scratch / "cache"), "GOLDENS": goldens}
        import pytest

        tally = Tally()
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", *(["-x"] if stop else [])]
        options += ["-m", "not slow"]  # what `make test` notices
        if importlib.util.find_spec("xdist"):
            options += ["-n", "0"]
        code = int(pytest.main([*options, f"--basetemp={scratch / 'tmp'}", *tests], plugins=[tally]))
        (scratch / "tally.json").write_text(json.dumps({"passed": tally.passed, "failed": tally.failed, "code": code}))
    finally:
        sys.stdout.flush()
        os._exit(code)


def verdict(tally: dict[str, Any] | None, late: bool) -> dict[str, Any]:
    """What a run of the tests says of a mistake."""
    if late:
        return {"verdict": "too slow"}
    if tally is None:
        return {"verdict": "caught", "by": "the test process died"}
    if tally["failed"]:
        return {"verdict": "caught", "by": tally["failed"]}
    if tally["code"] != 0 or not tally["passed"]:
        return {"verdict": "broken", "by": f"pytest ended with {tally['code']}, {tally['passed']} tests passed"}
    return {"verdict": "survived"}


def runs(mutants: Sequence[Mutant], trees: Sequence[Tree], folder: Path) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Every mistake with its verdict, as they come; as many at a time as there are `trees`."""
    waiting, free = list(mutants), list(trees)
    at_work: dict[int, tuple[Mutant, Tree, Path, float]] = {}
    try:
        while waiting or at_work:
            while waiting and free:
                mutant, tree = waiting.pop(0), free.pop()
                scratch = folder / "scratch" / mutant.id
                scratch.mkdir(parents=True)
                tree.plant(mutant)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of jax, which has made no thread yet
                    pid = os.fork()
                if pid == 0:
                    run_tests(tree.root, scratch, mutant.tests, mutant.goldens, stop=True)
                at_work[pid] = mutant, tree, scratch, time.monotonic()
            for pid, (mutant, tree, scratch, begun) in list(at_work.items()):
                late = time.monotonic() - begun > LIMIT_SECONDS
                if late:
                    os.killpg(pid, signal.SIGKILL)
                if os.waitpid(pid, 0 if late else os.WNOHANG)[0]:
                    del at_work[pid]
                    tree.mend()
                    free.append(tree)
                    path = scratch / "tally.json"
                    found = verdict(json.loads(path.read_text()) if path.exists() else None, late)
                    shutil.rmtree(scratch, ignore_errors=True)
                    yield mutant, found | {"seconds": round(time.monotonic() - begun, 1)}
            time.sleep(0.05)
    finally:
        for pid in at_work:
            os.killpg(pid, signal.SIGKILL)


def unsound(found: dict[str, dict], mutants: Sequence[Mutant], tree: Tree, folder: Path) -> list[str]:
    """Tests that noticed a mistake and fail without it too."""
    failed = []
    for goldens in ("", "all"):
        ids = {mutant.id for mutant in mutants if mutant.goldens == goldens}
        tests = sorted({found[i]["by"] for i in ids if "::" in found.get(i, {}).get("by", "")})
        while tests:
            scratch = folder / "scratch" / f"sound-{goldens}"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            pid = os.fork()
            if pid == 0:
                run_tests(tree.root, scratch, tests, goldens, stop=True)
            os.waitpid(pid, 0)
            bad = json.loads((scratch / "tally.json").read_text())["failed"]
            if not bad:
                break
            failed.append(bad)
            tests = [test for test in tests if test != bad]
    return failed


def slow(test: str) -> bool:
    """Whether `make test` leaves the test out."""
    return bool({test, test.partition("[")[0]} & set(SLOW.read_text(encoding="utf-8").splitlines()))


def write_results(found: dict[str, dict], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_page(mutants: Sequence[Mutant], found: dict[str, dict]) -> int:
    """Writes the tables of the page. Returns how many mistakes survive that could be noticed."""
    real = [mutant for mutant in mutants if not mutant.equivalent]
    judged = [mutant for mutant in real if mutant.id in found]
    rows, share = [], lambda part, whole: f"{part / whole:.1%}" if whole else ""
    for category in (*sorted({mutant.category for mutant in real}), "all"):
        own = [mutant for mutant in real if category in (mutant.category, "all")]
        planted = [mutant for mutant in own if mutant in judged]
        caught = sum(found[mutant.id]["verdict"] in CAUGHT for mutant in planted)
        rows.append((category, str(len(own)), str(len(planted)), str(caught), share(caught, len(planted))))
    pages.put(PAGE, "score", pages.table(("category", "in the list", "planted", "caught", "caught of planted"), rows))
    left = [mutant for mutant in judged if found[mutant.id]["verdict"] not in CAUGHT]
    lines = pages.table(
        ("mistake", "category", "what it does", "verdict"),
        [(f"`{each.id}`", each.category, each.slip, found[each.id]["verdict"]) for each in left],
    )
    pages.put(PAGE, "survivors", lines if left else ["None."])
    same = [(f"`{each.id}`", each.slip, each.equivalent) for each in mutants if each.equivalent]
    pages.put(PAGE, "equivalent", pages.table(("change", "what it does", "why"), same) if same else ["None."])
    every = [
        (
            f"`{each.id}`",
            each.category,
            each.slip,
            each.source,
            f"`{found[each.id]['by']}`" if "by" in found[each.id] else "",
        )
        for each in judged
    ]
    pages.put(PAGE, "list", pages.table(("mistake", "category", "what it does", "source", "noticed by"), every))
    return len(left)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="categories and ids, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes at a time")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--check", action="store_true", help="run what noticed a mistake without it: it must pass")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    mutants = load()
    found = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    found = {each.id: found[each.id] for each in mutants if each.id in found}
    if options.page:
        return int(write_page(mutants, found) > 0)
    wanted = [each for each in chosen(mutants, options.only) if not each.equivalent]
    left = wanted
    if not options.again:
        done = {each.id for each in wanted if found.get(each.id, {}).get("digest") == each.digest}
        left = [
            each
            for each in wanted
            if each.id not in done or found[each.id]["verdict"] not in CAUGHT or slow(found[each.id].get("by", ""))
        ]
    if options.check:
        left = []
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory(prefix="jaxformer-mutants-") as name:
        folder = Path(name)
        import environment

        os.environ[environment.CACHES] = str(folder / "caches")
        environment.prepare()
        for module in HEAVY:
            importlib.import_module(module)
        # After these imports, which have handlers of their own; by way of `finally`, which ends the tests at work.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        trees = [Tree(folder / str(i)) for i in range(options.jobs)]
        said = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "jax": sys.modules["jax"].__version__,
        }
        for number, (mutant, result) in enumerate(runs(left, trees, folder), 1):
            found[mutant.id] = {"digest": mutant.digest, **result, **said}
            write_results(found, options.results)
            by = f" by {result['by']}" if "by" in result else ""
            print(
                f"{number}/{len(wanted)} {mutant.category}/{mutant.id}: {result['verdict']}{by}, {result['seconds']} s"
            )
            sys.stdout.flush()
        checked = [each for each in wanted if each.id in found]
        for test in unsound(found, checked, trees[0], folder) if options.check else ():
            for mutant in checked:
                if found[mutant.id].get("by") == test:
                    found[mutant.id] |= {"verdict": "broken", "by": f"{test} fails without the mistake too"}
        write_results(found, options.results)
    missing = [each.id for each in wanted if each.id not in found or found[each.id]["verdict"] not in CAUGHT]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} caught" + (f"; not: {', '.join(missing)}" if missing else ""))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
