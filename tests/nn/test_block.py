"""What differs between the layers of one stack: the scale of their scores, and the width of their windows."""

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.nn.attention import Attention
from jaxformer.nn.block import Block, Context
from jaxformer.nn.masks import Mask, slots

LENGTH, WIDTH = 4, 8
SLOTS = slots(jnp.ones((1, LENGTH), jnp.int32))
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
    context = Context(Mask(SLOTS, SLOTS, causal=True, window=1))
    params = nn.meta.unbox(block.init(jax.random.key(0), (X, None), jnp.int32(0), None, context))

    def last(x, layer):
        return jnp.sum(block.apply(params, (x, None), layer, None, context)[0][0][0, -1])

    gradient = jax.jit(jax.grad(last))
    seen = [bool(jnp.any(gradient(X, jnp.int32(layer))[0, 0] != 0)) for layer in range(4)]
    assert [layer for layer in range(4) if not seen[layer]] == banded
