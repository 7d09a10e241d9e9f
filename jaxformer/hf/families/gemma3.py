"""The text models of Gemma 3 (2025): windows with a RoPE base of their own in five of six layers."""

from jaxformer.hf.families._gemma import Generation, family

FAMILY = family(
    Generation(
        model_type="gemma3_text",
        class_prefix="Gemma3",
        classes={"model": "Gemma3TextModel", "sequence": "Gemma3TextForSequenceClassification", "token": None},
        full_every=6,
        pattern_key="sliding_window_pattern",
        has_query_key_norm=True,
        has_local_base=True,
        caps=(None, None),
        positions=131072,
    )
)
