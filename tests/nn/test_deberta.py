"""Disentangled attention and the convolution, against loops over the papers' equations."""

import math

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    ConvConfig,
    DataConfig,
    EmbedConfig,
    EncodingConfig,
    NormConfig,
    TaskConfig,
)
from jaxformer.config.checks import check
from jaxformer.nn.attention import Attention
from jaxformer.nn.convolution import Convolution
from jaxformer.nn.encodings import deberta
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.types import Slots

WIDTH, HEADS, HEAD_WIDTH = 8, 2, 4


def config_of(**edits):
    return EncodingConfig(**{"kind": "deberta", "buckets": None, "max_distance": 4, **edits})


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def side_of(length):
    return Slots(jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32))


# Rows of the table


def test_without_buckets_every_distance_has_its_row_and_the_ends_are_shared():
    np.testing.assert_array_equal(deberta.row_of_distance(config_of()), [0, 1, 2, 3, 4, 5, 6, 7, 7])


def bucket(distance, buckets, longest):
    """The bucket of one distance, as DeBERTa v2's code has it."""
    size, middle = abs(distance), buckets // 2
    if size <= middle:
        return distance
    far = math.ceil(round(math.log(size / middle) / math.log((longest - 1) / middle) * (middle - 1), 6)) + middle
    return far if distance > 0 else -far


@pytest.mark.parametrize(("buckets", "longest"), [(8, 64), (6, 64), (2, 9), (256, 512)])
def test_buckets_are_exact_near_and_logarithmic_far(buckets, longest):
    rows = deberta.row_of_distance(config_of(buckets=buckets, max_distance=longest))
    expected = [bucket(n, buckets, longest) + buckets for n in range(-longest, longest + 1)]
    np.testing.assert_array_equal(rows, np.clip(expected, 0, 2 * buckets - 1))
    assert len(rows) == 2 * longest + 1


@pytest.mark.parametrize(("buckets", "longest"), [(7, 64), (8, 5), (6, 3)])
def test_impossible_buckets_are_refused(buckets, longest):
    with pytest.raises(ConfigError, match=f"buckets: got {buckets} with max_distance {longest}"):
        deberta.row_of_distance(config_of(buckets=buckets, max_distance=longest))


# The score


@pytest.mark.parametrize("length", [3, 7])
def test_score_without_buckets_reads_the_span_of_the_sequence(length):
    """DeBERTa v1 cuts the table to the k = min(length, N) nearest rows a direction; that is the same as not cutting."""
    config, longest = config_of(), 4
    q, k = draw(0, 1, length, HEADS, HEAD_WIDTH), draw(1, 1, length, HEADS, HEAD_WIDTH)
    key, query = draw(2, 2 * longest, HEADS, HEAD_WIDTH), draw(3, 2 * longest, HEADS, HEAD_WIDTH)
    reach = min(length, longest)
    near = slice(longest - reach, longest + reach)
    expected = np.zeros((1, HEADS, length, length), np.float32)
    for h, i, j in np.ndindex(HEADS, length, length):
        row = np.clip(i - j + reach, 0, 2 * reach - 1)
        expected[0, h, i, j] = q[0, i, h] @ key[near][row, h] + k[0, j, h] @ query[near][row, h]
    position, shared = side_of(length).position, deberta.Projected(jnp.asarray(key), jnp.asarray(query))
    got = jax.jit(lambda q, k: deberta.bias(config, shared, q, k, position, position))(q, k)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_attention_is_the_equation_with_the_contents_projections():
    """v3's flags: shared projections with biases, a normalised table, buckets; grouped keys; padding; both kernels."""
    encoding = config_of(buckets=4, max_distance=6, share_projections=True, norm=NormConfig(epsilon=1e-7))
    side, x = slots_from_segments(jnp.array([[1] * 7, [1] * 5 + [0] * 2])), jnp.asarray(draw(0, 2, 7, WIDTH))
    mask = Mask(side, side)

    def parts(kernel):
        config = AttentionConfig(heads=HEADS, kv_heads=1, block=4, kernel=kernel)
        return deberta.Table(encoding, config, HEAD_WIDTH), Attention(config, encoding, WIDTH)

    table, attention = parts("dense")
    key, position = jax.random.key(0), jnp.zeros((8, WIDTH))
    shapes = jax.eval_shape(table.init, key, side), jax.eval_shape(attention.init, key, x, mask, position)
    rng = np.random.default_rng(1)
    shared, params = (
        jax.tree.map(lambda a: np.float32(0.5 * rng.standard_normal(a.shape)), nn.meta.unbox(each)["params"])
        for each in shapes
    )
    assert set(params) == {"query", "key", "value", "out"}
    assert shared["table"].shape == (8, WIDTH)
    weights, rows = jax.tree.map(np.asarray, (params, shared))

    def project(name, y):
        return np.einsum("...d,dhk->...hk", y, weights[name]["kernel"]) + weights[name]["bias"]

    normal = rows["table"] - rows["table"].mean(-1, keepdims=True)
    normal = normal / np.sqrt((normal**2).mean(-1, keepdims=True) + 1e-7) * rows["norm"]["scale"] + rows["norm"]["bias"]
    q, k, v = (project(name, np.asarray(x)) for name in ("query", "key", "value"))
    a, b = project("key", normal), project("query", normal)
    expected = np.zeros((2, 7, WIDTH), np.float32)
    for n, i in np.ndindex(2, 7):
        length, o = (7, 5)[n], np.zeros((HEADS, HEAD_WIDTH))
        for h in range(HEADS):
            row = [np.clip(bucket(i - j, 4, 6) + 4, 0, 7) for j in range(length)]
            scores = [q[n, i, h] @ (k[n, j, 0] + a[row[j], 0]) + k[n, j, 0] @ b[row[j], h] for j in range(length)]
            probs = np.exp(np.array(scores) / math.sqrt(3 * HEAD_WIDTH))
            o[h] = probs / probs.sum() @ v[n, :length, 0]
        expected[n, i] = np.einsum("hk,hkd->d", o, weights["out"]["kernel"]) + weights["out"]["bias"]
    for kernel in ("dense", "blockwise"):
        table, attention = parts(kernel)
        run = lambda shared, params, of=table, at=attention: at.apply(  # noqa: E731
            {"params": params}, x, mask, of.apply({"params": shared}, side)
        )
        got, _ = jax.jit(run)(shared, params)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got[1, :5], expected[1, :5], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("content", "position"), [(True, True), (True, False), (False, True)])
def test_own_projections_exist_for_the_terms_asked_for_with_the_contents_biases(content, position):
    """v1's flags: the position keys have no bias, as the content's have none; the position queries have one."""
    encoding = config_of(content_to_position=content, position_to_content=position)
    table, dense = draw(0, 8, WIDTH), nn.Dense(1)
    layer = deberta.Projections(encoding, AttentionConfig(heads=HEADS, key_bias=False), WIDTH)
    made, variables = layer.init_with_output(jax.random.key(0), table, dense, dense)
    params = nn.meta.unbox(variables)["params"]
    assert {name: set(part) for name, part in params.items()} == {
        **({"key": {"kernel"}} if content else {}),
        **({"query": {"kernel", "bias"}} if position else {}),
    }
    assert deberta.terms(encoding) == 1 + content + position
    assert (made.key is not None, made.query is not None) == (content, position)
    if content:
        np.testing.assert_allclose(made.key, np.einsum("rd,dhk->rhk", table, params["key"]["kernel"]), rtol=1e-3)
    if position:
        scaled = np.einsum("rd,dhk->rhk", table, params["query"]["kernel"]) / math.sqrt((2 + content) * HEAD_WIDTH)
        np.testing.assert_allclose(made.query, scaled, rtol=1e-3, atol=1e-5)


def test_dropout_of_the_table_needs_a_key():
    encoding, table, dense = config_of(dropout=0.5), jnp.ones((8, WIDTH)), nn.Dense(1)
    layer = deberta.Projections(encoding, AttentionConfig(heads=HEADS), WIDTH)
    still, variables = layer.init_with_output(jax.random.key(0), table, dense, dense)
    np.testing.assert_allclose(still.key[0], still.key[1], rtol=1e-6)
    drawn = layer.apply(variables, table, dense, dense, rngs={"dropout": jax.random.key(1)})
    assert np.abs(drawn.key[0] - drawn.key[1]).max() > 1e-3


def test_absolute_positions_come_on_top_and_a_table_of_another_width_is_refused():
    side = side_of(3)
    assert not deberta.Absolute(config_of(), WIDTH).init(jax.random.key(0), side)
    module = deberta.Absolute(config_of(absolute=True, max_length=5), WIDTH)
    rows, variables = module.init_with_output(jax.random.key(0), side)
    table = nn.meta.unbox(variables)["params"]["learned"]["table"]
    assert table.shape == (5, WIDTH)
    np.testing.assert_array_equal(rows[0], table[:3])
    layer = deberta.Projections(config_of(), AttentionConfig(heads=HEADS, head_width=6), WIDTH)
    with pytest.raises(ConfigError, match="got 12 channels of all heads, expected the width 8"):
        layer.init(jax.random.key(0), jnp.zeros((8, 12)), nn.Dense(1), nn.Dense(1))


# The convolution


def convolution(groups, size, activation="gelu"):
    """The module, its parameters, and an input that holds two packed texts and a padded one."""
    module = Convolution(ConvConfig(size, groups, activation), NormConfig(order="post"))
    x, segment = jnp.asarray(draw(0, 2, 6, WIDTH)), jnp.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]])
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), x, segment))["params"]
    return module, {"params": {**params, "bias": jnp.asarray(draw(1, WIDTH))}}, x, segment


@pytest.mark.parametrize(("groups", "size"), [(1, 3), (2, 5), (WIDTH, 1)])
def test_convolution_is_the_sum_over_neighbours_of_the_same_segment(groups, size):
    module, variables, x, segment = convolution(groups, size, "sigmoid")
    kernel, bias = (np.asarray(variables["params"][name]) for name in ("kernel", "bias"))
    data, ids, share = np.asarray(x), np.asarray(segment), WIDTH // groups
    assert kernel.shape == (size, share, WIDTH)
    total = np.zeros(x.shape, np.float32)
    for n, t, c in np.ndindex(*x.shape):
        if ids[n, t] == 0:
            continue
        total[n, t, c] = bias[c]
        inputs = slice(c // share * share, (c // share + 1) * share)
        for o in range(size):
            s = t + o - size // 2
            if 0 <= s < 6 and ids[n, s] == ids[n, t]:
                total[n, t, c] += data[n, s, inputs] @ kernel[o, :, c]
    got = jax.jit(module.apply)(variables, x, segment)
    np.testing.assert_allclose(got.output, 1 / (1 + np.exp(-total)), rtol=1e-4, atol=1e-5)


def test_only_the_first_layer_adds_it_and_padding_is_then_zero():
    module, variables, x, segment = convolution(1, 3)
    y = jnp.asarray(draw(4, 2, 6, WIDTH))
    made, first, second = jax.jit(
        lambda v: (made := module.apply(v, x, segment), made.add(y, jnp.int32(0)), made.add(y, jnp.int32(1)))
    )(variables)
    total = np.asarray(y + made.output)
    expected = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + 1e-5)
    expected = np.where(np.asarray(segment)[..., None] != 0, expected, 0.0)
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal(second, y)


def test_a_stack_adds_the_convolution_of_its_input_after_its_first_layer():
    norm = NormConfig(order="post", epsilon=1e-7)
    edits = {"encoding": config_of(), "norm": norm, "embed": EmbedConfig(vocab=builders.VOCAB, norm=True), "layers": 3}
    module, variables = builders.make(builders.encoder(**edits, conv=ConvConfig(3, 2, "gelu")))
    batch = builders.batch(module.config, [5, 3])

    def layers(module, params):
        state = module.apply({"params": params}, batch, mutable="intermediates")[1]["intermediates"]["encoder"]
        return state["input"][0], state["blocks"]["output"][0]

    def loss(params):
        x, outputs = layers(module, params)
        return jnp.sum(outputs[2] ** 3), (x, outputs)

    params = variables["params"]
    gradient, (x, got) = jax.jit(jax.grad(loss, has_aux=True))(params)
    encoder = dict(params["encoder"])
    conv = encoder.pop("conv")
    plain = type(module)(builders.encoder(**edits))
    _, without = jax.jit(lambda params: layers(plain, params))({**params, "encoder": encoder})
    made = Convolution(ConvConfig(3, 2, "gelu"), norm)
    apart = jax.jit(lambda x, y: made.apply({"params": conv}, x, batch.source.slots.segment).add(y, jnp.int32(0)))
    chex.assert_trees_all_close(got[0], apart(x, without[0]), rtol=1e-4, atol=1e-5)
    assert np.abs(got[1] - without[1]).max() > 1e-2
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradient["encoder"]["conv"]))


def test_a_causal_stack_refuses_the_convolution():
    with pytest.raises(ConfigError, match="causal stack"):
        builders.make(builders.decoder(conv=ConvConfig()))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"encoding": EncodingConfig(kind="t5", buckets=None)}, "encoder.encoding.buckets: got None"),
        ({"conv": ConvConfig(kernel=4)}, "encoder.conv.kernel: got 4"),
        ({"conv": ConvConfig(groups=3)}, "encoder.conv.groups: got 3"),
        ({"conv": ConvConfig(activation="gelo")}, "did you mean 'gelu'"),
        ({"encoding": config_of(), "attention": AttentionConfig(heads=2, head_width=3)}, "head_width: got 3"),
        ({"encoding": config_of(absolute=True, max_length=9)}, "encoding.max_length: got 9"),
        ({"encoding": config_of(dropout=1.0)}, "encoding.dropout: got 1"),
    ],
)
def test_configs_that_make_no_sense_are_refused(edits, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(model=builders.encoder(**edits), data=DataConfig(length=16), task=TaskConfig("masked_lm")))
