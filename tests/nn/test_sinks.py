"""Attention sinks and clamped gates against their definitions, which share no code with the modules."""

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import testing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    FeedForwardConfig,
    LatentConfig,
    MeshConfig,
    MoEConfig,
    checks,
)
from jaxformer.nn import kernels, layers
from jaxformer.nn.kernels import CallSite, blockwise, dense
from jaxformer.nn.masks import Mask
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Slots

LENGTH, HEADS, GROUPS = 5, 4, 2
RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(2, LENGTH, n, 3)), jnp.float32) for n in (HEADS, GROUPS, GROUPS))
SINK = jnp.asarray([0.5, -1.0, 3.0, 0.0])
WEIGHT = jnp.asarray(RNG.normal(size=(2, LENGTH, HEADS, 3)), jnp.float32)
SEGMENT = np.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])


def mask(window=None):
    slots = Slots(jnp.asarray([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]), jnp.asarray(SEGMENT))
    return Mask(slots, slots, True, window)


def slow(q, k, v, sink, window):
    """Exponentials of visible scores over their sum and that of the sink, without a softmax."""
    t = np.arange(LENGTH)
    see = (SEGMENT[:, :, None] == SEGMENT[:, None]) & (SEGMENT[:, :, None] > 0) & (t[:, None] >= t)
    see &= t[:, None] - t < (window or LENGTH)
    k, v = k[:, :, [0, 0, 1, 1]], v[:, :, [0, 0, 1, 1]]
    weights = jnp.exp(jnp.sum(q[:, :, None] * k[:, None], axis=-1)) * see[..., None]
    share = weights / (jnp.sum(weights, axis=2, keepdims=True) + jnp.exp(sink))
    return jnp.sum(share[..., None] * v[:, None], axis=2)


@pytest.mark.parametrize("window", [None, 2])
def test_a_sink_takes_its_share_in_value_and_gradient(window):
    config = AttentionConfig(heads=HEADS, kv_heads=GROUPS, block=2, sink=True)

    def loss(attend):
        return lambda *args: jnp.sum(jnp.sin(attend(*args)) * WEIGHT)

    expected = jax.jit(jax.value_and_grad(loss(lambda *a: slow(*a, window)), (0, 1, 2, 3)))(Q, K, V, SINK)
    for kernel in (dense, blockwise):
        ours = lambda q, k, v, sink, run=kernel.attend: run(q, k, v, mask(window), None, None, config, sink)  # noqa: E731
        found = jax.jit(jax.value_and_grad(loss(ours), (0, 1, 2, 3)))(Q, K, V, SINK)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=kernel.__name__)


def test_only_kernels_with_sinks_are_chosen_and_others_refused():
    site = CallSite("cpu", "float32", 4, 4, 8, 64, 64, causal=True, context=2)
    assert kernels.choose_kernel(AttentionConfig(), site)[0] in ("ring", "ulysses")
    assert kernels.choose_kernel(AttentionConfig(sink=True), site)[0] == "dense"
    for name in ("ring", "ulysses", "splash", "cudnn"):
        assert kernels.get(name).needs(AttentionConfig(sink=True), False, False) == "attention.sink False"
        with pytest.raises(ConfigError, match=f"attention.kernel: got '{name}', .*attention.sink False"):
            checks.check(Config(model=builders.decoder(attention=AttentionConfig(heads=2, kernel=name, sink=True))))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_clamped_gates(limit):
    config = FeedForwardConfig(activation="silu", gated=True, slope=1.702, limit=limit, offset=1.0)
    x, gate = np.array([-2.0, -0.2, 0.3, 4.0]), np.array([3.0, -3.0, 0.2, 0.6])
    expected = []
    for value, opening in zip(x, gate, strict=True):
        if limit is not None:
            opening = limit if opening > limit else opening
            value = max(-limit, min(limit, value))
        expected.append(opening / (1 + np.exp(-1.702 * opening)) * (value + 1))
    np.testing.assert_allclose(layers.activate(config, jnp.asarray(x), jnp.asarray(gate)), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def clamped():
    """A model with sinks, windows in every other layer, clamped gates and a bias of the router, and a batch."""
    gates = FeedForwardConfig(width=8, activation="silu", gated=True, slope=1.702, limit=0.5, offset=1.0)
    config = builders.decoder(
        attention=AttentionConfig(heads=2, kv_heads=1, sink=True, window=2, window_every=2),
        ffn=gates,
        moe=MoEConfig(experts=4, top_k=2, router_bias=True),
    )
    return *builders.make(config), builders.batch(config, [6, 4, 5, 6])


def test_decoding_with_a_cache_equals_the_whole_pass(clamped):
    module, variables, _ = clamped
    config = builders.decoder()  # the streams of a decoder
    testing.assert_steps_equal_forward(module, variables, builders.batch(config, [6, 6]), prompt=3)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2, "data": 2}, {"context": 2, "expert": 2, "data": 2}])
def test_a_mesh_of_eight_changes_nothing(clamped, sizes):
    mesh = meshes.make(MeshConfig(**{"data": 1, **sizes}), jax.devices()[:8])
    testing.assert_sharded_equals_single(*clamped, mesh)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"ffn": FeedForwardConfig(slope=2.0)}, "ffn.slope: got 2.0, expected 1.0 with ffn.activation gelu"),
        ({"ffn": FeedForwardConfig(limit=2.0)}, "ffn.limit: got 2.0, expected None where ffn.gated is False"),
        ({"ffn": FeedForwardConfig(offset=1.0)}, "ffn.offset: got 1.0, expected 0.0 where ffn.gated is False"),
        ({"attention": AttentionConfig(sink=True, latent=LatentConfig())}, "sink: got True, expected False with"),
    ],
)
def test_what_nothing_would_read_is_refused(edits, message):
    with pytest.raises(ConfigError, match=message):
        checks.check(Config(model=builders.decoder(**edits)))
