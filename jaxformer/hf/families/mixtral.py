"""Mixtral (Jiang et al. 2024): Mistral whose feed-forward layers are mixtures of experts."""

from jaxformer.hf.families._llama import ExpertLayout, Variant, family

FAMILY = family(
    Variant(
        model_type="mixtral",
        class_prefix="Mixtral",
        answering_prefix="model.",
        bias="none",
        has_window=True,
        mixture=ExpertLayout("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size", 8, 2),
        kv_heads=8,
        theta=1e6,
        positions=131072,
        epsilon=1e-5,
        prefix_tokens=("<s>",),
    )
)
