"""Gemma 2 (2024): capped scores and logits, a window in every other layer, norms before and after each sub-layer."""

from jaxformer.hf.families._gemma import Generation, family

FAMILY = family(
    Generation(
        model_type="gemma2",
        class_prefix="Gemma2",
        classes={},
        full_every=2,
        pattern_key="",
        has_query_key_norm=False,
        has_local_base=False,
        caps=(50.0, 30.0),
        positions=8192,
    )
)
