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

    from jaxformer.model import Model

__version__ = "0.2.0"
__all__ = ["Model", "__version__", "from_encoder_decoder_pretrained", "from_pretrained", "load"]


def load(path: str | os.PathLike[str], which: str = "") -> Model:
    """The model of the run in a workdir (or of one of its checkpoints), ready to use.

    Args:
      which: "best", "last" or the number of a step; "": as `path` and the run's config say.
    """
    from jaxformer.hf import workdirs

    return workdirs.load(path, which)


def from_pretrained(directory: str | os.PathLike[str], **options: Any) -> Model:
    """The model of a Hugging Face directory: config.json, model.safetensors. See `hf.loading.from_pretrained`.

    It may be a model on the hub: "org/name" or "org/name@revision", with `revision`, `token`, `cache_dir`,
    `local_files_only`, `force_download` and `subfolder` (see `hf.peft.reading.from_pretrained`).

    A directory of the peft package (adapter_config.json) is read with its base model: `base=DIRECTORY`, or the one that
    the file names.
    """
    from jaxformer.hf.peft import reading

    return reading.from_pretrained(directory, **options)


def from_encoder_decoder_pretrained(
    encoder: str | os.PathLike[str], decoder: str | os.PathLike[str], **options: Any
) -> Model:
    """An encoder-decoder of two Hugging Face directories, to fine-tune: cross-attention between them is random.

    See `hf.pairs.from_encoder_decoder_pretrained`.
    """
    from jaxformer.hf import pairs

    return pairs.from_encoder_decoder_pretrained(encoder, decoder, **options)


def __getattr__(name: str) -> Any:
    """`jaxformer.Model`, imported when it is first asked for."""
    if name != "Model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxformer import model

    return model.Model
