"""Sizes and durations as text for people.

They are two short functions, and no package fits both: sizes stay in GiB, the unit of memory limits, however large they
are, and durations range from the microseconds of a kernel to the hours of a run.
"""

from __future__ import annotations

import math


def format_size(size: float) -> str:
    """Bytes in binary units with one decimal: "976.6 KiB", "1,430.5 GiB"."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} GiB"


def format_duration(seconds: float) -> str:
    """Seconds as "250 us", "1.5 ms", "12.3 s", "4 min 10 s" or "1 h 05 min"; "?" if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us" if seconds else "0 s"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
