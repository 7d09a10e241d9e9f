"""Ministral (Mistral AI 2024): Mistral with a window in some of its layers."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(
        model_type="ministral",
        class_prefix="Ministral",
        bias="none",
        layer_windows="types",
        window=4096,
        kv_heads=8,
        positions=131072,
        prefix_tokens=("<s>",),
    )
)
