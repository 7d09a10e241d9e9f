"""Mistral (Jiang et al. 2023): LLaMA with grouped queries and a sliding window."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(
        model_type="mistral",
        class_prefix="Mistral",
        answering_prefix="model.",
        bias="none",
        has_window=True,
        window=4096,
        kv_heads=8,
        positions=131072,
        prefix_tokens=("<s>",),
    )
)
