"""DeepSeek-V3 (DeepSeek-AI 2024): V2 with experts scored one by one, balanced by a bias in place of a loss."""

from jaxformer.hf.families._deepseek import Variant, family

FAMILY = family(Variant("deepseek_v3", "DeepseekV3", sigmoid=True, has_token_head=True))
