"""Blocks of a row's slots (BigBird) and summaries of blocks (LongT5): the mask, the kernels, and what is refused."""

import dataclasses

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    SparseConfig,
    checks,
)
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.nn import kernels, stack
from jaxformer.nn.attention import Attention
from jaxformer.nn.kernels import blockwise
from jaxformer.nn.masks import Blocks, Mask, block_of_slot, full_blocks
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.parallel.collectives import collectives
from jaxformer.plan import flops
from jaxformer.train import step as steps
from jaxformer.types import Slots

SPARSE = AttentionConfig(heads=2, sparse=SparseConfig(2, 1), block=3)
SUMMARY = AttentionConfig(heads=2, summary=3, window=2, block=4)
T5 = EncodingConfig("t5", buckets=6, max_distance=5)


def slots(length, *texts):
    index = jnp.arange(length)
    return Slots(jnp.tile(index, (len(texts), 1)), jnp.where(index < jnp.array(texts)[:, None], 1, -1))


@pytest.mark.parametrize(("length", "size"), [(15, 2), (12, 3), (17, 4)])
def test_blocks_see_the_first_the_last_and_their_neighbours(length, size):
    side, blocks = slots(length, length, length - 3), Blocks(size, (length - 1) // size, 2)
    got = np.asarray(Mask(side, side, blocks=blocks).dense())
    weight = np.exp(np.asarray(blocks.bias(side.position, side.position)))
    last = -(-length // size) - 1
    for row, t, s in np.ndindex(got.shape):
        own, other, real = t // size, s // size, length - 3 * row
        whole = own in (0, last) or other in (0, last)
        assert got[row, t, s] == (t < real and s < real and (whole or abs(own - other) <= 1))
        assert weight[row, 0, t, s] == pytest.approx(3.0 if other == 0 and own not in (0, last) else 1.0)


def test_short_rows_have_full_attention_unless_they_are_to_be_sparse():
    config = SparseConfig(4, 2)
    assert Blocks.of(config, 36) is None and Blocks.of(config, 37) == Blocks(4, 9, 2)
    assert Blocks.of(dataclasses.replace(config, short="sparse"), 9) == Blocks(4, 2, 2)


def test_the_slots_after_the_last_full_block_are_summed_in_it():
    side = slots(11, 11, 8, 2)
    full = full_blocks(side, 3)
    assert full.tolist() == [3, 2, 0]
    block = block_of_slot(side.position, full, 3)
    assert block[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2] and block[1, :8].tolist() == [0, 0, 0] + [1] * 5
    assert (block[2] == -1).all()


def test_a_text_without_the_padding_before_it_has_the_blocks_of_its_padded_row():
    """Decoding drops padding and keeps positions: 5 slots at positions 2 to 6 end two blocks of 3."""
    config, table = builders.stack(layers=1, attention=SUMMARY, encoding=T5), None
    encoding = dataclasses.replace(T5, bidirectional=True)
    shared = stack.encodings.get("t5").shared(encoding, SUMMARY, config.width // 2)
    layer, outputs = Attention(SUMMARY, encoding, config.width), []
    x = jax.random.normal(jax.random.key(1), (1, 7, config.width))
    whole = Slots(jnp.arange(7)[None], jnp.array([[0, 0, 1, 1, 1, 1, 1]]))
    for side, own in ((whole, x), (Slots(whole.position[:, 2:], whole.segment[:, 2:]), x[:, 2:])):
        mask = stack.self_attention_mask(config, False, side)
        if table is None:
            table = shared.init(jax.random.key(2), side)
            params = layer.init(jax.random.key(3), own, mask, shared.apply(table, side))
        outputs.append(layer.apply(params, own, mask, shared.apply(table, side))[0][:, -5:])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [SPARSE, SUMMARY], ids=["sparse", "summary"])
def test_blockwise_is_dense_in_values_and_gradients(own):
    config = builders.stack(layers=1, attention=own, encoding=T5)
    side, width = slots(15, 15, 10), config.width
    mask = stack.self_attention_mask(config, False, side)
    x = jax.random.normal(jax.random.key(1), (2, 15, width))
    encoding = dataclasses.replace(T5, bidirectional=True)
    shared = stack.encodings.get("t5").shared(encoding, own, width // 2)
    table = shared.init(jax.random.key(2), side)
    results = []
    for name in ("dense", "blockwise"):
        layer = Attention(dataclasses.replace(own, kernel=name), encoding, width)
        params = Attention(own, encoding, width).init(jax.random.key(3), x, mask, shared.apply(table, side))

        def loss(params, table, x, layer=layer):
            y = layer.apply(params, x, mask, shared.apply(table, side))[0]
            return jnp.sum(jnp.sin(y) * (side.segment > 0)[..., None]), y

        results.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(params, table, x))
    for ours, dense in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("own", "change"), [(SPARSE, lambda f: f), (SUMMARY, jax.grad)], ids=["sparse", "summary"])
def test_stages_with_recomputation_give_the_sums_or_gradients_of_one_device(own, change):
    model = builders.encoder(attention=own, encoding=T5)
    module, variables = builders.make(model)
    batch = builders.batch(model, [15, 9, 12, 15])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16, builders.VOCAB)), jnp.float32)
    compute = lambda module: jax.jit(change(lambda v, batch: jnp.sum(weights * module.apply(v, batch))))  # noqa: E731
    expected = jax.device_get(compute(module)(variables, batch))
    other = build.build(builders.encoder(attention=own, encoding=T5, remat="full"))
    mesh = meshes.make(MeshConfig(data=1, stage=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, dict(variables), rules.shardings(build.shapes(module), mesh))
        program = compute(other).lower(placed, steps.shard_batch(batch, mesh)).compile()
        assert "collective-permute" in {found.kind for found in collectives(program.as_text())}
        got = jax.device_get(program(placed, steps.shard_batch(batch, mesh)))
    chex.assert_trees_all_close(got, expected, rtol=2e-4, atol=2e-5)


def test_no_tile_with_a_visible_pair_is_skipped():
    side = slots(18, 18, 13)
    for blocks in (Blocks(2, 8, 1), Blocks(1, 17, 0)):
        query = jax.tree.map(lambda ids: blockwise.tile(ids, 3), side)
        active = np.asarray(blockwise.active_tiles(query, query, False, None, blocks))
        seen = np.asarray(Mask(side, side, blocks=blocks).dense()).reshape(2, 6, 3, 6, 3).any(axis=(0, 2, 4))
        assert (active | ~seen).all() and not active.all()


@pytest.mark.parametrize("name", ["ring", "ulysses", "splash", "cudnn"])
def test_kernels_without_blocks_refuse_them(name):
    side, x = slots(8, 8), jnp.zeros((1, 8, 2, 4))
    for mask in (Mask(side, side, blocks=Blocks(2, 3, 0)), Mask(side, side, summaries=True)):
        with pytest.raises(ConfigError, match="attention.sparse or attention.summary, expected dense or blockwise"):
            kernels.get(name).apply(x, x, x, mask, None, None, AttentionConfig(heads=2))
    assert kernels.get(name).refuse(SUMMARY, False, False) is not None


@pytest.mark.parametrize(
    ("own", "edits", "message"),
    [
        (SPARSE, {"causal": True}, "None in a causal stack"),
        (dataclasses.replace(SPARSE, summary=2), {}, "None with both"),
        (dataclasses.replace(SPARSE, window=2), {}, "None with a window"),
        (SUMMARY, {"encoding": EncodingConfig("rope")}, "None with encoding.kind rope"),
        (SUMMARY, {"data": DataConfig(packing="first_fit")}, "None with data.packing"),
        (SPARSE, {"mesh": MeshConfig(context=2)}, "1 with blocks of slots"),
        (dataclasses.replace(SUMMARY, kernel="ring"), {"encoding": T5}, "attention.sparse and attention.summary None"),
    ],
)
def test_what_cannot_be_honoured_is_refused(own, edits, message):
    run = {name: edits.pop(name) for name in ("data", "mesh") if name in edits}
    model = dataclasses.replace(builders.classifier(), encoder=builders.stack(attention=own, **edits))
    with pytest.raises(ConfigError, match=message):
        (checks.mesh.check_mesh if "mesh" in run else checks.check)(Config(model=model, **run))


def test_a_cache_is_refused_and_heads_for_spans_stand_alone():
    with pytest.raises(ConfigError, match="attention.sparse: got it in a causal stack or with a cache"):
        stack.self_attention_mask(builders.stack(attention=SPARSE), False, slots(4, 4), slots(8, 8))
    model = dataclasses.replace(builders.classifier(), head=HeadConfig(kind="classes", classes=2, residual_width=3))
    with pytest.raises(ConfigError, match="residual_width: got 3, expected None"):
        checks.check(Config(model=model))


@pytest.mark.parametrize("length", [15, 16])
def test_visible_keys_are_those_of_the_mask(length):
    side, blocks = slots(length, length), Blocks.of(SPARSE.sparse, length)
    seen = np.asarray(Mask(side, side, blocks=blocks).dense())[0].sum(axis=1).mean()
    assert flops.visible_keys(builders.stack(attention=SPARSE), False, length) == pytest.approx(seen)
