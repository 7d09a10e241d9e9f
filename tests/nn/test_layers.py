"""What the layers keep for the backward pass, and in which precision they compute."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import EmbedConfig, MeshConfig, NormConfig
from jaxformer.nn.layers import ACTIVATIONS, Dense, Embed, Norm, embedding_lookup
from jaxformer.parallel import mesh as meshes

LEAN = ("gelu", "gelu_tanh", "gelu_sigmoid", "silu", "mish")


def kept(function, *arguments) -> list[jax.ShapeDtypeStruct]:
    """The arrays that wait for the backward pass of `function`."""
    return jax.tree.leaves(jax.eval_shape(lambda *arguments: jax.vjp(function, *arguments)[1], *arguments))


def bytes_of(leaves) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_activation_keeps_its_argument(kind, dtype):
    x = normal(8, 64).astype(jnp.dtype(dtype))
    assert bytes_of(kept(ACTIVATIONS[kind], x)) == x.nbytes


@pytest.mark.parametrize("kind", LEAN)
def test_an_activation_rounds_once(kind):
    x = normal(4096).astype(jnp.bfloat16)
    act, wide = ACTIVATIONS[kind], lambda x: ACTIVATIONS[kind](x.astype(jnp.float32))

    @jax.jit
    def every(x):
        slope = jax.grad(lambda x: jnp.sum(act(x).astype(jnp.float32)))(x)
        wanted = jax.grad(lambda x: jnp.sum(wide(x)))(x.astype(jnp.float32))
        return act(x), wide(x).astype(jnp.bfloat16), slope, wanted

    value, rounded, slope, wanted = jax.device_get(every(x))
    chex.assert_trees_all_equal(value, rounded)
    assert slope.dtype == jnp.bfloat16
    chex.assert_trees_all_close(slope.astype(np.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", LEAN)
def test_the_slope_of_an_activation_is_that_of_its_values(kind):
    x, step = np.linspace(-4.0, 4.0, 81, dtype=np.float32), 1e-2
    act = ACTIVATIONS[kind]
    both = jax.jit(lambda x: (jax.vmap(jax.grad(act))(x), (act(x + step) - act(x - step)) / (2 * step)))
    chex.assert_trees_all_close(*both(x), atol=2e-4)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_keeps_its_argument(kind, dtype):
    norm, x = Norm(NormConfig(kind=kind)), normal(2, 8, 64).astype(jnp.dtype(dtype))
    params = jax.eval_shape(norm.init, jax.random.key(0), x)
    scale_and_bias = 2 * 64 * 4
    assert bytes_of(kept(norm.apply, params, x)) <= x.nbytes + scale_and_bias


def test_ids_without_a_row_are_nan_and_do_not_count_from_the_end():
    table = jnp.arange(6.0).reshape(3, 2)
    ids = jnp.asarray([[-1, 0, 2, 3, -4]])
    for found in (embedding_lookup(table, ids), jax.jit(embedding_lookup)(table, ids)):
        assert np.isnan(found[0]).all(axis=-1).tolist() == [True, False, False, True, True]
    gradient = jax.jit(jax.grad(lambda table: jnp.nansum(embedding_lookup(table, ids))))(table)
    np.testing.assert_array_equal(gradient, [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize("rows", ["vocab", None])
def test_rows_of_a_divided_table_are_looked_up_and_added_up_where_they_lie(rows):
    rng = np.random.default_rng(0)
    table, gradient = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 8), (8, 4, 8)))
    ids = rng.integers(0, 16, (8, 4)).astype(np.int32)
    expected = np.zeros_like(table)
    np.add.at(expected, ids, gradient)
    beyond = ids.copy()
    beyond[0, :2] = 16, -1
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))

    def both(table, ids, gradient):
        found, pull = jax.vjp(lambda table: embedding_lookup(table, ids, rows), table)
        return found, jax.lax.psum(pull(gradient)[0], "data")

    with jax.set_mesh(mesh):
        apart = jax.shard_map(
            both, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P()), axis_names={"data"}, check_vma=False
        )
        place = NamedSharding(mesh, P("tensor" if rows else None, "fsdp"))
        compiled = jax.jit(apart, in_shardings=(place, None, None), out_shardings=(None, place))
        found, summed = compiled(table, ids, gradient)
        nowhere, _ = compiled(table, beyond, gradient)
    np.testing.assert_array_equal(found, table[ids])
    np.testing.assert_allclose(summed, expected, rtol=1e-6, atol=1e-6)
    assert np.isnan(np.asarray(nowhere)[0, :2]).all() and not np.isnan(np.asarray(nowhere).reshape(32, 8)[2:]).any()


def test_a_tied_head_projects_back_to_a_factorised_table_unless_the_stack_has_done_it():
    table, up = normal(7, 3), normal(3, 5)
    embed, variables = Embed(EmbedConfig(vocab=7, width=3), 5), {"params": {"table": table, "up": up}}
    for x, expected in ((normal(2, 5), normal(2, 5) @ up.T), (normal(2, 3), normal(2, 3))):
        run = jax.jit(lambda x: embed.apply(variables, x, method="unembedding_factors"))
        narrow, rows = jax.device_get(run(x))
        chex.assert_trees_all_close(narrow @ rows.T, expected @ table.T, atol=1e-5)


def test_a_parameter_of_another_shape_is_refused_by_name():
    layer = Dense((5, 3), ("embed", "mlp"), bias=False)
    with pytest.raises(ScopeParamShapeError, match=r'"kernel".*\(5, 3\).*\(5, 4\)'):
        layer.apply({"params": {"kernel": np.ones((5, 4), np.float32)}}, np.ones((2, 5), np.float32))
