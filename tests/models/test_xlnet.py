"""XLNet against its equations in numpy; what permutations, memories and generation must keep."""

import dataclasses
import functools
import math

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    ConvConfig,
    EncodingConfig,
    ModelConfig,
    NormConfig,
    PermutationConfig,
)
from jaxformer.models import build
from jaxformer.models.xlnet import XLNet, hidden_by_order, next_memory
from jaxformer.tasks import permutation_lm
from jaxformer.types import MEMORY, Batch, Permutation, Slots, Stream

T, WIDTH, LAYERS = 5, 8, 2


def config_of(**edits) -> ModelConfig:
    shape = {
        "encoding": EncodingConfig("transformer_xl"),
        "norm": NormConfig(order="post"),
        "attention": AttentionConfig(heads=2, bias=False),
    }
    return ModelConfig(encoder=builders.stack(**shape | edits), permutation=PermutationConfig())


@functools.cache
def made(causal=None):
    config = config_of(causal=causal)
    return config, *builders.make(config)


def stream(rows=2, length=T, seed=0, kinds=True, real=None) -> Stream:
    rng = np.random.default_rng(seed)
    segment = np.ones((rows, length), np.int32) if real is None else np.asarray(real, np.int32)
    position = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    tokens = rng.integers(1, builders.VOCAB, (rows, length)).astype(np.int32)
    return Stream(tokens, Slots(position, segment), rng.integers(0, 2, (rows, length)) if kinds else None)


def run(causal, source, hidden=None, targets=None, memory=None):
    _, module, variables = made(causal)
    call = lambda *given: module.apply(variables, *given, method=module.streams)  # noqa: E731
    return jax.jit(call)(source, hidden, targets, memory)


# The equations, one row and one query at a time


def slow(params, source, hidden, targets, memory):
    """Both streams after every layer, from the published equations; rows that see nothing take the mean."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rows, length = source.tokens.shape
    held = memory.shape[2]
    h = params["source_embed"]["table"][source.tokens]
    g = np.broadcast_to(params["mask_embed"], (rows, targets.shape[1], WIDTH))
    states = [(h, g)]
    for layer in range(LAYERS):
        weights = jax.tree.map(lambda x, layer=layer: x[layer], params["encoder"]["blocks"])
        everything = np.concatenate([memory[layer], h], axis=1)
        content, query = np.zeros_like(h), np.zeros_like(g)
        for b in range(rows):
            apart = hidden[b] | (source.slots.segment[b] == 0)[None]
            kind = np.concatenate([np.zeros(held), source.token_type[b]])
            for t in range(length):
                own = apart[t] & (np.arange(length) != t)
                q = np.einsum("d,dhk->hk", h[b, t], weights["attention"]["query"]["kernel"])
                content[b, t] = one(weights, h[b, t], attend(weights, q, everything[b], t, held, own, kind))
            q = np.einsum("md,dhk->mhk", g[b], weights["attention"]["query"]["kernel"])
            q = np.einsum("mhk,mt->thk", q, targets[b])
            o = [attend(weights, q[t], everything[b], t, held, apart[t], kind) for t in range(length)]
            o = np.einsum("thk,mt->mhk", o, targets[b])
            for m in range(targets.shape[1]):
                query[b, m] = one(weights, g[b, m], o[m])
        h, g = content, query
        states.append((h, g))
    return [np.stack(x) for x in zip(*states, strict=True)]


def attend(weights, q, x, t, held, apart, kind):
    """`[H, K]` for the query `[H, K]` at slot t of the text, behind `held` slots of memory."""
    attention = weights["attention"]
    k, v = (np.einsum("sd,dhk->shk", x, attention[name]["kernel"]) for name in ("key", "value"))
    p = attention["position"]
    seen = np.concatenate([np.zeros(held, bool), apart]) < 1
    scores = np.zeros((q.shape[0], len(x)))
    for s in range(len(x)):
        angle = (t + held - s) / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
        r = np.einsum("d,dhk->hk", np.concatenate([np.sin(angle), np.cos(angle)]), p["kernel"])
        relation = p["relation"][int(kind[held + t] != kind[s])]
        parts = ((p["content_bias"], k[s]), (p["position_bias"], r), (p["kind_bias"], relation))
        scores[:, s] = sum(np.sum((q + bias) * with_, axis=-1) for bias, with_ in parts) / q.shape[-1] ** 0.5
    if not seen.any():
        return v.mean(0)
    weight = np.where(seen, np.exp(scores - scores[:, seen].max(-1, keepdims=True)), 0.0)
    return np.einsum("hs,shk->hk", weight / weight.sum(-1, keepdims=True), v)


def one(weights, x, o):
    """The rest of a layer for one slot `[D]`."""

    def norm(y, p):
        y = y - y.mean()
        return y / np.sqrt((y * y).mean() + 1e-5) * p["scale"] + p["bias"]

    x = norm(x + np.einsum("hk,hkd->d", o, weights["attention"]["out"]["kernel"]), weights["attention_norm"])
    ffn = weights["ffn"]
    inner = x @ ffn["in"]["kernel"] + ffn["in"]["bias"]
    inner = inner * (1 + np.array([math.erf(y / 2**0.5) for y in inner])) / 2
    return norm(x + inner @ ffn["out"]["kernel"] + ffn["out"]["bias"], weights["ffn_norm"])


def permutation(seed=3):
    """Who comes after whom in a random order of each of 2 rows: its first slot sees nothing."""
    rng = np.random.default_rng(seed)
    rank = np.stack([rng.permutation(T) for _ in range(2)])
    return rank[:, :, None] <= rank[:, None, :], rank


@pytest.mark.parametrize("held", [0, 2])
def test_both_streams_are_the_equations(held):
    source = stream(real=[[1] * T, [0, 0, 1, 1, 1]])
    hidden, rank = permutation()
    memory = np.random.default_rng(5).standard_normal((LAYERS, 2, held, WIDTH)).astype(np.float32)
    targets = np.eye(T, dtype=np.float32)[np.argsort(rank, axis=1)[:, [0, 2, 4]]]
    got = run(None, source, hidden, targets, memory if held else None)
    content, query = slow(made()[2]["params"], source, hidden, targets, memory)
    chex.assert_trees_all_close(got.content, content.astype(np.float32), rtol=1e-4, atol=2e-5)
    chex.assert_trees_all_close(got.query, query.astype(np.float32), rtol=1e-4, atol=2e-5)
    chex.assert_trees_all_equal(got.memory[:, :, held:], got.content[:-1])


# What must hold


def test_a_prediction_knows_its_predecessors_and_nothing_else():
    """By gradient: the query stream of a slot depends on exactly the tokens before it in the permutation.

    Except the first slot's, which has none: as in the published code it weighs all slots alike.
    """
    _, module, variables = made()
    hidden, rank = permutation()
    source, targets = stream(), np.tile(np.eye(T, dtype=np.float32), (2, 1, 1))
    embedded = np.asarray(variables["params"]["source_embed"]["table"])[source.tokens]

    def output(x):
        given = source._replace(tokens=x)
        return module.apply(variables, given, hidden, targets, method=module.streams).output.sum(-1)

    slope = np.abs(jax.jit(jax.jacrev(output))(embedded)).sum(-1)  # [B, M, B, T]
    for b in range(2):
        before = rank[b][:, None] > rank[b][None]
        np.testing.assert_array_equal(slope[b, :, b] > 0, before | (rank[b] == 0)[:, None])


def test_without_permutation_it_is_the_ordinary_encoder():
    config, module, variables = made()
    source = stream(real=[[1] * T, [1, 1, 1, 0, 0]])
    ordinary = build.build(dataclasses.replace(config, permutation=None))
    params = {name: part for name, part in variables["params"].items() if name != "mask_embed"}
    expected = builders.apply(ordinary)({"params": params}, Batch(source, None))
    chex.assert_trees_all_equal(builders.apply(module)(variables, Batch(source, None)), expected)
    streams = run(None, source)
    logits = builders.apply(module, module.logits)(variables, streams, source.slots)
    real = source.slots.segment == 1
    chex.assert_trees_all_close(logits[real], expected[real], rtol=1e-5, atol=1e-6)
    assert isinstance(module, XLNet) and not isinstance(ordinary, XLNet)


def test_causal_texts_with_memories_are_one_text():
    source = stream(length=7, kinds=False)
    whole = run(True, source).content
    first, rest = (jax.tree.map(lambda x, part=part: x[:, part], source) for part in (slice(4), slice(4, 7)))
    rest = rest._replace(slots=rest.slots._replace(position=rest.slots.position - 4))
    before = run(True, first)
    after = run(True, rest, memory=before.memory)
    chex.assert_trees_all_close(jnp.concatenate([before.content, after.content], 2), whole, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(after.memory, whole[:-1], rtol=1e-4, atol=1e-5)


def test_memories_are_cut_and_have_no_gradient():
    inputs, old = jnp.arange(6.0).reshape(1, 1, 6, 1), -jnp.ones((1, 1, 2, 1))
    values = lambda *given: next_memory(*given)[0, 0, :, 0].tolist()  # noqa: E731
    assert values(None, inputs, old) == [-1, -1, 0, 1, 2, 3, 4, 5]
    assert values(PermutationConfig(memory=3), inputs, old) == [3, 4, 5]
    assert values(PermutationConfig(memory=3, reuse=2), inputs, old) == [-1, 0, 1]
    assert values(PermutationConfig(reuse=2), inputs, None) == [0, 1]
    assert (jax.grad(lambda x: next_memory(None, x, old).sum())(inputs) == 0).all()


def test_generation_reads_the_whole_text_for_every_token():
    _, module, variables = made()
    tokens = np.random.default_rng(2).integers(1, builders.VOCAB, (2, 6)).astype(np.int32)

    @jax.jit
    def direct(text):
        """The definition: the text and a slot that nobody sees, whose token is asked for."""
        rows, length = text.shape[0], text.shape[1] + 1
        ids = jnp.concatenate([text, jnp.zeros((rows, 1), jnp.int32)], axis=1)
        position = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        hidden = np.zeros((rows, length, length), bool)
        hidden[:, :, -1] = True
        targets = np.zeros((rows, 1, length), np.float32)
        targets[:, 0, -1] = 1
        source = Stream(ids, Slots(position, jnp.ones_like(ids)))
        return module.apply(variables, method=lambda m: m.logits(m.streams(source, hidden, targets), source.slots))[
            0, 0
        ]

    padded = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)  # the second row is shorter
    prompt = Stream(np.where(padded, tokens[:, :5], 7), Slots(np.tile(np.arange(5, dtype=np.int32), (2, 1)), padded))
    start = jax.jit(lambda batch: module.apply(variables, batch, 5, method=module.start))
    logits, state = start(Batch(None, prompt))
    step = builders.apply(module, module.step)
    _, state = step(variables, tokens[:, 4:5], state.grow(7))
    last, _ = step(variables, tokens[:, 5:], state.rows(jnp.array([0, 1])))
    for row, size in enumerate((4, 2)):
        text = tokens[row : row + 1, :size]
        chex.assert_trees_all_close(logits[row], direct(text), rtol=1e-4, atol=1e-5)
        text = np.concatenate([text, tokens[row : row + 1, 4:]], axis=1)
        chex.assert_trees_all_close(last[row], direct(text), rtol=1e-4, atol=1e-5)


# Batches with a permutation

ORDERS = ([3, 0, 4, 2, 1], [0, 2, 3, 1, 4])
"""Factorisation order of the slots of each row; from the third on they are predicted."""
REAL = np.array([[1] * T, [1, 1, 1, 1, 0]], np.int32)


def seen(order: list[int], slot: int, given: int = 2) -> set[int]:
    """The definition: slots that slot `slot` is predicted from, or which its content reads beside itself."""
    place = order.index(slot)
    return set(order[: max(place, given)]) - ({slot} if place >= given else set())


def permuted(tokens_seed=0, continues=None, orders=ORDERS, given=2) -> Batch:
    """Two rows, the second with padding in slot 4, which its order has last and no target names."""
    order, targets = np.zeros((2, T), np.int32), np.full((2, 4), -1, np.int32)
    for row, slots in enumerate(orders):
        predicted = [slot for slot in slots[given:] if REAL[row, slot]]
        order[row, predicted] = np.arange(1, len(predicted) + 1)
        targets[row, : len(predicted)] = predicted
    source = stream(seed=tokens_seed, real=REAL)
    labels = np.where(targets >= 0, np.take_along_axis(source.tokens, targets, axis=1), 0)
    weights = (targets >= 0).astype(np.float32)
    flags = None if continues is None else np.array(continues)
    return Batch(source, None, labels, weights, permutation=Permutation(order, targets), continues=flags)


def test_what_an_order_hides_is_the_definition():
    hidden = np.asarray(hidden_by_order(permuted().permutation.order))
    for row, order in enumerate(ORDERS):
        for slot in np.flatnonzero(REAL[row]):
            visible = {int(s) for s in np.flatnonzero(REAL[row] & ~hidden[row, slot])}
            assert visible == seen(order, slot) & set(np.flatnonzero(REAL[row]))


def slow_logits(params, batch, memory):
    """Logits `[B, 4, V]` of the targets and the content states by the equations, row by row: memories differ."""
    rows = []
    for row in range(2):
        hidden = np.array([[s not in seen(ORDERS[row], t) for s in range(T)] for t in range(T)])
        one_hot = np.array([[t == s for s in range(T)] for t in batch.permutation.targets[row]], float)
        source = jax.tree.map(lambda x, row=row: x[row : row + 1], batch.source)
        content, query = slow(params, source, hidden[None], one_hot[None], memory[row])
        rows.append((query[-1, 0] @ np.asarray(params["source_embed"]["table"], np.float64).T, content[:-1]))
    return [x for x, _ in rows], [x for _, x in rows]


@functools.cache
def remembering():
    config = dataclasses.replace(config_of(), permutation=PermutationConfig(memory=7))
    module = build.build(config)
    apply = lambda v, batch: module.apply(v, batch, full_logits=False, mutable=[MEMORY])  # noqa: E731
    empty = {"states": np.zeros((2, LAYERS, 7, WIDTH), np.float32), "count": np.zeros(2, np.int32)}
    return jax.jit(apply), {"params": made()[2]["params"], MEMORY: empty}


def test_rows_that_continue_read_their_memories_and_the_loss_is_that_of_the_equations():
    apply, variables = remembering()
    params, task = variables["params"], tasks.get("permutation_lm")
    memory, held = [np.zeros((LAYERS, 1, 0, WIDTH))] * 2, [[5, 5], [7, 5]]
    for number, continues in enumerate(([False, False], [True, False])):
        batch = permuted(number, continues)
        logits, changed = apply(variables, batch)
        memory = [memory[row] if continues[row] else memory[row][:, :, :0] for row in range(2)]
        expected, content = slow_logits(params, batch, memory)
        losses = []
        for row in range(2):
            for column, label in enumerate(batch.labels[row]):
                if batch.weights[row, column]:
                    np.testing.assert_allclose(logits[row, column], expected[row][column], rtol=1e-4, atol=2e-5)
                    losses.append(np.log(np.exp(expected[row][column]).sum()) - expected[row][column][label])
            memory[row] = np.concatenate([memory[row], content[row]], axis=2)[:, :, -7:]
            states = changed[MEMORY]["states"][row]
            size = memory[row].shape[2]
            real = slice(7 - size, 7 if REAL[row].all() else 6)  # the equations say nothing of padding's content
            told = memory[row][:, 0, : real.stop - real.start]
            np.testing.assert_allclose(states[:, real], told, rtol=1e-4, atol=2e-5)
        assert changed[MEMORY]["count"].tolist() == held[number]
        total, count = task.loss(Config(), logits, batch)["loss"]
        np.testing.assert_allclose([total, count], [sum(losses), len(losses)], rtol=1e-5)
        variables = {"params": params, **changed}


def test_a_target_depends_on_the_tokens_before_it_in_the_order_and_on_its_own_memory():
    """By gradient, of the text and of the memories."""
    apply, variables = remembering()
    batch = permuted(0, [True, False])
    embedded = np.asarray(variables["params"]["source_embed"]["table"])[batch.source.tokens]
    states = np.random.default_rng(1).standard_normal((2, LAYERS, 7, WIDTH)).astype(np.float32)

    def output(x, states):
        memory = {"states": states, "count": np.array([6, 6], np.int32)}
        text = batch._replace(source=batch.source._replace(tokens=x))
        return apply({**variables, MEMORY: memory}, text)[0].sum(-1)

    text, remembered = jax.jit(jax.jacrev(output, argnums=(0, 1)))(embedded, states)
    text, remembered = np.abs(text).sum(-1), np.abs(remembered).sum(axis=(3, 5))  # [B, M, B, T], [B, M, B, S]
    for row, targets in enumerate(batch.permutation.targets):
        for column, slot in enumerate(targets[targets >= 0]):
            visible = seen(ORDERS[row], int(slot)) & set(np.flatnonzero(REAL[row]))
            assert set(np.flatnonzero(text[row, column, row])) == visible
            assert set(np.flatnonzero(remembered[row, column, row])) == (set(range(1, 7)) if row == 0 else set())
            assert not text[row, column, 1 - row].any() and not remembered[row, column, 1 - row].any()


def test_with_the_order_of_the_text_it_is_a_left_to_right_language_model():
    """All predictions of one pass are those of the prefixes alone, which hold nothing after them."""
    _, module, variables = made()
    text = np.random.default_rng(4).integers(1, builders.VOCAB, T).astype(np.int32)
    order, targets = np.tile(np.arange(T, dtype=np.int32), (T, 1)), np.full((T, T - 1), -1, np.int32)
    tokens, segment = np.tile(text, (T, 1)), np.ones((T, T), np.int32)
    targets[0] = np.arange(1, T)  # row 0: the whole text
    for t in range(1, T):  # row t: its first t tokens, and another token in slot t, which is the target
        targets[t, 0], tokens[t, t], segment[t, t + 1 :] = t, (text[t] + 5) % builders.VOCAB, 0
        order[t, t + 1 :] = 0
    source = Stream(tokens, Slots(np.tile(np.arange(T, dtype=np.int32), (T, 1)), segment))
    batch = Batch(source, None, permutation=Permutation(order, targets))
    logits = np.asarray(builders.apply(module)(variables, batch))
    np.testing.assert_allclose(logits[1:, 0], logits[0], rtol=1e-4, atol=1e-5)
    # From which its loss is a language model's: the labels are the next tokens, and the sum a log-likelihood.
    features = permutation_lm.ordered(text, np.arange(1, T), T - 1)
    np.testing.assert_array_equal(features["order"], order[0])
    np.testing.assert_array_equal(features["labels"], text[1:])


@pytest.mark.parametrize(
    ("edits", "field"),
    [
        ({"conv": ConvConfig()}, "conv"),
        ({"norm": NormConfig()}, "norm.order"),
        ({"encoding": EncodingConfig("t5")}, "encoding.kind"),
        ({"ffn": None}, "ffn"),
        ({"residual_ffn": False}, "residual_ffn"),
        ({"attention": AttentionConfig(heads=2, bias=False, gate=True)}, "attention.gate"),
    ],
)
def test_layers_that_have_no_two_streams_are_refused(edits, field):
    with pytest.raises(ConfigError, match=f"model.encoder.{field}: got"):
        build.shapes(build.build(config_of(**edits)))


def test_a_kernel_without_tables_is_refused_by_two_streams_alone():
    config = config_of(attention=AttentionConfig(heads=2, bias=False, kernel="blockwise"))
    module, variables = build.build(config), made()[2]
    source = stream(kinds=False)
    assert jnp.isfinite(builders.apply(module)(variables, Batch(source, None))).all()
    with pytest.raises(ConfigError, match="got blockwise with a mask of single pairs"):
        jax.eval_shape(lambda: module.apply(variables, source, method=module.streams))
