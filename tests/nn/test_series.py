"""Series in models: patches and normalisation against loops, padding and channels that do not reach each other."""

import dataclasses
import functools

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import testing
from jaxformer.config import (
    EmbedConfig,
    EncodingConfig,
    HeadConfig,
    LinearConfig,
    MeshConfig,
    ModelConfig,
    SeriesConfig,
)
from jaxformer.models import build, linear
from jaxformer.nn import series
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch, Slots, Stream

LOOK_BACK, HORIZON, CHANNELS = 10, 3, 2


def stream(values, lengths):
    """Series of these lengths, padded on the right with numbers that nobody may read."""
    values = np.array(values, np.float32)
    segment = (np.arange(values.shape[1]) < np.array(lengths)[:, None]).astype(np.int32)
    position = np.arange(values.shape[1], dtype=np.int32) * segment
    return Stream(np.where(segment[..., None] == 1, values, 1e3).astype(np.float32), Slots(position, segment))


def draw(rows=2, steps=LOOK_BACK, channels=CHANNELS, seed=0):
    return np.random.default_rng(seed).normal(3.0, 2.0, (rows, steps, channels)).astype(np.float32)


def model(head=None, **edits):
    """A model of series: an encoder, or with `linear` maps alone. `edits` are of its section `series`."""
    maps = edits.pop("linear", None)
    stack = builders.stack(layers=1, embed=EmbedConfig())
    head = head or HeadConfig(kind="forecast", look_back=LOOK_BACK, horizon=HORIZON)
    section = SeriesConfig(**{"channels": CHANNELS, **edits})
    return ModelConfig(encoder=None if maps else stack, linear=maps, head=head, series=section)


# --- patches


@pytest.mark.parametrize(("patch", "stride"), [(1, 1), (4, 4), (4, 2), (3, 2), (2, 5)])
def test_a_patch_begins_at_every_stride_and_repeats_the_last_value(patch, stride):
    values, lengths = draw(), [LOOK_BACK, 7]
    found = jax.device_get(jax.jit(series.cut_patches, static_argnums=(1, 2))(stream(values, lengths), patch, stride))
    for row, length in enumerate(lengths):
        starts = range(0, length, stride)
        for slot, start in enumerate(starts):
            steps = [values[row, min(start + offset, length - 1)] for offset in range(patch)]
            np.testing.assert_array_equal(found.tokens[row, slot], np.concatenate(steps))
        assert found.slots.segment[row].tolist() == [1] * len(starts) + [0] * (-(-LOOK_BACK // stride) - len(starts))
        assert found.slots.position[row, : len(starts)].tolist() == list(range(len(starts)))


def test_the_published_look_back_has_42_patches():
    assert ModelConfig(series=SeriesConfig(patch=16, stride=8)).slots("encoder", 336) == 42


# --- normalisation


@pytest.mark.parametrize(
    ("kind", "independent"), [("none", True), ("instance", True), ("instance", False), ("last", False)]
)
def test_a_series_is_normalised_over_its_own_steps_and_restored(kind, independent):
    config = SeriesConfig(channels=CHANNELS, normalise=kind, independent=independent, affine=kind == "instance")
    module, values, lengths = series.SeriesInput(config), draw(), [LOOK_BACK, 6]
    affine = {"scale": np.float32([2.0, 0.5]), "bias": np.float32([1.0, -1.0])} if kind == "instance" else {}

    def apply(*given, method):
        return jax.jit(lambda *given: module.apply({"params": affine}, *given, method=method))(*given)

    read, statistics = jax.device_get(apply(stream(values, lengths), method="read"))
    for row, length in enumerate(lengths):
        for channel in range(CHANNELS):
            x = values[row, :length, channel].astype(np.float64)
            centre = {"none": 0.0, "instance": x.mean(), "last": x[-1]}[kind]
            deviation = np.sqrt(x.var() + 1e-5) if kind == "instance" else 1.0
            expected = (x - centre) / deviation
            if affine:
                expected = expected * float(affine["scale"][channel]) + float(affine["bias"][channel])
            place = (row * CHANNELS + channel, slice(length), 0) if independent else (row, slice(length), channel)
            np.testing.assert_allclose(read.tokens[place], expected, rtol=1e-4, atol=1e-5)
            found = read.tokens[(place[0], slice(length, None), place[2])]
            np.testing.assert_array_equal(found, np.zeros(LOOK_BACK - length))
    outputs = np.stack([read.tokens[i, :HORIZON].T.reshape(-1) for i in range(len(read.tokens))])
    if not independent:
        outputs = np.stack([read.tokens[i, :HORIZON].reshape(-1) for i in range(len(read.tokens))])
    back = apply(outputs, statistics, method="restore")
    np.testing.assert_allclose(back, values[:, :HORIZON], rtol=1e-4, atol=1e-4)


def test_no_gradient_passes_through_the_statistics():
    module = series.SeriesInput(SeriesConfig(channels=CHANNELS, normalise="instance"))

    def total(values):
        source = stream(draw(), [LOOK_BACK] * 2)._replace(tokens=values)
        return module.apply({}, source, method="normalise")[0].sum()

    found = jax.jit(jax.grad(total))(draw())
    np.testing.assert_allclose(found, np.broadcast_to(1 / draw().std(axis=1, keepdims=True), found.shape), rtol=1e-3)


# --- models

MODELS = {
    "patches": model(patch=4, stride=2, normalise="instance", affine=True),
    "channels": model(patch=4, stride=2, independent=True, normalise="instance"),
    "nlinear": model(linear=LinearConfig(), normalise="last"),
    "dlinear": model(linear=LinearConfig(trend=5, individual=True)),
}


@functools.cache
def made(name):
    """The variables of a model, and its compiled forecast of three series."""
    module, variables = builders.make(MODELS[name])
    run = builders.apply(module)
    return variables, lambda values: np.asarray(run(variables, Batch(stream(values, [LOOK_BACK] * 3), None)))


@pytest.mark.parametrize("name", MODELS)
def test_a_forecast_follows_the_scale_of_its_series(name):
    """Normalised models forecast a x + b where they forecast x; and each row is its own."""
    config, (_, forecast) = MODELS[name], made(name)
    values = draw(rows=3)
    base = forecast(values)
    assert base.shape == (3, HORIZON, CHANNELS)
    other = values.copy()
    other[1] += 1.0
    other[2] = values[0]
    moved = forecast(other)
    np.testing.assert_allclose(moved[0], base[0], rtol=1e-5)
    np.testing.assert_allclose(moved[2], base[0], rtol=1e-5)
    if config.series.normalise == "none":
        assert np.abs(moved[1] - base[1] - 1.0).max() > 1e-2
    else:
        np.testing.assert_allclose(moved[1], base[1] + 1.0, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["channels", "nlinear", "dlinear"])
def test_channels_that_are_independent_do_not_reach_each_other(name):
    _, forecast = made(name)
    values = draw(rows=3)
    changed = values.copy()
    changed[:, :, 1] = draw(rows=3, seed=1)[:, :, 1]
    first, second = forecast(values), forecast(changed)
    np.testing.assert_allclose(first[..., 0], second[..., 0], rtol=1e-5)
    assert np.abs(first[..., 1] - second[..., 1]).max() > 1e-2
    if name != "dlinear":  # whose maps are of a channel each
        np.testing.assert_allclose(forecast(values[..., ::-1])[..., ::-1], first, rtol=1e-4, atol=1e-5)


def test_dlinear_is_two_maps_of_trend_and_remainder():
    (variables, forecast), values, width = made("dlinear"), draw(rows=3), 5
    found, params = forecast(values), variables["params"]
    for row in range(3):
        for channel in range(CHANNELS):
            x = values[row, :, channel]
            padded = np.concatenate([[x[0]] * (width // 2), x, [x[-1]] * (width // 2)])
            trend = np.array([padded[i : i + width].mean() for i in range(LOOK_BACK)])
            parts = {"trend": trend, "remainder": x - trend}
            expected = sum(
                part @ params[name]["kernel"][channel] + params[name]["bias"][channel] for name, part in parts.items()
            )
            np.testing.assert_allclose(found[row, :, channel], expected, rtol=1e-4, atol=1e-4)


def test_the_average_of_a_constant_is_the_constant():
    np.testing.assert_allclose(linear.moving_average(jnp.full((1, 1, 7), 3.0), 5), np.full((1, 1, 7), 3.0), rtol=1e-6)


def test_padding_of_a_series_changes_no_class():
    head = HeadConfig(kind="classes", classes=3, pooling="mean")
    module, variables = builders.make(model(head, patch=3, stride=2, normalise="instance"))
    values = draw(steps=12)
    short = Batch(stream(values[:, :9], [9, 5]), None)
    long = Batch(stream(values, [9, 5]), None)
    both = jax.jit(lambda variables: (module.apply(variables, long), module.apply(variables, short)))
    np.testing.assert_allclose(*both(variables), rtol=1e-5, atol=1e-6)


def test_a_decoder_sees_the_patches_in_every_step():
    """Captions: the decoder attends to patches, in whole passes and step by step."""
    section = SeriesConfig(channels=CHANNELS, patch=3, stride=2, normalise="instance")
    config = dataclasses.replace(model(HeadConfig()), series=section, decoder=builders.stack(layers=1))
    module, variables = builders.make(config)
    target = builders.stream(np.random.default_rng(0), [4, 4])
    testing.assert_steps_equal_forward(module, variables, Batch(stream(draw(), [LOOK_BACK, 7]), target), prompt=3)


@pytest.mark.parametrize("name", ["channels", "dlinear"])
def test_a_mesh_forecasts_as_one_device(name):
    module, variables = builders.make(MODELS[name])
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    batch = Batch(stream(draw(rows=4), [LOOK_BACK] * 4), None)
    testing.assert_sharded_equals_single(module, variables, batch, mesh, rtol=1e-4, atol=1e-5)


def test_learned_positions_are_counted_in_patches():
    config = model(patch=4, stride=2)
    encoder = dataclasses.replace(config.encoder, encoding=EncodingConfig(kind="learned", max_length=5))
    shapes = nn.meta.unbox(build.shapes(build.build(dataclasses.replace(config, encoder=encoder))))["params"]
    assert shapes["head"]["horizon"]["kernel"].shape == (5, 8, HORIZON * CHANNELS)
    assert shapes["source_embed"]["up"].shape == (4 * CHANNELS, 8)
