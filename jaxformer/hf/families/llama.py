"""LLaMA 1 to 3 (Touvron et al. 2023): grouped queries by num_key_value_heads, all rope scalings."""

from jaxformer.hf.families._llama import Variant, family

FAMILY = family(Variant(type="llama", name="Llama", mlp_bias=True, before=("<s>",)))
