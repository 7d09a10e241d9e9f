"""A model as an NNX module: the same arrays and bits, its gradients, its dropout, and the way back."""

import dataclasses

import builders
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.model import Model

SEQ2SEQ = builders.seq2seq(layers=1, attention=builders.AttentionConfig(heads=2, dropout=0.5))
BATCH = builders.batch(SEQ2SEQ)


def model(parts=SEQ2SEQ) -> Model:
    module, variables = builders.make(parts)
    others = {name: value for name, value in variables.items() if name != "params"}
    return Model(module, variables["params"], others, Config(model=parts), None)


def test_it_holds_the_same_arrays_and_computes_the_same_bits():
    plain = model()
    converted = plain.as_nnx()
    held, given = jax.tree.leaves(nnx.state(converted, nnx.Param)), jax.tree.leaves(plain.params)
    assert len(held) == len(given) and all(one is other for one, other in zip(held, given))
    want = jax.jit(plain.module.apply)(plain.inference_variables(), BATCH)
    assert np.array_equal(nnx.jit(lambda module, batch: module(batch))(converted, BATCH), want)
    source = plain.module.apply(plain.inference_variables(), BATCH.source, method="encode")
    np.testing.assert_array_equal(converted.encode(BATCH.source), source)


def test_trained_there_it_comes_back_and_the_first_one_stays_as_it_was():
    plain = model()
    before = jax.tree.map(np.array, plain.params)
    converted = plain.as_nnx()
    loss = lambda module, batch: (module(batch) ** 2).mean()  # noqa: E731
    nnx.Optimizer(converted, optax.sgd(0.1), wrt=nnx.Param).update(converted, nnx.grad(loss)(converted, BATCH))
    trained = plain.with_nnx(converted)
    variables = plain.inference_variables()
    slope = jax.grad(lambda params: (plain.module.apply({**variables, "params": params}, BATCH) ** 2).mean())
    want = jax.tree.map(lambda param, gradient: param - 0.1 * gradient, plain.params, slope(plain.params))
    jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, 1e-6, 1e-7), trained.params, want)
    jax.tree.map(np.testing.assert_array_equal, plain.params, before)
    assert trained.config == plain.config


def test_statistics_of_batch_norm_go_both_ways():
    plain = model(builders.encoder(layers=1, norm=builders.NormConfig(kind="batch")))
    statistics = plain.variables["batch_stats"]
    back = plain.with_nnx(plain.as_nnx()).variables["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, back, statistics)
    assert jax.tree.leaves(statistics)


def test_dropout_is_on_where_keys_are_given():
    plain = model()
    off, on = plain.as_nnx(), plain.as_nnx(nnx.Rngs(dropout=0))
    assert np.array_equal(off(BATCH), off(BATCH))
    first, second = on(BATCH), on(BATCH)
    assert not np.array_equal(first, second) and not np.array_equal(first, off(BATCH))


def test_another_models_module_is_refused():
    plain = model()
    wider = model(dataclasses.replace(SEQ2SEQ, decoder=dataclasses.replace(SEQ2SEQ.decoder, layers=2)))
    with pytest.raises(
        ConfigError, match=r"with_nnx: got float32 \[2, .*\] at params/decoder/.*, expected float32 \[1,"
    ):
        plain.with_nnx(wider.as_nnx())
    with pytest.raises(ConfigError, match="with_nnx: got nothing at params/decoder/blocks/cross/"):
        plain.with_nnx(model(builders.decoder(layers=1)).as_nnx())
    with pytest.raises(ConfigError, match="with_nnx: got a Linear, expected a module that as_nnx made"):
        plain.with_nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
