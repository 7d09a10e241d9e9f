"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts scored by a softmax, within groups of devices."""

from jaxformer.hf.families._deepseek import Variant, family

FAMILY = family(Variant("deepseek_v2", "DeepseekV2", sigmoid=False))
