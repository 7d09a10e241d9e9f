"""Hugging Face checkpoints, read and written with our own code: neither torch nor transformers is needed."""
