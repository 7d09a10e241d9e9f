"""The shapes in signatures, checked at every call that a test makes: jaxtyping's import hook, with beartype.

What is checked are the arguments and results of functions and methods whose signature has arrays. Constructors are not:
what `tree.map`, `vmap` and shardings build of a structure holds other things than arrays, and a Linen module's fields
are static. Functions within functions are not either: they would be compiled anew, checks and all, at each call of what
is around them.
"""

import re
from numbers import Integral, Real
from typing import Any, Callable

import jaxtyping
from beartype import BeartypeConf, BeartypeHintOverrides, beartype

ROOMS = (
    "jaxformer.nn",
    "jaxformer.models",
    "jaxformer.decode",
    "jaxformer.losses",
    "jaxformer.metrics",
    "jaxformer.chunks",
    "jaxformer.parallel.pipeline",
)

# numpy's numbers do for Python's, and an int for a float
_typed = beartype(conf=BeartypeConf(hint_overrides=BeartypeHintOverrides({int: Integral, float: Real})))


def install() -> None:
    """Checks what is imported from now on. As in jax itself, numpy's arrays do for jax's."""
    import jax
    import numpy as np

    from jaxformer import types

    types.Array = jax.Array | np.ndarray
    jaxtyping.jaxtyped = where_arrays_are_named(jaxtyping.jaxtyped)  # the hook decorates every function with it
    jaxtyping.install_import_hook(ROOMS, f"{__name__}.check")


def where_arrays_are_named(jaxtyped: Callable) -> Callable:
    """`jaxtyped` that leaves classes, inner functions and functions without arrays in their signature as they are."""

    def decorate(*, typechecker: Callable) -> Callable:
        checked = jaxtyped(typechecker=typechecker)

        def decorated(function: Any) -> Any:
            if isinstance(function, type) or "<locals>" in function.__qualname__ or not names_arrays(function):
                return function
            return checked(function)

        return decorated

    return decorate


def names_arrays(function: Callable) -> bool:
    """Whether an annotation, or an alias that stands in one, is of arrays with a shape."""
    hints = " ".join(map(str, function.__annotations__.values()))
    aliases = (str(function.__globals__.get(name)) for name in re.findall(r"\w+", hints))
    return any(re.search(r"\[[\w.]*Array, ", text) for text in (hints, *aliases))


def check(function: Callable) -> Callable:
    """`function`, which has the signature of the one to be checked, checking it.

    jaxtyping asks twice: with the arguments alone, and with the result beside them. The second checks the result only:
    the sizes of letters are still those that the arguments gave.
    """
    result = function.__annotations__.get("return", Any)
    if result is not Any:
        function.__annotations__ = {"return": result}
    return _typed(function)
