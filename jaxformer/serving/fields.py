"""Fields of a JSON request, with types and ranges. Every field is read, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxformer.registry import nearest
from jaxformer.serving.refusal import Refusal


class Fields:
    """The fields of a request's body. A field that is null counts as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in body.items() if value is not None}
        self._names: list[str] = []

    def raw(self, name: str) -> Any:
        """The value of a field; None if it is absent."""
        self._names.append(name)
        return self.values.get(name)

    def number(self, name: str, default: float | None, low: float, high: float) -> Any:
        """A number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        """A whole number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def boolean(self, name: str) -> bool:
        """True or false; false if it is absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return bool(value)

    def texts(self, name: str, most: int) -> list[str]:
        """A string, or a list of up to `most` strings; [] if it is absent."""
        value = self.raw(name)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise wrong(name, value, "a string or a list of strings")
        if len(values) > most:
            raise Refusal(f"{name}: got {len(values)} strings, expected at most {most}", param=name)
        for text in values:
            check_text(name, text)
        return values

    def neutral(self, name: str, *values: Any) -> None:
        """Refuses a field of the interface that is not supported, unless its value changes nothing."""
        value = self.raw(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            only = " or ".join(map(repr, values)) or "none"
            got = f"{name}: got {_shown(value)}, expected {only}"
            raise Refusal(f"{got}; this server does not support it", param=name, code="unsupported_parameter")

    def end(self) -> None:
        """Refuses the fields that have not been read."""
        for name in self.values:
            if name not in self._names:
                hint = nearest(name, self._names)
                raise Refusal(f"{name}: got an unknown field{hint}; remove it", param=name, code="unknown_parameter")


def wrong(name: str, value: Any, expected: str) -> Refusal:
    """The refusal of a field's value."""
    return Refusal(f"{name}: got {_shown(value)}, expected {expected}", param=name, code="invalid_value")


def check_text(name: str, text: str) -> None:
    """Refuses text that UTF-8 cannot hold: JSON's escapes can name half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise wrong(name, text[error.start], "text that UTF-8 can hold") from None


def _shown(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:60] + "..."
