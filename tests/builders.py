"""Small models and batches that many tests need."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer import testing
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
from jaxformer.nn.layers import shapes_alone
from jaxformer.parallel import mesh as meshes
from jaxformer.train import metric_window
from jaxformer.types import Batch, Stream

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
    return testing.random_stream(rng, lengths, VOCAB, width)


def batch(config: ModelConfig, lengths: list[int] = (5, 3), width: int | None = None, seed: int = 0) -> Batch:
    """A batch with the streams that `config` reads, and labels and weights for its head."""
    return testing.random_batch(config, lengths, width, seed)


def make(config: ModelConfig, seed: int = 0):
    """The module and variables for it, every parameter off its symmetric start (biases, norms).

    Drawn by numpy: compiling the initialisation would take longer than most tests, and is tested where it is.
    """
    module = build.build(config)
    return module, testing.random_variables(module, seed)


apply = testing.apply


def interrupted(monkeypatch, step: int) -> list[None]:
    """The process gets SIGTERM in this step of training, counted from 1, and finishes it. A list of all steps."""
    add, calls = metric_window.MetricWindow.add, []

    def interrupt(self, sums, batch):
        calls.append(None)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, sums, batch)

    monkeypatch.setattr(metric_window.MetricWindow, "add", interrupt)
    return calls


def one_device(monkeypatch) -> None:
    """Runs take one device, as on a small machine: saving copies of arrays compiles a program for every part of one."""
    make = meshes.make
    monkeypatch.setattr(meshes, "make", lambda config, devices=None: make(config, (devices or jax.devices())[:1]))


def share_programs(monkeypatch, programs: dict) -> None:
    """Runs of one config compile what they train and measure with once, and keep it in `programs`.

    What the programs are made of beside the config follows from it. That a resumed run makes the same ones is
    `test_loop.py::test_stopped_and_resumed_is_the_uninterrupted_run`, whose resumed run does not share them.
    """
    from jaxformer.train import step

    def share(name: str) -> None:
        make = getattr(step, name)

        def made(config, module, *rest):
            key = name, repr(config), repr(module), *(part for part in rest if isinstance(part, jax.sharding.Mesh))
            if key not in programs:
                programs[key] = make(config, module, *rest)
            return programs[key]

        monkeypatch.setattr(step, name, made)

    share("make_train_step")
    share("make_eval_step")
    share("make_reference_step")


def drawn_parameters(monkeypatch) -> None:
    """Models start from parameters that numpy draws, scaled by their seed: shapes and boxes are those of the model.

    For tests that train from the start and read no initial value: compiling the initialisation is a third of what a
    short training costs, and it is tested where it is (tests/models/test_build.py).
    """
    init = build.init_variables

    def boxed(module, number):
        rng = np.random.default_rng(0)

        def value(path, leaf):
            name = jax.tree_util.keystr(path)
            if path[0].key != "params":
                return np.full(leaf.shape, "var" in name, leaf.dtype)
            drawn = rng.normal("scale" in name, 0.25, leaf.shape)
            return (drawn * (0.5 + number % 64 / 64)).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(value, build.shapes(module))

    def draw(module, key):
        return boxed(module, jax.random.key_data(key)[-1].astype(jnp.float32))

    def create(module, key, mesh):
        layout = build.rules.shardings(build.shapes(module), mesh)
        return jax.device_put(nn.meta.unbox(boxed(module, np.float32(jax.random.key_data(key)[-1]))), layout)

    @functools.cache
    def shapes(module):
        with shapes_alone():
            return jax.eval_shape(functools.partial(init, module), build._abstract_key())

    # What was and will be cached is made by the real function.
    monkeypatch.setattr(build, "_initialiser", functools.cache(lambda module: functools.partial(init, module)))
    monkeypatch.setattr(build, "_shapes", shapes)
    monkeypatch.setattr(build, "init_variables", draw)
    monkeypatch.setattr(build, "create", create)


def packed(rng: np.random.Generator, lengths: list[int]) -> Stream:
    """One row that holds several examples as segments 1, 2, ..."""
    segment = np.concatenate([np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)])[None]
    tokens = rng.integers(1, VOCAB, size=segment.shape).astype(np.int32)
    return Stream(tokens, jax.tree.map(np.asarray, masks.slots_from_segments(jnp.asarray(segment))))


def saved_run(workdir, config, params, tokenizers) -> None:
    """A workdir with one checkpoint of these parameters, as a trained run leaves it, without training one."""
    from jaxformer import checkpoint
    from jaxformer.config import overrides
    from jaxformer.types import TrainState

    workdir.mkdir(parents=True)
    checkpoints = checkpoint.Checkpoints(workdir, dataclasses.replace(config.checkpoint, keep_best=0))
    checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0), {}), {}, {})
    checkpoints.close()
    tokenizers.save(workdir)
    (workdir / "config.json").write_text(overrides.to_json(config))
