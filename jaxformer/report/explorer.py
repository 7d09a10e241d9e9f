"""The attention explorer as a page, or as a section of a run's page, from what `analysis/explorer.py` computed.

A page without a server holds what was computed. Text from models and people is JSON in one element, which
`templates/explorer.js` shows as text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.report import charts, templating
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run

DATA_FILE = "explore.json"
"""File of a workdir with what was computed; a report of the run shows it."""
PAGE_FILE = "explore.html"
"""The page beside it."""
FORMAT = 1
"""Version of the value that this page shows."""

OPACITY = {"field": "strength", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 1]}, "legend": None}
"""Cells as transparent as they are weak, so that they fit light and dark pages."""


def heat_map(name: str, x: str, y: str, value: str) -> dict[str, Any]:
    """Specification of a heat map of a data set whose fields are "column", "row", "sign", "strength" and "value"."""
    axis = {"labelLimit": 90, "domain": False, "ticks": False, "grid": False}
    return {
        "data": {"name": name},
        "height": 300,
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "column", "type": "nominal", "sort": None, "title": x, "axis": axis | {"labelAngle": -50}},
            "y": {"field": "row", "type": "nominal", "sort": None, "title": y, "axis": axis},
            "color": {
                "field": "sign",
                "type": "nominal",
                "scale": {"domain": ["more", "less"], "range": [charts.COLOURS[0], charts.COLOURS[1]]},
                "legend": None,
            },
            "opacity": OPACITY,
            "tooltip": [
                {"field": "row", "type": "nominal", "title": y},
                {"field": "column", "type": "nominal", "title": x},
                {"field": "value", "type": "quantitative", "title": value, "format": ".4f"},
            ],
        },
    }


EMPTY: dict[str, list[Any]] = {"column": [], "row": [], "sign": [], "strength": [], "value": []}
"""Data of a heat map before the page's script fills it."""


def page_charts() -> list[charts.Chart]:
    """The charts of the explorer; its script fills them."""
    texts = {
        "explore-map": (
            "The chosen head as a heat map",
            ("key", "query", "attention"),
            "Attention of each query (row) on each key (column). The lines beside it show the same.",
        ),
        "explore-ablation": (
            "Change of the log-probability without a part",
            ("head", "layer", "change"),
            "Each cell is a head or feed-forward layer that was removed: blue the text became likelier, orange less "
            "likely.",
        ),
        "explore-patching": (
            "Part of the difference that an activation brings back",
            ("token or head", "layer", "restored"),
            "Each cell is an activation that was put into the other sentence, at a layer and token or of a head: 1 "
            "brings back all of the answer's log-probability.",
        ),
    }
    return [
        charts.Chart(
            name, title, heat_map(name, *axes), description, {name: dict(EMPTY)}, note=description, renderer="canvas"
        )
        for name, (title, axes, description) in texts.items()
    ]


def section(document: Mapping[str, Any], serve: bool = False) -> str:
    """The explorer's elements and its data. The page has `charts.scripts(page_charts(), script())` at its end."""
    figures = {chart.name: charts.figure(chart) for chart in page_charts()}
    content = charts.json_text({**document, "serve": serve})
    template = templating.environment().get_template("explorer.html")
    return template.render(figures=figures, data=content, serve=serve, format=FORMAT)


def script() -> str:
    """The explorer's JavaScript; it needs `window.charts`."""
    return templating.text("explorer.js")


def style() -> str:
    """CSS of the explorer."""
    return templating.text("explorer.css")


def render(document: Mapping[str, Any], serve: bool = False) -> str:
    """The explorer as a page of its own.

    Args:
      serve: the page may ask the server that it comes from.
    """
    embedded = charts.scripts(page_charts(), script())
    template = templating.environment().get_template("explorer_page.html")
    html = template.render(
        title=f"{document['name']}: attention explorer",
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        policy=embedded.policy(connect=serve),
        style=charts.style() + style(),
        section=section(document, serve),
        scripts=embedded.html,
    )
    return html.encode("utf-8", "replace").decode()


def read(workdir: Path) -> dict[str, Any] | None:
    """The explorer's results that a workdir holds; None if it has none.

    Raises:
      ConfigError: the file is damaged, or of another version.
    """
    path = workdir / DATA_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: got {error}, expected JSON; run jaxformer explore again") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{path}: got another format, expected {FORMAT}; run jaxformer explore again")
    return value


@dataclass(frozen=True)
class Explored:
    """The explorer as a part of a run's page: its section, charts, script, style, and notes for the page's head."""

    html: str = ""
    charts: tuple[Chart, ...] = ()
    script: str = ""
    style: str = ""
    notes: tuple[str, ...] = ()


NOTHING = Explored()
"""A page without the explorer."""


def of_runs(runs: Sequence[Run]) -> Explored:
    """The explorer of a run for which `jaxformer explore` was called; nothing for several runs."""
    if len(runs) != 1:
        return NOTHING
    try:
        document = read(runs[0].workdir)
    except ConfigError as error:
        return Explored(notes=(str(error),))
    if document is None:
        return NOTHING
    return Explored(section(document), tuple(page_charts()), script(), style())
