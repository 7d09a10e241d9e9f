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


def write(workdirs: Sequence[str | os.PathLike[str]]) -> Path:
    """Writes `report.html` and `loss.png` into the first of `workdirs`; with several, they compare the runs.

    Returns:
      The path of the page.

    Raises:
      ConfigError: no workdir is given, or one of them is not a folder.
    """
    if not workdirs:
        raise ConfigError("report: got no workdir, expected at least one; give --workdir=DIR")
    found = runs.read(workdirs)
    target = Path(workdirs[0])
    files.write(target / "loss.png", figures.png(figures.loss(found, figures.PRINT)))
    files.write(target / "report.html", page.render(found))
    return target / "report.html"


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
