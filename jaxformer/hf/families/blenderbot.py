"""Blenderbot (Roller et al. 2021): BART in pre-norm order without a norm over the embeddings."""

from __future__ import annotations

from jaxformer.hf.families._mbart import Variant, family
from jaxformer.hf.table import CallConvention

FAMILY = family(
    Variant(
        model_type="blenderbot",
        class_prefix="Blenderbot",
        offset=0,
        order="pre",
        embed_norm=False,
        positions=128,
        vocab=8008,
        pad=0,
        convention=CallConvention(decoder_start_token=1, suffix_tokens=("</s>",)),
    )
)
