"""BlenderbotSmall (Roller et al. 2021): BART whose decoder normalises tokens before positions are added."""

from __future__ import annotations

from jaxformer.hf.families._mbart import Variant, family
from jaxformer.hf.table import CallConvention

FAMILY = family(
    Variant(
        model_type="blenderbot-small",
        class_prefix="BlenderbotSmall",
        offset=0,
        order="post",
        embed_norm=True,
        norms_tokens=True,
        positions=512,
        vocab=50265,
        pad=0,
        convention=CallConvention(decoder_scales_embeddings=True, decoder_start_token=1),
    )
)
