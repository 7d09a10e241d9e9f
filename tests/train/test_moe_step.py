"""Mixtures of experts in training: what their losses add, over microbatches and on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import builders
import chex
import jax
import numpy as np
import pytest
from test_step import SMALL, config_of, losses, one_device, run

from jaxformer import tasks
from jaxformer.config import FeedForwardConfig, MeshConfig, MoEConfig
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import step


def test_penalties_enter_the_training_loss_for_every_layer_of_both_sides_and_no_other():
    model = builders.seq2seq(**SMALL | {"layers": 2, "moe": MoEConfig(4, 2, balance_loss=0.3, z_loss=0.2)})
    config, task = config_of(model), tasks.get("translation")
    module, variables = builders.make(model)
    batch = builders.batch(model, [5, 2, 4])
    key = jax.random.key(0)

    @jax.jit
    def both(params):
        trained = step.summed_loss(config, module, task, params, {}, batch, key)
        logits = module.apply(variables, batch)
        return trained, task.loss(config, logits, batch), task.metrics(config, logits, batch)

    (numerator, (changed, sums)), plain, measured = both(variables["params"])
    assert changed == {}
    found = {name: float(value[0] / value[1]) for name, value in sums.items()}
    expected = float(plain["loss"][0] / plain["loss"][1]) + 4 * (0.3 * found["balance"] + 0.2 * found["router_z"])
    assert found["loss"] == pytest.approx(expected, rel=1e-5) and numerator == sums["loss"][0]
    assert found["balance"] > 0.5 and found["router_z"] > 0 and found["dropped"] == 0
    assert found["least_loaded"] < 0.25 < found["most_loaded"]
    assert not {"balance", "router_z"} & set(measured)


def test_microbatches_with_the_same_tokens_equal_one_batch_of_them_all():
    model = builders.decoder(**SMALL | {"moe": MoEConfig(4, 2, capacity=0.7), "remat": "full"})
    half = builders.batch(model, [5, 2, 4, 3])
    batch = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), half)  # row i goes to microbatch i % 2
    module, variables = builders.make(model)
    task, key = tasks.get("language_modelling"), jax.random.key(0)
    found = []
    for parts in (1, 2):
        config = config_of(model, "language_modelling", accumulation=parts)
        found.append(
            jax.jit(lambda p, c=config: step.batch_gradients(c, module, task, p, {}, batch, key))(variables["params"])
        )
    chex.assert_trees_all_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0][2]["dropped"][0] > 0 and np.abs(found[0][0]["decoder"]["blocks"]["ffn"]["router"]).max() > 0


@functools.partial(jax.jit, static_argnums=0)
def balanced_gradients(parts, balance, params, batch):
    """Gradients and sums of one batch in `parts`; the weight of the balance is an argument, to compile once."""
    model = builders.decoder(**SMALL | {"moe": MoEConfig(4, 2, capacity=0.7, balance_loss=balance, z_loss=0.2)})
    config, task = config_of(model, "language_modelling", accumulation=parts), tasks.get("language_modelling")
    grads, _, sums = step.batch_gradients(config, build.build(model), task, params, {}, batch, jax.random.key(0))
    return grads, sums


@pytest.mark.parametrize(("balance", "equal"), [(0.0, True), (0.1, False)])
def test_microbatches_equal_one_batch_but_for_the_loss_that_balances_experts(balance, equal):
    model, found = builders.decoder(**SMALL | {"moe": MoEConfig(4, 2)}), []
    batch, params = builders.batch(model, [5, 2, 4, 1, 3, 5, 2, 4]), builders.make(model, seed=2)[1]["params"]
    for parts in (1, 4):
        grads, sums = jax.device_get(balanced_gradients(parts, np.float32(balance), params, batch))
        values = {name: float(pair[0] / pair[1]) for name, pair in sums.items()}
        layers = model.decoder.layers
        found.append((grads, values, values["loss"] - layers * balance * values["balance"]))
    (one, values, rest), (split, others, left) = found
    assert left == pytest.approx(rest, rel=1e-5), "the balance is all that differs"
    assert (others["dropped"], others["router_z"]) == pytest.approx((values["dropped"], values["router_z"]), rel=1e-5)
    assert others["balance"] != pytest.approx(values["balance"], rel=1e-2)
    if equal:
        chex.assert_trees_all_close(split, one, rtol=1e-4, atol=1e-6)
    else:
        with pytest.raises(AssertionError):
            chex.assert_trees_all_close(split, one, rtol=1e-4, atol=1e-6)


def test_five_losses_on_a_mesh_equal_those_on_one_device():
    ffn = FeedForwardConfig(width=16, gated=True, dropout=0.1)
    model = builders.decoder(**SMALL | {"moe": MoEConfig(4, 2, capacity=0.7, shared=1), "ffn": ffn, "dropout": 0.1})
    model = dataclasses.replace(
        model, decoder=dataclasses.replace(model.decoder, embed=dataclasses.replace(model.decoder.embed, vocab=16))
    )
    config = config_of(model, "language_modelling")
    batches = [builders.batch(model, [6, 2, 4, 1, 3, 5, 2, 5], seed=seed) for seed in range(5)]
    ((_, alone),) = run(config, one_device(), batches)
    ((state, spread),) = run(config, meshes.make(MeshConfig(data=1, fsdp=2, expert=2, tensor=2)), batches)
    np.testing.assert_allclose(losses(spread), losses(alone), rtol=2e-5)
    kernel = state.params["decoder"]["blocks"]["ffn"]["in"]["kernel"]
    assert kernel.shape == (1, 4, 8, 16) and kernel.addressable_shards[0].data.shape == (1, 2, 4, 8)
    moment = next(x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape)
    assert moment.sharding.is_equivalent_to(kernel.sharding, kernel.ndim)
    assert spread[-1]["dropped"][0] > 0
    assert build.count_params(state.params["decoder"]["blocks"]["ffn"]) == 8 * 4 + (4 + 1) * (3 * 8 * 16 + 16 + 16 + 8)


def test_a_bias_follows_the_load_of_its_expert_and_not_the_loss():
    moe = MoEConfig(4, 2, gate="sigmoid", correction=True, correction_rate=0.25, balance_loss=0.0, z_loss=0.0)
    model = builders.decoder(**SMALL | {"moe": moe})
    batch, (module, variables) = builders.batch(model, [5] * 4), builders.make(model)
    ((state, _),) = run(config_of(model, "language_modelling", accumulation=2), one_device(), [batch])
    apply = jax.jit(lambda variables: module.apply(variables, batch, mutable=["intermediates"])[1]["intermediates"])
    sown = apply(variables)["decoder"]["blocks"]["ffn"]
    before = np.asarray(variables["params"]["decoder"]["blocks"]["ffn"]["correction_bias"])
    scores = 1 / (1 + np.exp(-np.asarray(sown["router_logits"][0]))) + before[:, None, None]
    chosen = np.argsort(-scores, axis=-1)[..., :2]
    excess = np.bincount(chosen.reshape(-1), minlength=4) - chosen.size / 4
    assert np.any(excess > 0) and np.any(excess < 0)
    after = np.asarray(state.params["decoder"]["blocks"]["ffn"]["correction_bias"])
    np.testing.assert_allclose(after, before - 0.25 * np.sign(excess), rtol=1e-6)
