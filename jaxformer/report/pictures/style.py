"""Colours, sizes and labels of figures that Matplotlib draws."""

from __future__ import annotations

INK = "#22262c"
"""Colour of text and lines on white."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
"""Colours that readers with colour blindness tell apart (Okabe and Ito 2008), and grey."""

DASHES = ("-", "--", ":", "-.")
"""Line styles, so that curves differ without colour, too."""


def escape_label(text: str) -> str:
    """A text for Matplotlib, which reads dollars as formulas and hides labels that begin with "_"."""
    text = text.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
