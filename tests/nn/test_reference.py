"""The plain functions agree with one another, with the dense kernel, and with sums written out by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels, reference
from jaxformer.nn.masks import Mask, slots_from_segments

WIDTH, HEADS, HEAD_WIDTH, LENGTH = 6, 2, 3, 5


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def setup():
    projections = [normal(i, WIDTH, HEADS, HEAD_WIDTH) / WIDTH**0.5 for i in range(3)]
    return normal(3, 2, LENGTH, WIDTH), projections, normal(4, HEADS, HEAD_WIDTH, WIDTH)


def mask_of(name):
    segment = {"padded": [[1, 1, 1, 0, 0], [1] * 5], "packed": [[1, 1, 2, 2, 2], [1] * 5]}
    side = slots_from_segments(jnp.array(segment.get(name, [[1] * 5] * 2)))
    return Mask(side, side, causal=name in ("causal", "packed"))


MASKS = ["full", "padded", "causal", "packed"]


def test_softmax_by_hand():
    scores = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0], [1.0, 2.0, 3.0]]))
    mask = jnp.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], bool)
    expected = jnp.array([[0.125, 0.25, 0.625], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    chex.assert_trees_all_close(reference.softmax(scores, mask), expected, rtol=1e-6)
    chex.assert_trees_all_close(reference.softmax(scores + 1000.0, mask), expected, rtol=1e-3)


def test_self_attention_is_the_written_out_sum(setup):
    x = np.asarray(setup[0], np.float64)
    expected = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(LENGTH):
            weight = np.exp([x[b, t] @ x[b, s] for s in range(LENGTH)])
            expected[b, t] = sum(weight[s] / weight.sum() * x[b, s] for s in range(LENGTH))
    np.testing.assert_allclose(reference.self_attention(setup[0]), expected, rtol=2e-5, atol=1e-5)


def test_scale_divides_by_the_root_of_the_head_width(setup):
    x, (wq, wk, wv), _ = setup
    one = reference.single_head(x, wq[:, 0], wk[:, 0], wv[:, 0], scale=True)
    other = reference.single_head(x, wq[:, 0] / jnp.sqrt(HEAD_WIDTH), wk[:, 0], wv[:, 0], scale=False)
    chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [True, False])
def test_parameter_free_is_single_head_with_identity_weights(setup, name, scale):
    x, eye = setup[0], jnp.eye(WIDTH)
    mask = mask_of(name).dense()
    chex.assert_trees_all_close(
        reference.self_attention(x, mask, scale), reference.single_head(x, eye, eye, eye, mask, scale), rtol=1e-6
    )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [True, False])
def test_loop_is_batched_is_dense_kernel(setup, name, scale):
    x, (wq, wk, wv), wo = setup
    mask = mask_of(name)
    loop = reference.multi_head_loop(x, wq, wk, wv, wo, mask.dense(), scale)
    batched = reference.multi_head(x, wq, wk, wv, wo, mask.dense(), scale)
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    q = q / jnp.sqrt(HEAD_WIDTH) if scale else q
    kernel = kernels.get("dense").apply(q, k, v, mask, None, None, AttentionConfig(heads=HEADS))
    chex.assert_trees_all_close(loop, batched, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(loop, jnp.einsum("bthk,hkd->btd", kernel, wo), rtol=1e-4, atol=1e-5)


def test_one_head_of_full_width_is_single_head(setup):
    x = setup[0]
    wq, wk, wv = (normal(i, WIDTH, WIDTH) for i in range(3))
    looped = reference.multi_head_loop(x, wq[:, None], wk[:, None], wv[:, None], jnp.eye(WIDTH)[None])
    chex.assert_trees_all_close(looped, reference.single_head(x, wq, wk, wv), rtol=1e-5, atol=1e-6)


def test_permutation_equivariance_without_mask_and_its_loss_with_a_causal_one(setup):
    x, order = setup[0], jnp.array([2, 0, 4, 1, 3])
    chex.assert_trees_all_close(
        reference.self_attention(x)[:, order], reference.self_attention(x[:, order]), rtol=1e-5, atol=1e-6
    )
    mask = mask_of("causal").dense()
    gap = reference.self_attention(x, mask)[:, order] - reference.self_attention(x[:, order], mask)
    assert jnp.max(jnp.abs(gap)) > 0.1


def test_heads_slice_channels_not_time(setup):
    """The output at one time step depends on every other step through every head."""
    x, (wq, wk, wv), wo = setup
    for head in range(HEADS):
        only = jnp.zeros_like(wo).at[head].set(wo[head])
        jacobian = jax.jit(jax.jacobian(lambda x, wo=only: reference.multi_head_loop(x, wq, wk, wv, wo)[0]))(x)[:, :, 0]
        assert (jnp.max(jnp.abs(jacobian), axis=(1, 3)) > 1e-4).all()
