"""One layer: where its norms and sums stand, how its scores are scaled, and what differs by its number."""

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import AttentionConfig, EncodingConfig, NormConfig
from jaxformer.nn import reference
from jaxformer.nn.attention import Attention
from jaxformer.nn.block import Block, LayerContext
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.layers import Norm
from jaxformer.nn.masks import Mask, slots_from_segments

LENGTH, WIDTH = 4, 8
SLOTS = slots_from_segments(jnp.ones((1, LENGTH), jnp.int32))
X = jnp.asarray(np.random.default_rng(0).standard_normal((1, LENGTH, WIDTH)), jnp.float32)


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_scores_are_divided_by_the_number_of_the_layer_from_one(layer):
    encoding = EncodingConfig(kind="none")
    scaled = Attention(AttentionConfig(heads=2, bias=False, scale_by_layer=True), encoding, WIDTH)
    plain = Attention(AttentionConfig(heads=2, bias=False), encoding, WIDTH)
    made = nn.meta.unbox(plain.init(jax.random.key(0), X, Mask(SLOTS, SLOTS)))
    params = jax.tree.map(lambda x: 3.0 * x, made["params"])
    less = params | {"query": {"kernel": params["query"]["kernel"] / (layer + 1)}}
    got = scaled.apply({"params": params}, X, Mask(SLOTS, SLOTS), layer=jnp.int32(layer))[0]
    np.testing.assert_allclose(got, plain.apply({"params": less}, X, Mask(SLOTS, SLOTS))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("every", "banded"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_the_last_layer_of_every_so_many_is_banded(every, banded):
    """By gradient: with a window of 1 a banded layer's slots see themselves alone."""
    attention = AttentionConfig(heads=2, window=1, window_every=every)
    block = Block(builders.stack(attention=attention, encoding=EncodingConfig(kind="none")))
    context = LayerContext(Mask(SLOTS, SLOTS, causal=True, window=1))
    params = nn.meta.unbox(block.init(jax.random.key(0), (X, None), jnp.int32(0), None, context))

    def last(x, layer):
        return jnp.sum(block.apply(params, (x, None), layer, None, context)[0][0][0, -1])

    gradient = jax.jit(jax.grad(last))
    seen = [bool(jnp.any(gradient(X, jnp.int32(layer))[0, 0] != 0)) for layer in range(4)]
    assert [layer for layer in range(4) if not seen[layer]] == banded


def test_scores_are_divided_by_the_root_of_a_head_width_of_its_own():
    """Where heads x head width is not the model width: twice as wide heads."""
    attention = Attention(AttentionConfig(heads=2, head_width=8, bias=False), EncodingConfig(kind="none"), WIDTH)
    params = nn.meta.unbox(attention.init(jax.random.key(0), X, Mask(SLOTS, SLOTS)))["params"]
    q, k, v = (jnp.einsum("btd,dhk->bhtk", X, params[name]["kernel"]) for name in ("query", "key", "value"))
    o = jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3) / 8**0.5) @ v
    wanted = jnp.einsum("bhtk,hkd->btd", o, params["out"]["kernel"])
    got = attention.apply({"params": params}, X, Mask(SLOTS, SLOTS))[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["pre", "post", "sandwich"])
def test_norms_and_residual_sums_stand_where_the_order_says(order):
    config = builders.stack(norm=NormConfig(order=order), encoding=EncodingConfig(kind="none"))
    block, context = Block(config), LayerContext(Mask(SLOTS, SLOTS))
    drawn = nn.meta.unbox(block.init(jax.random.key(0), (X, None), jnp.int32(0), None, context))["params"]
    noise = np.random.default_rng(1).standard_normal  # so that no norm is as any other
    params = jax.tree.map(lambda x: x + 0.3 * noise(x.shape).astype(np.float32), drawn)

    def norm(name, x):
        return Norm(config.norm).apply({"params": params[name]}, x)

    def sublayer(name, x, function):
        if order == "post":
            return norm(f"{name}_norm", x + function(x))
        y = function(norm(f"{name}_norm", x))
        return x + (norm(f"{name}_post_norm", y) if order == "sandwich" else y)

    attention = Attention(config.attention, config.encoding, WIDTH)
    attend = lambda x: attention.apply({"params": params["attention"]}, x, Mask(SLOTS, SLOTS))[0]  # noqa: E731
    feed = lambda x: FeedForward(config.ffn, WIDTH).apply({"params": params["ffn"]}, x)  # noqa: E731
    wanted = sublayer("ffn", sublayer("attention", X, attend), feed)
    (got, _), _ = block.apply({"params": params}, (X, None), jnp.int32(0), None, context)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_without_an_output_projection_heads_stand_one_after_another():
    attention = Attention(AttentionConfig(heads=2, bias=False, output=False), EncodingConfig(kind="none"), WIDTH)
    params = nn.meta.unbox(attention.init(jax.random.key(0), X, Mask(SLOTS, SLOTS)))["params"]
    got = attention.apply({"params": params}, X, Mask(SLOTS, SLOTS))[0]
    heads = [
        reference.single_head(X, *(params[name]["kernel"][:, head] for name in ("query", "key", "value")))
        for head in range(2)
    ]
    np.testing.assert_allclose(got, jnp.concatenate(heads, axis=-1), rtol=1e-5, atol=1e-6)
