"""Qwen3 (Yang et al. 2025): LLaMA with normalised queries and keys."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(
        model_type="qwen3",
        class_prefix="Qwen3",
        layer_windows="late",
        has_query_key_norm=True,
        kv_heads=32,
        head_width=128,
        positions=32768,
    )
)
