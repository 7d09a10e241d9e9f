"""Cells, layers and attention against their equations, written out in numpy one slot at a time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import EmbedConfig, RecurrentConfig
from jaxformer.nn import cells, masks
from jaxformer.nn.recurrent import (
    AttendingLayer,
    Encoder,
    Gates,
    Layer,
    Memory,
    additive_scores,
    dot_scores,
    probabilities,
)
from jaxformer.types import Slots

B, T, S, D, W, E = 2, 5, 4, 3, 4, 6


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(module: nn.Module, *args, seed: int = 0) -> dict:
    """Variables with random numbers everywhere, biases included, without running the module."""
    shapes = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), *args))["params"])
    leaves, tree = jax.tree.flatten(shapes)
    return {"params": jax.tree.unflatten(tree, [0.6 * draw(seed + i, *x.shape) for i, x in enumerate(leaves)])}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference_step(cell: str, gates: dict, x, h, c, extra=0.0):
    """One step of one row; `extra` is added to the input's share of the gates `[G, W]`."""
    inputs = np.einsum("d,dgw->gw", x, gates["input"]["kernel"]) + gates["input"]["bias"] + extra
    hidden = np.einsum("v,vgw->gw", h, gates["recurrent"])
    if cell == "rnn":
        return np.tanh(inputs[0] + hidden[0]), c
    if cell == "lstm":
        i, f, g, o = inputs + hidden
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    hidden = hidden + gates["recurrent_bias"]
    r, z = sigmoid(inputs[0] + hidden[0]), sigmoid(inputs[1] + hidden[1])
    n = np.tanh(inputs[2] + r * hidden[2])
    return z * h + (1 - z) * n, c


def softmax(scores, visible):
    weights = np.where(visible, np.exp(scores - scores.max()), 0.0)
    return weights / max(weights.sum(), 1e-30)


class CellTest(chex.TestCase):
    @chex.variants(with_jit=True)
    @parameterized.parameters(("rnn", False), ("lstm", False), ("gru", True))
    def test_a_layer_is_its_equations_step_by_step(self, cell, reverse):
        module, x = Layer(cell, W, reverse=reverse), draw(1, B, T, D)
        segment = np.ones((B, T), np.int32)
        marks = cells.segment_boundaries(jnp.asarray(segment), reverse)
        variables = filled(module, x, marks)
        y, states, last = self.variant(module.apply)(variables, x, marks)
        chex.assert_shape([y, *states], (B, T, W))
        gates = variables["params"]["gates"]
        for row in range(B):
            h, c = np.zeros(W), np.zeros(W)
            for t in reversed(range(T)) if reverse else range(T):
                h, c = reference_step(cell, gates, x[row, t], h, c)
                np.testing.assert_allclose(y[row, t], h, rtol=2e-5, atol=1e-6)
                if cell == "lstm":
                    np.testing.assert_allclose(states[1][row, t], c, rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(last[0][row], h, rtol=2e-5, atol=1e-6)

    @chex.variants(with_jit=True)
    @parameterized.parameters(("additive", "gru"), ("dot", "lstm"))
    def test_an_attending_layer_is_its_equations_step_by_step(self, attention, cell):
        module = AttendingLayer(cell, W, attention)
        x, memory = draw(1, B, T, D), Memory(draw(2, B, S, W), draw(3, B, S, E))
        visible = np.ones((B, T, S), bool)
        visible[0, :, 3] = visible[1, :, 1:] = False
        marks = cells.segment_boundaries(jnp.ones((B, T), jnp.int32))
        variables = filled(module, x, marks, memory, visible)
        (y, _), sown = self.variant(lambda *a: module.apply(*a, mutable=["intermediates"]))(
            variables, x, marks, memory, visible
        )
        (alpha,) = sown["intermediates"]["attention"]
        p = variables["params"]
        for row in range(B):
            keys, values, seen = memory.keys[row], memory.values[row], visible[row, 0]
            h, c, output = np.zeros(W), np.zeros(W), np.zeros(W)
            for t in range(T):
                if attention == "additive":
                    probs = softmax(np.tanh(h @ p["query"] + keys) @ p["vector"], seen)
                    extra = np.einsum("e,egw->gw", probs @ values, p["context"])
                    h, c = reference_step(cell, p["gates"], x[row, t], h, c, extra)
                else:
                    extra = np.einsum("v,vgw->gw", output, p["context"])
                    h, c = reference_step(cell, p["gates"], x[row, t], h, c, extra)
                    probs = softmax(keys @ h, seen)
                output = np.tanh(np.concatenate([h, probs @ values]) @ p["combine"] + p["combine_bias"])
                np.testing.assert_allclose(y[row, t], output, rtol=5e-5, atol=2e-6)
                np.testing.assert_allclose(alpha[row, t], probs, rtol=5e-5, atol=2e-6)


def test_attention_weights_sum_to_one_on_visible_slots_and_are_zero_elsewhere():
    query, keys = jnp.asarray(5 * draw(0, B, W)), jnp.asarray(draw(1, B, S, W))
    visible = jnp.asarray([[True, True, False, True], [False] * 4])
    for scores in (dot_scores(query, keys), additive_scores(query, keys, jnp.asarray(draw(2, W)))):
        probs = probabilities(scores, visible)
        np.testing.assert_allclose(probs.sum(axis=1), [1.0, 0.0], rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(probs)[~np.asarray(visible)], 0.0)
        assert (np.asarray(probs)[np.asarray(visible)] > 0).all()


@pytest.mark.parametrize(
    ("cell", "count"),
    [("rnn", D * W + W * W + W), ("lstm", 4 * (D * W + W * W + W)), ("gru", 3 * (D * W + W * W + 2 * W))],
)
def test_the_number_of_parameters_is_the_textbook_one(cell, count):
    marks = cells.segment_boundaries(jnp.ones((B, T), jnp.int32))
    variables = filled(Layer(cell, W), draw(0, B, T, D), marks)
    assert sum(x.size for x in jax.tree.leaves(variables)) == count


def test_every_gate_starts_with_an_orthogonal_recurrent_kernel():
    kernel = cells.orthogonal(jax.random.key(0), (W, 4, W))
    np.testing.assert_allclose(np.einsum("wgv,wgu->gvu", kernel, kernel), np.tile(np.eye(W), (4, 1, 1)), atol=1e-5)
    assert np.abs(kernel[:, 0] - kernel[:, 1]).max() > 0.1


def test_boundaries_say_what_is_real_and_where_segments_start():
    segment = jnp.asarray([[0, 1, 1, 0, 1, 2, 2, 0]])
    forward, backward = cells.segment_boundaries(segment), cells.segment_boundaries(segment, reverse=True)
    real = np.array([[0, 1, 1, 0, 1, 1, 1, 0]], bool)
    chex.assert_trees_all_equal(forward, cells.Boundaries(real, np.array([[0, 1, 0, 0, 0, 1, 0, 0]], bool)))
    chex.assert_trees_all_equal(backward, cells.Boundaries(real, np.array([[0, 0, 0, 0, 1, 0, 1, 0]], bool)))


def test_segment_edges_are_the_first_and_last_slot_of_the_same_segment():
    x = draw(0, 1, 6, 2)
    source, target = jnp.asarray([[0, 1, 1, 2, 0, 0]]), jnp.asarray([[2, 1, 0, 3]])
    zero = np.zeros(2)
    last, first = (cells.at_segment_edge(jnp.asarray(x), source, target, last=last)[0] for last in (True, False))
    expected = np.stack([x[0, 3], x[0, 2], zero, zero]), np.stack([x[0, 3], x[0, 1], zero, zero])
    chex.assert_trees_all_equal((last, first), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_hoisted_gradient_is_the_ordinary_one(reverse):
    """Every argument's gradient, with two kernels, of which one reads what the other made."""

    def body(dot, consts, carry, x):
        h = jnp.tanh(dot("outer", dot("inner", carry[0]) * consts) + x["value"])
        return (jnp.where(x["keep"], h, carry[0]),), h[:, :2]

    kernels = {"inner": draw(0, W, 3), "outer": draw(1, 3, W)}
    xs = {"value": draw(3, T, B, W), "keep": np.random.default_rng(4).random((T, B, 1)) < 0.7}
    weight_last, weight_y = draw(5, B, W), draw(6, T, B, 2)

    def loss(run):
        def value(kernels, consts, carry, value):
            (last,), ys = run(body, reverse, kernels, consts, carry, xs | {"value": value})
            return (last * weight_last).sum() + (ys * weight_y).sum()

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))

    args = jax.tree.map(jnp.asarray, (kernels, draw(2, 3), (draw(7, B, W),), xs["value"]))
    hoisted, plain = loss(cells.scan)(*args), loss(cells.plain_scan)(*args)
    chex.assert_trees_all_close(hoisted, plain, rtol=1e-5, atol=1e-6)
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(hoisted[1])) > 1e-3


def encoder(cell: str = "lstm", **edits) -> RecurrentConfig:
    settings = {"cell": cell, "width": 8, "bidirectional": True, "layers": 2, "embed": EmbedConfig(vocab=9)}
    return RecurrentConfig(**(settings | edits))


def encode(config: RecurrentConfig, x, segment) -> jax.Array:
    slots = Slots(jnp.zeros_like(segment), segment)
    return Encoder(config).apply(VARIABLES[config.cell], x, slots).outputs


ONES = Slots(jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32))
VARIABLES = {cell: filled(Encoder(encoder(cell)), jnp.zeros((1, 4, 8)), ONES) for cell in ("lstm", "gru")}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_bidirectional_encoder_does_not_notice_padding(cell):
    x, run = draw(0, 1, 4, 8), jax.jit(encode, static_argnums=0)
    bare = run(encoder(cell), x, jnp.ones((1, 4), jnp.int32))
    assert np.abs(bare).min() > 0
    junk = 9 * draw(1, 3, 7, 8)
    segment = np.zeros((3, 7), np.int32)
    for row, start in enumerate((0, 3, 2)):  # padding right, left, on both sides
        junk[row, start : start + 4], segment[row, start : start + 4] = x, 1
    padded = run(encoder(cell), junk, jnp.asarray(segment))
    for row, start in enumerate((0, 3, 2)):
        np.testing.assert_allclose(padded[row, start : start + 4], bare[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(padded)[segment == 0], 0.0)


PACK = jax.jit(lambda x, segment: encode(encoder(), x, segment))


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3), gaps=st.lists(st.integers(0, 2), min_size=3))
def test_packed_examples_are_encoded_as_if_alone(lengths, gaps):
    x, room = draw(0, 1, 20, 8), 20
    segment, alone, places, at = np.zeros((1, room), np.int32), np.zeros((3, room), np.int32), [], 0
    copies = np.zeros((3, room, 8), np.float32)
    for index, (length, gap) in enumerate(zip(lengths, gaps, strict=False)):
        at += gap
        segment[0, at : at + length], alone[index, :length] = index + 1, 1
        copies[index, :length] = x[0, at : at + length]
        places.append((at, length))
        at += length
    packed = PACK(x, jnp.asarray(segment))
    single = PACK(jnp.asarray(copies), jnp.asarray(alone))
    for index, (start, length) in enumerate(places):
        np.testing.assert_allclose(packed[0, start : start + length], single[index, :length], rtol=1e-5, atol=1e-6)


def test_one_direction_is_causal_and_two_are_not():
    x, segment = jnp.asarray(draw(0, 1, 4, 8)), jnp.ones((1, 4), jnp.int32)
    slots = masks.slots_from_segments(segment)

    def influence(config: RecurrentConfig) -> np.ndarray:
        variables = filled(Encoder(config), x, slots)
        run = lambda x: Encoder(config).apply(variables, x, slots).outputs  # noqa: E731
        return np.asarray(jnp.abs(jax.jit(jax.jacobian(run))(x)).sum(axis=(0, 2, 3, 5)))

    one, two = influence(encoder(bidirectional=False, layers=1)), influence(encoder(layers=1))
    np.testing.assert_array_equal(np.triu(one, 1), 0.0)
    assert (np.tril(one) + np.triu(np.ones((4, 4)), 1) > 0).all()
    assert (two > 0).all()


def test_recurrent_dropout_draws_one_mask_a_sequence_and_only_with_a_key():
    module, x = Gates("lstm", 64, dropout=0.25), draw(0, 3, T, D)
    variables = filled(module, x)
    assert module.apply(variables, x)[2]["keep"] is None
    keep = np.asarray(module.apply(variables, x, rngs={"dropout": jax.random.key(0)})[2]["keep"])
    assert keep.shape == (3, 64)
    np.testing.assert_allclose(np.unique(keep), [0.0, 1 / 0.75], rtol=1e-6)
    assert 0.6 < (keep > 0).mean() < 0.9


def test_bfloat16_keeps_float32_states_and_stays_close():
    module, x = Layer("lstm", W), jnp.asarray(draw(0, B, T, D))
    marks = cells.segment_boundaries(jnp.ones((B, T), jnp.int32))
    variables = filled(module, x, marks)
    run = jax.jit(lambda x: module.apply(variables, x, marks))
    exact, (y, states, last) = run(x), run(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert {s.dtype for s in (*states, *last)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(y.astype(jnp.float32), exact[0], atol=0.03)
