"""Every kernel of the folder equals the dense one, in value and in gradient; the dense one equals the plain formula."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import registry
from jaxformer.config import AttentionConfig, EncodingConfig, MeshConfig
from jaxformer.nn import encodings, kernels, reference
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, blockwise, dense
from jaxformer.nn.layers import Dense
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Slots

KERNELS = registry.names("jaxformer.nn.kernels")
DIVIDED = {  # kernels of a mesh that divides sequences; on one device they are others of the folder
    "ring": (MeshConfig(data=2, context=4), MeshConfig(data=2, context=2, tensor=2), MeshConfig(data=1, context=8)),
    "ulysses": (MeshConfig(data=2, context=4), MeshConfig(data=2, context=2, tensor=2)),
}
LOCAL = [name for name in KERNELS if name not in DIVIDED and name != "cudnn"]  # cuDNN: tests/nn/test_fused.py
BIASES = [kind for kind in registry.names("jaxformer.nn.encodings") if encodings.get(kind).bias is not None]
BATCH, HEADS, HEAD_WIDTH = 2, 4, 4
LONG = [[1, 1, 1, 1, 2, 2, 2, 0, 0], [0] * 9]  # packed and padded; the second row sees nothing at all


SLOTS = jax.jit(slots_from_segments)


def mask_of(name: str, rows: int = 7, columns: int = 9) -> Mask:
    segments = np.ones((BATCH, max(rows, columns)), np.int32)
    if name in ("packed", "packed causal"):
        segments = np.array(LONG, np.int32)
    if name == "padded":
        segments = np.array([[1] * 6 + [0] * 3, [1] * 2 + [0] * 7], np.int32)
    side = jax.tree.map(np.asarray, SLOTS(segments))
    query, key = (jax.tree.map(lambda ids: ids[:, :length], side) for length in (rows, columns))  # noqa: B023
    if name == "step":  # late queries against a longer cache
        query = query._replace(position=query.position + 2)
    window = 3 if "window" in name else None
    return Mask(query, key, causal="causal" in name or name == "step", window=window)


MASKS = ["full", "padded", "causal", "packed", "packed causal", "window", "causal window", "step"]


def inputs(rows=7, columns=9, groups=2, dtype=jnp.float32):
    draw = np.random.default_rng(0).standard_normal
    q, do = (draw((BATCH, 8, HEADS, HEAD_WIDTH))[:, :rows].astype(dtype) for _ in range(2))
    k, v = (draw((BATCH, columns, groups, HEAD_WIDTH)).astype(dtype) for _ in range(2))
    return q, k, v, do


def general(args, q, k, query_position, key_position):
    """A bias that depends on everything a bias may depend on, with an integer argument that has no gradient."""
    near = jnp.abs(query_position[:, None, :, None] - key_position[:, None, None, :]) < args["near"]
    by_query = jnp.einsum("bthk,hk->bht", q, args["weight"])[..., None]
    by_key = jnp.einsum("bshk,hk->bhs", jnp.tanh(jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)), args["weight"])
    by_key = by_key[:, :, None]
    return jnp.where(near, by_query * by_key, -0.5).astype(jnp.float32)


@functools.cache
def bias_of(kind: str | None) -> AttentionBias:
    """The bias of that encoding, with the real-valued part of its arguments."""
    if kind is None:
        return AttentionBias(None, {})
    if kind == "general":
        weight = jnp.linspace(-1, 1, HEADS * HEAD_WIDTH).reshape(HEADS, -1)
        return AttentionBias(general, {"weight": weight, "near": jnp.int32(4)}, {"weight": 0, "near": -1})
    encoding, config = encodings.get(kind), EncodingConfig(kind=kind, buckets=6, max_distance=8, bidirectional=True)
    attention, width = AttentionConfig(heads=HEADS, kv_heads=2), HEADS * HEAD_WIDTH

    class Shared(nn.Module):
        @nn.compact
        def __call__(self, side):
            shared = None if encoding.shared is None else encoding.shared(config, attention, HEAD_WIDTH)(side)
            if encoding.layer is None:
                return shared
            query = Dense((width, HEADS, HEAD_WIDTH), (None, None, None), name="query")
            key = Dense((width, 2, HEAD_WIDTH), (None, None, None), name="key")
            return encoding.layer(config, attention, width)(shared, query, key)

    shared = nn.meta.unbox(jax.jit(Shared().init_with_output)(jax.random.key(3), mask_of("full").query)[0])
    return AttentionBias(functools.partial(encoding.bias, config), shared, encoding.heads(shared))


@functools.partial(jax.jit, static_argnames=("name", "kind", "config"))
def compiled(name, kind, config, q, k, v, do, mask, args):
    def forward(q, k, v, args):
        bias = bias_of(kind)
        bias = bias._replace(args=jax.tree.map(lambda a, b: a if b is None else b, bias.args, args, is_leaf=none))
        o = kernels.get(name).apply(q, k, v, mask, bias if kind else None, None, config)
        assert o.dtype == q.dtype
        return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32)), o

    (_, o), gradients = jax.value_and_grad(forward, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, args)
    return o, gradients


def none(leaf):
    return leaf is None


def run(name, mask, bias=None, block=4, change=lambda *tensors: tensors, **shapes):
    """Output, and gradients with respect to q, k, v and the bias's arguments."""
    real = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, bias_of(bias).args)
    config = AttentionConfig(heads=HEADS, block=block, window=mask.window)
    return compiled(name, bias, config, *change(*inputs(**shapes)), mask, real)


@functools.cache
def expected(mask, bias=None, groups=2, rows=7, columns=9):
    return run("dense", mask_of(mask, rows, columns), bias, groups=groups, rows=rows, columns=columns)


def compare(name, mask, bias=None, block=4, groups=2, rows=7, columns=9):
    if kernels.get(name).refuse(AttentionConfig(), bias is not None, False) is not None:
        pytest.skip("the kernel refuses this")
    got = run(name, mask_of(mask, rows, columns), bias, block, groups=groups, rows=rows, columns=columns)
    chex.assert_trees_all_close(got, expected(mask, bias, groups, rows, columns), rtol=1e-4, atol=2e-5)


OTHERS = [name for name in LOCAL if name != "dense"]


@pytest.mark.parametrize(
    ("mask", "bias", "groups", "rows", "columns"),
    [("packed causal", "general", 2, 7, 9), ("causal window", "deberta", 2, 8, 8), ("padded", None, 1, 8, 5)],
)
@pytest.mark.parametrize("name", DIVIDED)
def test_kernel_is_dense_over_divided_sequences(name, mask, bias, groups, rows, columns):
    """Every case on another mesh: what the mask, the bias and the heads are divided over varies with it."""
    places = DIVIDED[name]
    case = ["packed causal", "causal window", "padded"].index(mask)
    with jax.set_mesh(meshes.make(places[case % len(places)])):
        got = run(name, mask_of(mask, rows, columns), bias, 2, groups=groups, rows=rows, columns=columns)
    wanted = expected(mask, bias, groups, rows, columns)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(wanted), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", DIVIDED)
def test_dropout_over_divided_sequences_keeps_the_mean_and_differs_between_devices(name):
    mask, config = mask_of("full", 8, 8), AttentionConfig(heads=HEADS, block=4)
    q, k, _, _ = inputs(8, 8, groups=4)
    ones = jnp.ones_like(k)
    with jax.set_mesh(meshes.make(DIVIDED[name][0])):
        attend = jax.jit(
            lambda key: kernels.get(name).apply(q, k, ones, mask, None, AttentionDropout(0.5, key), config)
        )
        # One at a time: simulated devices share threads, and programs in flight can starve one another's exchanges.
        many = np.stack([np.asarray(attend(jax.random.key(seed))) for seed in range(60)])
    sums = many[..., 0]  # each the sum of its kept probabilities, 1 on average
    assert abs(sums.mean() - 1.0) < 0.03
    assert len(np.unique(sums[0])) == sums[0].size


@pytest.mark.parametrize("bias", ["general", *BIASES])
@pytest.mark.parametrize("name", OTHERS)
def test_kernel_is_dense_with_scores(name, bias):
    compare(name, "packed causal", bias)


@pytest.mark.parametrize(("groups", "block", "rows", "columns"), [(1, 3, 8, 4), (4, 128, 1, 9)])
@pytest.mark.parametrize("name", OTHERS)
def test_kernel_is_dense_for_groups_tiles_and_lengths(name, groups, block, rows, columns):
    compare(name, "padded", groups=groups, block=block, rows=rows, columns=columns)


# What holds for every file of the folder, dense included


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_is_the_formula(groups):
    mask = mask_of("packed causal")

    @jax.jit
    def both(q, k, v):
        share = HEADS // groups
        heads = [(q[:, :, h], k[:, :, h // share], v[:, :, h // share]) for h in range(HEADS)]
        rows = [reference.attend(*each, mask.dense(), scale=False) for each in heads]
        return dense.attend(q, k, v, mask, None, None, AttentionConfig(heads=HEADS)), jnp.stack(rows, axis=2)

    chex.assert_trees_all_close(*both(*inputs(groups=groups)[:3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOCAL)
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(name):
    o, (dq, dk, dv, _) = jax.device_get(run(name, mask_of("packed")))
    assert (o[1] == 0).all()
    assert (o[0] != 0).any()
    for gradient in (dq[1], dk[1], dv[1], dk[0, 7:], dv[0, 7:]):
        assert (gradient == 0).all()
    chex.assert_tree_all_finite((o, dq, dk, dv))


@pytest.mark.parametrize("name", LOCAL)
def test_hidden_keys_have_no_influence_even_when_huge(name):
    mask = mask_of("padded")
    hidden = np.asarray(mask.key.segment == 0)[:, :, None, None]

    def change(q, k, v, do):
        return q, np.where(hidden, 1e9, k).astype(k.dtype), np.where(hidden, 1e3, v).astype(v.dtype), do

    o, (_, dk, dv, _) = run(name, mask, change=change)
    chex.assert_trees_all_equal(o, run(name, mask)[0])
    chex.assert_trees_all_equal(np.where(hidden, dk, 0.0), np.where(hidden, dv, 0.0), np.zeros_like(dk))


@pytest.mark.parametrize("name", LOCAL)
def test_hidden_keys_have_no_influence_beside_scores_far_below_zero(name):
    """A masking value of -10,000, as some libraries add, would win over visible scores of minus a million."""
    mask = mask_of("padded")
    hidden = np.asarray(mask.key.segment == 0)[:, :, None, None]

    def low(value):
        return lambda q, k, v, do: (0 * q - 1e3, 0 * k + 1e3, np.where(hidden, value, v).astype(v.dtype), do)

    chex.assert_trees_all_equal(run(name, mask, change=low(1e3))[0], run(name, mask, change=low(-7.0))[0])


@pytest.mark.parametrize("name", LOCAL)
def test_large_scores_do_not_overflow(name):
    o, gradients = run(name, mask_of("causal"), change=lambda q, k, v, do: (1e4 * q, k, v, do))
    chex.assert_tree_all_finite((o, gradients))
    np.testing.assert_allclose(o[:, 0], np.repeat(inputs()[2][:, 0], 2, axis=1), rtol=1e-5)


@pytest.mark.parametrize("name", LOCAL)
def test_bfloat16_is_close_to_float32(name):
    half = run(name, mask_of("causal"), dtype=jnp.bfloat16)
    full = expected("causal")
    chex.assert_trees_all_close(jax.tree.map(lambda x: np.asarray(x).astype(np.float32), half), full, atol=0.12)


@pytest.mark.parametrize("name", LOCAL)
def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_the_same_draw(name):
    if kernels.get(name).refuse(AttentionConfig(), False, True) is not None:
        pytest.skip("the kernel refuses this")
    mask, config = mask_of("full"), AttentionConfig(heads=HEADS, block=4)
    (q, k, v, do), key = inputs(), jax.random.key(5)

    def total(k, v, key):
        o = kernels.get(name).apply(q, k, v, mask, None, AttentionDropout(0.3, key), config)
        return jnp.sum(o * do), o

    forward = jax.jit(lambda k, v, key: jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(k, v, key))
    (_, o), gradients = forward(k, v, key)
    chex.assert_trees_all_equal(forward(k, v, key)[0][1], o)

    many = np.stack([forward(k, v, draw)[0][1] for draw in jax.random.split(key, 200)])
    plain = np.asarray(expected("full")[0])
    assert np.abs(o - plain).max() > 0.1
    assert np.abs(many.mean(0) - plain).max() < 6 * many.std(0).max() / 200**0.5

    def moved(x, way, step):
        return np.asarray(x) + step * way

    ways = [np.random.default_rng(i).standard_normal(k.shape).astype(np.float32) for i in range(2)]
    for ahead, back, slope in (
        ((moved(k, ways[0], 1e-2), v), (moved(k, ways[0], -1e-2), v), np.sum(gradients[0] * ways[0])),
        ((k, moved(v, ways[1], 1e-2)), (k, moved(v, ways[1], -1e-2)), np.sum(gradients[1] * ways[1])),
    ):
        difference = forward(*ahead, key)[0][0] - forward(*back, key)[0][0]
        np.testing.assert_allclose(slope, difference / 2e-2, rtol=2e-2, atol=2e-2)


def test_probabilities_are_what_the_dense_kernel_sums_with():
    mask, config = mask_of("packed causal"), AttentionConfig(heads=HEADS)
    q, k, v, _ = inputs()
    probs, see = jax.device_get(jax.jit(lambda: (dense.probabilities(q, k, mask, None, None, config), mask.dense()))())
    chex.assert_shape(probs, (BATCH, HEADS, 7, 9))
    assert (probs[:, 0][~see] == 0).all()
    chex.assert_trees_all_close(probs.sum(-1), np.broadcast_to(see.any(-1)[:, None], probs.shape[:3]) * 1.0, rtol=1e-6)
    o = np.einsum("bhts,bshk->bthk", probs, np.repeat(v, 2, axis=2))
    chex.assert_trees_all_close(o, expected("packed causal")[0], rtol=1e-4, atol=1e-5)


def test_noise_rate_and_scale():
    x, key = np.ones((200, 201), np.float32), jax.random.key(0)
    y, whole = jax.device_get(jax.jit(lambda: [AttentionDropout(rate, key).drop(x) for rate in (0.25, 0.0)])())
    np.testing.assert_allclose(np.mean(y == 0), 0.25, atol=0.01)
    np.testing.assert_allclose(y[y != 0], 4 / 3, rtol=1e-5)
    neighbours = (y[:, :-1] == 0) & (y[:, 1:] == 0)  # entries of one random word are independent
    np.testing.assert_allclose([neighbours[:, 0::2].mean(), neighbours[:, 1::2].mean()], 1 / 16, atol=0.01)
    chex.assert_trees_all_equal(whole, x)


# Memory, and tiles that are skipped


def temporary(name, length):
    """Bytes of temporaries of a compiled gradient at this length. Nothing is run."""
    config = AttentionConfig(heads=2, block=64)
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, side):
        return jnp.sum(kernels.get(name).apply(q, k, v, Mask(side, side, causal=True), None, None, config) ** 2)

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, Slots(ids, ids))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_blockwise_memory_is_linear_in_length_and_dense_memory_quadratic():
    short, long = temporary("blockwise", 1024), temporary("blockwise", 4096)
    assert 2.5 < long / short < 4.4
    assert 14.0 < temporary("dense", 4096) / temporary("dense", 1024) < 17.0
    assert long < temporary("dense", 1024)


@jax.jit
def skipped(mask):
    """Tiles that are read, and those in which anything is seen."""
    query, key = (jax.tree.map(lambda ids: blockwise.tile(ids, 3), side) for side in (mask.query, mask.key))
    seen = mask.dense().reshape(BATCH, 3, 3, 3, 3).any(axis=(0, 2, 4))
    return blockwise.active_tiles(query, key, mask.causal, mask.window), seen


@pytest.mark.parametrize("name", MASKS)
def test_skipped_tiles_are_empty_ones(name):
    active, seen = jax.device_get(skipped(mask_of(name, 9, 9)))
    assert (active | ~seen).all()
    if name in ("causal", "causal window", "window", "padded", "full"):
        chex.assert_trees_all_equal(active, seen)
