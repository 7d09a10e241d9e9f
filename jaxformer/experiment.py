"""Experiments: one claim, tested by numbers, with a verdict that the numbers decide.

The folder is the registry. A file `experiments/NAME.py` defines

    CLAIM      one sentence that could turn out wrong
    RULE       one sentence: which numbers make it "supported", which "not supported"; else it is "unclear"
    run        (scale) -> Result; scale "smoke" is seconds, for the tests, and "full" is the evidence; several seeds
    plot       (Result) -> matplotlib figure

and `jaxformer experiment NAME --scale=full --workdir=DIR` runs it. `docs/experiments.md` shows how to write one.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

from jaxformer.config import ConfigError
from jaxformer.files import read_json
from jaxformer.files import write as write_file
from jaxformer.registry import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = ("smoke", "full")
VERDICTS = ("supported", "not supported", "unclear")

Row = Mapping[str, Any]
"""Numbers of one condition and seed: every name in `Result.conditions`, "seed", and one float for every measure."""


@dataclass(frozen=True)
class Result:
    """What was measured, and what it says about the claim.

    Attributes:
      conditions: the columns of `rows` that say what was varied; the others, besides "seed", are measures.
      rows: one for every condition and seed, all with the same columns.
      verdict: one of `VERDICTS`, computed from `rows` by the rule that the experiment states.
      reason: the numbers behind the verdict, as a sentence.
    """

    conditions: tuple[str, ...]
    rows: tuple[Row, ...]
    verdict: str
    reason: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict: got {self.verdict!r}, expected one of {', '.join(VERDICTS)}")
        if not self.rows:
            raise ValueError("rows: got none, expected one for every condition and seed")
        for row in self.rows:
            if list(row) != list(self.rows[0]) or not {*self.conditions, "seed"} < set(row):
                expected = ", ".join([*self.conditions, "seed"])
                raise ValueError(f"rows: got columns {', '.join(row)}, expected the same in all, with {expected}, more")

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the measured columns."""
        return tuple(name for name in self.rows[0] if name != "seed" and name not in self.conditions)

    def values(self, measure: str, **where: Any) -> list[float]:
        """One measure of all the rows in which the named columns have the given values."""
        return [row[measure] for row in self.rows if all(row[name] == value for name, value in where.items())]

    def levels(self, condition: str) -> list[Any]:
        """The values of a condition, in the order in which they occur."""
        return list(dict.fromkeys(row[condition] for row in self.rows))


def verdict(supported: bool, refuted: bool) -> str:
    """The word for what a rule found; "unclear" when neither or, with noise in the numbers, both."""
    if supported == refuted:
        return "unclear"
    return "supported" if supported else "not supported"


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """An experiment file's constants and functions."""

    name: str
    claim: str
    rule: str
    run: Callable[[str], Result]
    plot: Callable[[Result], Figure]


def files() -> dict[str, Path]:
    """Experiments by name: of `experiments/` here, and of the one beside this package where it has one."""
    found: dict[str, Path] = {}
    for folder in (Path.cwd() / "experiments", Path(__file__).resolve().parents[1] / "experiments"):
        for path in sorted(folder.glob("[!_]*.py")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def get(name: str) -> Experiment:
    """The experiment of the file `experiments/NAME.py`.

    Raises:
      ConfigError: there is no such file, or it lacks a part.
    """
    known = files()
    if name not in known:
        expected = f"expected one of {', '.join(known)}" if known else "expected files in a folder experiments/ here"
        raise ConfigError(f"experiment: got {name!a}, {expected}{nearest(name, tuple(known))}")
    path = known[name]
    spec = importlib.util.spec_from_file_location(f"experiments.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    parts = {"CLAIM": str, "RULE": str, "run": Callable, "plot": Callable}
    for part, kind in parts.items():
        if not isinstance(getattr(module, part, None), kind):
            raise ConfigError(f"{path}: got no {part}, expected {', '.join(parts)}; see docs/experiments.md")
    return Experiment(name, module.CLAIM, module.RULE, module.run, module.plot)


# --- running ----------------------------------------------------------------------------------------------------------


def run(name: str, scale: str, workdir: str | Path) -> int:
    """Runs an experiment and writes `figure.png`, `result.md` and `result.json`, the last one last, into `workdir`.

    Returns:
      0: whatever the verdict is, the experiment is done.

    Raises:
      ConfigError: unknown name or scale, or `workdir` holds something else.
    """
    if scale not in SCALES:
        raise ConfigError(f"--scale: got {scale!a}, expected one of {', '.join(SCALES)}{nearest(scale, SCALES)}")
    experiment = get(name)
    workdir = Path(workdir)
    refuse_other(workdir, name, scale)
    workdir.mkdir(parents=True, exist_ok=True)
    print(f"claim    {experiment.claim}\nrule     {experiment.rule}\n", flush=True)
    begun = time.monotonic()
    result = experiment.run(scale)
    seconds = time.monotonic() - begun
    write(workdir, experiment, scale, result, seconds)
    print("\n".join(table(result)))
    print(f"\nverdict  {result.verdict}: {result.reason}\nwritten  to {workdir} after {seconds:.0f} s", flush=True)
    return 0


def refuse_other(workdir: Path, name: str, scale: str) -> None:
    """Keeps a smoke run from replacing an evening's evidence, and an experiment from a training run's folder."""
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir: got {str(workdir)!a} (a file), expected a folder")
    if (workdir / "config.json").exists():
        raise ConfigError(
            f"--workdir: got {str(workdir)!a} (a training run), expected a new folder or this experiment's"
        )
    path = workdir / "result.json"
    if not path.exists():
        return
    try:
        held = read_json(path)
        there = f"{held['experiment']} at scale {held['scale']}"
    except (ConfigError, LookupError):
        there = "something unreadable"
    if there != f"{name} at scale {scale}":
        raise ConfigError(f"{path}: got {there}, expected {name} at scale {scale} or no file; choose another --workdir")


def progress(text: str) -> None:
    """A line for whoever waits. It goes to stderr, so that stdout is claim, table and verdict."""
    print(text, file=sys.stderr, flush=True)


def write(workdir: Path, experiment: Experiment, scale: str, result: Result, seconds: float) -> None:
    """The three files, each whole or not at all."""
    record = {
        "experiment": experiment.name,
        "scale": scale,
        "claim": experiment.claim,
        "rule": experiment.rule,
        "verdict": result.verdict,
        "reason": result.reason,
        "seconds": round(seconds, 1),
        "versions": {package: metadata.version(package) for package in ("jax", "flax", "optax", "numpy")},
        "conditions": list(result.conditions),
        "rows": [{key: _finite(value) for key, value in row.items()} for row in result.rows],
    }
    picture = io.BytesIO()
    experiment.plot(result).savefig(picture, format="png", dpi=150, bbox_inches="tight")
    write_file(workdir / "figure.png", picture.getvalue())
    write_file(workdir / "result.md", markdown(experiment, scale, result, seconds))
    write_file(workdir / "result.json", json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: str | Path) -> Result:
    """The `Result` of a `result.json`, to plot it again or to judge it anew."""
    held = read_json(path)
    rows = tuple({key: math.nan if value is None else value for key, value in row.items()} for row in held["rows"])
    return Result(tuple(held["conditions"]), rows, held["verdict"], held["reason"])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON knows no NaN


# --- words and pictures -----------------------------------------------------------------------------------------------


def groups(result: Result) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of every condition, over its seeds."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in result.rows:
        found.setdefault(tuple(row[name] for name in result.conditions), []).append(row)
    return found


def cells(result: Result) -> list[list[str]]:
    """A header and one line for every condition: the number of seeds, and of every measure the mean and the range."""
    lines = [[*result.conditions, "seeds", *result.measures]]
    for condition, rows in groups(result).items():
        values = [[row[name] for row in rows] for name in result.measures]
        lines.append([*map(_brief, condition), str(len(rows)), *map(_spread, values)])
    return lines


def table(result: Result) -> list[str]:
    """`cells` with the columns lined up."""
    lines = cells(result)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def markdown(experiment: Experiment, scale: str, result: Result, seconds: float) -> str:
    """A page to paste into a report."""
    head, *body = ["| " + " | ".join(line) + " |" for line in cells(result)]
    command = f"jaxformer experiment {experiment.name} --scale={scale} --workdir=DIR"
    lines = [
        f"# {experiment.name}: {result.verdict}",
        f"**Claim.** {experiment.claim}",
        f"**Rule.** {experiment.rule}",
        f"**Verdict: {result.verdict}.** {result.reason}",
        f"![{experiment.name}](figure.png)",
        "\n".join([head, "|" + "---|" * len(cells(result)[0]), *body]),
        "Mean over seeds, with the smallest and the largest in brackets.",
        f"`{command}`, {seconds:.0f} s",
    ]
    return "\n\n".join(lines) + "\n"


def _brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    mean = statistics.fmean(values)
    exact = low == high or any(map(math.isnan, values))
    return _brief(low if low == high else mean) if exact else f"{mean:.3g} [{low:.3g}, {high:.3g}]"


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette: told apart by people who see fewer colours."""


def figure(*titles: str, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for every title, side by side, quiet in everything that is not data."""
    from matplotlib.figure import Figure  # the object alone: no window, no global state

    made = Figure(figsize=(4.2 * len(titles) + 1.4, height), layout="constrained")
    panels = list(made.subplots(1, len(titles), squeeze=False)[0])
    for panel, title in zip(panels, titles):
        panel.set_title(title, fontsize=10, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return made, panels


def curves(panel: Axes, result: Result, x: str, y: str, by: str, only: Iterable[Any] | None = None) -> None:
    """A line for every level of the condition `by`: the mean of `y` over seeds against `x`, with the range shaded."""
    for level, colour in zip(result.levels(by) if only is None else only, itertools.cycle(COLOURS)):
        points = [(at, result.values(y, **{by: level, x: at})) for at in result.levels(x)]
        points = [(at, values) for at, values in points if values]
        where = [at for at, _ in points]
        panel.plot(where, [statistics.fmean(v) for _, v in points], "o-", color=colour, ms=4, lw=1.6, label=str(level))
        low, high = [min(v) for _, v in points], [max(v) for _, v in points]
        panel.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(x.replace("_", " "))
    panel.set_ylabel(y.replace("_", " "))


def legend(made: Figure, panel: Axes, title: str | None = None) -> None:
    """The legend of `panel`, beside all panels."""
    made.legend(*panel.get_legend_handles_labels(), title=title, loc="outside right upper", fontsize=8, frameon=False)
