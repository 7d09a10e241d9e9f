"""Reads the pickle of a torch state dict as data: its opcodes build tuples, dicts and tensors, and nothing is called.

Python's own unpickler imports and calls what a file names. Here `pickletools` splits the file into opcodes, and those
that a state dict consists of are interpreted: a name stays a name, and "reduce" is understood for the names in `RULES`
alone. Any other opcode or name is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

STORAGES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": ml_dtypes.bfloat16, "DoubleStorage": "<f8",
        "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
        "BoolStorage": "?",
    }.items()
}  # fmt: skip
"""Name of a storage's class in `torch` -> element type."""

MAX_SIZE = 2**48
"""Bound of sizes, strides and offsets."""


class Refused(Exception):
    """The file holds something that a state dict does not need; the message says what."""


@dataclass(frozen=True)
class Name:
    """A name in the file, `module.name`. It is never imported."""

    module: str
    name: str


@dataclass(frozen=True)
class Storage:
    """Numbers of the file, whose bytes lie elsewhere, under `key`."""

    key: str
    dtype: np.dtype
    count: int


@dataclass(frozen=True)
class View:
    """A tensor: a part of a storage, with strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK = object()


def _tensor(arguments: tuple[Any, ...]) -> View:
    """The result of `torch._utils._rebuild_tensor_v2`."""
    if len(arguments) < 4 or not isinstance(arguments[0], Storage):
        raise Refused("a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides) or len(shape) > 32:
        raise Refused("a tensor without a shape")
    if not all(type(n) is int and 0 <= n < MAX_SIZE for n in (offset, *shape, *strides)):
        raise Refused("a tensor whose sizes are no numbers")
    return View(storage, offset, shape, strides)


def _parameter(arguments: tuple[Any, ...]) -> View:
    """The result of `torch._utils._rebuild_parameter`."""
    if not arguments or not isinstance(arguments[0], View):
        raise Refused("a parameter without a tensor")
    return arguments[0]


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Hashable, Any]:
    if arguments not in ((), ([],)):
        raise Refused("a dict that is made of something")
    return {}


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arguments[0]) if arguments and isinstance(arguments[0], (tuple, list)) else ()


RULES: dict[Name, Callable[[tuple[Any, ...]], Any]] = {
    Name("collections", "OrderedDict"): _ordered_dict,
    Name("torch._utils", "_rebuild_tensor"): _tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch._utils", "_rebuild_parameter"): _parameter,
    Name("torch", "Size"): _size,
}
"""Name -> what a "reduce" of it means."""

LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING",
    "SHORT_BINSTRING", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "INT", "LONG", "UNICODE",
}  # fmt: skip
"""Opcodes that push their argument."""

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUTS, GETS = {"BINPUT", "LONG_BINPUT", "PUT"}, {"BINGET", "LONG_BINGET", "GET"}


def read(file: BinaryIO) -> Any:
    """The object of the pickle at the file's position, which afterwards is behind it.

    Raises:
      Refused: an opcode or a name is none that a state dict needs.
      ValueError, IndexError, KeyError, TypeError: the file is damaged.
    """
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.run(opcode.name, argument)
    raise Refused("a pickle without an end")


class _Machine:
    """A stack and a memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """One opcode."""
        stack = self.stack
        if name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in SHORT_TUPLES:
            stack[-SHORT_TUPLES[name] :] = [tuple(stack[-SHORT_TUPLES[name] :])]
        elif name in PUTS:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in GETS:
            stack.append(self.memo[int(argument)])
        elif name not in ("PROTO", "FRAME"):
            self.combine(name, argument)

    def combine(self, name: str, argument: Any) -> None:
        """Executes an opcode that takes several values from the stack and pushes one."""
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self.pop_to_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = self.pop_to_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            self.container(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = self.pop_to_mark() if name == "APPENDS" else [stack.pop()]
            self.container(list).extend(items)
        elif name == "GLOBAL":
            stack.append(Name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [Name(str(stack[-2]), str(stack[-1]))]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, Name) or function not in RULES or not isinstance(arguments, tuple):
                what = f"{function.module}.{function.name}" if isinstance(function, Name) else "something"
                raise Refused(f"a call of {what}, which a state dict does not need")
            stack.append(RULES[function](arguments))
        elif name == "BUILD" and isinstance(stack[-2], dict) and isinstance(stack[-1], dict):
            stack.pop()  # the metadata of a state dict: versions of modules
        else:
            raise Refused(f"the opcode {name}, which a state dict does not need")

    def pop_to_mark(self) -> list[Any]:
        """The items above the last mark."""
        begin = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[begin + 1 :]
        del self.stack[begin:]
        return items

    def container(self, kind: type) -> Any:
        """The dict or list on top of the stack."""
        if not isinstance(self.stack[-1], kind):
            raise Refused(f"an item of something that is no {kind.__name__}")
        return self.stack[-1]


def _storage(identity: Any) -> Storage:
    """The storage that a persistent id names: ("storage", class, key, device, count), in old files with a view."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise Refused("a persistent id that names no storage")
    _, kind, key, _, count, *view = identity
    if not isinstance(kind, Name) or kind.module != "torch" or kind.name not in STORAGES:
        raise Refused("a storage of unknown type")
    if any(part is not None for part in view):
        raise Refused("a storage that is part of another")
    if type(count) is not int or not 0 <= count < MAX_SIZE:
        raise Refused("a storage without a size")
    return Storage(str(key), STORAGES[kind.name], count)
