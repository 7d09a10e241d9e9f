"""The pipeline is the layer scan, stage by stage."""

from __future__ import annotations

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.models import build
from jaxformer.nn.kernels import _sharding
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import pipeline, rules, shards
from jaxformer.parallel.collectives import collectives


@pytest.fixture(scope="module")
def mesh():
    return meshes.make(MeshConfig(stage=2, data=1), jax.devices()[:2])


@pytest.mark.parametrize("parts", [2, 4])
def test_every_microbatch_passes_every_layer_in_order(mesh, parts):
    weights, x = jnp.arange(1.0, 5.0), jnp.linspace(-1.0, 1.0, 8)[:, None, None] * jnp.ones((8, 3, 2))
    offset = jnp.arange(8.0)

    def layer(w, x, context, number, part):
        return x * w + context[:, None, None] + 10 * number + 1000 * part, jnp.stack([w * context.sum(), part])

    def prepare(rows, shared):
        return rows * shared

    def run(weights, x, offset, shared):
        return pipeline.pipeline(prepare, layer, weights, x, offset, shared, parts)

    def loop(weights, x, offset, shared):
        part = jnp.arange(8) // (8 // parts)
        said = jnp.stack([weights * (offset * shared).sum() / parts, jnp.full(4, (parts - 1) / 2)], axis=1)
        for number in range(4):
            x = x * weights[number] + (offset * shared + 10 * number + 1000 * part)[:, None, None]
        return x, said

    arguments = weights, x, offset, jnp.float32(2.0)
    pull = lambda f: jax.jit(lambda *a: jax.vjp(f, *a)[1]((jnp.sin(x), jnp.ones((4, 2)))))(*arguments)  # noqa: E731
    with jax.set_mesh(mesh):
        assert (
            pipeline.can_pipeline(8, 4, parts)
            and not pipeline.can_pipeline(7, 4, parts)
            and not pipeline.can_pipeline(8, 3, parts)
        )
        compiled = jax.jit(run).lower(*arguments).compile()
        assert "collective-permute" in {found.kind for found in collectives(compiled.as_text())}
        chex.assert_trees_all_close(compiled(*arguments), jax.jit(loop)(*arguments), rtol=1e-6)
        chex.assert_trees_all_close(pull(run), pull(loop), rtol=1e-5)


def test_a_kernel_within_a_stage_takes_over_the_axes_of_size_1(mesh):
    """Else the TPU's compiler refuses it: "Mosaic kernels cannot be automatically partitioned"."""
    found = []

    def stage(x):
        found.append((shards.is_inside_shard_map(), _sharding.layout(2, 2)))
        kernel = shards.shard(
            lambda x: found.append((shards.is_inside_shard_map(), _sharding.layout(2, 2))) or x, P(), P()
        )
        return kernel(x)

    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(stage, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False))(jnp.ones(2))
        assert found == [(True, _sharding.Layout((), (), ())), (False, None)]
        assert not shards.is_inside_shard_map() and _sharding.layout(2, 2) is not None
    assert not shards.is_inside_shard_map() and _sharding.layout(2, 2) is None


def test_dropout_is_drawn_anew_for_every_microbatch_and_the_same_for_a_key(mesh):
    config = builders.encoder(dropout=0.5)
    module, variables = builders.make(config)
    batch = builders.batch(config, [5, 5, 5, 5])
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), batch.source)  # so that only dropout differs
    run = jax.jit(lambda key: module.apply(variables, batch._replace(source=same), rngs={"dropout": key}))
    with jax.set_mesh(mesh):
        first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert len({row.tobytes() for row in [*first, *other]}) == 8


def test_rows_that_do_not_divide_are_scanned(mesh):
    config = builders.decoder()
    module, variables = builders.make(config)
    batch = builders.batch(config, [5, 2, 4])
    expected = builders.apply(module)(variables, batch)
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, rules.shardings(build.shapes(module), mesh))
        kernel = placed["params"]["decoder"]["blocks"]["ffn"]["in"]["kernel"]
        assert kernel.addressable_shards[0].data.shape[0] == 1, "each stage keeps its own layers"
        chex.assert_trees_all_close(builders.apply(module)(placed, batch), expected, rtol=1e-5, atol=1e-6)
