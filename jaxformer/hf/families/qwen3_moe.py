"""Qwen3 with experts (Yang et al. 2025): many small experts, with weights that may be left unnormalised."""

from jaxformer.hf.families._llama import ExpertLayout, Variant, family

FAMILY = family(
    Variant(
        model_type="qwen3_moe",
        class_prefix="Qwen3Moe",
        has_query_key_norm=True,
        mixture=ExpertLayout(
            block="mlp",
            parts=("gate_proj", "up_proj", "down_proj"),
            count="num_experts",
            width="moe_intermediate_size",
            experts=128,
            top_k=8,
            normalise=False,
        ),
        kv_heads=4,
        positions=32768,
    )
)
