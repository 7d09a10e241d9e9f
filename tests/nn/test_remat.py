"""Rematerialisation changes memory and nothing else."""

from __future__ import annotations

import builders
import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import AttentionConfig, ConfigError, FeedForwardConfig, NormConfig
from jaxformer.models import build
from jaxformer.nn import remat

ORDER = ("full", "names", "minimal", "none")


def gradient(policy: str, batch):
    """The compiled loss and gradient of a decoder whose layers follow a policy, and its variables.

    Deep enough that what waits for the backward pass outweighs what one layer needs at a time.
    """
    config = builders.decoder(
        remat=policy,
        layers=24,
        width=16,
        norm=NormConfig(kind="rms"),
        attention=AttentionConfig(heads=2, bias=False),
        ffn=FeedForwardConfig(width=64, bias=False),
    )
    variables = builders.make(config)[1]
    module = build.build(config)
    loss = lambda variables: jnp.square(module.apply(variables, batch)).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss)).lower(variables).compile(), variables


@pytest.fixture(scope="module")
def batch():
    return builders.batch(builders.decoder(), [64, 50, 64, 10])


def test_policies_agree_in_value_and_gradient_and_differ_in_memory(batch):
    made = {policy: gradient(policy, batch) for policy in (*ORDER, "offload")}
    results = {policy: compiled(variables) for policy, (compiled, variables) in made.items()}
    for policy in made:
        chex.assert_trees_all_close(results[policy], results["none"], rtol=1e-5, atol=1e-6)
    bytes_ = [made[policy][0].memory_analysis().temp_size_in_bytes for policy in ORDER]
    assert bytes_ == sorted(set(bytes_)), dict(zip(ORDER, bytes_, strict=True))


def test_offloading_needs_host_memory_beside_the_devices(batch, monkeypatch):
    class Device:
        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})()]

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ConfigError, match="got offload, expected a device with pinned host memory .it has device"):
        remat.policy(builders.stack(remat="offload"))
