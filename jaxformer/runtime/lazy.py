"""Modules that are imported when they are first used, so that a command starts without what it does not need."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module `name` until an attribute is read; from then on passes all reads on to it.

    For a type checker, write the import itself:

        if TYPE_CHECKING:
            import optax
        else:
            optax = lazy.LazyModule("optax")
    """

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)  # later reads find it without this function
        return value
