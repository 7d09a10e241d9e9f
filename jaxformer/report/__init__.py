"""Metrics and results as something to look at: `report.html`, one page that needs nothing else, and `loss.png`.

Both are made from the files of a workdir alone, so a page can be written while the run goes on, after it was killed,
or on another machine. What is missing or damaged is said on the page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Sequence

from jaxformer import files, redaction
from jaxformer.config import ConfigError
from jaxformer.report import figures, page, runs

__all__ = ["finish", "write"]


def write(workdirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] = "") -> Path:
    """Writes a page, and the picture of the losses beside it.

    Of one run they are `report.html` and `loss.png` in its workdir. Of several they compare the runs, and are
    `comparison.html` and `comparison.png` in the folder that holds them all: no run's own page is replaced.

    Args:
      output: another place for the page, a file that ends in .html; the picture has the same name with .png.

    Returns:
      The path of the page.

    Raises:
      ConfigError: no workdir is given, one of them is not a folder, or the page cannot be written there.
    """
    if not workdirs:
        raise ConfigError("report: got no workdir, expected at least one; give --workdir=DIR")
    found = runs.read(workdirs)
    target, picture = _places(found, output)
    try:
        files.write(picture, figures.png(figures.loss(found, figures.PRINT)))
        files.write(target, page.render(found))
    except OSError as error:
        got = f"{target}: got {error.strerror or error}"
        raise ConfigError(f"{got}, expected to write the page there; give --output=FILE.html") from error
    return target


def _places(found: Sequence[runs.Run], output: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where the page and the picture go."""
    if output:
        target = Path(output)
        if target.suffix != ".html" or target.is_dir():
            raise ConfigError(f"--output: got {str(output)!a}, expected a file that ends in .html")
        return target, target.with_suffix(".png")
    if len(found) == 1:
        return found[0].workdir / "report.html", found[0].workdir / "loss.png"
    folder = Path(os.path.commonpath([run.workdir.parent for run in found]))
    return folder / "comparison.html", folder / "comparison.png"


def finish(workdir: str | os.PathLike[str]) -> None:
    """`write` at the end of a training: by its first process only, and never the reason that a finished run fails."""
    from jaxformer.parallel import distributed  # brings in jax, which the rest of a report does without

    if not distributed.first():
        return
    try:
        print(f"report in {write([workdir])}", file=sys.stderr)
    except Exception as error:  # whatever goes wrong with pictures: the run itself is done and saved
        words = redaction.text(" ".join(str(error).split()))
        print(f"warning: no report ({type(error).__name__}: {words}); see jaxformer report", file=sys.stderr)
