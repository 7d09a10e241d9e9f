"""The template engine of pages: everything is escaped unless a template says `safe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from jaxformer.report.blocks import Block
    from jaxformer.report.charts import Chart


SHOW_BLOCKS = '{% from "blocks.html" import show %}{% for block in blocks %}{{ show(block, figure) }}{% endfor %}'


@cache
def environment() -> jinja2.Environment:
    """Templates of `jaxformer/report/templates`; a missing value is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("jaxformer.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def text(name: str) -> str:
    """Content of a file of `jaxformer/report/templates` as it is: scripts and styles."""
    return resources.files("jaxformer.report").joinpath("templates", name).read_text(encoding="utf-8")


def blocks_html(blocks: Sequence[Block], figure: Callable[[Chart], str] | None = None) -> str:
    """The HTML of blocks.

    Args:
      figure: the element of a chart; None if there is none among the blocks.
    """
    template = environment().from_string(SHOW_BLOCKS)
    html = template.render(blocks=blocks, figure=figure)
    return html.encode("utf-8", "replace").decode()  # UTF-8 has no surrogates, which JSON can hold
