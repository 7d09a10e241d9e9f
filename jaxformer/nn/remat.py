"""Rematerialisation: which of a layer's values wait for the backward pass, and which it computes again.

Chen et al. 2016. Values and gradients are the same under every policy; memory falls and work rises from none to full.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.config import ConfigError, StackConfig
from jaxformer.types import Array

NAMES = ("query", "key", "value", "attention", "cross", "hidden", "ffn")
"""What a layer gives a name: the projections, each sub-layer's output before its residual sum, and the feed-forward's
hidden activations."""


def name(x: Float[Array, "*shape"], name: str) -> Float[Array, "*shape"]:
    """`x`, under one of `NAMES`."""
    return checkpoint_name(x, name)


def policy(config: StackConfig) -> Callable | None:
    """What `jax.checkpoint` may keep under `config.remat`; None: nothing.

    Raises:
      ConfigError: offload, and this backend's devices have no pinned host memory.
    """
    policies = jax.checkpoint_policies
    if config.remat == "minimal":
        return policies.dots_with_no_batch_dims_saveable
    if config.remat == "names":
        return policies.save_only_these_names(*config.remat_names)
    if config.remat == "offload":
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" not in kinds:
            raise ConfigError(
                f"remat: got offload, expected a device with pinned host memory (it has {', '.join(kinds)}); use names"
            )
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(config.remat_names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return None
