"""The shapes in signatures, checked at every call that a test makes: jaxtyping's import hook, with beartype.

What is checked are the arguments and results of functions and methods. Constructors are not: what `tree.map`, `vmap`
and shardings build of a structure holds other things than arrays, and a Linen module's fields are static. Functions
within functions are not either: they would be compiled anew, checks and all, at each call of what is around them.
"""

from numbers import Integral, Real
from typing import Any, Callable

from beartype import BeartypeConf, BeartypeHintOverrides, beartype
from jaxtyping import install_import_hook

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
    install_import_hook(ROOMS, f"{__name__}.check")
    import jax
    import numpy as np

    from jaxformer import types

    types.Array = jax.Array | np.ndarray


def check(function: Callable) -> Callable:
    """`function`, which has the signature of the one to be checked, checking it; or as it is.

    jaxtyping asks twice: with the arguments alone, and with the result beside them. The second checks the result only:
    the sizes of letters are still those that the arguments gave.
    """
    if function.__name__ == "__init__" or "<locals>" in function.__qualname__:
        return function
    result = function.__annotations__.get("return", Any)
    if result is not Any:
        function.__annotations__ = {"return": result}
    return _typed(function)
