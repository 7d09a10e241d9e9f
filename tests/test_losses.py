"""Cross-entropy against its formula written out, values and gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import losses


def plain(logits, labels, weights, smoothing=0.0, z_loss=0.0, classes=None):
    """The definition: cross-entropy against an explicit target distribution, differentiated by JAX."""
    classes = logits.shape[-1] if classes is None else classes
    target = (1 - smoothing) * jax.nn.one_hot(labels, logits.shape[-1])
    target = target + smoothing / classes * (jnp.arange(logits.shape[-1]) < classes)
    log_z = jnp.log(jnp.exp(logits).sum(-1))
    return jnp.sum(weights * (-(target * (logits - log_z[..., None])).sum(-1) + z_loss * log_z**2))


def example(seed=0, shape=(2, 3), vocab=8, classes=7):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((*shape, vocab))
    return jnp.float32(logits), jnp.int32(rng.integers(classes, size=shape)), jnp.float32(rng.random(shape))


def test_a_pointer_is_a_cross_entropy_over_the_slots_that_may_be_chosen():
    """Gradients too; rows without a label, padding and slots that may not be chosen count for nothing."""
    rng = np.random.default_rng(0)
    logits = jnp.float32(2 * rng.standard_normal((3, 5, 2)))
    allowed = jnp.array([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
    labels = np.zeros((3, 5, 2), bool)
    labels[0, 2, 0] = labels[0, 3, 1] = labels[1, 4, 0] = True  # the second row's other choice is not known

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def ours(x):
        return losses.pointer_cross_entropy(x, jnp.asarray(labels), allowed, 0.2, 1e-2)

    @jax.jit
    @jax.value_and_grad
    def formula(x):
        rows = [(x[0, [0, 2, 3], 0], 1), (x[0, [0, 2, 3], 1], 2), (x[1, :, 0], 4)]
        return sum(plain(row[None], jnp.array([place]), jnp.ones(1), 0.2, 1e-2) for row, place in rows)

    (value, count), slope = ours(logits)
    chex.assert_trees_all_close((value, slope), formula(logits), rtol=2e-5, atol=2e-6)
    assert count == 3


class CrossEntropy(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_is_its_formula_and_so_is_its_gradient(self):
        logits, labels, weights = example()
        for smoothing, z_loss, classes in [(0, 0, None), (0.1, 0, None), (0.3, 1e-2, 5)]:
            labels = labels % (classes or 8)
            ours = self.variant(
                jax.value_and_grad(
                    lambda x: losses.cross_entropy(x, labels, weights, smoothing, z_loss, classes)[0]  # noqa: B023
                )
            )(logits)
            formula = jax.jit(jax.value_and_grad(plain), static_argnums=(3, 4, 5))
            wanted = formula(logits, labels, weights, smoothing, z_loss, classes)
            chex.assert_trees_all_close(ours, wanted, rtol=2e-5, atol=2e-6)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def sums(logits, labels, weights, smoothing=0.0, z_loss=0.0, classes=None):
    """Loss sum, weight sum, gradient of the loss sum."""
    loss = jax.value_and_grad(
        lambda x: losses.cross_entropy(x, labels, weights, smoothing, z_loss, classes), has_aux=True
    )
    (value, count), slope = loss(logits)
    return value, count, slope


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((0.0, 0.0, None), np.log(4)),
        ((0.0, 0.5, None), np.log(4) + 0.5 * 2**2),
        ((0.3, 0.0, None), 0.7 * np.log(4) + 0.1 * (np.log(2) + 2 * np.log(4))),
        ((0.3, 0.0, 2), 0.7 * np.log(4) + 0.15 * (np.log(2) + np.log(4))),
    ],
)
def test_hand_computed_values(options, wanted):
    logits = np.log(np.float32([[0.5, 0.25, 0.25]])) + 2  # log Z = 2
    loss, count, _ = sums(logits, np.array([1]), np.ones(1, np.float32), *options)
    np.testing.assert_allclose((loss, count), (wanted, 1), rtol=1e-6)


def test_slots_of_weight_zero_are_not_counted():
    logits, labels, weights = example()
    weights = np.where(np.arange(weights.size).reshape(weights.shape) % 2, weights, 0.0).astype(np.float32)
    assert 0 < weights.sum() != weights.size
    assert sums(logits, labels, weights)[1] == pytest.approx(weights.sum())


def test_labels_of_weight_zero_may_be_anything():
    logits, labels, weights = map(np.array, example())
    weights[0, 1], labels[0, 1] = 0.0, 0
    wanted = sums(logits, labels, weights, 0.1, 1e-3)
    for junk in (-1, -100, 8, 10**6):
        labels[0, 1] = junk
        ours = sums(logits, labels, weights, 0.1, 1e-3)
        chex.assert_trees_all_equal(ours, wanted)
        chex.assert_tree_all_finite(ours)
        np.testing.assert_array_equal(ours[2][0, 1], 0.0)


def test_extreme_logits_stay_finite():
    logits = np.float32([[1e4, -1e4, 0.0], [-3e38, -3e38, 0.0]])
    value = sums(logits, np.array([0, 2]), np.ones(2, np.float32))
    chex.assert_tree_all_finite(value)
    np.testing.assert_allclose(value[0], 0.0, atol=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels, weights = example()
    low = logits.astype(jnp.bfloat16)
    value, _, slope = sums(low, labels, weights)
    assert value.dtype == jnp.float32
    assert slope.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, plain(low.astype(jnp.float32), labels, weights), rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), cut=st.sampled_from([1, 2]))
def test_ragged_microbatches_sum_to_the_whole(seed, cut):
    logits, labels, weights = map(np.asarray, example(seed, shape=(4, 3)))
    weights = np.float32(weights > 0.4)  # ragged: rows keep different numbers of labels
    whole = sums(logits, labels, weights, 0.1, 1e-3)
    first, second = (
        sums(logits[rows], labels[rows], weights[rows], 0.1, 1e-3) for rows in (slice(cut), slice(cut, None))
    )
    np.testing.assert_allclose(first[0] + second[0], whole[0], rtol=1e-5)
    np.testing.assert_array_equal(first[1] + second[1], whole[1])
    np.testing.assert_allclose(np.concatenate([first[2], second[2]]), whole[2], rtol=1e-6)
