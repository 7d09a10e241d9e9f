"""Scores that grow with the position of their query (`attention.temperature`), and the option's crossings."""

from __future__ import annotations

import dataclasses
import math

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import testing
from jaxformer.analysis.draw import model as drawing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EncodingConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    TemperatureConfig,
)
from jaxformer.config.checks.stack import check_stack
from jaxformer.hf import comparison
from jaxformer.models import xlnet
from jaxformer.nn import attention, block
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch, Stream

OWN = AttentionConfig(heads=4, kv_heads=2, temperature=TemperatureConfig(rate=0.7, length=2))


def factors(positions):
    return np.array([[1 + 0.7 * math.log(1 + p // 2) for p in row] for row in positions])


def test_the_factor_is_that_of_the_definition():
    positions = np.array([[0, 1, 2, 3, 4, 5, 11], [-3, -1, 0, 9, 8191, 8192, 2]])
    got = attention.temperature(OWN.temperature, jnp.asarray(positions))
    np.testing.assert_allclose(got, factors(np.maximum(positions, 0)), rtol=1e-6)
    assert got[0, 1] == 1 and got.dtype == jnp.float32


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_scores_of_a_packed_row_are_multiplied_by_the_factor_of_the_position_in_its_text(kernel):
    """Since exp(f s) is exp(s)^f, probabilities are powers of those without the option, divided by their sum."""
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2, 0]])
    slots = slots_from_segments(segments)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 8)), jnp.float32)
    mask = Mask(slots, slots, causal=True, same_slots=True)
    plain = dataclasses.replace(OWN, temperature=None, block=4)
    make = lambda config: attention.Attention(config, EncodingConfig("none"), 8)  # noqa: E731
    params = nn.meta.unbox(make(plain).init(jax.random.key(0), x, mask))
    run = lambda config, **more: make(config).apply(params, x, mask, **more)  # noqa: E731
    _, sown = run(plain, mutable=["intermediates"])
    before = np.asarray(sown["intermediates"]["probabilities"][0], np.float64)[0]  # [H, T, S]
    power = before ** factors([[0, 1, 2, 0, 1, 2, 3, 4, 0]])[0][None, :, None]
    expected = power / power.sum(-1, keepdims=True)
    own = dataclasses.replace(OWN, kernel=kernel, block=4)
    (got, _), sown = run(own, mutable=["intermediates"])
    text = slice(0, 8)
    np.testing.assert_allclose(sown["intermediates"]["probabilities"][0][0][:, text], expected[:, text], atol=1e-6)
    assert np.abs(expected - before)[:, text].max() > 0.01
    kernels = jax.tree.map(lambda p: np.asarray(p, np.float64), params["params"])
    v = np.einsum("td,dgk->tgk", np.asarray(x[0], np.float64), kernels["value"]["kernel"]) + kernels["value"]["bias"]
    o = np.einsum("hts,shk->thk", expected, np.repeat(v, 2, axis=1))
    y = np.einsum("thk,hkd->td", o, kernels["out"]["kernel"]) + kernels["out"]["bias"]
    np.testing.assert_allclose(got[0, text], y[text], rtol=1e-4, atol=1e-5)


def test_cached_tokens_and_beams_have_the_logits_of_the_whole_pass():
    config = ModelConfig(decoder=builders.stack(layers=2, attention=OWN, encoding=EncodingConfig("rope")))
    module, variables = builders.make(config)
    tokens = np.random.default_rng(2).integers(1, builders.VOCAB, (2, 7)).astype(np.int32)
    slots = lambda rows, n: slots_from_segments(jnp.ones((rows, n), jnp.int32))  # noqa: E731
    unstacked = module.unstack(variables)

    @jax.jit
    def decode(tokens):
        first, state = module.apply(variables, Batch(None, Stream(tokens[:, :2], slots(2, 2))), 12, method=module.start)
        more, state = module.apply(unstacked, tokens[:, 2:5], state, method=module.extend)
        two, _ = module.apply(unstacked, tokens[:, 5:7], state.branch(2), method=module.step)
        beams = jnp.concatenate([tokens[:, [0, 1, 2, 3, 4, i]] for i in (5, 6)])
        whole = module.apply(variables, Batch(None, Stream(beams, slots(4, 6))))
        return first, more, two, whole

    first, more, two, whole = decode(tokens)
    chex.assert_trees_all_close(first, whole[:2, 1], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(more, whole[:2, 2:5], rtol=1e-4, atol=1e-5)
    two = two.reshape(2, 2, -1).swapaxes(0, 1).reshape(4, -1)
    chex.assert_trees_all_close(two, whole[:, 5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [{"context": 2}, {"stage": 2}])
def test_on_eight_devices_as_on_one(axes):
    config = ModelConfig(decoder=builders.stack(layers=2, attention=OWN, encoding=EncodingConfig("rope")))
    module, variables = builders.make(config)
    mesh = meshes.make(MeshConfig(data=1, tensor=2, fsdp=2, **axes), jax.devices()[:8])
    testing.assert_sharded_equals_single(module, variables, builders.batch(config, [6, 4, 5, 6]), mesh)


def test_cross_attention_has_none_and_what_cannot_have_it_refuses_by_name():
    assert block.cross_attention(builders.stack(attention=OWN), name="cross").config.temperature is None
    decoder = builders.stack(attention=dataclasses.replace(OWN, kv_heads=None, latent=LatentConfig()))
    with pytest.raises(
        ConfigError, match=r"attention.temperature: got 'a section', expected None with attention.latent"
    ):
        check_stack(decoder, "config.model.decoder", Config(model=ModelConfig(decoder=decoder)))
    with pytest.raises(ConfigError, match=r"encoder\.attention\.temperature: got a section, expected None with"):
        xlnet.check(
            builders.stack(attention=OWN, encoding=EncodingConfig("transformer_xl"), norm=NormConfig(order="post"))
        )


def test_the_diagram_and_a_refused_export_name_it():
    model = ModelConfig(decoder=builders.stack(attention=OWN))
    assert "temperature by position" in repr(drawing.diagram(model, ""))
    plain = ModelConfig(decoder=builders.stack(attention=dataclasses.replace(OWN, temperature=None)))
    (line,) = comparison.config_differences(model, plain)
    assert line.startswith("model.decoder.attention.temperature TemperatureConfig") and "expected None" in line
