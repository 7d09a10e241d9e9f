"""Figures of `jaxformer draw`, from the values of `jaxformer.analysis.draw`: PNG, SVG or PDF for papers and slides."""

from __future__ import annotations

import io
import os

import matplotlib as mpl
from matplotlib.figure import Figure

from jaxformer.errors import ConfigError
from jaxformer.runtime import files

FORMATS = ("png", "svg", "pdf")
"""Suffixes of files that are written."""
DPI = 150
"""Pixels per inch of a PNG."""


def check_output(path: str | os.PathLike[str]) -> str:
    """The format of a file by its suffix, one of `FORMATS`.

    Raises:
      ConfigError: it has another suffix, or is a directory.
    """
    suffix = os.path.splitext(path)[1].removeprefix(".").lower()
    if suffix not in FORMATS or os.path.isdir(path):
        expected = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"--output: got {str(path)!a}, expected a file that ends in {expected}")
    return suffix


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure on white, whole or not at all; the same figure gives the same bytes.

    Raises:
      ConfigError: the suffix is none of `FORMATS`, or the file cannot be written.
    """
    kind, out = check_output(path), io.BytesIO()
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with mpl.rc_context({"svg.hashsalt": "jaxformer", "pdf.fonttype": 42}):  # text stays text in a PDF
        figure.savefig(out, format=kind, dpi=DPI, facecolor="white", metadata=dates)
    try:
        files.write_atomic(path, out.getvalue())
    except OSError as error:
        got = f"--output: got {str(path)!a} ({error.strerror or error})"
        raise ConfigError(f"{got}, expected a writable file; name another one") from error
