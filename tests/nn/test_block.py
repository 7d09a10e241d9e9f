"""One layer: where its norms and sums stand, how its scores are scaled, and what differs by its number."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import testing
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
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.stack import check_stack
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


def drawn(module, *arguments, deviation=0.4):
    """Parameters of a module, none of them as any other. numpy draws them: initialisation would be compiled."""
    noise = np.random.default_rng(1).standard_normal

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + deviation * noise(leaf.shape)).astype(np.float32)

    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), *arguments))["params"]
    return jax.tree_util.tree_map_with_path(draw, shapes)


def test_scores_are_divided_by_the_number_of_the_layer_from_one():
    encoding = EncodingConfig(kind="none")
    scaled = Attention(AttentionConfig(heads=2, bias=False, scale_by_layer=True), encoding, WIDTH)
    plain = Attention(AttentionConfig(heads=2, bias=False), encoding, WIDTH)
    params = drawn(plain, X, Mask(SLOTS, SLOTS))

    @jax.jit
    def both(layer):
        less = params | {"query": {"kernel": params["query"]["kernel"] / (layer + 1)}}
        got = scaled.apply({"params": params}, X, Mask(SLOTS, SLOTS), layer=layer)[0]
        return got, plain.apply({"params": less}, X, Mask(SLOTS, SLOTS))[0]

    found = [both(np.int32(layer)) for layer in (0, 1, 4)]
    for got, wanted in found:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0][0] - found[2][0]).max() > 0.01


@pytest.mark.parametrize(("every", "banded"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_the_last_layer_of_every_so_many_is_banded(every, banded):
    """By gradient: with a window of 1 a banded layer's slots see themselves alone."""
    attention = AttentionConfig(heads=2, window=1, window_every=every)
    block = Block(builders.stack(attention=attention, encoding=EncodingConfig(kind="none")))
    context = LayerContext(Mask(SLOTS, SLOTS, causal=True, window=1))
    params = {"params": drawn(block, (X, None), jnp.int32(0), None, context)}

    def last(x, layer):
        return jnp.sum(block.apply(params, (x, None), layer, None, context)[0][0][0, -1])

    gradient = jax.jit(jax.grad(last))
    seen = [np.asarray(gradient(X, np.int32(layer)))[0, 0].any() for layer in range(4)]
    assert [layer for layer in range(4) if not seen[layer]] == banded


def test_scores_are_divided_by_the_root_of_a_head_width_of_its_own():
    """Where heads x head width is not the model width: twice as wide heads."""
    attention = Attention(AttentionConfig(heads=2, head_width=8, bias=False), EncodingConfig(kind="none"), WIDTH)
    params = drawn(attention, X, Mask(SLOTS, SLOTS))
    q, k, v = (np.einsum("btd,dhk->bhtk", X, params[name]["kernel"]) for name in ("query", "key", "value"))
    scores = np.exp(q @ np.swapaxes(k, 2, 3) / 8**0.5)
    o = scores / scores.sum(axis=-1, keepdims=True) @ v
    wanted = np.einsum("bhtk,hkd->btd", o, params["out"]["kernel"])
    got = jax.jit(lambda: attention.apply({"params": params}, X, Mask(SLOTS, SLOTS))[0])()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["pre", "post", "sandwich", "res_post"])
def test_norms_and_residual_sums_stand_where_the_order_says(order):
    config = builders.stack(norm=NormConfig(order=order), encoding=EncodingConfig(kind="none"))
    block, context, params = drawn_layer(config)

    def norm(name, x):
        return Norm(config.norm).apply({"params": params[name]}, x)

    def sublayer(name, x, function):
        if order == "post":
            return norm(f"{name}_norm", x + function(x))
        if order == "res_post":
            return x + norm(f"{name}_norm", function(x))
        y = function(norm(f"{name}_norm", x))
        return x + (norm(f"{name}_post_norm", y) if order == "sandwich" else y)

    _, attend, feed = slow_layer(config, params)
    compare(block, context, params, lambda: sublayer("ffn", sublayer("attention", X, attend), feed))


@pytest.mark.parametrize("over", ["head", "heads"])
def test_queries_and_keys_are_normalised_by_head_or_over_all_heads(over):
    config = AttentionConfig(heads=4, kv_heads=2, bias=False, norm=NormConfig("rms"), norm_over=over)
    attention = Attention(config, EncodingConfig(kind="none"), WIDTH)
    params = drawn(attention, X, Mask(SLOTS, SLOTS))
    q, k, v = (np.einsum("btd,dhk->bthk", X, params[name]["kernel"]) for name in ("query", "key", "value"))

    def normalised(x, scale):
        axes = -1 if over == "head" else (-2, -1)
        scale = scale if over == "head" else scale.reshape(x.shape[-2:])
        return x / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + config.norm.epsilon) * scale

    q, k = normalised(q, params["query_norm"]["scale"]), normalised(k, params["key_norm"]["scale"])
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.exp(np.einsum("bthk,bshk->bhts", q, k) / 2**0.5)
    o = np.einsum("bhts,bshk->bthk", scores / scores.sum(axis=-1, keepdims=True), v)
    wanted = np.einsum("bthk,hkd->btd", o, params["out"]["kernel"])
    got = jax.jit(lambda: attention.apply({"params": params}, X, Mask(SLOTS, SLOTS))[0])()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_norms_over_divided_heads_and_on_outputs_are_those_of_one_device():
    attention = AttentionConfig(heads=4, kv_heads=2, norm=NormConfig("rms"), norm_over="heads")
    config = builders.decoder(attention=attention, norm=NormConfig("rms", "res_post"), remat="full")
    mesh = meshes.make(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    testing.assert_sharded_equals_single(*builders.make(config), builders.batch(config, [6, 4, 5, 6]), mesh)


def test_without_an_output_projection_heads_stand_one_after_another():
    attention = Attention(AttentionConfig(heads=2, bias=False, output=False), EncodingConfig(kind="none"), WIDTH)
    params = drawn(attention, X, Mask(SLOTS, SLOTS))

    @jax.jit
    def both():
        heads = [
            reference.single_head(X, *(params[name]["kernel"][:, head] for name in ("query", "key", "value")))
            for head in range(2)
        ]
        return attention.apply({"params": params}, X, Mask(SLOTS, SLOTS))[0], jnp.concatenate(heads, axis=-1)

    np.testing.assert_allclose(*both(), rtol=1e-5, atol=1e-6)


def drawn_layer(config):
    """Parameters of a layer in which no norm is as any other."""
    block, context = Block(config), LayerContext(Mask(SLOTS, SLOTS))
    return block, context, drawn(block, (X, None), jnp.int32(0), None, context)


def compare(block, context, params, wanted):
    """A layer is what `wanted()` computes, in one program."""

    @jax.jit
    def both():
        (got, _), _ = block.apply({"params": params}, (X, None), jnp.int32(0), None, context)
        return got, wanted()

    np.testing.assert_allclose(*both(), rtol=1e-4, atol=1e-5)


def slow_layer(config, params):
    """The three parts of a layer as plain functions: a norm by name, attention and feed-forward."""

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + config.norm.epsilon)
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
    other = "ffn_norm" if sublayers == "parallel" else "attention_norm"
    compare(block, context, params, lambda: X + attend(norm("attention_norm", X)) + feed(norm(other, X)))


def test_residual_connections_may_start_after_the_norm():
    config = builders.stack(residual_after_norm=True, encoding=EncodingConfig(kind="none"))
    block, context, params = drawn_layer(config)
    norm, attend, feed = slow_layer(config, params)

    def wanted():
        x = norm("attention_norm", X)
        x = norm("ffn_norm", x + attend(x))
        return x + feed(x)

    compare(block, context, params, wanted)


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
    module, variables = builders.make(config)
    tokens = np.random.default_rng(0).integers(1, builders.VOCAB, (8, 6)).astype(np.int32)
    slots = jax.tree.map(np.asarray, slots_from_segments(np.ones((8, 6), np.int32)))
    batch = Batch(None, Stream(tokens, slots))
    prompt = Batch(None, Stream(tokens[:, :4], jax.tree.map(lambda x: x[:, :4], slots)))

    def decode(variables):
        variables = module.unstack(variables)
        first, state = module.apply(variables, prompt, 6, method="start")
        return first, module.apply(variables, tokens[:, 4:5], state, method="step")[0]

    @jax.jit
    def together(variables):
        return module.apply(variables, batch), decode(variables), decode(int8.quantize(module, variables))

    whole, exact, rounded = jax.device_get(together(variables))
    for found, rtol in ((exact, 1e-4), (rounded, 0.1)):
        for slot, logits in enumerate(found, start=3):
            np.testing.assert_allclose(logits, whole[:, slot], rtol=rtol, atol=rtol * np.abs(whole).max())
    mesh = meshes.make(MeshConfig(stage=2, tensor=2, fsdp=2))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(variables, rules.shardings(build.shapes(module), mesh))
        np.testing.assert_allclose(jax.jit(module.apply)(sharded, batch), whole, rtol=1e-4, atol=1e-5)


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
