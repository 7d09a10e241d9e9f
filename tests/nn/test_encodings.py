"""Every encoding of the folder keeps the contract; each known one has its paper's values."""

import functools
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import registry
from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig
from jaxformer.nn import encodings
from jaxformer.nn.encodings import alibi, rope, sinusoidal, t5
from jaxformer.nn.layers import Dense
from jaxformer.nn.masks import slots_from_segments
from jaxformer.types import Slots

NAMES = registry.names("jaxformer.nn.encodings")
ATTENTION = AttentionConfig(heads=4, kv_heads=2)
WIDTH, HEAD_WIDTH = 12, 6


def config_of(kind, **changes):
    return EncodingConfig(kind=kind, max_length=16, max_distance=20, buckets=8, bidirectional=True, **changes)


def made(module, side):
    return jax.jit(lambda side: nn.meta.unbox(module.init_with_output(jax.random.key(0), side)[0]))(side)


class Shared(nn.Module):
    """What an attention layer gives to `rotate` and `bias`, with projections that some layers share."""

    config: EncodingConfig

    @nn.compact
    def __call__(self, side):
        encoding, width = encodings.get(self.config.kind), ATTENTION.heads * HEAD_WIDTH
        shared = None if encoding.shared is None else encoding.shared(self.config, ATTENTION, HEAD_WIDTH)(side)
        if encoding.layer is None:
            return shared
        query = Dense((width, ATTENTION.heads, HEAD_WIDTH), (None, None, None), name="query")
        key = Dense((width, ATTENTION.kv_heads, HEAD_WIDTH), (None, None, None), name="key")
        return encoding.layer(self.config, ATTENTION, width)(shared, query, key)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def positions(*rows):
    return Slots(np.array(rows, np.int32), np.ones((len(rows), len(rows[0])), np.int32))


# What holds for every file of the folder


@pytest.mark.parametrize("kind", NAMES)
def test_hooks_keep_the_contract(kind):
    encoding, config = encodings.get(kind), config_of(kind)
    q, k = normal(2, 5, 4, HEAD_WIDTH), normal(2, 5, 2, HEAD_WIDTH)

    @jax.jit
    def every(q, k):
        side = slots_from_segments(jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 0, 0]]))
        shared, found = made(Shared(config), side), {}
        if encoding.embed is not None:
            found["embedded"] = made(encoding.embed(config, WIDTH), side)
        if encoding.rotate is not None:
            found["turned"] = [encoding.rotate(config, x, shared) for x in (q, k, q.astype(jnp.bfloat16))]
        if encoding.bias is not None:
            found["one"] = encoding.bias(config, shared, q[:, :3], k, side.position[:, :3], side.position)

            def total(shared, q, k):
                whole = encoding.bias(config, shared, q, k, side.position, side.position)
                return jnp.sum(whole), whole

            (_, found["whole"]), found["gradients"] = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(shared, q, k)
        return found

    found = jax.device_get(every(q, k))
    if "embedded" in found:
        chex.assert_shape(found["embedded"], (2, 5, WIDTH))
    for x, turned in zip((q, k, q.astype(jnp.bfloat16)), found.get("turned", ())):
        chex.assert_equal_shape_prefix([turned, x], 4)
        assert turned.dtype == x.dtype
    if "one" in found:
        assert found["one"].shape in ((1, 4, 3, 5), (2, 4, 3, 5))
        assert found["one"].dtype == jnp.float32
        np.testing.assert_allclose(found["whole"][..., :3, :], found["one"], rtol=1e-5, atol=1e-6)
        chex.assert_tree_all_finite(found["gradients"])


@pytest.mark.parametrize("kind", NAMES)
def test_only_relative_position_matters_to_scores(kind):
    """Moving all positions by one number changes neither rotated products nor scores."""
    encoding, config = encodings.get(kind), config_of(kind)
    q, k = np.asarray(normal(2, 1, 5, 4, HEAD_WIDTH))
    k = k[:, :, : ATTENTION.kv_heads]

    @jax.jit
    def scores(side):
        shared = made(Shared(config), side)
        turn = (lambda x: encoding.rotate(config, x, shared)) if encoding.rotate is not None else (lambda x: x)
        total = jnp.einsum("bthk,bshk->bhts", turn(q), jnp.repeat(turn(k), 2, axis=2))
        if encoding.bias is not None:
            total += encoding.bias(config, shared, q, k, side.position, side.position)
        return total

    near = scores(positions([0, 1, 2, 3, 9]))
    chex.assert_trees_all_close(near, scores(positions([7, 8, 9, 10, 16])), rtol=1e-4, atol=1e-4)
    if encoding.rotate is not None or encoding.bias is not None:
        assert np.abs(np.asarray(near) - scores(positions([0, 1, 2, 5, 9]))).max() > 1e-2


def test_a_bias_without_the_axis_of_rows_is_refused():
    """It would be broadcast: every row would have the bias of one of them."""
    own = encodings.Encoding(bias=lambda config, shared, q, k, *positions: jnp.zeros((2, q.shape[1], k.shape[1])))
    q, k, position = jnp.zeros((3, 4, 2, 8)), jnp.zeros((3, 5, 2, 8)), jnp.zeros((3, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"got a bias of 3 axes, \(2, 4, 5\), expected \[b, H, T, S\]"):
        own.checked_bias(EncodingConfig(kind="alibi"), None, q, k, position, position)


def test_unknown_name_says_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        encodings.get("ropes")


# Sinusoidal


sinusoids = jax.jit(sinusoidal.sinusoids, static_argnums=1)


def test_sinusoids_by_hand():
    code = sinusoids(np.array([0, 1, 3]), 4)
    expected = [[np.sin(p), np.cos(p), np.sin(p / 100), np.cos(p / 100)] for p in (0, 1, 3)]
    np.testing.assert_allclose(code, expected, rtol=1e-6, atol=1e-7)


def test_odd_width_drops_the_last_cosine():
    code = sinusoids(np.array([2]), 5)
    angles = 2 * 10000.0 ** (-np.array([0, 2, 4]) / 5)
    expected = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(1, 6)[:, :5]
    np.testing.assert_allclose(code, expected, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(start=st.integers(0, 500), step=st.integers(0, 50))
def test_sinusoids_of_a_later_position_are_a_rotation(start, step):
    """PE(p + n) = M(n) PE(p) with a matrix that does not depend on p: sine and cosine share their exponent."""
    width = 8
    here, there = np.asarray(sinusoids(np.array([start, start + step]), width), np.float64)
    angle = step * 10000.0 ** (-np.arange(0, width, 2) / width)
    sine, cosine = here[0::2], here[1::2]
    rotated = np.stack([sine * np.cos(angle) + cosine * np.sin(angle), cosine * np.cos(angle) - sine * np.sin(angle)])
    np.testing.assert_allclose(there, rotated.T.reshape(-1), atol=1e-4)


# Learned


def test_learned_reads_rows_and_refuses_more_slots_than_rows():
    module = encodings.get("learned").embed(config_of("learned"), WIDTH)
    side = positions([3, 0, 3])

    @jax.jit
    def every(key):
        variables = module.init(key, side)
        table = nn.meta.unbox(variables)["params"]["table"]
        return table, module.apply(variables, side), module.apply(variables, positions([16]))

    table, rows, beyond = jax.device_get(every(jax.random.key(0)))
    chex.assert_shape(table, (16, WIDTH))
    chex.assert_trees_all_equal(rows[0], table[np.array([3, 0, 3])])
    assert np.isnan(beyond).all()
    with pytest.raises(ConfigError, match=r"max_length: got 16, expected at least the sequence length 17"):
        module.apply({"params": {"table": table}}, positions(range(17)))


# RoPE


@functools.partial(jax.jit, static_argnames=("config", "position", "head_width"))
def turn(config, x, position, head_width):
    shared = rope.Angles(config, ATTENTION, head_width).apply({}, positions(position))
    return rope.rotate(config, x, shared)


def turned(config, x, position, head_width=HEAD_WIDTH):
    return np.asarray(turn(config, x, tuple(position), head_width))


def test_rope_by_hand():
    x = np.float32([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    halves = turned(config_of("rope"), x, [2], 4)[0, 0, 0]  # pairs (0, 2) at angle 2 and (1, 3) at 2 / 100
    np.testing.assert_allclose(halves, [np.cos(2), -np.sin(0.02), np.sin(2), np.cos(0.02)], rtol=1e-5)
    neighbours = turned(config_of("rope", interleaved=True), x, [2], 4)[0, 0, 0]  # pairs (0, 1) and (2, 3)
    np.testing.assert_allclose(neighbours, [np.cos(2), np.sin(2), -np.sin(0.02), np.cos(0.02)], rtol=1e-5)


def test_rope_forms_differ_by_a_permutation_of_channels():
    x = normal(1, 3, 2, HEAD_WIDTH)
    order = np.array([0, 3, 1, 4, 2, 5])  # halves -> neighbours
    halves = turned(config_of("rope"), x, [0, 4, 9])
    neighbours = turned(config_of("rope", interleaved=True), x[..., order], [0, 4, 9])
    chex.assert_trees_all_close(halves[..., order], neighbours, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_keeps_lengths_position_zero_and_the_rest(interleaved):
    config = config_of("rope", fraction=0.7, interleaved=interleaved)  # 4 of 6 channels
    x = normal(1, 3, 2, HEAD_WIDTH)
    y = turned(config, x, [0, 5, 9])
    chex.assert_trees_all_close(y[:, 0], x[:, 0])
    chex.assert_trees_all_equal(y[..., 4:], x[..., 4:])
    chex.assert_trees_all_close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    assert (np.abs(y[:, 1:, :, :4] - x[:, 1:, :, :4]).max(axis=(1, 2)) > 1e-3).all()


@pytest.mark.parametrize(("fraction", "head_width"), [(1.0, 5), (0.5, 6), (0.1, 6), (2.0, 6)])
def test_rope_refuses_widths_without_pairs(fraction, head_width):
    with pytest.raises(ConfigError, match="expected an even number"):
        rope.Angles(config_of("rope", fraction=fraction), ATTENTION, head_width).apply({}, positions([0]))


# ALiBi


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2.0**-i for i in range(1, 9)] + [2 ** -(i / 2) for i in (1, 3, 5, 7)]),
    ],
)
def test_alibi_slopes(heads, expected):
    np.testing.assert_allclose(alibi.slopes(heads), expected, rtol=1e-6)


def test_alibi_scores_are_straight_lines_on_both_sides():
    position = np.array([[0, 1, 5]], np.int32)
    q = np.zeros((1, 3, 2, 4), np.float32)
    bias = jax.jit(lambda: alibi.bias(config_of("alibi"), jnp.array([0.5, 0.25]), q, q, position, position))()
    distance = np.array([[0, 1, 5], [1, 0, 4], [5, 4, 0]])
    np.testing.assert_allclose(bias, -np.array([0.5, 0.25])[None, :, None, None] * distance)


# T5


def slow_bucket(offset: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The published formula in exact arithmetic: floor of a logarithm as a comparison of powers."""
    bucket, distance = 0, max(-offset, 0)
    if bidirectional:
        buckets //= 2
        bucket, distance = (buckets if offset > 0 else 0), abs(offset)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    steps = 0
    while steps < buckets and Fraction(distance, exact) ** (buckets - exact) >= Fraction(max_distance, exact) ** (
        steps + 1
    ):
        steps += 1
    return bucket + min(exact + steps, buckets - 1)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (12, 96), (10, 125)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_the_formula(bidirectional, buckets, max_distance):
    config = EncodingConfig(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    offsets = range(-max_distance, max_distance + 1)
    expected = [slow_bucket(n, bidirectional, buckets, max_distance) for n in offsets]
    np.testing.assert_array_equal(t5.bucket_of_offset(config), expected)


def test_t5_scores_look_up_the_table_and_saturate():
    config = EncodingConfig(bidirectional=True)
    table = np.arange(64, dtype=np.float32).reshape(32, 2)
    query, key = np.int32([[300]]), np.int32([[300, 299, 301, 290, 310, 0, 900]])
    q, k = np.zeros((1, 1, 2, 4), np.float32), np.zeros((1, 7, 2, 4), np.float32)
    compiled = jax.jit(t5.bias, static_argnums=0)
    bias = compiled(config, table, q, k, query, key)
    buckets = np.array([0, 1, 17, 8, 24, 15, 31])  # Raffel et al.'s code, 32 buckets, bidirectional
    np.testing.assert_array_equal(bias[0, :, 0], [2 * buckets, 2 * buckets + 1])
    causal = compiled(EncodingConfig(bidirectional=False), table, q, k, query, key)
    np.testing.assert_array_equal(np.asarray(causal)[0, 0, 0] / 2, [0, 1, 0, 10, 0, 31, 0])


def test_t5_refuses_what_makes_no_sense():
    with pytest.raises(ConfigError, match="bidirectional: got None"):
        t5.bucket_of_offset(EncodingConfig())
    with pytest.raises(ConfigError, match="max_distance: got 16 with 32 buckets"):
        t5.bucket_of_offset(EncodingConfig(bidirectional=False, max_distance=16))
    with pytest.raises(ConfigError, match="with 1 buckets"):
        t5.bucket_of_offset(EncodingConfig(bidirectional=True, buckets=2))


def test_rows_of_the_offset_are_no_positions():
    config = EncodingConfig(kind="learned", max_length=6, offset=2)
    with pytest.raises(ConfigError, match="got 4, expected at least the sequence length 5"):
        encodings.get("learned").embed(config, 8).init(
            jax.random.key(0), slots_from_segments(jnp.ones((1, 5), jnp.int32))
        )
