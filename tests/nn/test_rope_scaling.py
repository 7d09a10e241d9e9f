"""Frequencies and magnitudes of stretched rotations: a slow reference, and the other library's values."""

import math

import jax
import numpy as np
import pytest

from jaxformer.config import AttentionConfig, Config, ConfigError, EncodingConfig, RopeScalingConfig, StackConfig
from jaxformer.config.checks.stack import check_stack
from jaxformer.nn.encodings import rope
from jaxformer.types import Slots

BASE, WIDTH = 100.0, 12


def scaled(kind, **fields):
    return EncodingConfig("rope", base=BASE, scaling=RopeScalingConfig(kind, **fields))


LISTS = {"short": (1.0, 1.5, 2.0, 3.0, 4.0, 8.0), "long": (0.5, 2.0, 4.0, 9.0, 16.0, 30.0)}
CONFIGS = {
    "linear": scaled("linear", factor=3.0),
    "dynamic": scaled("dynamic", factor=2.5, original=16),
    "yarn": scaled("yarn", factor=4.0, original=64),
    "yarn_short": scaled("yarn", factor=4.0, original=4, fast=2.0),
    "yarn_fractions": scaled(
        "yarn", factor=8.0, original=64, fast=5.0, slow=0.5, whole=False, magnitude=0.8090757591352083
    ),
    "llama3": scaled("llama3", factor=8.0, original=64),
    "longrope": scaled("longrope", factor=4.0, original=16, **LISTS),
    "longrope_short": scaled("longrope", factor=2.0, original=40, magnitude=1.3, **LISTS),
}
THEIRS = {  # of `ROPE_INIT_FUNCTIONS`, transformers 5.23, for rows of 40 slots
    "linear": ([0.3333333, 0.1547196, 0.07181448, 0.03333334, 0.01547196, 0.007181449], 1.0),
    "dynamic": ([1.0, 0.3398818, 0.1155197, 0.03926303, 0.01334479, 0.004535652], 1.0),
    "yarn": ([1.0, 0.3771291, 0.1346522, 0.04375, 0.01160397, 0.005386087], 1.138629436111989),
    "yarn_short": ([1.0, 0.1160397, 0.05386086, 0.025, 0.01160397, 0.005386087], 1.138629436111989),
    "yarn_fractions": ([1.0, 0.4542884, 0.1480243, 0.03954013, 0.005801986, 0.002693044], 0.8090757591352083),
    "llama3": ([1.0, 0.4641589, 0.1019893, 0.01304226, 0.005801986, 0.002693044], 1.0),
    "longrope": ([2.0, 0.2320794, 0.05386086, 0.01111111, 0.002900993, 0.0007181449], 1.224744871391589),
    "longrope_short": ([1.0, 0.3094393, 0.1077217, 0.03333334, 0.01160397, 0.002693044], 1.3),
}


def slots(lengths, size=None):
    size = size or max(lengths)
    segment = np.asarray([[int(slot < length) for slot in range(size)] for length in lengths], np.int32)
    return Slots(np.broadcast_to(np.arange(size, dtype=np.int32), segment.shape), segment)


def reference(config, length):
    """One channel pair at a time, in double precision."""
    scaling, pairs, found = config.scaling, WIDTH // 2, []
    for i in range(pairs):
        theta = config.base ** (-2 * i / WIDTH)
        if scaling.kind == "linear":
            found.append(theta / scaling.factor)
        elif scaling.kind == "dynamic":
            growth = scaling.factor * max(length, scaling.original) / scaling.original - (scaling.factor - 1)
            found.append((config.base * growth ** (WIDTH / (WIDTH - 2))) ** (-2 * i / WIDTH))
        elif scaling.kind == "longrope":
            found.append(theta / (scaling.long if length > scaling.original else scaling.short)[i])
        elif scaling.kind == "llama3":
            wave = 2 * math.pi / theta
            if wave < scaling.original / scaling.high:
                found.append(theta)
            elif wave > scaling.original / scaling.low:
                found.append(theta / scaling.factor)
            else:
                kept = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
                found.append((1 - kept) * theta / scaling.factor + kept * theta)
        else:
            # The pair that turns n times in the original length: original theta_d = 2 pi n.
            where = [
                WIDTH / 2 * math.log(scaling.original / (2 * math.pi * turns)) / math.log(config.base)
                for turns in (scaling.fast, scaling.slow)
            ]
            if scaling.whole:
                where = [math.floor(where[0]), math.ceil(where[1])]
            first, last = max(where[0], 0), min(where[1], WIDTH - 1)
            stretched = min(max((i - first) / (last - first or 0.001), 0.0), 1.0)
            found.append(theta * (1 - stretched) + theta / scaling.factor * stretched)
    if scaling.kind == "longrope":
        return found, scaling.magnitude or math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original))
    if scaling.kind != "yarn":
        return found, 1.0
    return found, scaling.magnitude or 0.1 * math.log(scaling.factor) + 1


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_magnitude(name):
    frequency, magnitude = jax.jit(rope.frequencies, static_argnums=(0, 1))(CONFIGS[name], WIDTH, slots([40]))
    for expected, factor in (reference(CONFIGS[name], 40), THEIRS[name]):
        frequency = np.asarray(frequency).reshape(-1, WIDTH // 2)
        np.testing.assert_allclose(frequency, np.broadcast_to(expected, frequency.shape), rtol=3e-6)
        assert magnitude == pytest.approx(factor)


@pytest.mark.parametrize("name", ["yarn", "yarn_fractions", "longrope"])
def test_yarns_magnitude_is_on_cosine_and_sine(name):
    """Turned queries and keys are longer by it, so scores by its square."""
    angles = rope.Angles(CONFIGS[name], AttentionConfig(heads=1), WIDTH)
    cosine, sine = jax.device_get(jax.jit(lambda side: angles.apply({}, side))(slots([40])))
    theta, magnitude = reference(CONFIGS[name], 40)
    angle = np.arange(40)[:, None] * np.asarray(theta)
    np.testing.assert_allclose(cosine[0], magnitude * np.cos(angle), atol=2e-5)
    np.testing.assert_allclose(sine[0], magnitude * np.sin(angle), atol=2e-5)
    np.testing.assert_allclose(np.square(cosine) + np.square(sine), magnitude**2, rtol=1e-5)


def test_each_text_of_a_packed_row_has_the_list_of_its_own_length():
    """A row of 5 and 18 tokens and padding, beside one of 16 that begins behind its padding."""
    segment = np.asarray([[1] * 5 + [2] * 18 + [0] * 2, [0] * 9 + [1] * 16], np.int32)
    position = np.asarray([[*range(5), *range(18), 0, 0], [0] * 9 + [*range(16)]], np.int32)
    frequency, _ = jax.jit(rope.frequencies, static_argnums=(0, 1))(
        CONFIGS["longrope"], WIDTH, Slots(position, segment)
    )
    expected = {length: reference(CONFIGS["longrope"], length)[0] for length in (5, 16, 18)}
    for row, column, length in [(0, 0, 5), (0, 4, 5), (0, 5, 18), (0, 22, 18), (1, 9, 16), (1, 24, 16)]:
        np.testing.assert_allclose(np.asarray(frequency)[row, column], expected[length], rtol=3e-6)


def test_divisors_have_to_be_one_for_each_pair():
    for divisors, name in (({"short": (1.0,) * 6, "long": (1.0,)}, "long"), ({"long": (1.0,) * 6}, "short")):
        with pytest.raises(
            ConfigError, match=rf"scaling.{name}: got . divisors, expected 6, one for each rotated pair"
        ):
            rope.frequencies(scaled("longrope", **divisors), WIDTH, slots([4]))
    for scaling, message in (
        (
            {"kind": "longrope", "short": (1.0,) * 2, "long": (1.0,)},
            r"scaling.long: got \(1.0,\), expected 2 numbers, one for",
        ),
        ({"kind": "linear", "short": (1.0,)}, r"scaling.short: got \(1.0,\), expected \(\) with kind linear"),
        ({"kind": "longrope", "original": 1, "short": (1.0,), "long": (1.0,)}, "expected 2 numbers, one for"),
        (
            {"kind": "longrope", "original": 1, "short": (1.0,) * 2, "long": (1.0,) * 2},
            "original: got 1, expected at le",
        ),
    ):
        encoding = EncodingConfig("rope", scaling=RopeScalingConfig(**scaling))
        stack = StackConfig(width=8, attention=AttentionConfig(heads=2), encoding=encoding)
        with pytest.raises(ConfigError, match=message):
            check_stack(stack, "config.model.decoder", Config())


def test_a_row_of_dynamic_rotations_does_not_depend_on_those_beside_it():
    angles = rope.Angles(CONFIGS["dynamic"], AttentionConfig(heads=1), WIDTH)
    usual = rope.Angles(EncodingConfig("rope", base=BASE), AttentionConfig(heads=1), WIDTH)

    @jax.jit
    def every():
        sides = [slots([10, 40, 25]), *(slots([length]) for length in (10, 40, 25))]
        return [angles.apply({}, side) for side in sides], usual.apply({}, slots([10]))

    (together, *apart), unstretched = jax.device_get(every())
    for row, length in enumerate((10, 40, 25)):
        for got, alone in zip(together, apart[row], strict=True):
            np.testing.assert_allclose(got[row, :length], alone[0], rtol=1e-6)
    np.testing.assert_allclose(apart[0][1], unstretched[1], rtol=1e-6)


def test_dynamic_rotations_of_one_pair_have_nothing_to_stretch():
    angles = rope.Angles(CONFIGS["dynamic"], AttentionConfig(heads=1), 2)
    cosine, sine = jax.jit(lambda side: angles.apply({}, side))(slots([40]))
    np.testing.assert_allclose(cosine[0, :, 0], np.cos(np.arange(40)), atol=1e-5)
    np.testing.assert_allclose(sine[0, :, 0], np.sin(np.arange(40)), atol=1e-5)
