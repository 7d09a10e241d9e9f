"""Tokens that are in both texts of a pair: the features against loops, and what reads them."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    ConfigError,
    EmbedConfig,
    GeneratorConfig,
    MeshConfig,
    ModelConfig,
    RecurrentConfig,
)
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.stack import check_recurrent
from jaxformer.nn.layers import Embed
from jaxformer.nn.matching import match_features
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Slots, Stream

ROWS, LENGTH, IDS = 8, 16, 4
PAIRS = dict(vocab=builders.VOCAB, kinds=2, matches=True)


def pairs(seed: int = 0) -> Stream:
    """Rows of two packed pairs of a few different tokens, padded on the right; one row ends with padding that reads."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, IDS, (ROWS, LENGTH)).astype(np.int32)
    segment, types = np.zeros((2, ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        first, second, third, end = np.sort(rng.choice(np.arange(1, LENGTH + 1), 4, replace=False))
        segment[row, :second], segment[row, second:end] = 1, 2
        types[row, first:second], types[row, third:end] = 1, 1
    segment[0] = np.where(np.arange(LENGTH) < 12, 1, -1)
    types[0] = (np.arange(LENGTH) >= 5) & (np.arange(LENGTH) < 14)
    tokens[0, 12:] = 1  # padding of both types
    return Stream(tokens, Slots(np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), segment), types)


def by_loops(stream: Stream, unmatched: tuple[int, ...]) -> np.ndarray:
    """The features as the papers say them: look for each token in the other text."""
    tokens, segment, types = (np.asarray(x).tolist() for x in (stream.tokens, stream.slots.segment, stream.token_type))
    wanted = np.zeros((ROWS, LENGTH, 2), np.float32)
    for row in range(ROWS):
        for i, token in enumerate(tokens[row]):
            own = [j for j in range(LENGTH) if segment[row][j] == segment[row][i]]
            equal = [j for j in own if tokens[row][j] == token and j != i]
            asked = [j for j in equal if types[row][j] != types[row][i]]
            if segment[row][i] > 0 and asked and token not in unmatched:
                wanted[row, i] = 1.0, 1.0 / len(equal)
    return wanted


@pytest.mark.parametrize("unmatched", [(), (0, 2)])
def test_features_are_those_of_loops_over_both_texts(unmatched):
    stream = pairs()
    wanted = by_loops(stream, unmatched)
    assert 0.1 < wanted[..., 0].mean() < 0.9 and len(np.unique(wanted[..., 1])) >= 3
    np.testing.assert_allclose(jax.jit(match_features, static_argnums=1)(stream, unmatched), wanted, rtol=1e-6)


def test_a_mesh_that_divides_rows_and_slots_finds_the_same():
    stream = pairs()
    mesh = meshes.make(MeshConfig(data=2, context=4))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(stream, jax.NamedSharding(mesh, jax.P("data", "context")))
        found = jax.device_get(jax.jit(match_features)(sharded))
    np.testing.assert_allclose(found, by_loops(stream, ()), rtol=1e-6)


def test_one_text_has_no_match():
    stream = pairs()
    assert not np.any(match_features(stream._replace(token_type=np.zeros_like(stream.tokens))))
    assert not np.any(match_features(stream._replace(token_type=None)))


def test_the_vectors_are_added_to_tokens_and_kinds():
    stream, rng = pairs(), np.random.default_rng(1)
    shapes = {"table": (builders.VOCAB, 4), "kinds": (2, 4), "matches": (2, 4)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    embed = Embed(EmbedConfig(**PAIRS, scale=True, unmatched=(2,)), 4)
    found = jax.jit(embed.apply)({"params": params}, stream)
    wanted = 2.0 * (params["table"][stream.tokens] + by_loops(stream, (2,)) @ params["matches"])
    wanted += params["kinds"][stream.token_type]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"^embed\.matches: got vectors .* pass ids"):
        embed.apply({"params": params}, stream._replace(tokens=jnp.zeros((ROWS, LENGTH, 4))))


STACK = builders.stack(embed=EmbedConfig(**PAIRS))
REFUSED = {
    "decoder": ModelConfig(decoder=STACK),
    "encoder": ModelConfig(encoder=STACK, decoder=builders.stack()),
    "encoder ": ModelConfig(encoder=dataclasses.replace(STACK, causal=True)),
    "encoder  ": ModelConfig(encoder=STACK, generator=GeneratorConfig(encoder=builders.stack())),
    "generator.encoder": ModelConfig(encoder=builders.stack(), generator=GeneratorConfig(encoder=STACK)),
    "recurrent_decoder": ModelConfig(recurrent_decoder=RecurrentConfig(embed=EmbedConfig(**PAIRS))),
}


@pytest.mark.parametrize("part", REFUSED)
def test_models_that_do_not_see_both_texts_are_refused(part):
    with pytest.raises(ConfigError, match=rf"^config\.model\.{part.strip()}\.embed\.matches: got True, expected False"):
        check_model(REFUSED[part])


@pytest.mark.parametrize(
    ("embed", "field"), [(EmbedConfig(matches=True, kinds=1), "matches"), (EmbedConfig(unmatched=(1,)), "unmatched")]
)
def test_fields_that_nothing_would_read_are_refused(embed, field):
    with pytest.raises(ConfigError, match=rf"^config\.model\.recurrent_encoder\.embed\.{field}: got "):
        check_recurrent(RecurrentConfig(embed=embed), "config.model.recurrent_encoder")
