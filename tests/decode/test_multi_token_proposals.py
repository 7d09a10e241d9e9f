"""Speculative decoding by the first module of `multi_token`: what it proposes, and that outputs are those without."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_generate import SIZE, STACK, VOCABULARY, assert_same, make_prompts
from test_speculation import tokens_a_pass

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    DecodeConfig,
    EncodingConfig,
    MeshConfig,
    ModelConfig,
    MultiTokenConfig,
)
from jaxformer.config.checks import sections
from jaxformer.decode import streaming
from jaxformer.decode.compiled import BoundModel
from jaxformer.decode.draft import SelfDraftedModel
from jaxformer.decode.engine import Engine, Sampling
from jaxformer.decode.runner import Runner
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.types import Batch, Slots, Stream

STACKS = {
    "rope": dataclasses.replace(
        STACK, layers=2, encoding=EncodingConfig("rope"), attention=AttentionConfig(heads=2, kv_heads=1, window=4)
    ),
    "learned": dataclasses.replace(STACK, encoding=EncodingConfig("learned", max_length=32)),
}
OPTIONS = {
    "greedy": DecodeConfig(max_length=12, batch=2),
    "sample": DecodeConfig(method="sample", max_length=12, batch=2, top_p=0.9, repetition_penalty=1.2, hypotheses=2),
}


@functools.cache
def model(name: str) -> tuple:
    module = build.build(ModelConfig(decoder=STACKS[name], multi_token=MultiTokenConfig(depth=2)))
    rng = np.random.default_rng(3)
    shapes = nn.meta.unbox(build.shapes(module))
    return module, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def proposing(options: DecodeConfig) -> DecodeConfig:
    return dataclasses.replace(options, speculate=1, proposals="multi_token")


@pytest.mark.parametrize(("name", "method"), [("rope", "greedy"), ("learned", "sample")])
def test_outputs_are_those_without_proposals(name, method):
    """Six prompts of unlike lengths in two rows, so that rows are refilled while others go on."""
    runner, prompts = Runner(*model(name), VOCABULARY), make_prompts("decoder")
    expected = runner.generate(prompts, OPTIONS[method])
    found, share = tokens_a_pass(runner, prompts, proposing(OPTIONS[method]))
    assert_same(found, expected)
    assert 1.0 <= share < 2.0


def test_on_a_mesh_outputs_are_those_of_one_device_without_proposals():
    module, variables = model("rope")
    mesh, prompts = meshes.make(MeshConfig(data=2, tensor=2), jax.devices()[:4]), make_prompts("decoder")
    expected = Runner(module, variables, VOCABULARY).generate(prompts, OPTIONS["greedy"])
    with jax.set_mesh(mesh):
        sharded = jax.tree.map(jax.device_put, variables, rules.shardings(build.shapes(module), mesh))
        found = Runner(module, sharded, VOCABULARY).generate(prompts, proposing(OPTIONS["greedy"]))
    assert_same(found, expected)


@pytest.mark.parametrize("left", [False, True])
def test_proposals_are_what_the_module_predicts_in_training(left):
    """Some proposals are kept and others are not, in two rows that are padded on either side."""
    module, variables = model("rope")
    rng, prompt = np.random.default_rng(1), 5
    text = rng.integers(1, SIZE, (2, 16)).astype(np.int32)
    lengths = np.array([prompt, 3])
    whole = [Stream(row[None], Slots(np.arange(16)[None], np.ones((1, 16), np.int32))) for row in text]
    forward = jax.jit(functools.partial(module.apply, variables, full_logits=False))
    want = [np.asarray(forward(Batch(None, row)).further[0])[0] for row in whole]  # column t: token t + 2
    columns = np.arange(prompt) - (prompt - lengths if left else 0 * lengths)[:, None]
    segment = ((columns >= 0) & (columns < lengths[:, None])).astype(np.int32)
    columns = np.clip(columns, 0, 15)
    tokens = np.take_along_axis(text, columns, axis=1) * segment
    own = SelfDraftedModel(BoundModel(module, variables))
    _, state = jax.jit(own.start, static_argnums=1)(Batch(None, Stream(tokens, Slots(columns * segment, segment))), 24)
    read, extend = jax.jit(own.read), jax.jit(own.extend)
    at = lengths.copy()  # the number of tokens that the model has read
    for kept in ((2, 1), (1, 2), (2, 2), (1, 1), (2, 1), (1, 2)):
        last = np.stack([text[row, at[row]] for row in range(2)])[:, None]
        proposed, state = read(last, state)
        for row in range(2):
            np.testing.assert_allclose(proposed[row], want[row][at[row] - 1], rtol=1e-4, atol=1e-4)
        right = np.stack([text[row, at[row] + 1] for row in range(2)])
        wrong = (right + 1) % SIZE
        second = np.where(np.array(kept) == 2, right, wrong)[:, None].astype(np.int32)
        _, state = extend(np.concatenate([last, second], axis=1), state)
        state = state.keep(jnp.asarray(kept), 2)
        at += np.array(kept)


def test_a_module_that_is_right_doubles_the_tokens_of_a_pass():
    """Tokens whose successors do not depend on the text: the module's layer adds nothing to the token's embedding."""
    module, variables = model("rope")
    params = jax.tree.map(np.zeros_like, variables["params"])
    width, table = STACK.width, np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    ones = lambda path, x: np.ones_like(x) if path[-1].key == "scale" else x  # noqa: E731
    params = jax.tree_util.tree_map_with_path(ones, params)
    params["target_embed"]["table"] = table  # tied head: the likeliest token is the token itself, in both
    params["multi_token_0"]["projection"]["kernel"][width:] = np.eye(width, dtype=np.float32)
    runner = Runner(module, {"params": params}, dataclasses.replace(VOCABULARY, eos=()))
    prompts, options = make_prompts("decoder", 2), DecodeConfig(max_length=21)
    found, share = tokens_a_pass(runner, prompts, proposing(options))
    assert_same(found, runner.generate(prompts, options))
    assert share == 2.0


def test_the_engine_and_streams_take_proposals():
    runner, prompts = Runner(*model("rope"), VOCABULARY), make_prompts("decoder", 3)
    plain = [h[0].tokens.tolist() for h in runner.generate(prompts, DecodeConfig(max_length=16))]
    options = proposing(DecodeConfig(max_length=16))
    pieces = [piece.tolist() for piece in streaming.stream(runner, prompts[2], options, steps=2)]
    assert list(itertools.chain(*pieces)) == plain[2]
    outputs: dict[int, list[int]] = {}
    engine = Engine(runner, options, max_new=16, max_prompt=8, rows=2)
    for index, prompt in enumerate(prompts):
        given = outputs.setdefault(index, [])
        engine.submit(
            engine.job(prompt, Sampling(), 16, lambda piece, given=given: given.extend(piece.tokens.tolist()))
        )
    while engine.has_jobs:
        engine.step()
    assert list(outputs.values()) == plain


def test_what_cannot_propose_is_refused():
    module, variables = model("rope")
    runner, prompts, options = Runner(module, variables, VOCABULARY), make_prompts("decoder", 1), OPTIONS["greedy"]
    plain = Runner(build.build(ModelConfig(decoder=STACK)), {"params": {}}, VOCABULARY)
    for bundle, edits, message in (
        (plain, {"speculate": 1}, "got multi_token and a model without such a module"),
        (dataclasses.replace(runner, draft=runner), {"speculate": 1}, "got multi_token and a draft, expected one"),
        (runner, {"speculate": 2}, "got 2, expected 1 for proposals of multi_token"),
        (runner, {"speculate": 0}, "got 0, expected 1 for proposals of multi_token"),
    ):
        with pytest.raises(ConfigError, match=message):
            bundle.generate(prompts, dataclasses.replace(options, proposals="multi_token", **edits))
    with pytest.raises(ConfigError, match="config.decode.speculate: got 3, expected 1 for proposals of multi_token"):
        sections.check_decode(dataclasses.replace(options, proposals="multi_token", speculate=3), module.config)
    with pytest.raises(ConfigError, match="config.decode.proposals: got .multi_token., expected look_up"):
        sections.check_decode(proposing(options), ModelConfig(decoder=STACK))
