"""Small models and batches that many tests need."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.models import build
from jaxformer.nn import masks
from jaxformer.parallel import mesh as meshes
from jaxformer.types import Batch, Slots, Stream

VOCAB = 13


def stack(**edits) -> StackConfig:
    """A two-layer stack of width 8 with 2 heads; nested parts by name."""
    base = StackConfig(
        layers=2,
        width=8,
        embed=EmbedConfig(vocab=VOCAB),
        encoding=EncodingConfig(kind="rope"),
        attention=AttentionConfig(heads=2),
        ffn=FeedForwardConfig(width=16),
        norm=NormConfig(),
        unroll=1,
    )
    return dataclasses.replace(base, **edits)


def seq2seq(**edits) -> ModelConfig:
    return ModelConfig(encoder=stack(**edits), decoder=stack(**edits), share_embeddings=True)


def decoder(**edits) -> ModelConfig:
    return ModelConfig(decoder=stack(**edits))


def encoder(**edits) -> ModelConfig:
    return ModelConfig(encoder=stack(**edits))


def classifier(**edits) -> ModelConfig:
    return ModelConfig(encoder=stack(**edits), head=HeadConfig(kind="classes", classes=3, pooling="mean"))


FAMILIES = {"encoder": encoder, "decoder": decoder, "seq2seq": seq2seq, "classifier": classifier}


def stream(rng: np.random.Generator, lengths: list[int], width: int | None = None) -> Stream:
    """Random tokens, right-padded to `width` (default: the longest)."""
    width = width or max(lengths)
    segment = (np.arange(width)[None, :] < np.asarray(lengths)[:, None]).astype(np.int32)
    tokens = rng.integers(1, VOCAB, size=segment.shape).astype(np.int32) * segment
    position = np.where(segment == 0, 0, np.arange(width)[None, :]).astype(np.int32)
    return Stream(tokens, Slots(position, segment))


def batch(config: ModelConfig, lengths: list[int] = (5, 3), width: int | None = None, seed: int = 0) -> Batch:
    """A batch with the streams that `config` reads, and labels and weights for its head."""
    rng = np.random.default_rng(seed)
    source = stream(rng, [n + 1 for n in lengths], width) if config.encoder is not None else None
    target = stream(rng, list(lengths), width) if config.decoder is not None else None
    side = target or source
    if config.head.kind == "classes":
        labels = rng.integers(0, config.head.classes, size=len(lengths)).astype(np.int32)
        return Batch(source, target, labels, np.ones(len(lengths), np.float32))
    labels = rng.integers(1, VOCAB, size=side.tokens.shape).astype(np.int32)
    return Batch(source, target, labels, side.slots.segment.astype(np.float32))


def make(config: ModelConfig, seed: int = 0):
    """The module and variables for it, every parameter off its symmetric start (biases, norms).

    Drawn by numpy: compiling the initialisation would take longer than most tests, and is tested where it is.
    """
    module, rng = build.build(config), np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if path[-1].key in ("scale", "var") else 0.0
        spread = 0.25 if path[0].key == "params" else 0.0
        return jnp.asarray(middle + spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return module, jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(build.shapes(module)))


def apply(module, method=None):
    """The compiled `module.apply(variables, *arguments)`; eager scans would compile at every call."""
    return jax.jit(lambda variables, *arguments: module.apply(variables, *arguments, method=method))


def one_device(monkeypatch) -> None:
    """Runs take one device, as on a small machine: saving copies of arrays compiles a program for every part of one."""
    make = meshes.make
    monkeypatch.setattr(meshes, "make", lambda config, devices=None: make(config, (devices or jax.devices())[:1]))


def packed(rng: np.random.Generator, lengths: list[int]) -> Stream:
    """One row that holds several examples as segments 1, 2, ..."""
    segment = np.concatenate([np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)])[None]
    tokens = rng.integers(1, VOCAB, size=segment.shape).astype(np.int32)
    return Stream(tokens, jax.tree.map(np.asarray, masks.slots(jnp.asarray(segment))))
