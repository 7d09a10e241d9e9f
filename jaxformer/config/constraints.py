"""The values that a config field allows, as annotations of its type.

A field of `schema.py` is one line: `heads: PositiveInt = 4`, `kind: Literal["layer", "rms"] = "layer"`,
`kernel: KernelName = "auto"`. The type is what `hints.convert` converts to, the annotation what `check_value` checks,
and the reference of fields prints both.
"""

from __future__ import annotations

import importlib
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from jaxformer import registry
from jaxformer.errors import ConfigError

MAX_INT32 = 2**31 - 1
"""Largest number of steps, position, token id and array size: all of them are int32."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers.

    Attributes:
      low: lower bound.
      high: upper bound; None: there is none.
      ends: whether the bounds belong to the interval, as in mathematics: "[]", "[)", "(]" or "()".
    """

    low: float
    high: float | None = None
    ends: str = "[]"

    def exceeds_low(self, value: float) -> bool:
        """True if `value` is above the lower bound."""
        return value >= self.low if self.ends[0] == "[" else value > self.low

    def __contains__(self, value: float) -> bool:
        if self.high is None:
            return self.exceeds_low(value)
        return self.exceeds_low(value) and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def describe(self, with_high: bool = True) -> str:
        """The interval in words: "at least 0 and less than 1"."""
        words = f"{'at least' if self.ends[0] == '[' else 'more than'} {_plain(self.low)}"
        if self.high is not None and with_high:
            words += f" and {'at most' if self.ends[1] == ']' else 'less than'} {_plain(self.high)}"
        return words


@dataclass(frozen=True)
class Folder:
    """The name of a file in a package of the project, or the dotted path of a module of the user's.

    Attributes:
      package: the package, as "jaxformer.tasks". Its names are listed without importing it.
      constant: what the file or module defines: "TASK".
      record: the class of that constant, defined in the package's `__init__`; "": the constant is a function.
      extra: names that are allowed beside those of files.
    """

    package: str
    constant: str
    record: str = ""
    extra: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """All names that the project itself has."""
        return self.extra + registry.names(self.package)

    def member(self, name: str) -> Any:
        """The constant of the file or module `name`.

        Raises:
          ValueError: there is no such file, or the module cannot be imported or defines no such constant. From outside
            the project it is a ConfigError.
        """
        value = registry.member(self.package, name, self.constant)
        if not registry.is_external(self.package, name):
            return value
        record = getattr(importlib.import_module(self.package), self.record) if self.record else None
        if not (callable(value) if record is None else isinstance(value, record)):
            expected = f"a {self.package}.{self.record}" if self.record else "a function"
            got = f"{self.package}: got {name!a}, whose {self.constant} is of type {type(value).__name__}"
            raise ConfigError(f"{got}, expected {expected}")
        return value


@dataclass(frozen=True)
class OptionsOf:
    """Marks a field that holds the `options` dataclass of the module that another field of its section names.

    Attributes:
      field: that other field, whose type is a `Folder`.
    """

    field: str


Constraint = Range | Folder | tuple[Any, ...]

PositiveInt = Annotated[int, Range(1, MAX_INT32)]
Count = Annotated[int, Range(0, MAX_INT32)]
Seed = Annotated[int, Range(0, 2**32 - 1)]  # JAX drops the bits above: the seeds 0 and 2**32 would be one
Length = Annotated[int, Range(2, 2**30)]  # the data pipeline uses 2**30 for a length that nothing exceeds
Layers = Annotated[int, Range(0, 10_000)]  # each costs compile time; the deepest published model has as many
CellLayers = Annotated[int, Range(1, 1_000)]  # recurrent layers are not scanned
Beams = Annotated[int, Range(1, 100_000)]  # rows of one prompt, all decoded at once
NotNegative = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, None, "(]")]
AtLeastOne = Annotated[float, Range(1.0)]
MoreThanOne = Annotated[float, Range(1.0, None, "(]")]
Rate = Annotated[float, Range(0.0, 1.0, "[)")]  # of dropout or decay: 1 would leave nothing
Probability = Annotated[float, Range(0.0, 1.0)]
PositiveShare = Annotated[float, Range(0.0, 1.0, "(]")]
ProperShare = Annotated[float, Range(0.0, 1.0, "()")]

EncodingName = Annotated[str, Folder("jaxformer.nn.encodings", "ENCODING", "Encoding")]
KernelName = Annotated[str, Folder("jaxformer.nn.kernels", "KERNEL", "Kernel", extra=("auto",))]
SourceName = Annotated[str, Folder("jaxformer.data.sources", "SOURCE")]
TrackerName = Annotated[str, Folder("jaxformer.train.trackers", "TRACKER")]
TaskName = Annotated[str, Folder("jaxformer.tasks", "TASK", "Task", extra=("none",))]


def split_constraint(hint: Any) -> tuple[Any, Constraint | OptionsOf | None]:
    """A type without its annotation, and the annotation.

    A `Literal` is the type of its first value, with the tuple of its values as the annotation.
    """
    if typing.get_origin(hint) is Annotated:
        base, *annotations = typing.get_args(hint)
        known = [item for item in annotations if isinstance(item, (Range, Folder, OptionsOf))]
        return base, known[0] if known else None
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), choices
    return hint, None


def describe_constraint(constraint: Constraint | OptionsOf | None) -> str:
    """The allowed values in words for the reference of fields; "" where every value of the type is allowed."""
    if isinstance(constraint, Range):
        return constraint.describe(with_high=constraint.high != MAX_INT32)
    if isinstance(constraint, Folder):
        return ", ".join(constraint.names()) + ", or a module of yours"
    if isinstance(constraint, OptionsOf):
        return ""
    return ", ".join(choice or '""' for choice in constraint or ())


def check_value(value: Any, constraint: Constraint, path: str) -> None:
    """Raises ConfigError if a value of the right type is none that `constraint` allows."""
    if isinstance(constraint, Range):
        if value not in constraint:
            # A value that is too small is told the lower bound only, where the upper one is that of the number type.
            with_high = constraint.high != MAX_INT32 or constraint.exceeds_low(value)
            raise ConfigError(f"{path}: got {value}, expected {constraint.describe(with_high)}")
        return
    if isinstance(constraint, Folder):
        if registry.is_external(constraint.package, value):
            _import_external(value, constraint, path)
            return
        choices, otherwise = constraint.names(), "; no module of this name is beside the recipe, here or on PYTHONPATH"
    else:
        choices, otherwise = constraint, ""
    if value not in choices:
        names = ", ".join(choice or "''" for choice in choices)
        remedy = registry.nearest(value, choices) or otherwise
        raise ConfigError(f"{path}: got {value!a}, expected one of {names}{remedy}")


def _import_external(name: str, folder: Folder, path: str) -> None:
    try:
        folder.member(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{folder.package}: ')}") from None


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
