"""Parts of a run on their own: what a save holds, what an evaluation sums, what a first state and a clip are."""

import dataclasses
import types

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer import tasks
from jaxformer.config import Config, DataConfig, MeshConfig, TaskConfig, TrainConfig
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import evaluate, optim, step
from jaxformer.train.run import Run

TASK = TaskConfig(name="language_modelling", vocab=builders.VOCAB)


def saved(evaluated_at: int, step_number: int = 5) -> tuple:
    """The measures and the progress that `Run.save` hands to the checkpoints."""
    kept = []
    run = types.SimpleNamespace(
        values={"loss": 1.5},
        evaluated_at=evaluated_at,
        step=step_number,
        window=types.SimpleNamespace(state=dict),
        guard=types.SimpleNamespace(consecutive=3),
        patience=types.SimpleNamespace(state=dict),
        dataset=types.SimpleNamespace(key="key"),
        state=None,
        batches=None,
        progress={"reference": "hash", "teacher": None},
        pipeline=types.SimpleNamespace(data_state=lambda batches: {}),
        checkpoints=types.SimpleNamespace(save=lambda *given: kept.append(given)),
    )
    Run.save(run)
    _, _, values, progress, _ = kept[0]
    return values, progress


def test_a_checkpoint_competes_with_measures_of_its_own_step_only():
    assert saved(evaluated_at=5)[0] == {"loss": 1.5}
    assert saved(evaluated_at=4)[0] == {}


def test_bad_steps_in_a_row_are_counted_on_when_a_run_goes_on():
    assert saved(evaluated_at=5)[1]["skipped_in_a_row"] == 3


def test_a_checkpoint_names_the_reference_that_the_run_began_with():
    assert saved(evaluated_at=5)[1]["reference"] == "hash"


def model(dropout: float = 0.0):
    config = Config(
        model=builders.decoder(layers=1, dropout=dropout), data=DataConfig(length=6), task=TASK, mesh=MeshConfig(data=1)
    )
    module, variables = builders.make(config.model)
    return config, module, variables


def test_an_evaluation_adds_the_sums_of_all_batches():
    config, module, variables = model()
    mesh = meshes.make(config.mesh, jax.devices()[:1])
    batches = [builders.batch(config.model, lengths, width=6, seed=i) for i, lengths in enumerate(([6, 2], [3, 1]))]
    with jax.set_mesh(mesh):
        measure = step.make_eval_step(config, module)
        size = {"examples": 4.0, "lines": 4.0, "bytes": 12.0, "words": 4.0}
        values = evaluate.evaluate_batches(config, measure, variables, batches, size, mesh)
        sums = [jax.device_get(measure(variables, batch)["loss"]) for batch in batches]
    expected = sum(total for total, _ in sums) / sum(count for _, count in sums)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-5)


def test_an_evaluation_drops_nothing():
    config, module, variables = model(dropout=0.5)
    batch = builders.batch(config.model, [6, 4])
    got = step.make_eval_step(config, module)(variables, batch)
    plain = dataclasses.replace(config.model, decoder=dataclasses.replace(config.model.decoder, dropout=0.0))
    logits = builders.apply(build.build(plain))(variables, batch)
    chex.assert_trees_all_close(got, tasks.get("language_modelling").metrics(config, logits, batch), rtol=1e-5)


def test_the_weight_average_begins_as_the_parameters():
    config = Config(model=builders.decoder(layers=1), task=TASK, train=TrainConfig(ema=0.9), mesh=MeshConfig(data=1))
    mesh = meshes.make(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        state = step.init_state(config, build.build(config.model), optax.sgd(0.1), mesh)
    chex.assert_trees_all_equal(state.variables["ema"], state.params)


def test_gradients_below_the_limit_are_not_scaled_up():
    grads = {"a": jnp.asarray([0.3, 0.4])}
    small, large = (optim.clip_by_norm(grads, jnp.float32(0.5), limit) for limit in (1.0, 0.25))
    chex.assert_trees_all_close(small, grads)
    chex.assert_trees_all_close(large, {"a": jnp.asarray([0.15, 0.2])}, rtol=1e-6)
