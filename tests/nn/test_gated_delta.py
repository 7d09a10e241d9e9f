"""The gated delta rule against the recurrence slot by slot, and in every place where a stack's layers are read."""

from __future__ import annotations

import dataclasses

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from jaxformer import testing
from jaxformer.analysis import attention
from jaxformer.analysis.layers import Reader
from jaxformer.config import (
    AdapterConfig,
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    DeltaConfig,
    EncodingConfig,
    FeedForwardConfig,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    TaskConfig,
    ValueResidualConfig,
)
from jaxformer.config.checks import mesh as mesh_checks
from jaxformer.config.checks import size
from jaxformer.config.checks.model import check_model
from jaxformer.config.checks.sections import check_task, check_train
from jaxformer.config.checks.stack import check_stack
from jaxformer.config.layer_groups import layer_groups
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.generate import ModelBundle, generate
from jaxformer.models import adapters, build
from jaxformer.nn import delta_rule
from jaxformer.nn.gated_delta import GatedDelta, text_numbers
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.plan import decoding, flops, shapes
from jaxformer.train import optim
from jaxformer.train import step as steps
from jaxformer.types import Batch, Slots, Stream

DELTA = DeltaConfig(key_heads=2, value_heads=4, key_width=3, value_width=2, conv_kernel=3, chunk=4)
"""Heads of values that share keys, unlike widths, and chunks that divide no length of these tests."""


# --- the layer --------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_slots(params, config, x, segment):
    """The layer on one row `[T, D]`: one text, one head and one slot after the other, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    y, keys = np.zeros_like(x), config.key_heads * config.key_width
    for text in sorted(set(segment) - {0}):
        places = [t for t in range(len(x)) if segment[t] == text]
        rows = x[places]
        mixed = {}
        for name in ("query", "key", "value"):
            inputs, taps = rows @ params[name]["kernel"], params[f"{name}_conv"]
            summed = np.zeros_like(inputs)
            for t in range(len(rows)):
                for back in range(min(config.conv_kernel, t + 1)):
                    summed[t] += taps[config.conv_kernel - 1 - back] * inputs[t - back]
            mixed[name] = summed * sigmoid(summed)
        assert mixed["query"].shape[1] == keys
        gate = rows @ params["gate"]["kernel"]
        steps = np.log1p(np.exp(rows @ params["decay"]["kernel"] + params["step_bias"]))
        betas = sigmoid(rows @ params["beta"]["kernel"])
        heads = np.zeros((len(rows), config.heads * config.value_width))
        for h in range(config.heads):
            of_key = h * config.key_heads // config.heads
            k_part = slice(of_key * config.key_width, (of_key + 1) * config.key_width)
            v_part = slice(h * config.value_width, (h + 1) * config.value_width)
            state = np.zeros((config.key_width, config.value_width))
            for t in range(len(rows)):
                q, k, v = mixed["query"][t, k_part], mixed["key"][t, k_part], mixed["value"][t, v_part]
                q, k = (z / np.sqrt(z @ z + 1e-6) for z in (q, k))
                decayed = state * np.exp(-np.exp(params["log_scale"][h]) * steps[t, h])
                state = decayed + betas[t, h] * np.outer(k, v - decayed.T @ k)
                o = state.T @ q / np.sqrt(config.key_width)
                o = o / np.sqrt(np.mean(o**2) + config.epsilon) * params["norm"]["scale"]
                heads[t, v_part] = o * gate[t, v_part] * sigmoid(gate[t, v_part])
        y[places] = heads @ params["out"]["kernel"]
    return y


@pytest.fixture(scope="module")
def layer():
    """A layer with drawn parameters, two rows of packed and padded texts, and its outputs for them."""
    module, rng = GatedDelta(DELTA, 8), np.random.default_rng(0)
    x = rng.normal(size=(2, 11, 8)).astype(np.float32)
    segment = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 2, 2, 3, 0, 0]], np.int32)
    shape = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), x, segment)))
    variables = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), shape)
    return module, variables, x, segment


def test_the_layer_is_that_of_loops_over_texts_heads_and_slots(layer):
    module, variables, x, segment = layer
    apply = jax.jit(module.apply)
    got = apply(variables, x, segment)[0]
    for row in range(2):
        expected = by_slots(variables["params"], DELTA, x[row].astype(np.float64), segment[row])
        real = segment[row] > 0
        np.testing.assert_allclose(np.asarray(got[row])[real], expected[real], rtol=1e-4, atol=2e-5)
    shown = np.array([[-1, -1, 1, 1, 1, 1, 1, 1, -1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1]], np.int32)
    got = apply(variables, x, shown)[0]
    for row in range(2):  # padding whose output is used is a slot of its text with input 0
        inputs = np.where(shown[row][:, None] > 0, x[row].astype(np.float64), 0)
        expected = by_slots(variables["params"], DELTA, inputs, np.ones(11, int))
        np.testing.assert_allclose(np.asarray(got[row]), expected, rtol=1e-4, atol=2e-5)
    assert (np.asarray(got[1, 8:]) == 0).all()


def test_chunks_of_any_size_and_single_slots_give_the_outputs_and_gradients_of_the_recurrence(layer):
    """Scalar products of outputs and of the last state with drawn weights, and their gradients, by three ways."""
    rng = np.random.default_rng(1)
    shapes = {
        "q": (2, 7, 2, 3),
        "k": (2, 7, 2, 3),
        "v": (2, 7, 2, 4),
        "g": (2, 7, 2),
        "b": (2, 7, 2),
        "s": (2, 2, 3, 4),
    }
    arguments = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights, last = rng.normal(size=(2, 7, 2, 4)), rng.normal(size=(2, 2, 3, 4))
    run = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0]])

    def prepared(a):
        k = a["k"] / jnp.linalg.norm(a["k"], axis=-1, keepdims=True)
        return a["q"], k, a["v"], -jax.nn.softplus(a["g"]), jax.nn.sigmoid(a["b"]), a["s"]

    def summed(o, state):
        return jnp.sum(o * weights) + jnp.sum(state * last)

    def in_chunks(size, a):
        *others, state = prepared(a)
        return summed(*delta_rule.chunked(*others, jnp.asarray(run), state, size))

    def by_recurrence(a):
        *others, state = prepared(a)
        outputs = []
        for t in range(7):
            begins = t > 0 and run[:, t] != run[:, t - 1]
            state = jnp.where(jnp.asarray(begins).reshape(-1, 1, 1, 1), 0.0, state)
            o, state = delta_rule.single(*(x[:, t] for x in others), state)
            outputs.append(o)
        return summed(jnp.stack(outputs, axis=1), state)

    expected = jax.jit(jax.value_and_grad(by_recurrence))(arguments)
    for chunk in (1, 3, 64):
        got = jax.jit(jax.value_and_grad(lambda a, chunk=chunk: in_chunks(chunk, a)))(arguments)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_keys_that_repeat_do_not_blow_rounding_errors_up():
    """Equal keys with beta 1 and no decay: powers of the triangular system would have entries of 10^18."""
    k = np.zeros((1, 64, 1, 4), np.float32)
    k[..., 0] = 1.0
    v = np.random.default_rng(2).normal(size=(1, 64, 1, 2)).astype(np.float32)
    zeros, ones = np.zeros((1, 64, 1), np.float32), np.ones((1, 64, 1), np.float32)
    run, state = np.zeros((1, 64), np.int32), np.zeros((1, 1, 4, 2), np.float32)
    o, after = delta_rule.chunked(k, k, v, zeros, ones, run, state, 64)
    np.testing.assert_allclose(o, v, atol=1e-5)  # each write replaces the value of the only key
    np.testing.assert_allclose(after[0, 0, 0], v[0, -1, 0], atol=1e-5)


def test_texts_are_numbered_in_their_row_and_padding_begins_none():
    segment = jnp.array([[0, 0, 3, 3, 0, 3, 1], [1, 1, 2, 0, 0, 4, 4], [0, 0, 0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 2, 2], [0] * 7]
    assert text_numbers(segment).tolist() == expected


# --- the stack --------------------------------------------------------------------------------------------------------

STACK = builders.stack(
    layers=4,
    attention=AttentionConfig(heads=2, bias=False, gate=True),
    encoding=EncodingConfig("rope", fraction=0.5),
    ffn=FeedForwardConfig(width=12, activation="silu", gated=True, bias=False),
    norm=NormConfig("rms"),
    delta=dataclasses.replace(DELTA, attention_layers=(2,)),
    moe=MoEConfig(experts=3, top_k=2, dense_at=(1, 2), dense_width=10, shared=1, shared_width=5, shared_gate=True),
)
"""Layers: delta with experts, delta, attention, delta with experts."""
MODEL = ModelConfig(decoder=STACK)
ALONE = ModelConfig(decoder=dataclasses.replace(STACK, layers=1, moe=None, delta=dataclasses.replace(DELTA)))
BOTH = ModelConfig(
    decoder=dataclasses.replace(STACK, layers=2, moe=None, delta=dataclasses.replace(DELTA, attention_layers=(1,)))
)


@pytest.fixture(scope="module")
def model():
    return builders.make(MODEL)


@pytest.fixture(scope="module")
def both():
    return builders.make(BOTH)


def test_layers_are_in_groups_of_one_form(model):
    groups = layer_groups(STACK)
    assert [(group.name, list(group.numbers)) for group in groups] == [
        ("blocks_0", [0]), ("blocks_1", [1]), ("blocks_2", [2]), ("blocks_3", [3]),
    ]  # fmt: skip
    assert [group.stack.delta is not None for group in groups] == [True, True, False, True]
    assert [group.stack.moe is not None for group in groups] == [True, False, False, True]
    every = dataclasses.replace(STACK, layers=9, moe=None, delta=DELTA)
    assert [(g.first, g.stack.layers) for g in layer_groups(every)] == [(0, 3), (3, 1), (4, 3), (7, 1), (8, 1)]
    blocks = model[1]["params"]["decoder"]
    assert "gated_delta" in blocks["blocks_3"] and "attention" not in blocks["blocks_3"]
    assert blocks["blocks_2"]["ffn"]["in"]["kernel"].shape == (1, 8, 10)
    assert blocks["blocks_0"]["ffn"]["shared"]["in"]["kernel"].shape == (1, 8, 5)


def test_a_prompt_and_then_single_steps_give_the_logits_of_the_whole_pass(model):
    testing.assert_steps_equal_forward(*model, builders.batch(MODEL, [7, 7]), 4, rtol=1e-4, atol=1e-5)


def test_packing_padding_and_the_order_of_rows_change_nothing(both):
    testing.assert_packing_invariant(*both, (5, 3), builders.VOCAB)
    testing.assert_padding_invariant(*both, builders.batch(BOTH, [5, 3]))
    testing.assert_causal(*both, builders.batch(BOTH, [5, 5]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_and_the_token_after_them_as_if_alone(both, side):
    module, variables = both
    rng, sizes = np.random.default_rng(3), (2, 6)
    prompts = [rng.integers(1, 13, n).astype(np.int32) for n in sizes]
    tokens, segment, position = (np.zeros((2, 8), np.int32) for _ in range(3))
    for i, prompt in enumerate(prompts):
        where = slice(0, len(prompt)) if side == "right" else slice(8 - len(prompt), 8)
        tokens[i, where], segment[i, where], position[i, where] = prompt, 1, np.arange(len(prompt))
    batch = Batch(None, Stream(tokens, Slots(position, segment)))
    logits, state = jax.jit(lambda b: module.apply(variables, b, 9, method=module.start))(batch)
    follow = np.array([[4], [9]], np.int32)
    after, _ = builders.apply(module, module.step)(variables, follow, state)
    forward = builders.apply(module)
    for i, prompt in enumerate(prompts):
        whole = np.concatenate([prompt, follow[i]])
        alone = np.pad(whole, (0, 8 - len(whole)))[None]
        slots = Slots(np.arange(8, dtype=np.int32)[None], np.int32(np.arange(8) < len(whole))[None])
        expected = forward(variables, Batch(None, Stream(alone, slots)))[0, : len(whole)]
        chex.assert_trees_all_close(logits[i], expected[-2], rtol=2e-5, atol=2e-6)
        chex.assert_trees_all_close(after[i], expected[-1], rtol=2e-5, atol=2e-6)


def bundle(both, **edits):
    module, variables = both
    return ModelBundle(module, variables, Vocabulary((0,), 0, size=builders.VOCAB), **edits)


PROMPTS = [{"target": np.arange(1, n)} for n in (3, 7, 4, 9, 2)]


def test_beams_reorder_the_states(both):
    """A score is the sum of the log-probabilities of the tokens in a pass over all of them."""
    options = DecodeConfig(method="beam", beams=3, hypotheses=3, max_length=5, length_penalty=0.0, batch=2)
    forward = builders.apply(both[0])
    for prompt, found in zip(PROMPTS, generate(bundle(both), PROMPTS, options), strict=True):
        assert len({tuple(each.tokens) for each in found}) == 3
        for each in found:
            text = np.concatenate([prompt["target"], each.tokens]).astype(np.int32)
            padded = np.pad(text, (0, 16 - len(text)))[None]
            slots = Slots(np.arange(16, dtype=np.int32)[None], np.int32(np.arange(16) < len(text))[None])
            logits = forward(both[1], Batch(None, Stream(padded, slots)))[0]
            chances = jax.nn.log_softmax(logits)[np.arange(len(text) - 1), text[1:]]
            np.testing.assert_allclose(each.score, chances[len(prompt["target"]) - 1 :].sum(), rtol=1e-4)


def test_queued_prompts_take_rows_of_a_batch_as_if_they_were_alone(both):
    options = DecodeConfig(method="greedy", max_length=40, batch=2)
    queued = generate(bundle(both), PROMPTS, options)
    alone = [generate(bundle(both), [prompt], options)[0] for prompt in PROMPTS]
    assert [each[0].tokens.tolist() for each in queued] == [each[0].tokens.tolist() for each in alone]


def test_a_row_goes_on_from_any_number_of_the_tokens_that_it_read_at_once(both):
    """Rows keep none, two and all of three tokens; the one after them is that of the whole pass over what they kept."""
    module, variables = both
    rng, kept = np.random.default_rng(7), np.array([0, 2, 3])
    batch = builders.batch(BOTH, [5, 5, 5])
    _, state = jax.jit(lambda b: module.apply(variables, b, 9, method=module.start))(batch)
    tokens, follow = (np.int32(rng.integers(1, 13, (3, n))) for n in (3, 1))
    logits, state = builders.apply(module, module.extend)(variables, tokens, state)
    with pytest.raises(ValueError, match="append_sequence: got a state after append_sequence, expected one after keep"):
        state.append_sequence(3, None)
    after, state = builders.apply(module, module.step)(variables, follow, state.keep(jnp.asarray(kept), 3))
    assert [type(part).__name__ for part in state.keys_values] == ["DeltaState", "KeyValues"]
    forward, slots = builders.apply(module), np.arange(16, dtype=np.int32)[None]
    prompts = np.asarray(batch.target.tokens)
    for row, count in enumerate(kept):
        for text, found in (
            (np.concatenate([prompts[row], tokens[row]]), logits[row, 2]),
            (np.concatenate([prompts[row], tokens[row, :count], follow[row]]), after[row]),
        ):
            padded = np.pad(text, (0, 16 - len(text)))[None]
            stream = Stream(padded, Slots(slots, np.int32(slots < len(text))))
            expected = forward(variables, Batch(None, stream))[0, len(text) - 1]
            chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=5e-5)


def test_proposals_of_a_draft_change_no_text(both):
    options = DecodeConfig(method="sample", max_length=6, batch=2)
    draft, proposing = bundle(builders.make(builders.decoder(layers=1))), dataclasses.replace(options, speculate=2)
    expected = generate(bundle(both), PROMPTS[:2], options)
    for each, found in zip(expected, generate(bundle(both, draft=draft), PROMPTS[:2], proposing), strict=True):
        assert each[0].tokens.tolist() == found[0].tokens.tolist()
        np.testing.assert_allclose(each[0].score, found[0].score, rtol=1e-4)
    with pytest.raises(ConfigError, match="draft: got a draft with a SlotState, expected a transformer without the"):
        generate(bundle(both, draft=bundle(both)), PROMPTS[:1], proposing)


def test_adapters_of_chosen_layers_compute_what_merged_kernels_do(both):
    adapter = AdapterConfig(rank=2, targets=("gated_delta", "ffn/in"), layers=(0,))
    module = build.build(dataclasses.replace(BOTH, adapter=adapter))
    rng = np.random.default_rng(5)
    shapes = traverse_util.flatten_dict(nn.meta.unbox(build.shapes(module))["params"])
    flat = traverse_util.flatten_dict(both[1]["params"])
    for path in shapes.keys() - flat.keys():
        flat[path] = jnp.asarray(rng.normal(size=shapes[path].shape), jnp.float32)
    plain = {path: box.shape for path, box in shapes.items()}
    for path, (x, _) in adapters.leaves(adapter, plain, build.linear_maps(module), jax.random.key(0)).items():
        if path[-1] == "lora_scale":
            assert x.tolist() == [8.0 * (path[1] == "blocks_0")]
            flat[path] = x
    assert {path[2:-1] for path in flat if path[-1] == "lora_a" and path[1] == "blocks_0"} == {
        *(("gated_delta", name) for name in ("query", "key", "value", "gate", "decay", "beta", "out")), ("ffn", "in"),
    }  # fmt: skip
    params, batch = traverse_util.unflatten_dict(flat), builders.batch(BOTH, [5, 3])
    merged = adapters.merge(params)
    expected = builders.apply(both[0])({"params": merged}, batch)
    np.testing.assert_allclose(builders.apply(module)({"params": params}, batch), expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(merged["decoder"]["blocks_1"]["ffn"]["in"]["kernel"])
            == np.asarray(both[1]["params"]["decoder"]["blocks_1"]["ffn"]["in"]["kernel"])).all()  # fmt: skip
    wrong = dataclasses.replace(adapter, targets=("gated_delta",), layers=(1,))
    with pytest.raises(ConfigError, match=r"adapter.layers: got 1, expected numbers from 0 to 1, of layers with one"):
        build.shapes(build.build(dataclasses.replace(BOTH, adapter=wrong)))


def test_rates_of_layers_follow_their_numbers_in_all_groups():
    shapes = build.shapes(build.build(MODEL))["params"]
    names = jax.tree.map(lambda box: box.names, shapes, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    factors = optim.rate_factors(nn.meta.unbox(shapes), 0.5, names)
    for number in range(4):
        found = {float(x.reshape(-1)[0]) for x in jax.tree.leaves(factors["decoder"][f"blocks_{number}"])}
        assert found == {0.5 ** (4 - number)}
    assert factors["target_embed"]["table"] == 0.5**5 and factors["decoder"]["final_norm"]["scale"] == 1


def test_gradients_on_eight_devices_with_recomputation_and_tiles_are_those_of_one(both):
    module, variables = both
    batch = builders.batch(BOTH, [6, 3, 2, 5])  # with more rows, or weights of seed 1, some sums nearly cancel
    draws = [np.random.default_rng(seed).normal(size=(4, 6, builders.VOCAB)).astype(np.float32) for seed in (2, 3, 4)]
    gradient = lambda module: jax.jit(  # noqa: E731
        jax.grad(lambda v, batch, weights: jnp.sum(weights * module.apply(v, batch)))
    )
    alone = gradient(module)
    expected = [jax.device_get(alone(variables, batch, weights)) for weights in draws]
    other = ModelConfig(decoder=dataclasses.replace(BOTH.decoder, remat="full"))
    mesh = meshes.make(MeshConfig(data=2, tensor=2, fsdp=2))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, dict(variables), rules.shardings(build.shapes(module), mesh))
        state = placed["params"]["decoder"]["blocks_0"]["gated_delta"]["value"]["kernel"]
        assert state.sharding.shard_shape(state.shape) == (1, 4, 4)
        spread, placed_batch = gradient(build.build(other)), steps.shard_batch(batch, mesh)
        got = [jax.device_get(spread(placed, placed_batch, weights)) for weights in draws]
    chex.assert_trees_all_close(got, expected, rtol=2e-4, atol=2e-5)
    for ours, one in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(ours - one).max() <= 1e-5 * np.abs(one).max()
    for name in ("query_conv", "key_conv", "value_conv", "log_scale", "step_bias"):
        assert np.all(expected[0]["params"]["decoder"]["blocks_0"]["gated_delta"][name])


def test_bfloat16_agrees_with_float32_and_keeps_a_float32_state(both):
    module, variables = both
    half = type(module)(dataclasses.replace(BOTH, dtype="bfloat16"))
    batch = builders.batch(BOTH, [6, 6])
    plain, rounded = (builders.apply(each)(variables, batch) for each in (module, half))
    chex.assert_trees_all_close(rounded, plain, rtol=0.1, atol=0.1)
    assert half.bind({}).decoder.empty_cache(1, 2, jnp.bfloat16)[0].state.dtype == jnp.float32


# --- what else reads a stack ------------------------------------------------------------------------------------------


def test_the_plan_knows_the_bytes_of_a_cache_the_parameters_and_the_products(model):
    module, variables = model
    batch = builders.batch(MODEL, [7, 7])._replace(labels=None, weights=None)
    state = jax.eval_shape(lambda: module.apply(variables, batch, 9, method=module.start)[1])
    parts = decoding.transformer_state_bytes(STACK, "float32", 9)
    held = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer)) for layer in state.keys_values]
    assert parts["states"] == (held[0] + held[1] + held[3]) / 2
    assert parts["keys and values"] == held[2] / 2
    longer = decoding.transformer_state_bytes(STACK, "float32", 900)
    assert longer["states"] == parts["states"] and longer["keys and values"] == 100 * parts["keys and values"]

    tree, names = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
    config = Config(model=MODEL, data=DataConfig(length=8))
    vectors = {"scale", "log_scale", "step_bias"}
    counted = sum(x.size for keys, x in jax.tree.leaves_with_path(tree) if keys[-1].key not in vectors)
    assert size.min_parameters(config) == counted
    multiplied = flops.matmul_parameters(config, tree, names)
    assert multiplied == pytest.approx(counted - 2 * (1 / 3) * 3 * 3 * 8 * 12)
    assert shapes.stack_layers(config, "decoder", 8).multiplied == pytest.approx(multiplied - builders.VOCAB * 8)


def test_the_products_of_the_rule_are_those_of_its_program():
    delta = dataclasses.replace(DELTA, chunk=8)
    arrays = [(1, 64, 4, 3), (1, 64, 4, 3), (1, 64, 4, 2), (1, 64, 4), (1, 64, 4)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arrays]
    run, state = jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1, 4, 3, 2), jnp.float32)
    program = jax.make_jaxpr(lambda *a: delta_rule.chunked(*a, 8))(*arguments, run, state)
    solution = 64 * delta.heads * 8 * (3 + 2) / 2  # a triangular system, which is no matrix product
    assert flops.count_flops(program.jaxpr) == 2 * (64 * flops.delta_products(delta) - solution)
    config = Config(model=ALONE, data=DataConfig(length=64))
    assert flops.attention_flops(config, 64) == 6 * flops.delta_products(DELTA)


def test_a_plan_of_beams_counts_a_state_for_each():
    request = decoding.Request(1, 4, 3)
    config = Config(model=BOTH, decode=DecodeConfig(method="beam", beams=3, max_length=3))
    schedule, _ = decoding._schedule(config, request)
    parts = decoding._cache_parts(config, None, request, schedule, schedule.capacities[-1])
    assert parts == {
        name: 3 * bytes_ for name, bytes_ in decoding.transformer_state_bytes(BOTH.decoder, "float32", 7).items()
    }


def test_what_acts_on_time_is_not_decayed_and_what_is_multiplied_is():
    mask = optim.decay_mask(nn.meta.unbox(build.shapes(build.build(BOTH)))["params"], OptimizerConfig())
    layer = mask["decoder"]["blocks_0"]["gated_delta"]
    assert not layer["log_scale"] and not layer["step_bias"] and not layer["norm"]["scale"]
    assert layer["query_conv"] and layer["value"]["kernel"]


def edited(**parts) -> ModelConfig:
    """`MODEL` with other fields of "delta", "moe", "attention" or of the stack itself."""
    nested = {name: dataclasses.replace(getattr(STACK, name), **edit) for name, edit in parts.items()
              if isinstance(edit, dict)}  # fmt: skip
    return ModelConfig(decoder=dataclasses.replace(STACK, **{**parts, **nested}))


REFUSED = {
    "heads": ({"delta": {"value_heads": 3}}, r"delta.value_heads: got 3, expected a multiple of key_heads \(2\)"),
    "two patterns": ({"delta": {"attention_every": 2}}, r"delta.attention_every: got 2, expected 4 where attention"),
    "layers": ({"delta": {"attention_layers": (4,)}}, r"delta.attention_layers: got \(4,\), expected different"),
    "no delta": ({"delta": {"attention_layers": (0, 1, 2, 3)}}, "delta: got 'a section', expected None where no layer"),
    "ahead": ({"causal": False}, "delta: got 'a section', expected None in a stack that is not causal"),
    "shared": ({"share_layers": True}, "got 'a section', expected None with share_layers|with share_layers"),
    "first norm": ({"first_norm": False, "moe": None}, "delta: got 'a section', expected None where first_norm"),
    "values": (
        {"attention": {"value_residual": ValueResidualConfig()}},
        "delta: got 'a section', expected None with attention.value_residual",
    ),
    "dense": ({"moe": {"dense_at": (4,)}}, r"moe.dense_at: got \(4,\), expected different numbers from 0 to 3"),
    "all dense": ({"moe": {"dense_at": (0, 1, 2, 3)}}, r"moe.dense_at: .* expected fewer numbers than the layers"),
    "gate of none": ({"moe": {"shared": 0, "shared_width": None}}, "moe.shared_gate: got True, expected False where"),
    "gate of latents": (
        {"attention": {"latent": LatentConfig()}}, "attention.gate: got True, expected False with attention.latent"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name):
    edits, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        check_stack(edited(**edits).decoder, "config.model.decoder", Config(model=MODEL))


def test_parts_that_need_layers_of_one_form_refuse_others(both):
    config = Config(model=MODEL)
    check_stack(STACK, "config.model.decoder", config)
    check_model(MODEL)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1, "stage": 1}
    with pytest.raises(ConfigError, match=r"mesh.stage: got 2, expected 1 for decoder.delta"):
        mesh_checks.check_divisibility(config, sizes | {"stage": 2})
    four = edited(moe=None, attention={"heads": 4}, embed=dataclasses.replace(STACK.embed, vocab=16))
    with pytest.raises(ConfigError, match=r"delta.key_heads: got 2, expected a multiple of mesh.tensor \(4\)"):
        mesh_checks.check_divisibility(Config(model=four), sizes | {"tensor": 4})
    with pytest.raises(ConfigError, match=r"decoder.delta: got 'a section', expected None for the task prefix_lm"):
        check_task(dataclasses.replace(config, task=TaskConfig(name="prefix_lm")))
    with pytest.raises(ConfigError, match=r"mesh.context: got 2, expected 1 with the gated delta rule"):
        mesh_checks.check_context(config, 2)
    with pytest.raises(
        ConfigError, match=r"decoder.delta: got 'a section', expected None in a decoder with an encoder"
    ):
        check_model(dataclasses.replace(MODEL, encoder=builders.stack()))
    check_train(dataclasses.replace(config, optimizer=OptimizerConfig(layer_decay=0.5)))
    with pytest.raises(ConfigError, match=r"ablate: got decoder.delta, expected None: layers with the gated delta"):
        Reader(*both).check_heads("ablate")


def test_layers_run_one_at_a_time_and_those_with_attention_show_it(both):
    reader, batch = Reader(*both), builders.batch(BOTH, [5, 3])
    visits = list(reader.walk(batch, maps=lambda side, layer: True))
    maps = {visit.layer: visit.output.attention for visit in visits if visit.output.attention is not None}
    assert list(maps) == [1] and maps[1].shape == (2, 2, 5, 5)
    expected = builders.apply(both[0])(both[1], batch)
    np.testing.assert_allclose(reader.logits(visits[-1].output.x, visits[-1].inputs.slots), expected, atol=2e-5)
    assert attention.chosen_layers(reader, "decoder", None) == attention.chosen_layers(reader, "decoder", [1]) == (1,)
    with pytest.raises(ConfigError, match=r"layers: got 0, which has the gated delta rule, expected layers of the dec"):
        attention.chosen_layers(reader, "decoder", [0, 1])
