"""Sizes and durations as text."""

import math

import pytest

from jaxformer.runtime import units


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1e6, "976.6 KiB"), (2**20, "1.0 MiB"), (16 * 2**30, "16.0 GiB"),
     (1430.5 * 2**30, "1,430.5 GiB")],
)  # fmt: skip
def test_sizes(size, text):
    assert units.format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-4, "250 us"), (0.4, "400 ms"), (12.345, "12.3 s"), (52, "52 s"), (59.6, "1 min 00 s"),
     (250, "4 min 10 s"), (3600, "1 h 00 min"), (math.inf, "?"), (math.nan, "?")],
)  # fmt: skip
def test_durations(seconds, text):
    assert units.format_duration(seconds) == text
