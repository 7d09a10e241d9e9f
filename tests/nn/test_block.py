"""One layer: where its norms and sums stand, how its scores are scaled, and what differs by its number."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    NormConfig,
)
from jaxformer.config.checks.model import check_model, check_stack
from jaxformer.decode import int8
from jaxformer.models import build
from jaxformer.nn import kernels, reference
from jaxformer.nn.attention import Attention
from jaxformer.nn.block import Block, LayerContext, has_window
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.layers import Norm
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.types import Batch, Stream

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


def drawn_layer(config):
    """Parameters of a layer in which no norm is as any other."""
    block, context = Block(config), LayerContext(Mask(SLOTS, SLOTS))
    drawn = nn.meta.unbox(block.init(jax.random.key(0), (X, None), jnp.int32(0), None, context))["params"]
    noise = np.random.default_rng(1).standard_normal
    return block, context, jax.tree.map(lambda x: x + 0.3 * noise(x.shape).astype(np.float32), drawn)


def slow_layer(config, params):
    """The three parts of a layer as plain functions: a norm by name, attention and feed-forward."""

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm.epsilon)
        return scaled * params[name].get("scale", 1.0) + params[name].get("bias", 0.0)

    attention = Attention(config.attention, config.encoding, WIDTH)
    attend = lambda x: attention.apply({"params": params["attention"]}, x, Mask(SLOTS, SLOTS))[0]  # noqa: E731
    feed = lambda x: FeedForward(config.ffn, WIDTH).apply({"params": params["ffn"]}, x)  # noqa: E731
    return norm, attend, feed


@pytest.mark.parametrize("sublayers", ["parallel", "parallel_one_norm"])
def test_parallel_sublayers_read_the_same_stream(sublayers):
    config = builders.stack(sublayers=sublayers, encoding=EncodingConfig(kind="none"))
    block, context, params = drawn_layer(config)
    assert ("ffn_norm" in params) == (sublayers == "parallel")
    norm, attend, feed = slow_layer(config, params)
    wanted = X + attend(norm("attention_norm", X))
    wanted += feed(norm("ffn_norm" if sublayers == "parallel" else "attention_norm", X))
    (got, _), _ = block.apply({"params": params}, (X, None), jnp.int32(0), None, context)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_residual_connections_may_start_after_the_norm():
    config = builders.stack(residual_after_norm=True, encoding=EncodingConfig(kind="none"))
    block, context, params = drawn_layer(config)
    norm, attend, feed = slow_layer(config, params)
    x = norm("attention_norm", X)
    x = norm("ffn_norm", x + attend(x))
    (got, _), _ = block.apply({"params": params}, (X, None), jnp.int32(0), None, context)
    np.testing.assert_allclose(got, x + feed(x), rtol=1e-4, atol=1e-5)


def test_named_layers_are_banded():
    attention = AttentionConfig(heads=2, window=1, window_layers=(0, 3))
    stack = builders.stack(attention=attention, layers=4)
    assert [bool(has_window(attention, jnp.int32(layer))) for layer in range(4)] == [True, False, False, True]
    assert stack.windowed_layers == (0, 3)


@pytest.mark.parametrize(
    "edits",
    [
        {
            "sublayers": "parallel_one_norm",
            "attention": AttentionConfig(heads=2, window=2, window_layers=(1,)),
            "output_width": 4,
            "embed": EmbedConfig(vocab=builders.VOCAB, width=4),
        },
        {"residual_after_norm": True, "norm": NormConfig(scale=False, bias=False)},
    ],
    ids=["parallel, windows, output width", "residual after norm"],
)
def test_layers_of_other_orders_decode_as_they_read(edits):
    """With a cache, with int8 weights, on eight devices and through two stages: the whole pass."""
    config = builders.decoder(**edits)
    module = build.build(config)
    params = nn.meta.unbox(build.init_variables(module, jax.random.key(0)))["params"]
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, builders.VOCAB, (8, 6)))
    slots = slots_from_segments(jnp.ones((8, 6), jnp.int32))
    batch = Batch(None, Stream(tokens, slots))
    whole = module.apply({"params": params}, batch)
    start = lambda variables, prompt: module.apply(variables, prompt, 6, method="start")  # noqa: E731
    prompt = Batch(None, Stream(tokens[:, :4], jax.tree.map(lambda x: x[:, :4], slots)))
    for variables, rtol in (({"params": params}, 1e-4), (int8.quantize(module, {"params": params}), 0.1)):
        variables = module.unstack(variables)
        logits, state = start(variables, prompt)
        np.testing.assert_allclose(logits, whole[:, 3], rtol=rtol, atol=rtol * float(jnp.abs(whole).max()))
        logits, _ = module.apply(variables, tokens[:, 4:5], state, method="step")
        np.testing.assert_allclose(logits, whole[:, 4], rtol=rtol, atol=rtol * float(jnp.abs(whole).max()))
    mesh = meshes.make(MeshConfig(stage=2, tensor=2, fsdp=2))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, rules.shardings(build.shapes(module), mesh)["params"])
        np.testing.assert_allclose(jax.jit(module.apply)({"params": sharded}, batch), whole, rtol=1e-4, atol=1e-5)


def test_a_head_of_its_own_reads_the_last_projection():
    config = dataclasses.replace(builders.decoder(output_width=4), head=HeadConfig(tied=False))
    shapes = nn.meta.unbox(build.shapes(build.build(config)))["params"]
    assert shapes["head"]["kernel"].shape == (4, builders.VOCAB)


@pytest.mark.parametrize("window", [{"window_layers": (1,)}, {"window_every": 2}])
def test_splash_refuses_windows_of_some_layers(window):
    refused = kernels.get("splash").refuse(AttentionConfig(heads=2, window=2, **window), False, False)
    assert refused is not None and next(iter(window)) in refused
    assert kernels.get("splash").refuse(AttentionConfig(heads=2, window=2), False, False) is None


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"sublayers": "parallel", "norm": NormConfig(order="post")}, "norm.order: got 'post'"),
        ({"sublayers": "parallel", "ffn": None}, "ffn: got None"),
        ({"residual_after_norm": True, "norm": NormConfig(order="post")}, "residual_after_norm: got True"),
        ({"attention": AttentionConfig(heads=2, window_layers=(1,))}, "window_layers: got"),
        ({"attention": AttentionConfig(heads=2, window=2, window_layers=(2,))}, "from 0 to 1"),
        ({"output_width": 5}, "output_width: got 5"),
        ({"embed": EmbedConfig(norm_before_positions=True)}, "norm_before_positions: got True"),
    ],
)
def test_contradictions_are_refused(edits, message):
    config = Config(model=builders.decoder(**edits))

    def check():
        check_stack(config.model.decoder, "config.model.decoder", config)
        check_model(config.model)

    with pytest.raises(ConfigError, match=message):
        check()
