"""The loss of a mixture: every entry by its component's task, the parts of the total, and one gradient."""

import dataclasses
import functools

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import metrics, tasks
from jaxformer.config import (
    ComponentConfig,
    Config,
    ConfigError,
    DataConfig,
    HeadConfig,
    MeshConfig,
    MixtureConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TemplateConfig,
    TrainConfig,
    components,
)
from jaxformer.parallel import mesh as meshes
from jaxformer.tasks import _mixture
from jaxformer.train import step
from jaxformer.types import Batch, DeferredLogits

SMOOTHING = {"a": 0.0, "b": 0.1, "c": 0.0, "d": 0.1, "held": 0.0}
VOCAB = 7


def config_of(name="text_to_text", **edits):
    """Four components in two groups of a common loss (a and c, b and d), and one that is not trained on."""
    parts = {
        each: ComponentConfig(
            weight=float(each != "held"),
            task=TaskConfig(
                name,
                label_smoothing=smoothing,
                template=TemplateConfig(source=f"{each} {{text}}") if name == "text_to_text" else None,
                **edits,
            ),
        )
        for each, smoothing in SMOOTHING.items()
    }
    return Config(data=DataConfig(mixture=MixtureConfig(parts)), task=TaskConfig(name, vocab=VOCAB))


def batch_of(rng, shape):
    labels = rng.integers(VOCAB, size=shape).astype(np.int32)
    weights = np.float32(rng.random(shape) > 0.3)
    return Batch(None, None, labels, weights, component=rng.integers(4, size=shape).astype(np.int32))


def test_components_with_one_loss_share_a_pass():
    config = config_of()
    groups = [members for _, members in _mixture.same_functions(config, components.trained(config))]
    assert groups == [["a", "c"], ["b", "d"]]
    _, members = _mixture.same_functions(config, components.names(config))[0]
    assert members == ["a", "c", "held"]


@pytest.mark.parametrize("deferred", [False, True])
def test_the_total_and_its_parts_are_sums_over_entries(deferred):
    config, rng = config_of(), np.random.default_rng(0)
    batch = batch_of(rng, (5, 6))
    hidden, table = rng.standard_normal((5, 6, 4)), rng.standard_normal((VOCAB, 4))
    hidden, table = (np.asarray(x, np.float32) for x in (hidden, table))

    def logits_of(hidden):
        return DeferredLogits(hidden, table, None, 8) if deferred else hidden @ table.T

    task = _mixture.objective(config)
    total = lambda x: task.loss(config, logits_of(x), batch)["loss"][0]  # noqa: E731

    def slow(hidden):
        """One entry after the other, with its component's smoothing."""
        log_probs = jax.nn.log_softmax(hidden @ table.T)
        smoothing = jnp.array([SMOOTHING[name] for name in "abcd"])[batch.component]
        picked = jnp.take_along_axis(log_probs, batch.labels[..., None], -1)[..., 0]
        return -((1 - smoothing) * picked + smoothing * log_probs.mean(-1)) * batch.weights

    @jax.jit
    def every(x):
        slowly = slow(x), jax.grad(lambda y: slow(y).sum())(x)
        return (task.loss(config, logits_of(x), batch), jax.grad(total)(x)), slowly

    both = every(hidden)
    sums, gradient = both[0]
    sums = {name: tuple(map(float, pair)) for name, pair in sums.items()}
    losses, expected = both[1]
    losses = np.asarray(losses, np.float64)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    weight = float(batch.weights.sum())
    assert sums["loss"] == pytest.approx((losses.sum(), weight), rel=1e-5)
    for number, name in enumerate("abcd"):
        own = batch.component == number
        of_own = float(batch.weights[own].sum())
        assert sums[f"loss/{name}"] == pytest.approx((losses[own].sum(), of_own), rel=1e-5)
        assert sums[f"share/{name}"] == pytest.approx((of_own, weight))
    assert set(sums) == {"loss", *(f"{kind}/{name}" for kind in ("loss", "share") for name in "abcd")}
    parts = [sums[f"loss/{name}"] for name in "abcd"]
    assert sums["loss"] == pytest.approx(tuple(map(sum, zip(*parts, strict=True))), rel=1e-6)


def test_rows_with_one_label_are_masked_as_padding():
    config, rng = config_of("classification"), np.random.default_rng(1)
    batch = batch_of(rng, (8,))
    logits = rng.standard_normal((8, VOCAB)).astype(np.float32)
    compare_with_components_alone(config, logits, batch, batch.component)


def compare_with_components_alone(config, logits, batch, component):
    """The parts of the mixture's loss are the task's own, of the rows of each component."""
    task, views = tasks.get(config.task.name), components.views(config)

    @jax.jit
    def both(logits):
        expected = {}
        for number, name in enumerate("abcd"):
            own = np.flatnonzero(component == number)
            alone = Batch(None, None, batch.labels[own], batch.weights[own])
            expected[f"loss/{name}"] = task.loss(views[name], logits[own], alone)["loss"]
        return _mixture.mixture_loss(config, logits, batch), expected

    sums, expected = both(logits)
    for name, pair in expected.items():
        assert tuple(map(float, sums[name])) == pytest.approx(tuple(map(float, pair)), rel=1e-5)


def test_starts_and_ends_of_other_components_are_neither_labels_nor_choices():
    """The weights of extractive answering are no weights of a sum, but the slots that may be chosen."""
    rng = np.random.default_rng(2)
    labels, allowed = np.zeros((6, 5), np.int32), np.ones((6, 5), np.float32)
    labels[np.arange(6), rng.integers(5, size=6)] = 3
    component = np.repeat(np.array([0, 1, 2, 3, 0, 1], np.int32)[:, None], 5, axis=1)
    logits = rng.standard_normal((6, 5, 2)).astype(np.float32)
    config = config_of("answering")
    batch = Batch(None, None, labels, allowed, component=component)
    compare_with_components_alone(config, logits, batch, component[:, 0])


def test_microbatches_on_a_mesh_have_the_sums_of_one_device():
    """Two microbatches on two devices, whose gradients meet once: the components are masked inside of a shard_map."""
    weights = {"a": 1.0, "b": 1.0}
    mixture = MixtureConfig({name: ComponentConfig(weight=weight) for name, weight in weights.items()})
    model = builders.decoder(layers=1)
    batch = builders.batch(model, [5, 2, 4, 1, 3, 5, 2, 5])
    number = np.broadcast_to((np.arange(8, dtype=np.int32) // 3 % 2)[:, None], batch.labels.shape)
    batch = batch._replace(component=number)
    found = []
    for devices, parts in ((1, 1), (2, 2)):
        config = Config(
            model=model,
            data=DataConfig(mixture=mixture),
            task=TaskConfig("language_modelling", label_smoothing=0.1, vocab=builders.VOCAB),
            train=TrainConfig(accumulation=parts),
        )
        module, variables = builders.make(model)
        act = functools.partial(step.batch_gradients, config, module, _mixture.objective(config))
        with jax.set_mesh(meshes.make(MeshConfig(data=devices), jax.devices()[:devices])):
            grads, _, sums = jax.jit(lambda batch: act(variables["params"], {}, batch, jax.random.key(0)))(batch)  # noqa: B023
        found.append((jax.device_get(grads), jax.device_get(sums)))
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)
    sums = found[1][1]
    for part in (0, 1):
        np.testing.assert_allclose(sums["loss"][part], sums["loss/a"][part] + sums["loss/b"][part], rtol=1e-5)


def test_measures_of_the_whole_are_those_of_all_examples():
    config = config_of()
    size = {"examples": 2, "lines": 2, "bytes": 9, "words": 3}
    sums = {
        "a": {"loss": (6.0, 3.0), "accuracy": (1.0, 3.0)},
        "b": {"loss": (1.0, 1.0), "accuracy": (1.0, 1.0)},
        "held": {"loss": (900.0, 1.0), "accuracy": (0.0, 1.0)},
    }
    got = _mixture.whole(config, sums, dict.fromkeys(sums, size))
    assert got == pytest.approx({"loss": 7 / 4, "accuracy": 0.5, "perplexity": np.exp(7 / 4)})
    by_class = {name: {**each, "macro_f1": (np.ones(2), np.ones(2))} for name, each in sums.items()}
    assert _mixture.whole(config, by_class, dict.fromkeys(sums, size)) == got
    assert _mixture.whole(config, {"held": sums["held"]}, {"held": size}) == {}
    del by_class["b"]["accuracy"]
    assert set(_mixture.whole(config, by_class, dict.fromkeys(sums, size))) == {"loss", "perplexity"}
    assert metrics.divide(sums["a"])["loss"] == 2.0


def test_a_run_on_one_data_set_has_the_task_itself():
    config = Config(model=ModelConfig(decoder=StackConfig()), task=TaskConfig("language_modelling"))
    assert _mixture.objective(config) is tasks.get("language_modelling")
    assert components.views(config) == {"": config}
    assert components.measure("loss", "") == "loss"
    assert set(_mixture.score_names(config)) == set(tasks.get("language_modelling").score_names)


def test_tasks_of_other_heads_and_losses_over_rows_are_refused():
    config = config_of()
    assert config.data.mixture is not None
    parts = dict(config.data.mixture.components)

    def with_task(task):
        mixture = MixtureConfig({**parts, "b": dataclasses.replace(parts["b"], task=task)})
        return dataclasses.replace(config, data=DataConfig(mixture=mixture))

    with pytest.raises(ConfigError, match="components.b.task.name: got tagging, which needs a head of slots, expected"):
        _mixture.objective(with_task(TaskConfig("tagging")))
    similar = config_of("similarity", objective="contrastive")
    with pytest.raises(ConfigError, match="components.a.task.name: got similarity, .* does not compare rows"):
        _mixture.objective(dataclasses.replace(similar, model=ModelConfig(head=HeadConfig(kind="pair"))))
    assert len(_mixture.score_names(config)) == 5 * 7
