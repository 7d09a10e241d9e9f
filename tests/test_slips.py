"""Slips that are easy to make when a transformer is written by hand: each is computed here, and the code is not it.

Every test shows both that the code equals the formula and that the slip would be noticed. `docs/notes.md` lists them.
"""

from __future__ import annotations

import re
from pathlib import Path

import builders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxformer import losses, tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    EncodingConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PermutationConfig,
    TaskConfig,
)
from jaxformer.nn import recurrent, reference
from jaxformer.nn.attention import Attention
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.nn.layers import Norm
from jaxformer.nn.masks import Mask
from jaxformer.tasks import _tokens
from jaxformer.train import optim
from jaxformer.types import Batch, Slots, Stream

ROOT = Path(__file__).resolve().parents[1]
BATCH, LENGTH, WIDTH, HEADS = 2, 8, 8, 2
HEAD_WIDTH = WIDTH // HEADS


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(one, other) -> bool:
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-4, atol=1e-5)


def softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


WEIGHTS = {
    **{name: normal(i, WIDTH, HEADS, HEAD_WIDTH) / 2 for i, name in enumerate(("query", "key", "value"))},
    "out": normal(3, HEADS, HEAD_WIDTH, WIDTH) / 2,
}


@jax.jit
def module(x: np.ndarray, memory: np.ndarray | None = None) -> jax.Array:
    """The model's own attention with `WEIGHTS`: `[B, T, D]`."""
    attention = Attention(AttentionConfig(heads=HEADS, bias=False), EncodingConfig(kind="none"), WIDTH)
    params = {name: {"kernel": kernel} for name, kernel in WEIGHTS.items()}
    here = Slots(*(np.broadcast_to(i, x.shape[:2]).astype(np.int32) for i in (np.arange(x.shape[1]), 1)))
    return attention.apply({"params": params}, x, Mask(here, here), memory=memory)[0]


def formula(x: np.ndarray, memory: np.ndarray, divisor: float = HEAD_WIDTH**0.5) -> np.ndarray:
    """concat_h softmax(q_h k_h^T / divisor) v_h W_o, queries from `x`, keys and values from `memory`."""
    q = np.einsum("btd,dhk->bhtk", x, WEIGHTS["query"])
    k, v = (np.einsum("bsd,dhk->bhsk", memory, WEIGHTS[name]) for name in ("key", "value"))
    o = softmax(q @ k.swapaxes(-1, -2) / divisor) @ v
    return np.einsum("bhtk,hkd->btd", o, WEIGHTS["out"])


@pytest.mark.parametrize("slip", [5**0.5, WIDTH**0.5, HEAD_WIDTH, 1.0], ids=["length", "width", "no root", "none"])
def test_scores_are_divided_by_the_root_of_the_head_width(slip):
    x = normal(4, BATCH, 5, WIDTH)
    assert close(module(x), formula(x, x))
    assert not close(module(x), formula(x, x, divisor=slip))


def test_a_sine_and_its_cosine_share_one_exponent():
    position, channel = np.arange(20)[:, None], np.arange(WIDTH)
    pairs = np.where(channel % 2 == 0, np.sin(position / 1e4 ** (channel / WIDTH)), 0.0)
    own = pairs + np.where(channel % 2 == 1, np.cos(position / 1e4 ** (channel / WIDTH)), 0.0)
    shared = pairs + np.where(channel % 2 == 1, np.cos(position / 1e4 ** ((channel - 1) / WIDTH)), 0.0)
    code = np.asarray(sinusoids(jnp.arange(20), WIDTH))
    assert close(code, shared)
    assert not close(code, own)
    # What it is for: the product of two codes depends on their distance only.
    assert np.ptp(np.diagonal(code @ code.T, 3)) < 1e-4 < 1e-2 < np.ptp(np.diagonal(own @ own.T, 3))


def test_heads_are_slices_of_channels_not_of_time():
    x = normal(5, BATCH, LENGTH, WIDTH)
    q, k, v = (np.einsum("btd,dhk->bthk", x, WEIGHTS[n]).reshape(x.shape) for n in ("query", "key", "value"))

    def sliced(axis: int) -> np.ndarray:
        """Heads from equal parts of `axis`, each attended and put back where it was. (T = D here, so both run.)"""
        heads = zip(*(np.split(a, HEADS, axis) for a in (q, k, v)))
        o = [softmax(a @ b.swapaxes(-1, -2) / HEAD_WIDTH**0.5) @ c for a, b, c in heads]
        return np.concatenate(o, axis) @ WEIGHTS["out"].reshape(WIDTH, WIDTH)

    weights = [WEIGHTS[name] for name in ("query", "key", "value", "out")]
    by_hand = (jax.jit(reference.multi_head_loop), jax.jit(reference.multi_head))
    for code in (module(x), *(function(x, *weights) for function in by_hand)):
        assert close(code, sliced(axis=2))
        assert not close(code, sliced(axis=1))


def test_the_query_of_cross_attention_comes_from_the_decoder():
    x, memory = normal(6, BATCH, LENGTH, WIDTH), normal(7, BATCH, LENGTH, WIDTH)
    assert close(module(x, memory), formula(x, memory))
    assert not close(module(x, memory), formula(memory, x))
    assert not close(module(x, memory), formula(memory, memory))


def test_a_seq2seq_model_looks_from_every_target_slot_at_every_source_slot():
    config = builders.seq2seq()
    model, variables = builders.make(config)
    batch = builders.batch(config, [3])  # and a source of 4
    read = jax.jit(lambda variables, batch: model.apply(variables, batch, mutable=["intermediates"]))
    _, sown = read(variables, batch)
    (probs,) = sown["intermediates"]["decoder"]["blocks"]["cross"]["probabilities"]
    assert probs.shape == (2, 1, 2, 3, 4)  # [L, B, H, T, S]
    np.testing.assert_allclose(probs.sum(axis=-1), 1.0, rtol=1e-5)  # the softmax is over keys


def standardised(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


AXES = {"batch": (0, 1), "layer": (2,)}


@pytest.mark.parametrize("kind", AXES)
def test_batch_statistics_are_one_a_feature_and_layer_statistics_one_a_slot(kind):
    x = (normal(8, 3, 5, WIDTH) * np.arange(1, WIDTH + 1) + np.arange(WIDTH)).astype(np.float32)
    norm = Norm(NormConfig(kind=kind))
    variables = norm.init(jax.random.key(0), x)
    y, _ = norm.apply(variables, x, rngs={"dropout": jax.random.key(1)}, mutable=["batch_stats"])
    assert close(y, standardised(x, AXES[kind]))
    for slip in {(0, 1), (2,), (0,), (1,), (1, 2), (0, 1, 2)} - {AXES[kind]}:
        assert not close(y, standardised(x, slip)), slip


def test_the_loss_is_against_the_next_token_not_the_input():
    ids, bos, eos, vocab = [5, 3, 6, 4], 1, 2, 8
    features = _tokens.next_token_features(ids, bos, eos, length=16)
    row = {name: value[None] for name, value in features.items()}
    slots = Slots(np.arange(5, dtype=np.int32)[None], np.ones((1, 5), np.int32))
    batch = Batch(None, Stream(row["target"], slots), row["labels"], row["weights"])

    def loss(predicted: list[int]) -> float:
        """Of a model that is sure of these tokens."""
        logits = 30.0 * jax.nn.one_hot(jnp.array([predicted]), vocab)
        name = "language_modelling"
        total, count = tasks.get(name).loss(Config(task=TaskConfig(name=name)), logits, batch)["loss"]
        return float(total / count)

    assert loss([*ids, eos]) < 1e-3  # says what comes next
    assert loss([bos, *ids]) > 20.0  # repeats its input, which the slip would call perfect


def attended(x: np.ndarray, weigh, project=None) -> np.ndarray:
    """Attention with `WEIGHTS` over `x`, with other weights than the softmax of scaled scores or other projections."""
    project = project or (lambda x, kernel: np.einsum("btd,dhk->bhtk", x, kernel))
    q, k, v = (project(x, WEIGHTS[name]) for name in ("query", "key", "value"))
    return np.einsum("bhtk,hkd->btd", weigh(q, k) @ v, WEIGHTS["out"])


def scaled_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q @ k.swapaxes(-1, -2) / HEAD_WIDTH**0.5


def test_the_softmax_is_not_linear():
    scores, others = normal(9, 4, 6), normal(10, 4, 6)
    assert close(reference.softmax(scores), softmax(scores))
    # What a linear map would keep, it does not: sums and multiples of scores.
    assert not close(reference.softmax(scores + others), softmax(scores) + softmax(others))
    assert not close(reference.softmax(2 * scores), 2 * softmax(scores))
    x = normal(11, BATCH, LENGTH, WIDTH)
    assert close(module(x), attended(x, lambda q, k: softmax(scaled_scores(q, k))))
    linear = lambda q, k: scaled_scores(q, k) / np.abs(scaled_scores(q, k)).sum(axis=-1, keepdims=True)  # noqa: E731
    for slip in (scaled_scores, linear):
        assert not close(module(x), attended(x, slip))


def test_scores_are_dot_products_not_cosines():
    x = normal(12, BATCH, LENGTH, WIDTH)

    def cosine(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return softmax(unit(q) @ unit(k).swapaxes(-1, -2) / HEAD_WIDTH**0.5)

    assert close(module(x), attended(x, lambda q, k: softmax(scaled_scores(q, k))))
    assert not close(module(x), attended(x, cosine))
    # And where a cosine is meant, in the similarity of sentences, it is one: lengths play no part.
    u, v = normal(13, 3, WIDTH), normal(14, 3, WIDTH)
    assert close(losses.cosine(u, v), np.sum(unit(u) * unit(v), axis=-1))
    assert close(losses.cosine(3 * u, v), losses.cosine(u, v))
    assert not close(losses.cosine(u, v), np.sum(u * v, axis=-1))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_projections_are_along_channels_not_along_the_sequence():
    """`[B, T, D]` times W `[D, D]` from the right; W from the left mixes slots, and with T = D it runs."""
    x = normal(15, BATCH, LENGTH, WIDTH)

    def along_time(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        return np.einsum("btd,thk->bhdk", x, kernel)

    weigh = lambda q, k: softmax(scaled_scores(q, k))  # noqa: E731
    assert close(module(x), attended(x, weigh))
    assert not close(module(x), attended(x, weigh, along_time))
    # Slots that are the same have the same query, wherever they stand; a map along time would tell them apart.
    same = np.broadcast_to(x[:, :1], x.shape)
    assert (
        np.ptp(np.asarray(module(same)), axis=1).max() < 1e-5 < np.ptp(attended(same, weigh, along_time), axis=1).max()
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_is_over_the_features_of_a_slot_not_per_element(kind):
    """Only scale and shift are one an element; a single number less its own mean would always be 0."""
    x = normal(16, 3, 5, WIDTH)
    norm = Norm(NormConfig(kind=kind))
    variables = nn.meta.unbox(norm.init(jax.random.key(0), x))
    y = norm.apply(variables, x)
    right = standardised(x, (2,)) if kind == "layer" else x / np.sqrt(np.mean(x * x, axis=2, keepdims=True) + 1e-5)
    slip = (x - x) / np.sqrt(0.0 + 1e-5) if kind == "layer" else x / np.sqrt(x * x + 1e-5)  # 0, and the sign
    assert close(y, right)
    assert not close(y, slip)
    assert {leaf.shape for leaf in jax.tree.leaves(variables)} == {(WIDTH,)}
    # So the numbers of a slot depend on each other, and those of two slots do not.
    changed = norm.apply(variables, x + np.eye(WIDTH, dtype=np.float32)[0] * (np.arange(5) == 2)[:, None])
    moved = ~np.isclose(changed, y, atol=1e-6)
    assert moved[:, 2].all()
    assert not np.delete(moved, 2, axis=1).any()


def test_an_update_is_made_of_gradients_and_is_no_part_of_them():
    """`torch.no_grad()` around an update keeps it out of the graph; it does not mean that no gradient is used."""
    a, b, rate = normal(17, 6, 4), normal(18, 6), 0.1
    params = {"w": jnp.asarray(normal(19, 4))}
    loss = lambda params: jnp.mean((a @ params["w"] - b) ** 2)  # noqa: E731
    rule = optim.optimizer(OptimizerConfig(name="sgd", momentum=0.0), lambda step: rate, params)
    state = rule.init(params)

    @jax.jit
    def updated(params):
        updates, _ = rule.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates)

    w = np.asarray(params["w"])
    by_hand = 2 * a.T @ (a @ w - b) / len(b)
    assert close(updated(params)["w"], w - rate * by_hand)
    assert not close(updated(params)["w"], w)  # the slip: no gradient, no change
    # The gradient of the step after is of the loss there, not of the loss as a function of the old parameters.
    after = updated(params)
    through = jax.jit(jax.grad(lambda params: loss(updated(params))))(params)["w"]
    gradient = jax.jit(jax.grad(loss))(after)["w"]
    assert close(gradient, 2 * a.T @ (a @ np.asarray(after["w"]) - b) / len(b))
    assert not close(gradient, through)


def test_the_decoder_term_is_added_once():
    """In an additive score W s + U h, and in a residual sum x + f(x)."""
    s, h, v = normal(20, 2, WIDTH), normal(21, 2, 5, WIDTH), normal(22, WIDTH)
    score = lambda times: np.tanh(times * s[:, None] + h) @ v  # noqa: E731
    assert close(recurrent.additive_scores(jnp.asarray(s), jnp.asarray(h), jnp.asarray(v)), score(1))
    assert not close(softmax(score(1)), softmax(score(2)))  # inside of the tanh it does not cancel
    config = builders.seq2seq(norm=NormConfig(kind="none"), ffn=None, layers=1)
    model, variables = builders.make(config)
    silent = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0 if "out" in [key.key for key in path] else leaf, variables
    )
    batch = builders.batch(config, [3])
    x = silent["params"]["source_embed"]["table"][batch.target.tokens]  # shared by both sides
    hidden = builders.apply(model, method="hidden")(silent, batch)
    assert close(hidden, x)  # sub-layers that say nothing leave the decoder's stream as it is
    assert not close(hidden, 2 * x)


def test_xlnet_sees_both_sides_and_is_no_decoder_only_model():
    """Its content stream reads like an encoder; in training a permutation, not the order of the text, hides slots."""
    length, changed = 5, 3
    xl = dict(encoding=EncodingConfig("transformer_xl"), norm=NormConfig(order="post"))
    bare = dict(attention=AttentionConfig(heads=2, bias=False))
    xlnet = ModelConfig(encoder=builders.stack(layers=1, **xl, **bare), permutation=PermutationConfig())
    gpt = builders.decoder(layers=1)

    def outputs(config: ModelConfig, call) -> tuple[np.ndarray, np.ndarray]:
        """Before and after another token at slot `changed`."""
        model, variables = builders.make(config)
        tokens = np.array([[1, 2, 3, 4, 5]], np.int32)
        other = np.where(np.arange(length) == changed, 9, tokens).astype(np.int32)
        slots = Slots(np.arange(length, dtype=np.int32)[None], np.ones((1, length), np.int32))
        run = jax.jit(lambda ids: call(model, variables, Stream(ids, slots)))
        return tuple(np.asarray(run(ids)) for ids in (tokens, other))

    def moved(pair: tuple[np.ndarray, np.ndarray]) -> list[bool]:
        return list(np.abs(pair[0] - pair[1]).max(axis=-1)[0] > 1e-6)

    whole = outputs(xlnet, lambda m, v, s: m.apply(v, s, method=m.streams).content[-1])
    assert moved(whole) == [True] * length
    causal = outputs(gpt, lambda m, v, s: m.apply(v, Batch(None, s), method=m.hidden))
    assert moved(causal) == [slot >= changed for slot in range(length)]  # the slip: what is left of it cannot move

    # Of the permutation 3 0 4 1 2 each slot predicts its token from those before it there, on either side of it.
    rank = np.argsort([3, 0, 4, 1, 2])
    hidden = (rank[:, None] <= rank[None, :])[None]
    targets = np.eye(length, dtype=np.float32)[None]
    query = outputs(xlnet, lambda m, v, s: m.apply(v, s, hidden, targets, method=m.streams).query[-1])
    after = [bool(rank[slot] > rank[changed]) for slot in range(length)]
    assert after[:changed] == [True] * changed  # token 3 is the first of the order: all to its left see it
    # The first of an order sees nothing, and then weighs all slots alike, its own included, as the published code does.
    assert moved(query) == [moves or slot == changed for slot, moves in enumerate(after)]


# --- the notes --------------------------------------------------------------------------------------------------------

PAGES = ("docs/notes.md", "docs/experiments.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_test_that_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:jaxformer|tests|experiments|configs|docs)/[\w/]*\.?\w*)(?:::(\w+))?`", text))
    assert len(named) >= 2
    for path, test in named:
        if "NAME" in path:  # stands for a file of the reader's
            continue
        assert (ROOT / path).exists(), f"{page} names {path}"
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page} names {path}::{test}"


def test_the_notes_name_every_encoding_kernel_cell_and_module():
    text = (ROOT / "docs/notes.md").read_text(encoding="utf-8")
    for path in [*(ROOT / "jaxformer/nn").rglob("*.py"), *(ROOT / "jaxformer/models").glob("*.py")]:
        if path.name != "__init__.py":
            assert f"`{path.relative_to(ROOT)}`" in text, f"docs/notes.md does not say what is in {path.name}"
