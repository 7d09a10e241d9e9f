"""Prefix language models: what each slot sees, alone and packed, in training and in decoding."""

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    DecodeConfig,
    EncodingConfig,
    FeedForwardConfig,
    NormConfig,
)
from jaxformer.decode.batching import pad_batch
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.cropped_context import Window
from jaxformer.decode.runner import Runner
from jaxformer.models import build
from jaxformer.models.transformer import Transformer
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch, Slots, Stream

LENGTH = 7
MODEL = builders.decoder(
    norm=NormConfig(kind="rms"),
    attention=AttentionConfig(heads=2, bias=False),
    ffn=FeedForwardConfig(width=16, bias=False),
)


def streams(tokens, prefix, segment=None) -> Batch:
    """Rows of tokens `[B, T]` with prefixes `[B]` or `[B, T]`; positions count from 0 in each segment."""
    tokens = np.asarray(tokens, np.int32)
    segment = np.ones_like(tokens) if segment is None else np.broadcast_to(segment, tokens.shape)
    position = np.stack([np.arange(len(row)) - np.searchsorted(row, row) for row in segment]).astype(np.int32)
    prefix = np.asarray(prefix, np.int32)
    prefix = np.broadcast_to(prefix[:, None] if prefix.ndim == 1 else prefix, tokens.shape)
    return Batch(None, Stream(tokens, Slots(position, np.asarray(segment, np.int32), prefix)))


@pytest.fixture(scope="module")
def made():
    module, variables = builders.make(MODEL)
    return module, variables, builders.apply(module)


def test_a_slot_depends_on_the_prefix_and_on_what_is_before_it(made):
    """Row i differs from the last row in token i alone; its logits differ where token i is read."""
    _, variables, run = made
    base = np.arange(1, LENGTH + 1)
    rows = np.where(np.eye(LENGTH, dtype=bool), base + 3, base)
    for prefix in (1, 3, LENGTH):
        logits = np.asarray(run(variables, streams([*rows, base], [prefix] * (LENGTH + 1))))
        reads = np.abs(logits[:-1] - logits[-1]).max(axis=-1).T > 1e-6  # [t, s]
        t, s = np.indices(reads.shape)
        np.testing.assert_array_equal(reads, (s <= t) | (s < prefix), err_msg=f"prefix {prefix}")


def test_texts_in_one_row_are_as_alone(made):
    _, variables, run = made
    segment, prefix = np.array([1, 1, 1, 2, 2, 2, 2]), np.array([2, 2, 2, 3, 3, 3, 3])
    tokens = np.arange(1, 8)
    together = np.asarray(run(variables, streams([tokens], [prefix], segment)))[0]
    padded = np.stack([np.pad(tokens[:3], (0, 4)), np.pad(tokens[3:], (0, 3))])
    real = np.array([[1] * 3 + [0] * 4, [1] * 4 + [0] * 3], np.int32)
    batch = streams(padded, [2, 3])
    batch = batch._replace(target=batch.target._replace(slots=batch.target.slots._replace(segment=real)))
    first, second = np.asarray(run(variables, batch))
    np.testing.assert_allclose(together, np.concatenate([first[:3], second[:4]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left", [False, True])
def test_decoding_reads_the_prompt_in_both_directions_and_writes_forwards(made, left):
    """Steps after a prefill are the whole pass, whose prefix ends where the prompt does. Prompts of two lengths."""
    module, variables, run = made
    tokens, sizes = np.random.default_rng(0).integers(1, builders.VOCAB, (2, LENGTH)), [4, 2]
    whole = np.asarray(run(variables, streams(tokens, sizes)))
    prompts = pad_batch([{"target": row[:n], "prefix": n} for row, n in zip(tokens, sizes)], 2, (0, 0), (4,))
    if left:
        prompts = jax.tree.map(lambda x: np.stack([x[0], np.roll(x[1], 2)]), prompts)
    start = builders.apply(module, lambda m, batch: m.start(batch, LENGTH))
    step = builders.apply(module, Transformer.step)
    logits, state = start(variables, prompts)
    for n in range(3):
        wanted = np.stack([whole[row, size + n - 1] for row, size in enumerate(sizes)])
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5)
        token = np.stack([tokens[row, size + n] for row, size in enumerate(sizes)])[:, None]
        logits, state = step(variables, token, state)


def test_a_cropped_text_keeps_what_is_left_of_its_prefix():
    """The window of a text beyond the model's positions, against slices of it."""
    text, size, prefix = np.arange(1, 20, dtype=np.int32), 6, 4
    prompts = pad_batch([{"target": text[:n], "prefix": min(n, prefix)} for n in (5, 3, 9)], 3, (0, 0), (10,))
    window = Window.from_prompts(jax.tree.map(jnp.asarray, prompts.target), size)
    window = window.branch(2).select_branches(jnp.array([[0, 1]] * 3)).flatten_branches().rows(jnp.array([0, 2, 4]))
    for count in range(5):
        stream = jax.tree.map(np.asarray, window.stream())
        for row, n in enumerate((5, 3, 9)):
            kept = text[: n + count][-size:]
            lost = n + count - len(kept)
            left = max(min(n, prefix) - lost, 0)
            np.testing.assert_array_equal(stream.tokens[row, size - len(kept) :], kept)
            assert (stream.slots.prefix[row] == left).all(), (count, row)
        window = window.append(jnp.asarray([[text[n + count]] for n in (5, 3, 9)]))


def test_texts_beyond_the_positions_are_decoded_from_their_last_tokens():
    """Greedy search against a pass over the last tokens for every new one, the rest of the prompt as its prefix."""
    positions = 6
    config = dataclasses.replace(
        MODEL, decoder=dataclasses.replace(MODEL.decoder, encoding=EncodingConfig(kind="learned", max_length=positions))
    )
    module, variables = builders.make(config)
    run, prompt = builders.apply(module), [3, 1, 4, 2]
    runner = Runner(module, variables, Vocabulary(eos=(), pad=0, size=builders.VOCAB), max_target_length=positions)
    ((found,),) = runner.generate([{"target": np.asarray(prompt), "prefix": 4}], DecodeConfig(max_length=6))
    text = list(prompt)
    for token in found.tokens:
        last = text[-positions:]
        left = max(len(prompt) - (len(text) - len(last)), 0)
        row = np.pad(last, (0, positions - len(last)))
        logits = np.asarray(run(variables, streams([row], [left])))[0, len(last) - 1]
        assert token == logits.argmax()
        text.append(int(token))


def test_a_run_learns_before_it_starts_that_a_kernel_has_no_prefix(monkeypatch):
    splash = dataclasses.replace(MODEL.decoder, attention=dataclasses.replace(MODEL.decoder.attention, kernel="splash"))
    monkeypatch.setattr(meshes, "platform", lambda: "tpu")
    config = dataclasses.replace(MODEL, decoder=splash)
    assert build.chosen_kernels(config, 128)["decoder"][0] == "splash"
    with pytest.raises(ConfigError, match="got splash, which needs a mask without a prefix"):
        build.chosen_kernels(config, 128, prefix=True)
    chosen = build.chosen_kernels(MODEL, 128, prefix=True)["decoder"]
    assert chosen[0] == "dense" and "splash needs a mask without a prefix" in chosen[1]
