"""LLaMA 1 to 3 (Touvron et al. 2023): grouped queries by num_key_value_heads, all rope scalings."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(Variant(model_type="llama", class_prefix="Llama", has_mlp_bias=True, prefix_tokens=("<s>",)))
