"""What is true of any transformer, whatever its size: causality, padding, packing, batch order, caching, layout."""

from __future__ import annotations

import dataclasses
import math
import re

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import registry, testing
from jaxformer.config import AttentionConfig, EncodingConfig, NormConfig
from jaxformer.data import packing
from jaxformer.nn.block import Block, LayerContext
from jaxformer.nn.layers import Norm
from jaxformer.nn.masks import Mask
from jaxformer.types import Batch, Slots, Stream

ENCODINGS = registry.names("jaxformer.nn.encodings")
KERNELS = [name for name in registry.names("jaxformer.nn.kernels") if name not in ("splash", "cudnn")]  # CPU has none


def encoding(kind: str) -> EncodingConfig:
    return EncodingConfig(kind=kind, max_length=32, buckets=8, max_distance=16)


def lean(kind: str, **edits) -> dict:
    """Encodings and kernels are parts of attention: beside them layers are whole with one encoding only, rope."""
    if kind == "rope":
        return {"encoding": encoding(kind), "attention": AttentionConfig(heads=2, **edits)}
    attention = AttentionConfig(heads=2, bias=False, **edits)
    return {"encoding": encoding(kind), "attention": attention, "ffn": None, "norm": NormConfig(kind="rms")}


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [(kind, "dense") for kind in ENCODINGS]
    + [("rope", "rowwise")]  # it takes no bias
    + [("t5", kernel) for kernel in KERNELS if kernel not in ("dense", "rowwise")],
)
def test_a_decoder_is_causal_by_gradient(kind, kernel):
    config = builders.decoder(**lean(kind, kernel=kernel, block=4))
    testing.assert_causal(*builders.make(config), builders.batch(config, [6]))


@pytest.mark.parametrize("family", builders.FAMILIES)
def test_padding_changes_nothing(family):
    config = builders.FAMILIES[family]()
    testing.assert_padding_invariant(*builders.make(config), builders.batch(config, [4]), extra=5, token=7)


@pytest.mark.parametrize("family", builders.FAMILIES)
def test_batch_order_changes_nothing(family):
    config = builders.FAMILIES[family]()
    testing.assert_batch_order_invariant(*builders.make(config), builders.batch(config, [5, 2, 4]))


@pytest.mark.parametrize("kind", ENCODINGS)
def test_packed_examples_do_not_see_each_other(kind):
    module, variables = builders.make(builders.decoder(**lean(kind)))
    testing.assert_packing_invariant(module, variables, (4, 4, 2, 4), builders.VOCAB)


@pytest.mark.parametrize("kind", ["rope", "t5", "learned"])
def test_packed_pairs_do_not_see_each_other(kind):
    module, variables = builders.make(builders.seq2seq(encoding=encoding(kind)))
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(1, builders.VOCAB, n)  # noqa: E731
    pairs = [{"source": draw(s), "target": draw(t), "labels": draw(t)} for s, t in ((4, 2), (3, 5), (2, 1))]
    # One program: row 0 is packed, and each other row holds one of its pairs.
    batch = packing.collate([pairs, *([pair] for pair in pairs)], 10)
    logits, segment = testing.apply(module)(variables, batch), np.asarray(batch.target.slots.segment)
    for number, pair in enumerate(pairs, 1):
        alone = logits[number, : len(pair["target"])]
        np.testing.assert_allclose(logits[0][segment[0] == number], alone, rtol=1e-5, atol=1e-6)


CASES = [("seq2seq" if kind == "t5" else "decoder", kind, {}) for kind in ENCODINGS] + [
    ("decoder", "rope", {"window": 3}),
    ("decoder", "alibi", {"kv_heads": 1, "head_width": 6}),
    ("seq2seq", "rope", {"norm": NormConfig("rms"), "norm_over": "heads", "sink": True}),
]


@pytest.mark.parametrize(("family", "kind", "edits"), CASES, ids=str)
def test_prefill_and_step_equal_forward(family, kind, edits):
    config = builders.FAMILIES[family](**lean(kind, **edits))
    testing.assert_steps_equal_forward(*builders.make(config), builders.batch(config, [7, 7]), prompt=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_decode_as_if_alone(side):
    config = builders.decoder()
    module, variables = builders.make(config)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 13, n).astype(np.int32) for n in (2, 5)]
    tokens, segment, position = (np.zeros((2, 5), np.int32) for _ in range(3))
    for i, prompt in enumerate(prompts):
        where = slice(0, len(prompt)) if side == "right" else slice(5 - len(prompt), 5)
        tokens[i, where], segment[i, where], position[i, where] = prompt, 1, np.arange(len(prompt))
    batch = Batch(None, Stream(tokens, Slots(position, segment)))
    logits, state = jax.jit(lambda b: module.apply(variables, b, 7, method=module.start))(batch)
    follow = np.array([[4], [9]], np.int32)
    after, _ = builders.apply(module, module.step)(variables, follow, state)
    forward = builders.apply(module)
    for i, prompt in enumerate(prompts):
        whole = np.concatenate([prompt, follow[i]])
        alone = np.pad(whole, (0, 6 - len(whole)))[None]
        slots = Slots(np.arange(6, dtype=np.int32)[None], np.int32(np.arange(6) < len(whole))[None])
        expected = forward(variables, Batch(None, Stream(alone, slots)))[0, : len(whole)]
        chex.assert_trees_all_close(logits[i], expected[-2], rtol=2e-5, atol=2e-6)
        chex.assert_trees_all_close(after[i], expected[-1], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("family", "kind"), [("seq2seq", "t5"), ("decoder", "alibi"), ("decoder", "rope")])
def test_branches_share_a_row_and_compute_as_if_alone(family, kind):
    """Whether layers are scanned (as `builders` has them) or each a part of the program of its own."""
    grouped = {"kv_heads": 1, "window": 3} if kind != "alibi" else {}
    unrolled = {"unroll": None} if grouped else {}
    config = builders.FAMILIES[family](**lean(kind, **grouped), **unrolled)
    module, scanned = builders.make(config)
    variables = module.unstack(scanned)
    assert ("0" in variables["params"]["decoder"]["blocks"]) == bool(unrolled)
    batch = builders.batch(config, [3, 2])._replace(labels=None, weights=None)
    _, state = jax.jit(lambda batch: module.apply(variables, batch, 3, method=module.start))(batch)
    rng, step = np.random.default_rng(5), builders.apply(module, module.step)
    first = jax.jit(lambda state: state.grow(3 + 3 * 4).branch(3))(state)
    choose, parents = jax.jit(lambda state, parents: state.select_branches(parents)), np.array([[1, 1, 0], [2, 0, 2]])
    tokens = rng.integers(1, 13, (3, 2, 3)).astype(np.int32)
    _, state = step(variables, tokens[0], first)
    _, state = step(variables, tokens[1], choose(state, parents))
    followed = choose(state, parents)
    needed = int(jax.jit(lambda state: state.max_used_slots(np.ones(2, bool)))(followed))
    assert needed < int(followed.index)  # there is what nobody reads any more
    logits, _ = step(variables, tokens[2], followed)
    lengths = (needed + 3, 3 + 3 * 5)  # fewer slots than there are, and more
    for length in lengths if family == "decoder" else lengths[:1]:
        dropped = jax.jit(lambda state: state.compact(np.ones(2, bool), length))(followed)  # noqa: B023
        assert int(dropped.index) == needed and dropped.slots.segment.shape[1] == length
        chex.assert_trees_all_close(logits, step(variables, tokens[2], dropped)[0], rtol=2e-5, atol=2e-6)
    again = np.take_along_axis(parents, parents, axis=1)
    texts = np.stack([np.take_along_axis(tokens[0], again, 1), np.take_along_axis(tokens[1], parents, 1), tokens[2]], 2)
    flat = jax.tree.map(lambda x: np.repeat(x, 3, axis=0), batch)
    real = np.array([3, 3, 3, 2, 2, 2])
    longer = np.pad(flat.target.tokens, ((0, 0), (0, 3)))
    for row, size in enumerate(real):
        longer[row, size : size + 3] = texts.reshape(6, 3)[row]
    index = np.arange(6)
    slots = Slots(np.tile(index, (6, 1)).astype(np.int32), (index < real[:, None] + 3).astype(np.int32))
    whole = builders.apply(module)(scanned, flat._replace(target=Stream(longer, slots)))
    chex.assert_trees_all_close(logits, whole[index, real + 2], rtol=2e-5, atol=2e-6)


def test_rows_picks_sequences():
    config = builders.seq2seq()
    module, variables = builders.make(config)
    batch = builders.batch(config, [4, 4, 4])
    _, state = jax.jit(lambda b: module.apply(variables, b, 6, method=module.start))(batch)
    order, tokens = np.array([2, 2, 0]), np.array([[1], [2], [3]], np.int32)
    picked = jax.jit(lambda state: state.rows(order))(state)
    step = builders.apply(module, module.step)
    logits, _ = step(variables, tokens, state)
    again, _ = step(variables, tokens[order], picked)
    chex.assert_trees_all_close(again, logits[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["decoder", "seq2seq"])
def test_another_prompt_takes_the_place_of_a_row_while_the_rest_go_on(family):
    config = builders.FAMILIES[family]()
    module, variables = builders.make(config)
    start = jax.jit(lambda batch: module.apply(variables, batch, 9, method=module.start)[1])
    step = builders.apply(module, module.step)
    rows, others = (builders.batch(config, sizes)._replace(labels=None, weights=None) for sizes in ([5, 4, 5], [2, 3]))
    state, other = start(rows), start(others)
    one, two = np.array([[1], [2], [3]], np.int32), np.array([[4], [5], [6]], np.int32)
    _, state = step(variables, one, state)
    mixed = jax.jit(lambda state, other: state.replace_rows(np.array([7, 1]), other))(state, other)  # 7: left out
    after, alone = step(variables, two, mixed)[0], step(variables, two[:2], other)[0]
    wanted = step(variables, two, state)[0]
    chex.assert_trees_all_close(after[np.array([0, 2])], wanted[np.array([0, 2])], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(after[1], alone[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["pre", "post", "sandwich", "res_post"])
def test_scanned_layers_equal_a_loop_over_layers(order):
    config = builders.encoder(norm=NormConfig(order=order), layers=3)
    module, variables = builders.make(config)
    batch = builders.batch(config, [4, 2])
    params, slots = variables["params"], batch.source.slots

    def loop(params):
        encoder = params["encoder"]
        embedded = module.apply({"params": params}, method=lambda m: m.source_embed(batch.source))
        position = module.apply({"params": params}, method=lambda m: m.encoder.shared(slots))
        context, x = LayerContext(mask=Mask(slots, slots), position=position), embedded
        for layer in range(3):
            weights = jax.tree.map(lambda a, layer=layer: a[layer], encoder["blocks"])
            (x, _), _ = Block(config.encoder).apply({"params": weights}, (x, None), jnp.int32(0), None, context)
        if order == "post":
            return x
        return Norm(config.encoder.norm).apply({"params": encoder["final_norm"]}, x)

    whole = jax.jit(lambda v: module.apply(v, batch, method=module.hidden))(variables)
    chex.assert_trees_all_close(jax.jit(loop)(params), whole, rtol=1e-5, atol=1e-6)


def test_an_encoder_without_positions_is_permutation_equivariant_and_one_with_them_is_not():
    for kind in ("none", "rope", "t5"):
        config = builders.encoder(encoding=encoding(kind))
        module, variables = builders.make(config)
        batch = builders.batch(config, [5])
        order = np.array([3, 0, 5, 1, 4, 2])
        moved = batch.source._replace(tokens=batch.source.tokens[:, order])
        run = builders.apply(module)
        there = run(variables, batch._replace(labels=None, weights=None))[:, order]
        back = run(variables, Batch(moved, None))
        same = np.allclose(there, back, rtol=1e-5, atol=1e-6)
        assert same == (kind == "none"), kind


@pytest.mark.parametrize("family", ["seq2seq", "classifier"])
def test_bfloat16_agrees_with_float32(family):
    config = builders.FAMILIES[family]()
    module, variables = builders.make(config)
    batch = builders.batch(config)
    plain = builders.apply(module)(variables, batch)
    assert plain.dtype == jnp.float32
    half = builders.apply(type(module)(dataclasses.replace(config, dtype="bfloat16")))(variables, batch)
    assert half.dtype == jnp.float32
    real = np.s_[...] if config.head.kind == "classes" else (batch.target or batch.source).slots.segment == 1
    chex.assert_trees_all_close(half[real], plain[real], rtol=0.1, atol=0.1)


def test_jit_agrees_with_operation_by_operation():
    config = builders.decoder()  # one that has no other part: every operation is a program of its own
    module, variables = builders.make(config)
    batch = builders.batch(config)
    with jax.disable_jit():
        eager = module.apply(variables, batch)
    chex.assert_trees_all_close(builders.apply(module)(variables, batch), eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["decoder", "seq2seq"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_backward_pass_of_a_blockwise_model_keeps_no_table_of_scores(family, remat):
    config = builders.FAMILIES[family](attention=AttentionConfig(heads=2, kernel="blockwise", block=4), remat=remat)
    module, variables = builders.make(config)
    batch = builders.batch(config, [48], width=48)

    def loss(params):
        return module.apply({"params": params}, batch).sum()

    shapes = re.findall(r":\w+\[([\d,]+)\]", str(jax.make_jaxpr(jax.grad(loss))(variables["params"])))
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < 48 * 48, "an array as large as the table of one head"
