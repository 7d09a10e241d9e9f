"""Qwen3 (Yang et al. 2025): LLaMA with normalised queries and keys."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(Variant(type="qwen3", name="Qwen3", head_norm=True, kv_heads=32, head_width=128, positions=32768))
