"""Rematerialisation: which activations of a layer are stored for the backward pass, and which are recomputed.

Chen et al. 2016. Values and gradients are equal under every policy. From "none" to "full", memory falls and work rises.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.config import StackConfig
from jaxformer.errors import ConfigError
from jaxformer.types import Array

NAMES = ("query", "key", "value", "attention", "cross", "hidden", "ffn")
"""Names of activations: the projections, each sub-layer's output before its residual sum, and the hidden activations of
the feed-forward layer."""


def name_activation(x: Float[Array, "*shape"], name: str) -> Float[Array, "*shape"]:
    """`x`, marked with one of `NAMES` for the policies "names" and "offload"."""
    return checkpoint_name(x, name)


def policy(config: StackConfig) -> Callable | None:
    """The policy of `jax.checkpoint` for `config.remat`; None stores nothing.

    Raises:
      ConfigError: remat is "offload", but the devices have no pinned host memory.
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
