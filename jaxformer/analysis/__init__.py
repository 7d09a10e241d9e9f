"""Attention maps, logit lens, ablation and patching of a model, as arrays; nothing here draws or writes files."""
