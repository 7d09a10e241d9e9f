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
import pytest

from jaxformer import tasks
from jaxformer.config import AttentionConfig, Config, EncodingConfig, NormConfig, TaskConfig
from jaxformer.nn import reference
from jaxformer.nn.attention import Attention
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.nn.layers import Norm
from jaxformer.nn.masks import Mask
from jaxformer.tasks import _tokens
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


def module(x: np.ndarray, memory: np.ndarray | None = None) -> np.ndarray:
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
    for code in (module(x), reference.multi_head_loop(x, *weights), reference.multi_head(x, *weights)):
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
    _, sown = model.apply(variables, batch, mutable=["intermediates"])
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
    features = _tokens.shifted(ids, bos, eos, length=16)
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
