"""Qwen2 (Yang et al. 2024): LLaMA with biases on query, key and value."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(model_type="qwen2", class_prefix="Qwen2", bias="inputs", layer_windows="late", kv_heads=32, positions=32768)
)
