"""The gated delta rule against the recurrence slot by slot, and layers that have it in every place that reads layers."""

from __future__ import annotations

import dataclasses

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import testing
from jaxformer.config import AttentionConfig, DeltaConfig, EncodingConfig, FeedForwardConfig, MoEConfig, NormConfig
from jaxformer.nn import delta_rule
from jaxformer.nn.gated_delta import GatedDelta, text_numbers

DELTA = DeltaConfig(key_heads=2, value_heads=4, key_width=3, value_width=2, kernel=3, chunk=4)
"""Heads of values that share keys, unlike widths, and chunks that divide no length of these tests."""


# --- the layer --------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_slots(params, config, x, segment):
    """The layer on one row `[T, D]`: one text, one head and one slot after the other, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    y, keys = np.zeros_like(x), config.key_heads * config.key_width
    for text in sorted(set(segment) - {0}):
        places = [t for t in range(len(x)) if segment[t] == text]
        rows = x[places]
        mixed = {}
        for name in ("query", "key", "value"):
            inputs, taps = rows @ params[name]["kernel"], params[f"{name}_conv"]
            summed = np.zeros_like(inputs)
            for t in range(len(rows)):
                for back in range(min(config.kernel, t + 1)):
                    summed[t] += taps[config.kernel - 1 - back] * inputs[t - back]
            mixed[name] = summed * sigmoid(summed)
        assert mixed["query"].shape[1] == keys
        gate = rows @ params["gate"]["kernel"]
        steps = np.log1p(np.exp(rows @ params["decay"]["kernel"] + params["step_bias"]))
        betas = sigmoid(rows @ params["beta"]["kernel"])
        heads = np.zeros((len(rows), config.heads * config.value_width))
        for h in range(config.heads):
            of_key = h * config.key_heads // config.heads
            k_part = slice(of_key * config.key_width, (of_key + 1) * config.key_width)
            v_part = slice(h * config.value_width, (h + 1) * config.value_width)
            state = np.zeros((config.key_width, config.value_width))
            for t in range(len(rows)):
                q, k, v = mixed["query"][t, k_part], mixed["key"][t, k_part], mixed["value"][t, v_part]
                q, k = (z / np.sqrt(z @ z + 1e-6) for z in (q, k))
                decayed = state * np.exp(-np.exp(params["log_scale"][h]) * steps[t, h])
                state = decayed + betas[t, h] * np.outer(k, v - decayed.T @ k)
                o = state.T @ q / np.sqrt(config.key_width)
                o = o / np.sqrt(np.mean(o**2) + config.epsilon) * params["norm"]["scale"]
                heads[t, v_part] = o * gate[t, v_part] * sigmoid(gate[t, v_part])
        y[places] = heads @ params["out"]["kernel"]
    return y


@pytest.fixture(scope="module")
def layer():
    """A layer with drawn parameters, two rows of packed and padded texts, and its outputs for them."""
    module, rng = GatedDelta(DELTA, 8), np.random.default_rng(0)
    x = rng.normal(size=(2, 11, 8)).astype(np.float32)
    segment = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 2, 2, 3, 0, 0]], np.int32)
    shape = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), x, segment)))
    variables = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), shape)
    return module, variables, x, segment


def test_the_layer_is_that_of_loops_over_texts_heads_and_slots(layer):
    module, variables, x, segment = layer
    got = jax.jit(module.apply)(variables, x, segment)[0]
    for row in range(2):
        expected = by_slots(variables["params"], DELTA, x[row].astype(np.float64), segment[row])
        real = segment[row] > 0
        np.testing.assert_allclose(np.asarray(got[row])[real], expected[real], rtol=1e-4, atol=2e-5)
