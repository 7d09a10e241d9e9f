"""Experiments: one claim, tested by measurements that decide its verdict.

The folder is the registry. A file `experiments/NAME.py` defines

    CLAIM      one sentence that could turn out wrong
    RULE       one sentence: the numbers that make it "supported" or "not supported"; otherwise it is "unclear"
    run        (scale) -> Result, over several seeds; "smoke" takes seconds, for tests; "full" is the evidence
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

from jaxformer.errors import ConfigError
from jaxformer.registry import nearest
from jaxformer.runtime.files import read_json
from jaxformer.runtime.files import write_atomic as write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = ("smoke", "full")
VERDICTS = ("supported", "not supported", "unclear")

Row = Mapping[str, Any]
"""One condition and seed: the values of `Result.conditions`, "seed", and one float for every measure."""


@dataclass(frozen=True)
class Result:
    """Measurements and their verdict.

    Attributes:
      conditions: columns of `rows` that were varied; the other columns, except "seed", are measures.
      rows: one row per condition and seed, all with the same columns.
      verdict: one of `VERDICTS`, computed from `rows` by the experiment's rule.
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
        """Names of the measures."""
        return tuple(name for name in self.rows[0] if name != "seed" and name not in self.conditions)

    def values(self, measure: str, **where: Any) -> list[float]:
        """Values of one measure, of the rows in which the named columns have these values."""
        return [row[measure] for row in self.rows if all(row[name] == value for name, value in where.items())]

    def levels(self, condition: str) -> list[Any]:
        """The different values of a condition, in order of first occurrence."""
        return list(dict.fromkeys(row[condition] for row in self.rows))


def verdict(supported: bool, refuted: bool) -> str:
    """The verdict for two conditions of a rule: "unclear" if neither holds, or (noise in the numbers) both."""
    if supported == refuted:
        return "unclear"
    return "supported" if supported else "not supported"


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """The constants and functions of an experiment file."""

    name: str
    claim: str
    rule: str
    run: Callable[[str], Result]
    plot: Callable[[Result], Figure]


def experiment_files() -> dict[str, Path]:
    """Experiment files by name: those in `./experiments/`, then those in `experiments/` beside this package."""
    paths: dict[str, Path] = {}
    for directory in (Path.cwd() / "experiments", Path(__file__).resolve().parents[1] / "experiments"):
        for path in sorted(directory.glob("[!_]*.py")):
            paths.setdefault(path.stem, path)
    return dict(sorted(paths.items()))


def get(name: str) -> Experiment:
    """The experiment of the file `experiments/NAME.py`.

    Raises:
      ConfigError: there is no such file, or it lacks one of its definitions.
    """
    known = experiment_files()
    if name not in known:
        expected = f"expected one of {', '.join(known)}" if known else "expected files in a folder experiments/ here"
        raise ConfigError(f"experiment: got {name!a}, {expected}{nearest(name, tuple(known))}")
    path = known[name]
    spec = importlib.util.spec_from_file_location(f"experiments.{name}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: got a file that is no Python module, expected one")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module
    spec.loader.exec_module(module)
    parts = {"CLAIM": str, "RULE": str, "run": Callable, "plot": Callable}
    for part, kind in parts.items():
        if not isinstance(getattr(module, part, None), kind):
            raise ConfigError(f"{path}: got no {part}, expected {', '.join(parts)}; see docs/experiments.md")
    return Experiment(name, module.CLAIM, module.RULE, module.run, module.plot)


# --- running ----------------------------------------------------------------------------------------------------------


def run(name: str, scale: str, workdir: str | Path) -> int:
    """Runs an experiment and writes `figure.png`, `result.md` and finally `result.json` into `workdir`.

    Returns:
      The exit code, 0 for every verdict.

    Raises:
      ConfigError: unknown name or scale, or `workdir` holds another result or a training run.
    """
    if scale not in SCALES:
        raise ConfigError(f"--scale: got {scale!a}, expected one of {', '.join(SCALES)}{nearest(scale, SCALES)}")
    experiment = get(name)
    workdir = Path(workdir)
    check_workdir(workdir, name, scale)
    workdir.mkdir(parents=True, exist_ok=True)
    print(f"claim    {experiment.claim}\nrule     {experiment.rule}\n", flush=True)
    begun = time.monotonic()
    result = experiment.run(scale)
    seconds = time.monotonic() - begun
    write(workdir, experiment, scale, result, seconds)
    print("\n".join(table(result)))
    print(f"\nverdict  {result.verdict}: {result.reason}\nwritten  to {workdir} after {seconds:.0f} s", flush=True)
    return 0


def check_workdir(workdir: Path, name: str, scale: str) -> None:
    """Raises a ConfigError if `workdir` holds a training run, or a result of another experiment or scale."""
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
        record = read_json(path)
        existing = f"{record['experiment']} at scale {record['scale']}"
    except (ConfigError, LookupError):
        existing = "something unreadable"
    if existing != f"{name} at scale {scale}":
        raise ConfigError(
            f"{path}: got {existing}, expected {name} at scale {scale} or no file; choose another --workdir"
        )


def progress(text: str) -> None:
    """Prints a progress line to stderr; stdout has only claim, table and verdict."""
    print(text, file=sys.stderr, flush=True)


def write(workdir: Path, experiment: Experiment, scale: str, result: Result, seconds: float) -> None:
    """Writes the three files, each atomically."""
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
    """The `Result` in a `result.json`, to plot it or judge it again."""
    record = read_json(path)
    rows = tuple({key: math.nan if value is None else value for key, value in row.items()} for row in record["rows"])
    return Result(tuple(record["conditions"]), rows, record["verdict"], record["reason"])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON knows no NaN


# --- tables and figures -----------------------------------------------------------------------------------------------


def rows_by_condition(result: Result) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of every condition, one per seed."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in result.rows:
        groups.setdefault(tuple(row[name] for name in result.conditions), []).append(row)
    return groups


def table_cells(result: Result) -> list[list[str]]:
    """A header and one line per condition: the number of seeds, and mean and range of every measure."""
    lines = [[*result.conditions, "seeds", *result.measures]]
    for condition, rows in rows_by_condition(result).items():
        values = [[row[name] for row in rows] for name in result.measures]
        lines.append([*map(_brief, condition), str(len(rows)), *map(_spread, values)])
    return lines


def table(result: Result) -> list[str]:
    """The lines of `table_cells` with aligned columns."""
    lines = table_cells(result)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def markdown(experiment: Experiment, scale: str, result: Result, seconds: float) -> str:
    """The result as a Markdown page."""
    head, *body = ["| " + " | ".join(line) + " |" for line in table_cells(result)]
    command = f"jaxformer experiment {experiment.name} --scale={scale} --workdir=DIR"
    lines = [
        f"# {experiment.name}: {result.verdict}",
        f"**Claim.** {experiment.claim}",
        f"**Rule.** {experiment.rule}",
        f"**Verdict: {result.verdict}.** {result.reason}",
        f"![{experiment.name}](figure.png)",
        "\n".join([head, "|" + "---|" * len(table_cells(result)[0]), *body]),
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
"""Palette of Okabe and Ito (2008), distinguishable with colour vision deficiency."""


def figure(*titles: str, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, side by side."""
    from matplotlib.figure import Figure  # the object alone: no window, no global state

    result = Figure(figsize=(4.2 * len(titles) + 1.4, height), layout="constrained")
    panels = list(result.subplots(1, len(titles), squeeze=False)[0])
    for panel, title in zip(panels, titles):
        panel.set_title(title, fontsize=10, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return result, panels


def curves(panel: Axes, result: Result, x: str, y: str, by: str, only: Iterable[Any] | None = None) -> None:
    """Plots a line per level of the condition `by`: the mean of `y` over seeds against `x`, its range shaded.

    Args:
      only: the levels to plot; None: all.
    """
    for level, colour in zip(result.levels(by) if only is None else only, itertools.cycle(COLOURS)):
        points = [(value, result.values(y, **{by: level, x: value})) for value in result.levels(x)]
        points = [(value, measured) for value, measured in points if measured]
        xs = [value for value, _ in points]
        means = [statistics.fmean(measured) for _, measured in points]
        panel.plot(xs, means, "o-", color=colour, ms=4, lw=1.6, label=str(level))
        low, high = [min(measured) for _, measured in points], [max(measured) for _, measured in points]
        panel.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(x.replace("_", " "))
    panel.set_ylabel(y.replace("_", " "))


def legend(figure: Figure, panel: Axes, title: str | None = None) -> None:
    """Draws the legend of `panel` beside all panels."""
    figure.legend(*panel.get_legend_handles_labels(), title=title, loc="outside right upper", fontsize=8, frameon=False)
