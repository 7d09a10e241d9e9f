"""Reports of runs: `report.html`, one page that loads nothing, and `loss.png`; and a run as text (`inspection`).

They are made from the files of a workdir, so a page can be written while the run continues, after it was killed, or on
another machine. The page names missing and damaged files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.report import charts, curves, page, runs
from jaxformer.report.runs import expand
from jaxformer.runtime import files, secrets

__all__ = ["expand", "write", "write_after_training"]


def write(
    workdirs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] = "",
    figures: str | os.PathLike[str] = "",
) -> Path:
    """Writes a page, and a figure of the losses beside it, if there are any.

    One run gets `report.html` and `loss.png` in its workdir. Several runs get `comparison.html` and `comparison.png`
    in the nearest common parent directory, so that no run's own page is replaced. A folder of seeds or of a sweep
    stands for its runs.

    Args:
      output: another path for the page, which ends in .html; the figure has the same name with .png.
      figures: a folder that gets every chart of the page as NAME.png and NAME.svg; "": none.

    Returns:
      The path of the page.

    Raises:
      ConfigError: there is no workdir, one of them is not a directory, or the page cannot be written.
    """
    if not workdirs:
        raise ConfigError("report: got no workdir, expected at least one; give --workdir=DIR")
    read_runs = runs.read(runs.expand(workdirs))
    target, picture = _output_paths(read_runs, output)
    if figures:
        charts.write_figures(page.all_charts(page.content(read_runs)), Path(figures))
    try:
        shown = curves.all_charts(read_runs)
        if shown:
            files.write_atomic(picture, charts.png(shown[0]))
        files.write_atomic(target, page.render(read_runs))
    except OSError as error:
        got = f"{target}: got {error.strerror or error}"
        raise ConfigError(f"{got}, expected to write the page there; give --output=FILE.html") from error
    return target


def _output_paths(read_runs: Sequence[runs.Run], output: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Paths of the page and of the figure."""
    if output:
        target = Path(output)
        if target.suffix != ".html" or target.is_dir():
            raise ConfigError(f"--output: got {str(output)!a}, expected a file that ends in .html")
        return target, target.with_suffix(".png")
    if len(read_runs) == 1:
        return read_runs[0].workdir / "report.html", read_runs[0].workdir / "loss.png"
    folder = Path(os.path.commonpath([run.workdir.parent for run in read_runs]))
    return folder / "comparison.html", folder / "comparison.png"


def write_after_training(workdir: str | os.PathLike[str]) -> None:
    """Writes the page of a finished run, in its first process only. A failure is a warning: the run itself is saved."""
    from jaxformer.parallel import distributed  # imports jax, which the rest of a report does not need

    if not distributed.is_first_process():
        return
    try:
        print(f"report in {write([workdir])}", file=sys.stderr)
    except Exception as error:  # figures and pages may fail in many ways, and none may fail the run
        words = secrets.redact(" ".join(str(error).split()))
        print(f"warning: no report ({type(error).__name__}: {words}); see jaxformer report", file=sys.stderr)
