"""mBART and mBART-50 (Liu et al. 2020; Tang et al. 2020): BART in pre-norm order, whose targets begin with a language.

Without decoder inputs a call makes them of the labels, of which the last token, the language, comes first.
"""

from __future__ import annotations

from jaxformer.hf.families._mbart import Variant, family
from jaxformer.hf.table import CallConvention

FAMILY = family(
    Variant(
        model_type="mbart",
        class_prefix="MBart",
        offset=2,
        order="pre",
        embed_norm=True,
        positions=1024,
        vocab=50265,
        pad=1,
        classifies=True,
        convention=CallConvention(decoder_input_from_source=True, starts_with_last_token=True, suffix_tokens=("</s>",)),
    )
)
