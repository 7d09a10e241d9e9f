"""The training step: microbatches, meshes, batch norm, the average. All on eight simulated devices."""

from __future__ import annotations

import dataclasses
import functools
import types

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    DcnConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
)
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel.collectives import collectives
from jaxformer.train import optim, step
from jaxformer.types import Batch, Slots

ROWS = [5, 2, 4, 1, 3, 5, 2, 5]
# For tests in which neither depth nor biases matter: compiling takes time by the layer and by the parameter.
SMALL = {
    "layers": 1,
    "norm": NormConfig(kind="rms"),
    "attention": AttentionConfig(heads=2, bias=False),
    "ffn": FeedForwardConfig(width=16, bias=False),
}
# For what a step does with a gradient, whatever it is the gradient of: its programs take a third of the time.
NO_LAYERS = SMALL | {"layers": 0}


def config_of(model: ModelConfig, task: str = "translation", **train) -> Config:
    return Config(
        model=model,
        task=TaskConfig(name=task, label_smoothing=0.1),
        # Not Adam: a key's bias has no gradient but rounding error, which Adam would blow up to the full rate.
        optimizer=OptimizerConfig(name="sgd", weight_decay=0.1),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
        train=TrainConfig(steps=10, **train),
    )


def run(config: Config, mesh: jax.sharding.Mesh, *runs: list) -> list[tuple[step.TrainState, list[dict]]]:
    """For every run, a list of batches, the state after a step on each of them, and the steps' sums."""
    module = build.build(config.model)
    schedule = optim.schedule(config.schedule, config.train.steps, 8)
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        found = []
        for batches in runs:
            state, sums = begin(config, module, optimizer, mesh), []
            for batch in batches:
                state, new = update(state, step.shard_batch(batch, mesh))
                sums.append(jax.device_get(new))
            found.append((state, sums))
    return found


def begin(config: Config, module: nn.Module, optimizer, mesh: jax.sharding.Mesh) -> step.TrainState:
    """A state on the mesh whose parameters numpy has drawn (see `builders.make`) and whose moments are 0."""
    variables = builders.make(config.model)[1]
    params = variables.pop("params")
    if config.train.ema is not None:
        variables["ema"] = jax.tree.map(np.array, params)
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(optimizer.init, params))
    state = step.TrainState(np.int32(0), params, moments, jax.random.key(1), variables)
    return jax.device_put(state, step.state_shardings(config, module, optimizer, mesh))


def one_device() -> jax.sharding.Mesh:
    return meshes.make(MeshConfig(), jax.devices()[:1])


def losses(sums: list[dict]) -> np.ndarray:
    return np.array([s["loss"][0] / s["loss"][1] for s in sums])


def test_microbatches_equal_one_batch_although_their_token_counts_differ():
    model, task = builders.decoder(**NO_LAYERS), "language_modelling"
    batch = builders.batch(model, ROWS)
    ((whole, sums),) = run(config_of(model, task), one_device(), [batch])
    ((split, other),) = run(config_of(model, task, accumulation=4), one_device(), [batch])
    chex.assert_trees_all_close(split.params, whole.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(other, sums, rtol=1e-5, atol=1e-6)
    averaged = jnp.mean(jnp.array([s.sum() for s in np.split(batch.weights, 4)]))
    assert averaged != batch.weights[:2].sum(), "the microbatches must be ragged for this test to mean anything"


def test_the_gradient_is_clipped_by_its_global_norm_before_the_rate_scales_it():
    model, task, rate = builders.decoder(**NO_LAYERS), "language_modelling", 0.1
    batch = builders.batch(model, ROWS)

    def change(clip: float | None):
        """What the first step of plain descent takes from the parameters, and the norm it reports."""
        config = config_of(model, task)
        config = dataclasses.replace(config, optimizer=OptimizerConfig(name="sgd", momentum=0.0, clip=clip))
        ((state, sums),) = run(config, one_device(), [batch])
        # In numpy: compiling each difference alone would take as long as the step.
        taken = jax.tree.map(np.subtract, *jax.device_get((builders.make(model)[1]["params"], state.params)))
        return taken, float(sums[0]["gradient_norm"][0])

    whole, norm = change(None)
    entries = np.concatenate([x.ravel() for x in jax.tree.leaves(whole)])
    assert norm == pytest.approx(float(np.linalg.norm(entries)) / rate, rel=1e-4)
    for clip, left in ((norm / 2, 0.5), (2 * norm, 1.0)):
        taken, reported = change(clip)
        assert reported == pytest.approx(norm, rel=1e-5)
        chex.assert_trees_all_close(taken, jax.tree.map(lambda x: left * x, whole), rtol=1e-3, atol=1e-6)  # noqa: B023


SLICES = DcnConfig(data=2)


@pytest.fixture(scope="module")
def whole():
    """Two steps on one device, each with its batch in one."""
    positions = EncodingConfig("learned", max_length=8)
    model = builders.decoder(layers=1, width=16, embed=EmbedConfig(vocab=16), encoding=positions)
    config = config_of(model, "language_modelling")
    batches = [builders.batch(model, [*ROWS, *ROWS], seed=seed) for seed in range(2)]
    return config, batches, *run(config, one_device(), batches)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (MeshConfig(data=1, fsdp=2, tensor=2, dcn=SLICES), 4),
        (MeshConfig(data=2, context=2, tensor=2), 2),
    ],
)
def test_devices_add_up_gradients_alone_and_meet_once_a_step(whole, sizes, parts):
    config, batches, (reference, sums) = whole
    train = dataclasses.replace(config.train, accumulation=parts)
    config = dataclasses.replace(config, mesh=sizes, train=train)
    module, mesh = build.build(config.model), meshes.make(meshes.merge_slices(sizes))
    schedule, other = optim.schedule(config.schedule, config.train.steps, 8), []
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = begin(config, module, optimizer, mesh)
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        update = update.lower(state, step.shard_batch(batches[0], mesh)).compile()
        for batch in batches:
            state, new = update(state, step.shard_batch(batch, mesh))
            other.append(jax.device_get(new))
    np.testing.assert_allclose(losses(other), losses(sums), rtol=2e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(reference.params), rtol=2e-4, atol=2e-6)
    found = [c for c in collectives(update.as_text()) if "data" in c.axes(mesh.shape)]
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
    assert held <= sum(c.bytes for c in found) <= 1.15 * held  # two devices send half of what they hold, twice


class Masks(nn.Module):
    """A loss that is a dropout mask (0 or 1) times the parameters: its gradient is the mask."""

    @nn.compact
    def __call__(self, batch, full_logits):
        w = self.param("w", nn.initializers.ones_init(), (64,))
        return (nn.Dropout(0.5, deterministic=False)(jnp.ones(64)) / 2 * w).sum()


@pytest.mark.parametrize("devices", [1, 2])
def test_every_microbatch_on_every_device_has_a_dropout_mask_of_its_own(devices):
    batch, config = builders.batch(builders.decoder(), ROWS), config_of(builders.decoder(), accumulation=2)
    task = types.SimpleNamespace(loss=lambda config, logits, batch: {"loss": (logits, jnp.ones(()))})
    params = {"w": jnp.ones(64)}
    mesh = meshes.make(MeshConfig(data=devices), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        assert step.can_reduce_once(config, {}, batch) or devices == 1
        act = jax.jit(lambda batch, key: step.batch_gradients(config, Masks(), task, params, {}, batch, key)[0]["w"])
        first, second = (np.asarray(act(step.shard_batch(batch, mesh), jax.random.key(seed))) for seed in range(2))
    masks = 2 * devices
    counts = first * masks  # of the masks that have a 1
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-5)
    # Equal masks add up to 0 and `masks` only; pairs of equal ones (one a microbatch, one a device) to even numbers.
    share = np.mean(np.round(counts) % 2)
    assert 0.25 < share < 0.75, "independent masks have an odd sum half of the time"
    assert (first != second).any()


def test_who_meets_once_a_step():
    batch, config = builders.batch(builders.decoder(), ROWS), config_of(builders.decoder(), accumulation=2)
    mixture = dataclasses.replace(config, model=builders.decoder(moe=MoEConfig(4, 2)))
    across = dataclasses.replace(config, mesh=MeshConfig(dcn=SLICES))
    with jax.set_mesh(meshes.make(MeshConfig(data=2, context=2, tensor=2))):
        assert step.can_reduce_once(config, {}, batch)
        assert not step.can_reduce_once(config, {"batch_stats": {}, "more": 1}, batch)
        assert not step.can_reduce_once(mixture, {}, batch)
        assert not step.can_reduce_once(config_of(builders.decoder()), {}, batch), "one microbatch meets once as it is"
        assert not step.can_reduce_once(config, {}, jax.tree.map(lambda x: x[:6], batch)), "6 rows are not 2 x 2 x n"
    with jax.set_mesh(meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))):
        assert not step.can_reduce_once(config, {}, batch) and step.can_reduce_once(across, {}, batch)
    with jax.set_mesh(meshes.make(MeshConfig(data=1, fsdp=8))):
        assert not step.can_reduce_once(across, {}, batch)
    with jax.set_mesh(meshes.make(MeshConfig(data=2, stage=2, tensor=2))):
        assert not step.can_reduce_once(config, {}, batch)
    classifier = config_of(builders.classifier(), "classification", accumulation=2)
    for axis, kept in (("tensor", True), ("context", False)):
        with jax.set_mesh(meshes.make(MeshConfig(data=4, **{axis: 2}))):
            assert step.can_reduce_once(classifier, {}, builders.batch(classifier.model, ROWS)) == kept
    assert not step.can_reduce_once(config, {}, batch), "no mesh"


def test_the_others_of_a_batch_are_those_of_all_devices_but_of_one_microbatch():
    model = dataclasses.replace(builders.encoder(**SMALL), head=HeadConfig(kind="pair", pooling="mean"))
    task = tasks.get("similarity")
    config = dataclasses.replace(
        config_of(model), task=TaskConfig("similarity", objective="contrastive", temperature=0.5)
    )
    source = builders.stream(np.random.default_rng(0), [6] * 8, 8)
    segment = np.repeat([[1, 1, 1, 2, 2, 2, 0, 0]], 8, axis=0).astype(np.int32)
    source = source._replace(slots=Slots(np.repeat([[0, 1, 2, 0, 1, 2, 0, 0]], 8, axis=0).astype(np.int32), segment))
    batch = Batch(source, None, np.ones(8, np.float32), np.ones(8, np.float32))
    module, variables = builders.make(model)

    def gradients(mesh: MeshConfig, devices: int, parts: int, *batches: Batch) -> list:
        train = dataclasses.replace(config.train, accumulation=parts)
        settings, place = dataclasses.replace(config, train=train), meshes.make(mesh, jax.devices()[:devices])

        @jax.jit
        def run(params, batch):
            grads, _, sums = step.batch_gradients(settings, module, task, params, {}, batch, jax.random.key(0))
            return grads, sums["loss"]

        with jax.set_mesh(place):
            return jax.device_get([run(variables["params"], step.shard_batch(batch, place)) for batch in batches])

    rows = [jax.tree.map(lambda x: x[0::2], batch), jax.tree.map(lambda x: x[1::2], batch)]
    (even, loss), (odd, other) = gradients(MeshConfig(), 1, 1, *rows)
    ((grads, sums),) = gradients(MeshConfig(data=4, tensor=2), 8, 2, batch)
    chex.assert_trees_all_close(grads, jax.tree.map(lambda x, y: (x + y) / 2, even, odd), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sums, np.add(loss, other), rtol=1e-5)
    assert sums[0] > 0.5, "one row a device: alone it would have nobody to be told from"


@pytest.fixture(scope="module")
def single():
    """Three steps on one device: the reference of both meshes."""
    model = builders.seq2seq(**SMALL | {"attention": AttentionConfig(heads=2, bias=False, dropout=0.1), "dropout": 0.1})
    model = dataclasses.replace(
        model,
        encoder=dataclasses.replace(model.encoder, embed=dataclasses.replace(model.encoder.embed, vocab=16)),
        decoder=dataclasses.replace(model.decoder, embed=dataclasses.replace(model.decoder.embed, vocab=16)),
    )
    config = config_of(model)
    batches = [builders.batch(model, ROWS, seed=seed) for seed in range(3)]
    return config, batches, *run(config, one_device(), batches)


def test_a_mesh_changes_nothing_but_where_things_lie(single):
    config, batches, (reference, sums) = single
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    ((state, other),) = run(config, mesh, batches)
    np.testing.assert_allclose(losses(other), losses(sums), rtol=2e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(reference.params), rtol=2e-4, atol=2e-6)
    kernel = state.params["decoder"]["blocks"]["ffn"]["in"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    moment = next(x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape)
    assert moment.sharding.is_equivalent_to(kernel.sharding, kernel.ndim)


def test_zero1_shards_the_moments_over_the_rows_devices_and_no_parameter():
    model = builders.decoder(**SMALL)
    for zero1, parts in ((False, {1}), (True, {8})):
        sizes = MeshConfig(data=8, zero1=zero1)
        config, module, mesh = dataclasses.replace(config_of(model), mesh=sizes), build.build(model), meshes.make(sizes)
        with jax.set_mesh(mesh):
            optimizer = optim.optimizer(config.optimizer, lambda _: 0.1, nn.meta.unbox(build.shapes(module))["params"])
            state = step.abstract_state(config, module, optimizer, mesh)
        divided = lambda x: x.size // np.prod(x.sharding.shard_shape(x.shape), dtype=int)  # noqa: E731
        assert {divided(x) for x in jax.tree.leaves(state.params)} == {1}
        assert {divided(x) for x in jax.tree.leaves(state.opt_state) if x.size % 8 == 0 and x.ndim} == parts


def test_zero1_divides_the_optimizer_state_and_changes_nothing_else(single):
    config, batches, (reference, sums) = single
    config = dataclasses.replace(config, mesh=MeshConfig(data=8, zero1=True))
    ((state, other),) = run(config, meshes.make(config.mesh), batches)
    np.testing.assert_allclose(losses(other), losses(sums), rtol=2e-6)
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(reference.params), rtol=2e-6, atol=2e-6)
    held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    whole = held(reference.params)
    assert held(state.params) == whole, "every device keeps all parameters"
    assert whole / 8 <= held(state.opt_state) < whole / 6, "and an eighth of the momentum"


def test_batch_norm_sees_the_global_batch_without_padding():
    model = builders.encoder(**SMALL | {"norm": NormConfig(kind="batch", momentum=0.5)})
    config = config_of(model, "masked_lm")
    batch = builders.batch(model, ROWS)
    filled = batch.source.tokens + 7 * (batch.source.slots.segment == 0)
    other = batch._replace(source=batch.source._replace(tokens=filled % builders.VOCAB))
    (alone, _), (padded, _) = run(config, one_device(), [batch], [other])
    ((spread, _),) = run(config, meshes.make(MeshConfig(data=8)), [batch])
    chex.assert_trees_all_close(jax.device_get(spread.variables), jax.device_get(alone.variables), rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(padded.variables, alone.variables, rtol=1e-5, atol=1e-6)
    start = jax.tree.leaves(build.shapes(build.build(model))["batch_stats"])
    assert len(start) == len(jax.tree.leaves(alone.variables["batch_stats"]))
    means = [x for path, x in jax.tree.leaves_with_path(alone.variables["batch_stats"]) if "mean" in str(path)]
    assert all(float(jnp.abs(x).max()) > 0 for x in means)


def test_batch_norm_sees_one_microbatch_after_the_other():
    model, task = builders.encoder(**SMALL | {"norm": NormConfig(kind="batch", momentum=0.5)}), tasks.get("masked_lm")
    batch = builders.batch(model, [5, 2, 4, 1])
    module, variables = builders.make(model)
    params, statistics = variables.pop("params"), variables

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(parts, statistics, batch):
        config = config_of(model, "masked_lm", accumulation=parts)
        return step.batch_gradients(config, module, task, params, statistics, batch, jax.random.key(0))

    grads, moved, sums = gradients(2, statistics, batch)
    first, after, part = gradients(1, statistics, jax.tree.map(lambda x: x[0::2], batch))
    second, twice, rest = gradients(1, after, jax.tree.map(lambda x: x[1::2], batch))
    weight, other = np.float32(part["loss"][1]), np.float32(rest["loss"][1])
    mean = jax.tree.map(lambda x, y: (weight * x + other * y) / (weight + other), *jax.device_get((first, second)))
    chex.assert_trees_all_close(grads, mean, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(moved, twice, rtol=1e-5, atol=1e-6)
    # Its loss alone: the gradients are not compiled.
    whole = jax.jit(lambda statistics, batch: gradients(1, statistics, batch)[2]["loss"])(statistics, batch)
    assert float(sums["loss"][0]) != pytest.approx(float(whole[0]), rel=1e-4), "it is not one batch, and docs say so"


def test_the_average_follows_the_parameters():
    model = builders.decoder(**NO_LAYERS)
    batches = [builders.batch(model, ROWS, seed=seed) for seed in range(2)]
    config = config_of(model, "language_modelling", ema=0.75)
    (first, _), (second, _) = run(config, one_device(), batches[:1], batches)
    averages, params = jax.device_get((first.variables["ema"], second.params))
    expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, averages, params)
    chex.assert_trees_all_close(second.variables["ema"], expected, rtol=1e-6, atol=1e-7)


def test_a_prefix_is_the_same_on_a_mesh_and_in_microbatches():
    """Sequences divided over a ring, rows over data, in two parts."""
    model = builders.decoder(**SMALL)
    batch = builders.batch(model, [8, 3, 5, 8, 6, 2, 7, 4], 8)
    prefix = np.broadcast_to(np.array([4, 1, 5, 8, 2, 2, 3, 1], np.int32)[:, None], (8, 8))
    batch = batch._replace(target=batch.target._replace(slots=batch.target.slots._replace(prefix=prefix)))
    assert_same_on_a_mesh(config_of(model, "prefix_lm"), batch, MeshConfig(data=2, context=4))


def test_a_second_output_is_a_sum_over_rows_too():
    """Two losses with denominators of their own, on one device and on eight, in one batch and in two."""
    model = dataclasses.replace(builders.encoder(**SMALL), head=HeadConfig(relation=True, width=8))
    batch = builders.batch(model, ROWS)._replace(relation=np.array([0, 1, 1, -1, 0, 1, 0, 0], np.int32))
    assert_same_on_a_mesh(config_of(model, "masked_lm"), batch, MeshConfig(data=4, context=2))


def assert_same_on_a_mesh(config: Config, batch: Batch, sizes: MeshConfig) -> None:
    """A step in two parts on this mesh has the loss and the parameters of a step on one device."""
    ((alone, sums),) = run(config, one_device(), [batch])
    split = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=2))
    ((state, other),) = run(split, meshes.make(sizes), [batch])
    chex.assert_trees_all_close(jax.device_get(state.params), jax.device_get(alone.params), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other[0]["loss"], sums[0]["loss"], rtol=1e-5)
