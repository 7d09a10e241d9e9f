"""Mixtral (Jiang et al. 2024): Mistral whose feed-forward layers are mixtures of experts."""

from jaxformer.hf.families._llama import Mixture, Variant, family

FAMILY = family(
    Variant(
        type="mixtral",
        name="Mixtral",
        bias="none",
        has_window=True,
        mixture=Mixture("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size", 8, 2),
        kv_heads=8,
        theta=1e6,
        positions=131072,
        epsilon=1e-5,
        before=("<s>",),
    )
)
