"""Cross-entropy against its formula written out, values and gradients."""

import chex
import jax
import jax.numpy as jnp
import jax.test_util
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
    keys = jax.random.split(jax.random.key(seed), 3)
    logits = 2 * jax.random.normal(keys[0], (*shape, vocab))
    return logits, jax.random.randint(keys[1], shape, 0, classes), jax.random.uniform(keys[2], shape)


class CrossEntropy(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_is_its_formula_and_so_is_its_gradient(self):
        logits, labels, weights = example()
        for smoothing, z_loss, classes in [(0, 0, None), (0.1, 0, None), (0.1, 0, 7), (0, 1e-2, 7), (0.3, 1e-2, 5)]:
            labels = labels % (classes or 8)
            ours = self.variant(
                jax.value_and_grad(
                    lambda x: losses.cross_entropy(x, labels, weights, smoothing, z_loss, classes)[0]  # noqa: B023
                )
            )(logits)
            wanted = jax.value_and_grad(plain)(logits, labels, weights, smoothing, z_loss, classes)
            chex.assert_trees_all_close(ours, wanted, rtol=2e-5, atol=2e-6)


def test_gradient_is_the_slope():
    logits, labels, weights = example(shape=(2,), vocab=5, classes=4)
    jax.test_util.check_grads(
        lambda x: losses.cross_entropy(x, labels, weights, 0.1, 1e-2, 4)[0],
        (logits,),
        order=1,
        modes=["rev"],
        atol=1e-2,
        rtol=1e-2,
    )


def test_hand_computed_values():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]])) + 2.0  # log Z = 2, whatever the constant
    one = jnp.ones(1)
    label = jnp.array([1])
    loss, count = losses.cross_entropy(logits, label, one)
    np.testing.assert_allclose((loss, count), (np.log(4), 1), rtol=1e-6)
    loss, _ = losses.cross_entropy(logits, label, one, z_loss=0.5)
    np.testing.assert_allclose(loss, np.log(4) + 0.5 * 2**2, rtol=1e-6)
    loss, _ = losses.cross_entropy(logits, label, one, label_smoothing=0.3)
    np.testing.assert_allclose(loss, 0.7 * np.log(4) + 0.1 * (np.log(2) + 2 * np.log(4)), rtol=1e-6)
    loss, _ = losses.cross_entropy(logits, label, one, label_smoothing=0.3, classes=2)
    np.testing.assert_allclose(loss, 0.7 * np.log(4) + 0.15 * (np.log(2) + np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("junk", [-1, -100, 8, 10**6])
def test_labels_of_weight_zero_may_be_anything(junk):
    logits, labels, weights = example()
    weights = weights.at[0, 1].set(0.0)
    grad = jax.value_and_grad(lambda labels, x: losses.cross_entropy(x, labels, weights, 0.1, 1e-3)[0], argnums=1)
    ours, wanted = grad(labels.at[0, 1].set(junk), logits), grad(labels.at[0, 1].set(0), logits)
    chex.assert_trees_all_equal(ours, wanted)
    chex.assert_tree_all_finite(ours)
    np.testing.assert_array_equal(ours[1][0, 1], 0.0)


def test_extreme_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0], [-3e38, -3e38, 0.0]])
    value = jax.value_and_grad(lambda x: losses.cross_entropy(x, jnp.array([0, 2]), jnp.ones(2))[0])(logits)
    chex.assert_tree_all_finite(value)
    np.testing.assert_allclose(value[0], 0.0, atol=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels, weights = example()
    low = logits.astype(jnp.bfloat16)
    ours, _ = losses.cross_entropy(low, labels, weights)
    wanted, _ = losses.cross_entropy(low.astype(jnp.float32), labels, weights)
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(ours, wanted)
    assert jax.grad(lambda x: losses.cross_entropy(x, labels, weights)[0])(low).dtype == jnp.bfloat16


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), cut=st.integers(1, 5))
def test_ragged_microbatches_sum_to_the_whole(seed, cut):
    logits, labels, weights = example(seed, shape=(6, 3))
    weights = (weights > 0.4).astype(jnp.float32)  # ragged: rows keep different numbers of labels

    def sums(part):
        grad = jax.value_and_grad(
            lambda x: losses.cross_entropy(x, labels[part], weights[part], 0.1, 1e-3), has_aux=True
        )
        (loss, count), slope = grad(logits[part])
        return loss, count, slope

    whole, first, second = sums(slice(None)), sums(slice(cut)), sums(slice(cut, None))
    np.testing.assert_allclose(first[0] + second[0], whole[0], rtol=1e-5)
    np.testing.assert_array_equal(first[1] + second[1], whole[1])
    np.testing.assert_allclose(np.concatenate([first[2], second[2]]), whole[2], rtol=1e-6)
