"""Several results of an analysis, one a line, that a notebook shows one after the other."""

from __future__ import annotations

from typing import Any, TypeVar

from jaxformer import display

T = TypeVar("T")


class Results(tuple[T, ...]):
    """A tuple of results, which a notebook displays."""

    def _repr_html_(self) -> str:
        results: tuple[Any, ...] = tuple(self)
        return display.joined([result._repr_html_() for result in results])
