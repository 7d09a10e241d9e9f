"""jaxformer: transformers, and the recurrent models before them, in JAX and Flax Linen, from one config.

    import jaxformer
    model = jaxformer.load("runs/multi30k")
    model.translate(["Ein Hund läuft."], beams=5)

Importing the package is instant: jax comes in with the first call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from jaxformer.hf.pretrained import Pretrained

__version__ = "0.1.0"
__all__ = ["__version__", "from_pretrained", "load"]


def load(path: str | os.PathLike[str]) -> Pretrained:
    """The model of the run in a workdir (or of one of its checkpoints), ready to use. See `checkpoint.load`."""
    from jaxformer.hf import workdirs

    return workdirs.load(path)


def from_pretrained(directory: str | os.PathLike[str], **options: Any) -> Pretrained:
    """The model of a Hugging Face directory: config.json, model.safetensors. See `hf.loading.from_pretrained`."""
    from jaxformer.hf import loading

    return loading.from_pretrained(directory, **options)
