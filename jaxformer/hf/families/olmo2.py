"""OLMo 2 (OLMo et al. 2024): LLaMA with norms on the outputs of sub-layers, and on queries and keys of all heads."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(
    Variant(
        model_type="olmo2",
        class_prefix="Olmo2",
        answering_prefix="",
        norm_order="res_post",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        has_query_key_norm=True,
        norm_over="heads",
        has_token_head=False,
        epsilon=1e-5,
    )
)
