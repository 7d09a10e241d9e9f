"""Gemma (2024): LLaMA with scaled embeddings, RMS scales stored as differences from 1, and a tanh GELU gate."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(
        model_type="gemma",
        prefix_tokens=("<bos>",),
        class_prefix="Gemma",
        has_offset_norm=True,
        tied=True,
        kv_heads=16,
        head_width=256,
        positions=8192,
        activation="gelu_pytorch_tanh",
    )
)
