"""How parameters come into being: the same values on every mesh, by a small program that is traced once."""

from __future__ import annotations

import builders
import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import EncodingConfig, MeshConfig, NormConfig
from jaxformer.models import build
from jaxformer.nn.layers import Dense
from jaxformer.parallel import mesh as meshes


@pytest.fixture(autouse=True)
def forgetful():
    """What other tests left in the caches decides nothing here, and nothing stays there of what is replaced here."""
    build._shapes.cache_clear()
    build._initialiser.cache_clear()
    yield
    build._shapes.cache_clear()
    build._initialiser.cache_clear()


def test_values_are_the_same_on_every_mesh():
    module = build.build(builders.decoder(unroll=None))
    found = []
    for sizes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        config = MeshConfig(**sizes)
        mesh = meshes.make(config, jax.devices()[: config.devices])
        with jax.set_mesh(mesh):
            found.append(jax.device_get(build.create(module, jax.random.key(3), mesh)))
    chex.assert_trees_all_equal(*found)


@pytest.mark.parametrize("family", ["decoder", "seq2seq"])
def test_the_program_is_as_long_for_many_layers_as_for_two(family):
    def program(layers: int) -> list[str]:
        module = build.build(builders.FAMILIES[family](layers=layers, unroll=None))  # on a CPU: all layers at once
        return jax.jit(lambda key: build.init_variables(module, key)).lower(jax.random.key(0)).as_text().splitlines()

    assert len(program(7)) == len(program(2)) > 100


def test_asking_for_shapes_traces_what_making_them_runs(monkeypatch):
    module = build.build(builders.decoder())
    calls = []
    draw = build.init_variables
    monkeypatch.setattr(build, "init_variables", lambda *given: calls.append(1) or draw(*given))
    mesh = meshes.make(MeshConfig(data=1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        build.create(module, jax.random.key(0), mesh)
        build.create(module, jax.random.key(1), mesh)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "config",
    [
        builders.seq2seq(share_layers=True, encoding=EncodingConfig(kind="t5", buckets=8, max_distance=16)),
        builders.classifier(norm=NormConfig(kind="batch")),
    ],
    ids=["shared", "classifier"],
)
def test_shapes_are_those_of_what_is_made(config):
    """Shapes are traced without random numbers: names, types and trees are the same as with them."""
    module = build.build(config)
    made = jax.eval_shape(lambda key: build.init_variables(module, key), jax.random.key(0))
    asked = build.shapes(module)
    assert jax.tree.structure(asked) == jax.tree.structure(made)  # names of axes are a part of it
    assert jax.tree.leaves(asked) == jax.tree.leaves(made)
    # What is made afterwards has values again.
    assert Dense((2, 3), (None, None), bias=False).init(jax.random.key(0), jnp.ones(2))["params"]["kernel"].value.all()


def test_asking_for_shapes_computes_nothing(monkeypatch):
    """A mesh may be of devices that are not here, on which nothing can run: that is how a slice is planned."""
    made, key = [], jax.random.key

    def watched(seed: int) -> jax.Array:
        made.append(key(seed))
        return made[-1]

    monkeypatch.setattr(jax.random, "key", watched)
    build.shapes(build.build(builders.decoder()))
    assert made
    assert all(isinstance(each, jax.core.Tracer) for each in made)
