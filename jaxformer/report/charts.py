"""Interactive charts of a page, and the same charts as PNG and SVG. Everything about Vega-Lite is in this file.

A `Chart` is a Vega-Lite specification, its data, and the same in words. A page shows charts like this:

    page_charts = [Chart("loss", "Loss", spec, "Training loss falls from 9 to 2.", {"loss": {"step": [...], ...}})]
    embedded = charts.scripts(page_charts)
    html = f'''<meta http-equiv="Content-Security-Policy" content="{embedded.policy()}">
    <style>{charts.style()}</style>
    {charts.figure(page_charts[0])}      where the chart stands
    {embedded.html}                      once, at the end of the body'''

and papers get `charts.write_figures(page_charts, folder)`: NAME.png and NAME.svg, on white.

The page needs nothing else: the library (Vega, Vega-Lite, Vega-Embed; 0.9 MB) is in it once, from the package
`vl-convert-python`. Scripts are allowed by their hashes; Vega evaluates its expressions with its interpreter, so that
neither 'unsafe-eval' nor 'unsafe-inline' is needed for scripts. Charts are drawn when they come into view.

Colours: a specification sets none for text, axes and grid. The page's text colour (or black on white) is set when a
chart is drawn. `COLOURS` are visible on both. Sizes: a page's chart is as wide as its column, `height` is the
specification's; a figure for papers is `Chart.width` wide.

Text from outside (names of runs, decoded text) may stand in data, titles and descriptions, which are shown as text. It
must not stand in an expression (`expr`, `calculate`, `filter`), which Vega evaluates, nor in `sort`, which becomes one
(an order of names is `scale.domain`): give expressions data fields with names of your own.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jaxformer.errors import ConfigError
from jaxformer.report import templating
from jaxformer.report.blocks import Table
from jaxformer.runtime import directories, files

COLOURS = ("#2f81d8", "#e0761a", "#2aa15c", "#d8444f", "#9068d6", "#b08a1e", "#18a0a8", "#cf57a4")
"""Mid-tones for categories, visible on white and on black."""

PRINT_INK = "#22262c"
"""Text colour of figures for papers, on white."""

INK_PLACEHOLDER = "#INK"
"""Stands for the page's text colour in a theme; the page's script replaces it."""

ZOOM = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "encodings": ["x"],
        "zoom": "wheel![event.shiftKey || event.ctrlKey]",  # a wheel alone scrolls the page
    },
    "bind": "scales",
}
"""Parameter of a layer (or of a specification without layers) that zooms and moves its x axis, whose field is `x`."""

CURSOR = {"name": "at", "value": None}
"""Parameter of a specification whose chart has a `readout`: the cursor's place on the x axis, None if it is away."""

CURSOR_RULE = {
    "data": {"values": [{}]},
    "mark": "rule",
    "encoding": {
        "x": {"value": {"expr": "isValid(at) ? scale('x', at) : 0"}},
        "opacity": {"value": {"expr": "isValid(at) ? 0.5 : 0"}},
    },
}
"""Layer that draws the cursor; it inherits no encoding, so it stands beside a layer of curves."""

VEGA_LITE_VERSION = "6.4"
"""Version of the language that specifications are written in."""

GLOBALS = "window.vegaEmbed = vegaEmbed;"
"""Script that makes the bundle's modules reachable. In some versions its `vega` is null; views suffice."""

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]*")
"""Names of charts and data sets: they become ids and file names."""

Repeat = tuple[Literal["repeat"], list[tuple[Any, int]]]
"""A column that repeats values, as ("repeat", [(value, count), ...]): names of long series are stored once."""

Columns = Mapping[str, "Sequence[Any] | Repeat"]
"""A data set: columns of equal length by name; None is a missing value."""


@dataclass(frozen=True)
class Chart:
    """A chart, its data, and the same in words.

    Attributes:
      name: id in the page and stem of its files: lower-case letters, digits and hyphens; unique in a page.
      title: caption, as text.
      spec: Vega-Lite specification without `data.values`, `width` and colours of text. It names its data set, as
        `{"data": {"name": "loss"}}`. An altair chart's `to_dict()` will do. `height` is in pixels.
      description: what a reader who cannot see it has to know, in a sentence or two.
      data: data sets by name. Charts of a page may share a data set of the same name.
      table: the data, or a summary of them, shown below the chart when it is opened.
      table_summary: what the table is, in a few words.
      note: remark under the caption, such as what was left out.
      renderer: "svg", or "canvas" for more than a few thousand marks, such as heat maps.
      width: of figures for papers, in pixels.
      readout: fields (x, y, name of the series, its colour) whose values are shown at the cursor, by mouse and by arrow
        keys; None if the marks have tooltips of their own. The specification has `CURSOR` and `CURSOR_RULE`.
      curve: True if the page's controls of curves (axis, smoothing, logarithms) apply to it.
    """

    name: str
    title: str
    spec: Mapping[str, Any]
    description: str
    data: Mapping[str, Columns] = field(default_factory=dict)
    table: Table | None = None
    table_summary: str = "the data as a table"
    note: str = ""
    renderer: Literal["svg", "canvas"] = "svg"
    width: int = 640
    readout: tuple[str, str, str, str] | None = None
    curve: bool = False

    def __post_init__(self) -> None:
        for name in (self.name, *self.data):
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"chart: got name {name!r}, expected lower-case letters, digits and hyphens")
        for name, columns in self.data.items():
            if len({column_length(column) for column in columns.values()}) > 1:
                raise ValueError(f"chart {self.name}: columns of {name} differ in length")


@dataclass(frozen=True)
class Scripts:
    """Everything executable in a page, and the policy that allows it and nothing else.

    Attributes:
      html: elements for the end of the body: data, the library, the script that draws.
      hashes: of the scripts in it, as a Content-Security-Policy has them.
    """

    html: str
    hashes: tuple[str, ...]

    def policy(self, connect: bool = False) -> str:
        """Content-Security-Policy of the page: no network, no foreign script, no `eval`.

        Args:
          connect: True if scripts may ask the server that the page came from.
        """
        sources = " ".join(f"'{each}'" for each in self.hashes)
        rules = ["default-src 'none'", f"script-src {sources}", "style-src 'unsafe-inline'"]
        rules += ["base-uri 'none'", "form-action 'none'"]
        return "; ".join([*rules, "connect-src 'self'"] if connect else rules)


def slug(text: str, taken: set[str] | None = None) -> str:
    """A name for `NAME_PATTERN` out of any text. It is added to `taken`, and differs from the names in it."""
    name = stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "chart"
    count = 1
    while taken is not None and name in taken:
        count += 1
        name = f"{stem}-{count}"
    if taken is not None:
        taken.add(name)
    return name


# --- in a page --------------------------------------------------------------------------------------------------------


def figure(chart: Chart) -> str:
    """The HTML element of one chart: caption, place to draw, buttons, values at the cursor, table. All text is escaped.

    It can be reached by keyboard. Arrows move the cursor along the curves, + and - zoom, Shift with an arrow moves the
    part that is shown, 0 shows all.
    """
    template = templating.environment().get_template("figure.html")
    return template.render(chart=chart, zooms=has_zoom(chart.spec), height=_height(chart.spec))


def scripts(charts: Sequence[Chart], extra: str = "", live: str = "") -> Scripts:
    """The data of all charts, the library and the script that draws them, for the end of a page's body.

    Args:
      extra: JavaScript of the page's own, run last; it may call `window.charts` (see `templates/charts.js`).
      live: value that `window.charts.live` has.

    Raises:
      ValueError: two charts have one name, or differ in a data set of one name.
    """
    data: dict[str, Columns] = {}
    shown: dict[str, dict[str, Any]] = {}
    for chart in charts:
        if chart.name in shown:
            raise ValueError(f"charts: got two of the name {chart.name!r}, expected distinct names")
        for name, columns in chart.data.items():
            if data.setdefault(name, columns) != columns:
                raise ValueError(f"chart {chart.name}: its data set {name!r} differs from another chart's")
        shown[chart.name] = {
            "spec": _complete(chart, {"width": "container"}),
            "renderer": chart.renderer,
            "readout": chart.readout,
            "curve": chart.curve,
            "data": list(chart.data),
        }
    named = {name: dict(columns) for name, columns in data.items()}
    content = json_text({"charts": shown, "data": named, "theme": theme(INK_PLACEHOLDER), "live": live})
    bodies = [library(), templating.text("charts.js"), *([extra] if extra else [])]
    element = f'<script type="application/json" id="chart-data">{content}</script>\n'
    return Scripts(
        element + "\n".join(f"<script>{body}</script>" for body in bodies), tuple(script_hash(body) for body in bodies)
    )


def json_text(value: Any) -> str:
    """JSON that may stand in a `<script>` element: no "<", so that no text ends it; other characters as escapes."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hash(body: str) -> str:
    """The source expression "sha256-..." that allows one inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(body.encode("utf-8")).digest()).decode()


def style() -> str:
    """CSS of charts; it uses the variables `--ink --paper --soft --line` of the page."""
    return templating.text("charts.css")


@cache
def library() -> str:
    """JavaScript of Vega, Vega-Lite and Vega-Embed: `vegaEmbed` on the window; 0.9 MB.

    It is made by `vl-convert-python` in about two seconds, so a copy is kept in the cache directory for each version.
    """
    version = metadata.version("vl-convert-python")
    key = hashlib.sha256(f"{version} {VEGA_LITE_VERSION} {GLOBALS}".encode()).hexdigest()[:12]
    path = directories.cache() / "vega" / f"{key}.js"
    try:
        text, digest = path.read_text(encoding="utf-8").rsplit("\n//", 1)
        if hashlib.sha256(text.encode("utf-8")).hexdigest() == digest:
            return text
    except (OSError, ValueError):  # absent, torn or no text: made again
        pass
    import vl_convert

    # A "</script" in a string of the library would end the element; in JavaScript strings "<\/" is the same text.
    text = vl_convert.javascript_bundle(GLOBALS, vl_version=VEGA_LITE_VERSION).replace("</script", "<\\/script")
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, f"{text}\n//{digest}")
    except OSError:
        pass  # a cache that cannot be written costs time only
    return text


# --- for papers -------------------------------------------------------------------------------------------------------


def svg(chart: Chart, ink: str = PRINT_INK) -> str:
    """The chart as an SVG document of `chart.width` pixels, on white, with its title."""
    import vl_convert

    return vl_convert.vegalite_to_svg(_print_spec(chart, ink), vl_version=VEGA_LITE_VERSION)


def png(chart: Chart, scale: float = 2.0, ink: str = PRINT_INK) -> bytes:
    """The chart as PNG of `scale * chart.width` pixels, on white, with its title."""
    import vl_convert

    return vl_convert.vegalite_to_png(_print_spec(chart, ink), vl_version=VEGA_LITE_VERSION, scale=scale)


def write_figures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg of every chart into `folder`, which is made if it is missing. Returns their paths.

    Raises:
      ConfigError: the folder or a file cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            for suffix, content in ((".svg", svg(chart)), (".png", png(chart))):
                paths.append(folder / f"{chart.name}{suffix}")
                files.write_atomic(paths[-1], content)
    except OSError as error:
        got = f"{folder}: got {error.strerror or error}"
        raise ConfigError(f"{got}, expected a folder to write figures into; give --figures=DIR") from error
    return paths


# --- specifications ---------------------------------------------------------------------------------------------------


def theme(ink: str) -> dict[str, Any]:
    """Vega-Lite's `config` for a text colour. The page's script does the same with the colour of the page."""
    axis = {
        "labelColor": ink, "titleColor": ink, "domainColor": ink, "tickColor": ink, "gridColor": ink,
        "gridOpacity": 0.13, "domainOpacity": 0.4, "tickOpacity": 0.4, "labelFontSize": 11, "titleFontSize": 12,
        "titleFontWeight": "normal", "labelOverlap": True,
    }  # fmt: skip
    legend = {"labelColor": ink, "titleColor": ink, "labelLimit": 280, "symbolStrokeWidth": 2.5, "orient": "bottom",
              "columns": 2, "titleFontWeight": "normal", "layout": {"bottom": {"direction": "vertical"}}}  # fmt: skip
    text = {"color": ink, "subtitleColor": ink, "fontWeight": 600, "fontSize": 14, "anchor": "start"}
    return {
        "axis": axis,
        "legend": legend,
        "title": text,
        "header": {"labelColor": ink, "titleColor": ink},
        "text": {"color": ink},
        "rule": {"color": ink},
        "view": {"stroke": None},
        "range": {"category": list(COLOURS)},
        # The place of the chart has a description. Those of marks, by Vega-Lite, would be expressions of titles.
        "aria": False,
        "mark": {"color": COLOURS[0], "aria": False},
        "font": "system-ui, sans-serif",
        "background": "transparent",
    }


def rows(columns: Columns) -> list[dict[str, Any]]:
    """The data set as a list of records, as Vega takes it."""
    expanded = {name: expand(column) for name, column in columns.items()}
    return [dict(zip(expanded, values, strict=True)) for values in zip(*expanded.values(), strict=True)]


def expand(column: Sequence[Any] | Repeat) -> list[Any]:
    """All values of a column."""
    return [v for v, count in column[1] for _ in range(count)] if _is_repeat(column) else list(column)


def column_length(column: Sequence[Any] | Repeat) -> int:
    """Number of values of a column."""
    return sum(count for _, count in column[1]) if _is_repeat(column) else len(column)


def has_zoom(spec: Mapping[str, Any]) -> bool:
    """True if the specification, or a layer of it, has the parameter `ZOOM`."""
    is_here = any(each.get("name") == "zoom" for each in spec.get("params", ()))
    return is_here or any(has_zoom(layer) for layer in spec.get("layer", ()))


def _is_repeat(column: Any) -> bool:
    return isinstance(column, tuple) and len(column) == 2 and column[0] == "repeat"


def _complete(chart: Chart, sizes: Mapping[str, Any]) -> dict[str, Any]:
    schema = f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE_VERSION.split('.')[0]}.json"
    return {"$schema": schema, "description": chart.description, **copy.deepcopy(dict(chart.spec)), **sizes}


def _print_spec(chart: Chart, ink: str) -> str:
    """The whole specification as JSON, on white. Halves of surrogate pairs, which UTF-8 lacks, become "?"."""
    spec = _complete(chart, {"width": chart.width, "title": chart.title})
    spec = _without_clips(spec)  # nothing is zoomed here, and every clipped mark is a slow mask of the whole picture
    spec["datasets"] = {name: rows(columns) for name, columns in chart.data.items()}
    # The fonts that the renderer can rely on are few; a page has its system's.
    config = theme(ink) | {"background": "white", "font": "DejaVu Sans, Verdana, sans-serif"}
    spec["config"] = config | spec.get("config", {})
    return json.dumps(spec, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode()


def _without_clips(value: Any) -> Any:
    """A specification without the "clip" of its marks."""
    if isinstance(value, dict):
        return {key: _without_clips(each) for key, each in value.items() if key != "clip"}
    return [_without_clips(each) for each in value] if isinstance(value, list) else value


def _height(spec: Mapping[str, Any]) -> int:
    height = spec.get("height", 240)
    return height if isinstance(height, int) else 240
