"""Qwen3 with experts (Yang et al. 2025): many small ones, whose weights need not be normalised."""

from jaxformer.hf.families._llama import Mixture, Variant, family

FAMILY = family(
    Variant(
        type="qwen3_moe",
        name="Qwen3Moe",
        head_norm=True,
        mixture=Mixture(
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
