"""Values mixed with those of the first layer (`attention.value_residual`) against numpy, and its crossings."""

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
from jaxformer.analysis.draw import model as drawing
from jaxformer.analysis.layers import Reader
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EncodingConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    StackConfig,
    ValueResidualConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks.stack import check_stack
from jaxformer.hf import comparison
from jaxformer.models import build, xlnet
from jaxformer.nn.block import Block, LayerContext
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim
from jaxformer.types import Batch, Stream

FIXED, LEARNED = ValueResidualConfig(first=0.75, own=0.4), ValueResidualConfig(learned=True)
OWN = AttentionConfig(heads=4, kv_heads=2, value_residual=LEARNED)


def stack(**edits) -> StackConfig:
    """Three layers of grouped attention alone, without positions."""
    return builders.stack(**{"layers": 3, "attention": OWN, "ffn": None, "encoding": EncodingConfig("none"), **edits})


def normed(x, params):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + NormConfig().epsilon) * params["scale"]
        + params["bias"]
    )


def by_loops(config, params, tokens):
    """Logits `[T, V]` of one row: layer by layer, query by query and head by head, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    table, stacked = params["target_embed"]["table"], params["decoder"]
    pick = lambda tree, i: jax.tree.map(lambda p: p if config.share_layers else p[i], tree)  # noqa: E731
    layers = [pick(stacked["dense_blocks"], 0)] if "dense_blocks" in stacked else []
    layers += [pick(stacked["blocks"], i) for i in range(config.layers - len(layers))]
    x, kept = table[tokens], None
    for number, layer in enumerate(layers):
        own = layer["attention"]
        read = normed(x, layer["attention_norm"]) if "attention_norm" in layer else x
        q, k, v = (np.einsum("td,dhk->thk", read, own[n]["kernel"]) + own[n]["bias"] for n in ("query", "key", "value"))
        residual = config.attention.value_residual
        if number == 0:
            kept = v
        elif residual is not None:
            first, last = own["value_scales"] if residual.learned else (residual.first, residual.own)
            v = first * kept + last * v
        y = np.zeros_like(x) + own["out"]["bias"]
        for t in range(len(x)):
            for h in range(4):
                scores = np.array([q[t, h] @ k[s, h // 2] for s in range(t + 1)]) / np.sqrt(2)
                weights = np.exp(scores - scores.max())
                y[t] += weights / weights.sum() @ v[: t + 1, h // 2] @ own["out"]["kernel"][h]
        x = x + y
    return normed(x, stacked["final_norm"]) @ table.T


FORMS = {
    "learned": {},
    "fixed, shared layers": {"attention": dataclasses.replace(OWN, value_residual=FIXED), "share_layers": True},
    "a first layer of its own": {"first_norm": False},
}


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_loops(name):
    model = ModelConfig(decoder=stack(**FORMS[name]))
    module, variables = builders.make(model)
    batch = builders.batch(model, [5, 5])
    got = testing.apply(module)(variables, batch)
    for row in range(2):
        expected = by_loops(model.decoder, variables["params"], batch.target.tokens[row])
        np.testing.assert_allclose(got[row], expected, rtol=1e-4, atol=1e-5)
    others = dataclasses.replace(model.decoder, attention=dataclasses.replace(OWN, value_residual=None))
    assert np.abs(by_loops(others, variables["params"], batch.target.tokens[1]) - expected).max() > 0.01


@pytest.fixture(scope="module")
def grouped():
    """A model with rotations and a window in every other layer, in a scan, and its variables."""
    own = dataclasses.replace(OWN, window=3, window_every=2)
    config = ModelConfig(decoder=stack(layers=2, attention=own, encoding=EncodingConfig("rope")))
    return config, *builders.make(config)


def test_recomputation_changes_no_gradient_and_factors_have_one(grouped):
    config, module, variables = grouped
    batch = builders.batch(config, [4, 3])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, builders.VOCAB)), jnp.float32)
    full = build.build(ModelConfig(decoder=dataclasses.replace(config.decoder, remat="full")))
    run = lambda module: jax.jit(jax.grad(lambda v: jnp.sum(weights * module.apply(v, batch))))(variables)  # noqa: E731
    got, expected = run(full), run(module)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    factors = expected["params"]["decoder"]["blocks"]["attention"]["value_scales"]
    assert factors.shape == (2, 2) and not np.any(factors[0]) and np.all(factors[1])


@pytest.mark.parametrize("unroll", [1, 2])
def test_cached_tokens_several_at_a_time_and_branches_have_the_logits_of_the_whole_pass(grouped, unroll):
    config, _, variables = grouped
    module = build.build(ModelConfig(decoder=dataclasses.replace(config.decoder, unroll=unroll)))
    tokens = np.random.default_rng(2).integers(1, builders.VOCAB, (2, 7)).astype(np.int32)
    slots = lambda rows, n: slots_from_segments(jnp.ones((rows, n), jnp.int32))  # noqa: E731
    unstacked = module.unstack(variables)

    @jax.jit
    def decode(tokens):
        first, state = module.apply(variables, Batch(None, Stream(tokens[:, :2], slots(2, 2))), 12, method=module.start)
        more, state = module.apply(unstacked, tokens[:, 2:4], state, method=module.extend)  # as speculation reads them
        one, state = module.apply(unstacked, tokens[:, 4:5], state, method=module.step)
        two, _ = module.apply(unstacked, tokens[:, 5:7], state.branch(2), method=module.step)  # two beams a row
        beams = jnp.concatenate([tokens[:, [0, 1, 2, 3, 4, i]] for i in (5, 6)])
        whole = module.apply(variables, Batch(None, Stream(beams, slots(4, 6))))
        return jnp.concatenate([first[:, None], more, one[:, None]], 1), two, whole.reshape(2, 2, 6, -1)

    steps, two, whole = decode(tokens)
    np.testing.assert_allclose(steps, whole[0][:, 1:5], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(two.reshape(2, 2, -1), whole[:, :, 5].swapaxes(0, 1), rtol=2e-5, atol=2e-6)


def test_packed_texts_see_themselves_alone(grouped):
    testing.assert_packing_invariant(*grouped[1:], (4, 2), builders.VOCAB)


def test_on_eight_devices_as_on_one(grouped):
    config, module, variables = grouped
    mesh = meshes.make(MeshConfig(data=1, tensor=2, context=2, fsdp=2), jax.devices()[:8])
    testing.assert_sharded_equals_single(module, variables, builders.batch(config, [6, 4, 5, 6]), mesh)


def test_cross_attention_has_values_of_its_own():
    config = builders.seq2seq(attention=OWN)
    module, variables = builders.make(config)
    start = lambda variables: module.apply(variables, builders.batch(config, [3, 2]), 4, method=module.start)  # noqa: E731
    assert jax.eval_shape(start, variables)[0].shape == (2, builders.VOCAB)  # whose memory is projected once
    shapes = build.shapes(module)["params"]["decoder"]["blocks"]
    assert "value_scales" in shapes["attention"] and "value_scales" not in shapes["cross"]
    assert shapes["attention"]["value_scales"].value.shape == (2, 2)
    assert not optim.decay_mask(nn.meta.unbox(shapes), OptimizerConfig())["attention"]["value_scales"]


def test_learned_factors_start_at_the_fixed_ones():
    own = dataclasses.replace(OWN, value_residual=dataclasses.replace(FIXED, learned=True))
    module, slots = Block(stack(attention=own)), builders.batch(builders.decoder(), [3]).target.slots
    inputs = (jnp.ones((1, 3, 8)), None, jnp.zeros((1, 3, 2, 2))), jnp.int32(1), None, LayerContext(Mask(slots, slots))
    start = jax.jit(module.init)(jax.random.key(0), *inputs)["params"]["attention"]["value_scales"].value
    np.testing.assert_allclose(start, [0.75, 0.4], rtol=1e-6)


def test_the_diagram_says_it_and_what_cannot_read_it_refuses_by_name():
    model = ModelConfig(decoder=stack())
    assert "values mixed" in repr(drawing.diagram(model, ""))
    with pytest.raises(ConfigError, match=r"analysis of layers: got decoder\.attention\.value_residual"):
        Reader(build.build(model), {})
    with pytest.raises(ConfigError, match=r"encoder\.attention\.value_residual: got a section, expected None with"):
        xlnet.check(
            builders.stack(attention=OWN, encoding=EncodingConfig("transformer_xl"), norm=NormConfig(order="post"))
        )
    sizes = {"stage": 3, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    with pytest.raises(ConfigError, match=r"mesh.stage: got 3, expected 1 for decoder.attention.value_residual"):
        mesh_checks.check_divisibility(Config(model=model), sizes)
    plain = ModelConfig(decoder=stack(attention=dataclasses.replace(OWN, value_residual=None)))
    (line,) = comparison.config_differences(model, plain)  # the reason that an export gives
    assert line.startswith("model.decoder.attention.value_residual ValueResidualConfig") and "expected None" in line


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"attention": dataclasses.replace(OWN, kv_heads=None, latent=LatentConfig())}, "with attention.latent, whose"),
        ({"attention": dataclasses.replace(OWN, summary=2)}, "with attention.summary, whose values"),
        ({"layers": 1}, "where layers is below 2"),
    ],
)
def test_what_has_no_values_to_mix_is_refused(edits, message):
    with pytest.raises(ConfigError, match=f"attention.value_residual: got 'a section', expected None {message}"):
        check_stack(stack(**edits), "config.model.encoder", Config(model=builders.encoder()))
