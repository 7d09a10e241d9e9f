"""Copying from the source: the mixture against loops, decoding against the whole pass, and what it is refused for."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import testing
from jaxformer.analysis import layers
from jaxformer.config import (
    ConfigError,
    HeadConfig,
    MeshConfig,
    ModelConfig,
    RecurrentConfig,
    SeriesConfig,
    StackConfig,
    overrides,
)
from jaxformer.config.checks.model import check_model
from jaxformer.hf.comparison import config_differences
from jaxformer.models import build
from jaxformer.nn.copying import Copy, CopySource, equal_tokens
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Slots, Stream

ROWS, TARGET, SOURCE, WIDTH, VOCAB = 3, 4, 7, 4, 16
CONFIG = dataclasses.replace(builders.seq2seq(layers=1), head=HeadConfig(copy=True))


def inputs(seed: int = 0):
    """Logits, hidden states, segments and a source whose tokens repeat; a row without one, and padding of a token."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    tokens = rng.integers(2, 7, (ROWS, SOURCE)).astype(np.int32)
    segment = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0], [0] * SOURCE], np.int32)
    tokens[0, 3] = tokens[0, 0]  # a token of both segments
    tokens[segment == 0] = 9
    target = np.array([[1, 1, 2, 2], [1, 1, 1, -1], [1, 1, 1, 1]], np.int32)
    return 3 * draw(ROWS, TARGET, VOCAB), draw(ROWS, TARGET, WIDTH), target, draw(ROWS, SOURCE, WIDTH), tokens, segment


def parameters(seed: int = 1):
    rng = np.random.default_rng(seed)
    shapes = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "gate": (WIDTH, 1)}
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {name: {"kernel": draw(*shape), "bias": draw(shape[-1])} for name, shape in shapes.items()}


def by_loops(params, logits, x, target, memory, tokens, segment):
    """See et al. 2017, equations 8 and 9, one slot at a time, in double precision."""
    apply = lambda name, v: v @ params[name]["kernel"].astype(np.float64) + params[name]["bias"]  # noqa: E731
    wanted = np.zeros((ROWS, TARGET, VOCAB))
    for row in range(ROWS):
        keys = apply("key", memory[row].astype(np.float64))
        for t in range(TARGET):
            generated = np.exp(logits[row, t].astype(np.float64))
            generated /= generated.sum()
            seen = [s for s in range(SOURCE) if segment[row, s] > 0 and segment[row, s] == abs(target[row, t])]
            if not seen:
                wanted[row, t] = generated
                continue
            scores = np.array([apply("query", x[row, t].astype(np.float64)) @ keys[s] / 2.0 for s in seen])
            weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            gate = 1 / (1 + np.exp(-apply("gate", x[row, t].astype(np.float64))[0]))
            wanted[row, t] = gate * generated
            for s, weight in zip(seen, weights, strict=True):
                wanted[row, t, tokens[row, s]] += (1 - gate) * weight
    return wanted


def mixed(params, logits, x, target, memory, tokens, segment):
    """Log-probabilities of the module for the same arrays."""
    copy = Copy(WIDTH, WIDTH)
    stream = Stream(tokens, Slots(jnp.zeros_like(tokens), segment))
    run = lambda copy: copy(logits, x, target, copy.source(memory, stream))  # noqa: E731
    return copy.apply({"params": params}, method=run)


def test_the_mixture_is_that_of_loops_and_sums_to_one():
    arrays, params = inputs(), parameters()
    found = jax.device_get(jax.jit(mixed)(params, *arrays)).astype(np.float64)
    wanted = by_loops(params, *arrays)
    np.testing.assert_allclose(found, np.log(wanted), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1.0, rtol=1e-5)


def test_gradients_are_those_of_differences():
    arrays, params = inputs(2), parameters(3)
    rng = np.random.default_rng(4)
    picked = rng.integers(2, 8, (ROWS, TARGET, 1))
    ways = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), (params, arrays[0], arrays[3]))

    def loss(trained):
        params, logits, memory = trained
        log_probs = mixed(params, logits, *arrays[1:3], memory, *arrays[4:])
        return -jnp.sum(jnp.take_along_axis(log_probs, picked, axis=-1))

    at = (params, arrays[0], arrays[3])
    gradient = jax.device_get(jax.jit(jax.grad(loss))(at))
    along = sum(np.vdot(g, w) for g, w in zip(jax.tree.leaves(gradient), jax.tree.leaves(ways), strict=True))

    def exact(step):
        params, logits, memory = jax.tree.map(lambda x, w: x + step * w.astype(np.float64), at, ways)
        return -np.log(
            np.take_along_axis(by_loops(params, logits, *arrays[1:3], memory, *arrays[4:]), picked, -1)
        ).sum()

    wanted = (exact(1e-5) - exact(-1e-5)) / 2e-5
    np.testing.assert_allclose(along, wanted, rtol=1e-4)


def test_extreme_scores_have_finite_outputs_and_gradients():
    logits, *rest = inputs()
    logits = np.where(np.arange(VOCAB) == 3, 300.0, -300.0).astype(np.float32) + 0 * logits
    params = parameters()
    params["gate"]["kernel"] = 200.0 * params["gate"]["kernel"]
    params["query"]["kernel"] = 100.0 * params["query"]["kernel"]
    value, gradient = jax.jit(jax.value_and_grad(lambda p: jnp.sum(mixed(p, logits, *rest))))(params)
    assert np.isfinite(value) and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_the_first_slot_of_a_token_is_of_its_segment():
    copied = CopySource(None, np.array([[5, 6, 5, 5, 6, 5]]), np.array([[1, 1, 1, 2, 2, 0]]))
    same, first = equal_tokens(copied)
    assert first[0, :5].tolist() == [True, True, False, True, True]
    assert same[0, 0].tolist() == [True, False, True, False, False, False]


@pytest.fixture(scope="module")
def model():
    return builders.make(CONFIG)


def test_decoding_copies_as_the_whole_pass_does(model):
    testing.assert_steps_equal_forward(*model, builders.batch(CONFIG, [6, 6]), prompt=2)


def test_states_carry_what_is_copied_through_beams_branches_and_new_rows(model):
    module, variables = model
    start = jax.jit(lambda variables, batch: module.apply(variables, batch, 8, method="start"))
    step = jax.jit(lambda variables, tokens, state: module.apply(variables, tokens, state, method="step")[0])
    batch = builders.batch(CONFIG, [4, 3])
    prompts = jax.tree.map(lambda x: np.stack([x[0], np.roll(x[1], 1)]), batch.target)
    logits, state = start(variables, batch)
    padded_on_the_left = start(variables, batch._replace(target=prompts))[0]
    np.testing.assert_allclose(padded_on_the_left, logits, rtol=1e-5, atol=1e-6)
    tokens = np.array([[3], [5]], np.int32)
    alone = step(variables, tokens, state)
    swapped = step(variables, tokens[::-1], state.rows(jnp.array([1, 0])))
    np.testing.assert_allclose(swapped, alone[::-1], rtol=1e-5, atol=1e-6)
    branched = step(variables, np.repeat(tokens, 2, axis=1), state.branch(2)).reshape(2, 2, -1)
    np.testing.assert_allclose(branched[:, 1], alone, rtol=1e-5, atol=1e-6)
    shorter = builders.batch(CONFIG, [2, 2], seed=5)
    new = start(variables, shorter)[1]
    replaced = state.replace_rows(jnp.array([1, 2]), new)  # the second of `new` is beyond the last row
    np.testing.assert_allclose(step(variables, tokens, replaced)[0], alone[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(replaced.copied.tokens[1, :3], np.array(shorter.source.tokens)[0])
    assert not np.any(replaced.copied.segment[1, 3:])


def test_a_mesh_that_divides_rows_and_the_vocabulary_gives_the_same():
    stack = builders.stack(layers=1, embed=dataclasses.replace(builders.stack().embed, vocab=VOCAB))
    config = dataclasses.replace(CONFIG, encoder=stack, decoder=stack)
    module = build.build(config)
    mesh = meshes.make(MeshConfig(data=2, tensor=2, context=2))
    testing.assert_sharded_equals_single(
        module, testing.random_variables(module), builders.batch(config, [4] * 4), mesh
    )


RNN = RecurrentConfig(embed=builders.stack().embed)
OTHER = builders.stack(embed=dataclasses.replace(builders.stack().embed, vocab=16))
PATCHES = builders.stack(embed=dataclasses.replace(builders.stack().embed, vocab=None))
REFUSED = {
    "copy": dataclasses.replace(builders.decoder(), head=CONFIG.head),
    "copy ": dataclasses.replace(CONFIG, decoder=OTHER, share_embeddings=False),
    "copy  ": ModelConfig(recurrent_encoder=RNN, recurrent_decoder=RNN, head=CONFIG.head),
    "copy   ": dataclasses.replace(CONFIG, encoder=PATCHES, series=SeriesConfig(channels=1), share_embeddings=False),
    "copy    ": dataclasses.replace(CONFIG, head=HeadConfig(copy=True, projection=False, tied=False)),
    "chunk": dataclasses.replace(CONFIG, head=HeadConfig(copy=True, chunk=4)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_copy_are_refused(case):
    with pytest.raises(
        ConfigError, match=rf"^config\.model\.head\.{case.strip()}: got .*, expected (False|None|equal)"
    ):
        check_model(REFUSED[case])


@pytest.mark.parametrize(
    ("section", "field", "value", "path"),
    [("tokenizer", "joint", False, "model.head.copy"), ("task", "z_loss", 1e-4, "task.z_loss")],
)
def test_runs_that_cannot_copy_are_refused(section, field, value, path):
    config = overrides.defaults()
    config.model.encoder, config.model.decoder = overrides.section(StackConfig), overrides.section(StackConfig)
    config.model.head.copy = True
    config.task.name = "summarisation"
    assert overrides.freeze(config).model.head.copy
    (config.data.tokenizer if section == "tokenizer" else config.task)[field] = value
    with pytest.raises(ConfigError, match=rf"^config\.{path}: got .*, expected "):
        overrides.freeze(config)


def test_a_head_that_copies_is_refused_where_only_the_residual_stream_is_read():
    with pytest.raises(
        ConfigError, match=r"^analysis of predictions: got a model with head\.copy True, expected False"
    ):
        layers.logits_of(build.build(CONFIG), None, None, "decoder")


def test_no_family_of_the_other_library_copies_or_matches():
    plain = ModelConfig(encoder=builders.stack(), head=HeadConfig())
    matching = dataclasses.replace(plain.encoder.embed, kinds=2, matches=True)
    edits = {
        "head.copy": dataclasses.replace(plain, head=HeadConfig(copy=True)),
        "embed.matches": dataclasses.replace(plain, encoder=builders.stack(embed=matching)),
    }
    for field, edited in edits.items():
        assert any(field in line for line in config_differences(edited, plain)), field
