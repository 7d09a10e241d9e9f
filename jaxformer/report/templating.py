"""The template engine of pages: everything is escaped unless a template says `safe`."""

from __future__ import annotations

from functools import cache
from importlib import resources

import jinja2


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
