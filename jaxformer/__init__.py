"""jaxformer: transformers, and the recurrent models before them, in JAX and Flax Linen, from one config.

    import jaxformer
    model = jaxformer.load("runs/multi30k")
    model.translate(["Ein Hund läuft."], beams=5)

Importing the package is instant: jax comes in with the first call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from jaxformer.model import Model

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | os.PathLike[str]) -> Model:
    """The model of the run in a workdir (or of one of its checkpoints), ready to use. See `checkpoint.load`."""
    from jaxformer import checkpoint

    return checkpoint.load(path)
