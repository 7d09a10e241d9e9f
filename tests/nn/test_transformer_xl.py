"""Transformer-XL positions against the published shift, their clamp, token types, and masks of single pairs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig
from jaxformer.nn.encodings import transformer_xl
from jaxformer.nn.encodings.transformer_xl import TokenTypes, Weights
from jaxformer.nn.kernels import blockwise, dense
from jaxformer.nn.masks import Mask, slots_from_segments

HEADS, HEAD_WIDTH, WIDTH = 2, 3, 8


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(token_types=None):
    shapes = {"content": (), "position": (), "token_type": (), "kernel": (WIDTH,), "relation": (2,)}
    made = {name: draw(i, *shape, HEADS, HEAD_WIDTH) for i, (name, shape) in enumerate(shapes.items())}
    return Weights(**made, token_types=token_types)


def shifted(layer, q, k, clamp=None, same=None):
    """The papers' way, for S - T slots of memory before T queries: codes of S ... -T + 1, then the relative shift."""
    rows, slots = q.shape[1], k.shape[1]
    position = np.arange(slots, -rows, -1.0)
    position = position if clamp is None else np.clip(position, -clamp, clamp)
    angle = position[:, None] / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    r = np.einsum("jd,dhk->jhk", np.concatenate([np.sin(angle), np.cos(angle)], -1), layer.kernel)
    by_position = np.einsum("bihk,jhk->bhij", q + layer.position, r)
    shape = by_position.shape
    moved = by_position.reshape(*shape[:2], shape[3], shape[2])[:, :, 1:].reshape(*shape[:3], shape[3] - 1)
    total = moved[..., :slots] + np.einsum("hk,bjhk->bhj", layer.content, k)[:, :, None]
    if same is not None:
        either = np.einsum("bihk,rhk->rbhi", q + layer.token_type, layer.relation)[..., None]
        total = total + np.where(same[:, None], either[0], either[1])
    return total


@functools.partial(jax.jit, static_argnames="clamp")
def score(layer, q, k, i, j, clamp=None):
    return transformer_xl.bias(EncodingConfig("transformer_xl", clamp=clamp), layer, q, k, i, j)


@pytest.mark.parametrize("clamp", [None, 3])
@pytest.mark.parametrize("memory", [0, 2])
def test_scores_are_the_papers_shift(clamp, memory):
    q, k = draw(7, 2, 5, HEADS, HEAD_WIDTH), draw(8, 2, 5 + memory, HEADS, HEAD_WIDTH)
    kind = np.array([[0, 0, 1, 1, 2], [3, 3, 0, 1, 1]])
    key_kind = np.concatenate([np.zeros((2, memory), int), kind], axis=1)
    i, j = np.tile(np.arange(5), (2, 1)), np.tile(np.arange(-memory, 5), (2, 1))
    layer = weights(TokenTypes(kind, key_kind))
    expected = shifted(layer, q, k, clamp, kind[:, :, None] == key_kind[:, None, :])
    np.testing.assert_allclose(score(layer, q, k, i, j, clamp), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clamp", [None, 3])
def test_scores_depend_on_positions_and_not_on_the_order_of_slots(clamp):
    q, k = draw(7, 1, 5, HEADS, HEAD_WIDTH), draw(8, 1, 5, HEADS, HEAD_WIDTH)
    order, here = np.array([3, 0, 4, 1, 2]), np.arange(5)[None]
    plain = np.asarray(score(weights(), q, k, here, here, clamp))
    moved = score(weights(), q[:, order], k[:, order], here[:, order] + 40, here[:, order] + 40, clamp)
    np.testing.assert_allclose(moved, plain[:, :, order][..., order], rtol=1e-4, atol=1e-4)


def test_token_types_are_refused_for_a_part_of_the_slots():
    kind = np.zeros((1, 5), int)
    q = draw(7, 1, 5, HEADS, HEAD_WIDTH)
    here = np.arange(5)[None]
    with pytest.raises(ConfigError, match="set attention.kernel to dense"):
        score(weights(TokenTypes(kind, kind)), q[:, :2], q, here[:, :2], here)


def test_hidden_pairs_are_honoured_or_refused():
    side = slots_from_segments(jnp.array([[1, 1, 1, 0]]))
    hidden = np.zeros((1, 4, 4), bool)
    hidden[0, 0, 1] = hidden[0, 2, 2] = True
    mask = Mask(side, side, hidden_pairs=hidden)
    expected = [[1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(mask.dense()[0], np.array(expected, bool))
    q, config = draw(1, 1, 4, HEADS, HEAD_WIDTH), AttentionConfig(heads=HEADS)
    probs = jax.jit(lambda m: dense.probabilities(q, q, m, None, None, config))(mask)
    chex.assert_trees_all_equal(probs[0] > 0, np.broadcast_to(np.array(expected, bool), (HEADS, 4, 4)))
    with pytest.raises(ConfigError, match="got blockwise with a mask of single pairs"):
        blockwise.attend(q, q, q, mask, None, None, config)
