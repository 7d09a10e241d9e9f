"""jaxformer: transformers, and the recurrent models before them, in JAX and Flax Linen, from one config."""
