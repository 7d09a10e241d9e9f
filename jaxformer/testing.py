"""Property tests of sequence models, as functions for your own test suite.

Each function takes a Linen module with its variables and a `Batch`, runs the module, and raises `AssertionError` if
the property does not hold. This project's own tests use them (tests/invariants/). A new module is tested like this:

    from jaxformer import testing
    from jaxformer.config import AttentionConfig, EmbedConfig, ModelConfig, StackConfig
    from jaxformer.models import build

    stack = StackConfig(layers=1, width=8, embed=EmbedConfig(vocab=13), attention=AttentionConfig(heads=2))
    config = ModelConfig(decoder=stack)
    module = build.build(config)
    variables = testing.random_variables(module)
    full = testing.random_batch(config, lengths=[5, 5])
    testing.assert_causal(module, variables, full)
    testing.assert_steps_equal_forward(module, variables, full, prompt=2)
    testing.assert_padding_invariant(module, variables, testing.random_batch(config, lengths=[5, 3]))

Tolerances are those of float32 on a CPU; give wider ones for other precisions and devices.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import metrics
from jaxformer.config import Config, ModelConfig
from jaxformer.models import build
from jaxformer.nn import masks
from jaxformer.nn.layers import Embed
from jaxformer.parallel import rules
from jaxformer.tasks import Task
from jaxformer.train import step as steps
from jaxformer.types import Array, Batch, PyTree, Slots, Stream, Sums

RTOL, ATOL = 1e-5, 1e-6
"""Tolerances of one pass in float32."""


# Inputs.


def random_variables(module: nn.Module, seed: int = 0, deviation: float = 0.25) -> dict[str, PyTree]:
    """Normally distributed variables of a module of `jaxformer.models`: mean 1 for scales and variances, else 0.

    No parameter is at its start, so that a bias or a scale that is left out of a computation shows in the values.

    Args:
      seed: of numpy's generator.
      deviation: standard deviation of the parameters; statistics of batch norm stay at their start.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        mean = 1.0 if path[-1].key in ("scale", "var") else 0.0
        spread = deviation if path[0].key == "params" else 0.0
        return jnp.asarray(mean + spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(build.shapes(module)))


def random_stream(rng: np.random.Generator, lengths: Sequence[int], vocab: int, length: int | None = None) -> Stream:
    """Random tokens 1 to `vocab` - 1, right-padded with 0.

    Args:
      lengths: real tokens of each row.
      vocab: V.
      length: T; None: the longest row's.
    """
    segment = (np.arange(length or max(lengths)) < np.asarray(lengths)[:, None]).astype(np.int32)
    tokens = rng.integers(1, vocab, size=segment.shape).astype(np.int32) * segment
    position = np.where(segment == 0, 0, np.arange(segment.shape[1])).astype(np.int32)
    return Stream(tokens, Slots(position, segment))


def random_batch(config: ModelConfig, lengths: Sequence[int], length: int | None = None, seed: int = 0) -> Batch:
    """A batch with the streams that a model of `config` reads, and labels and weights for its head.

    A source has one token more than the target beside it, so that the two sides cannot be confused.

    Args:
      lengths: real tokens of each row's target, or of its source where there is no target.
      length: T; None: the longest row's.
      seed: of numpy's generator.
    """
    rng = np.random.default_rng(seed)
    encoder = config.encoder or config.recurrent_encoder
    decoder = config.decoder or config.recurrent_decoder
    source = target = None
    if encoder is not None:
        source = random_stream(rng, [n + 1 for n in lengths], encoder.embed.vocab, length)
    if decoder is not None:
        target = random_stream(rng, lengths, decoder.embed.vocab, length)
    if config.head.kind == "classes":
        labels = rng.integers(0, config.head.classes, size=len(lengths)).astype(np.int32)
        return Batch(source, target, labels, np.ones(len(lengths), np.float32))
    stream, part = (target, decoder) if target is not None else (source, encoder)
    labels = rng.integers(1, part.embed.vocab, size=stream.tokens.shape).astype(np.int32)
    return Batch(source, target, labels, stream.slots.segment.astype(np.float32))


def apply(module: nn.Module, method: Callable | str | None = None) -> Callable[..., Any]:
    """The compiled `module.apply(variables, *arguments)`: outside of `jit` every layer would compile at each call."""
    return jax.jit(lambda variables, *arguments: module.apply(variables, *arguments, method=method))


# Properties of a module.


def assert_causal(module: nn.Module, variables: PyTree, batch: Batch) -> None:
    """Logits of target position t depend on the embeddings of target positions 0..t and on no later one.

    Tested by gradients: d logits[t] / d embedding[s] is exactly 0 for s > t and not 0 for s = t. Rows without padding
    only. The module embeds its target with one `jaxformer.nn.layers.Embed`.

    Raises:
      AssertionError: a position sees a later one, or does not see itself.
    """
    stream = batch.target
    rows, length = stream.tokens.shape
    if not np.all(np.asarray(stream.slots.segment) != 0):
        raise ValueError("assert_causal: got a batch with padding, expected full rows; cut it")

    def perturbed(delta: Array) -> Array:
        """Logits where `delta` `[B, T, D]` is added to the target's embeddings."""

        def add(call: Callable, arguments: tuple, keywords: dict, context: nn.module.InterceptorContext) -> Any:
            y = call(*arguments, **keywords)
            embeds = isinstance(context.module, Embed) and context.method_name == "__call__"
            return y + delta if embeds and arguments[0] is batch.target else y

        with nn.intercept_methods(add):
            return module.apply(variables, batch)

    width = (module.config.decoder or module.config.recurrent_decoder).width
    zeros = jnp.zeros((rows, length, width))
    influence = jnp.abs(jax.jit(jax.jacrev(perturbed))(zeros)).sum(axis=(0, 2, 3, 5))  # [t, s], summed over the rest
    chex.assert_shape(influence, (length, length))
    np.testing.assert_array_equal(np.triu(influence, 1), 0.0, "a position depends on a later one")
    np.testing.assert_array_less(0.0, np.diag(influence), "a position does not depend on its own token")


def assert_padding_invariant(
    module: nn.Module,
    variables: PyTree,
    batch: Batch,
    extra: int = 3,
    token: int = 1,
    rtol: float = RTOL,
    atol: float = ATOL,
) -> None:
    """Slots of padding, whatever token stands in them, change no output of a real slot.

    Args:
      extra: slots of padding that are added on the right of every stream.
      token: what stands in them.
    """

    def pad(stream: Stream | None) -> Stream | None:
        if stream is None:
            return None
        wide = lambda x, fill: np.pad(np.asarray(x), ((0, 0), (0, extra)), constant_values=fill)  # noqa: E731
        slots = Slots(wide(stream.slots.position, 0), wide(stream.slots.segment, 0))
        tokens = np.where(slots.segment == 0, token, wide(stream.tokens, token)).astype(np.int32)
        return Stream(tokens, slots, None if stream.kind is None else wide(stream.kind, 0))

    inputs = Batch(batch.source, batch.target)
    run = apply(module)
    short = run(variables, inputs)
    long = run(variables, Batch(pad(batch.source), pad(batch.target)))
    if long.shape == short.shape:  # one output a row
        chex.assert_trees_all_close(long, short, rtol=rtol, atol=atol)
        return
    real = np.asarray((batch.source if batch.target is None else batch.target).slots.segment) != 0
    chex.assert_trees_all_close(long[:, : short.shape[1]][real], short[real], rtol=rtol, atol=atol)


def assert_batch_order_invariant(
    module: nn.Module, variables: PyTree, batch: Batch, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """A row's output does not depend on its place in the batch."""
    inputs = Batch(batch.source, batch.target)
    rows = jax.tree.leaves(inputs)[0].shape[0]
    order = np.roll(np.arange(rows), 1)
    run = apply(module)
    moved = run(variables, jax.tree.map(lambda x: x[order], inputs))
    chex.assert_trees_all_close(moved, run(variables, inputs)[order], rtol=rtol, atol=atol)


def assert_packing_invariant(
    module: nn.Module, variables: PyTree, lengths: Sequence[int], vocab: int, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Examples packed into one row give the logits that each gives in a row of its own.

    For models that read one stream of tokens (encoder-only or decoder-only).

    Args:
      lengths: of the examples.
      vocab: tokens are below it.
    """
    rng = np.random.default_rng(0)
    segment = np.concatenate([np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)])[None]
    tokens = rng.integers(1, vocab, size=segment.shape).astype(np.int32)
    row, ends = jax.tree.map(np.asarray, masks.slots(jnp.asarray(segment))), np.cumsum(lengths)
    # Row 0 is packed; every other row has one of its examples, padded to the same width: one program for all.
    shape = (1 + len(lengths), segment.shape[1])
    alone = Stream(np.zeros(shape, np.int32), Slots(np.zeros(shape, np.int32), np.zeros(shape, np.int32)))
    alone.tokens[0], alone.slots.position[0], alone.slots.segment[0] = tokens[0], row.position[0], row.segment[0]
    for i, (end, length) in enumerate(zip(ends, lengths), start=1):
        alone.tokens[i, :length] = tokens[0, end - length : end]
        alone.slots.position[i, :length], alone.slots.segment[i, :length] = np.arange(length), 1
    decodes = module.config.decoder is not None or module.config.recurrent_decoder is not None
    logits = apply(module)(variables, Batch(None, alone) if decodes else Batch(alone, None))
    for i, (end, length) in enumerate(zip(ends, lengths), start=1):
        chex.assert_trees_all_close(logits[0, end - length : end], logits[i, :length], rtol=rtol, atol=atol)


def assert_steps_equal_forward(
    module: nn.Module, variables: PyTree, batch: Batch, prompt: int, rtol: float = 2e-5, atol: float = 2e-6
) -> None:
    """Decoding with a cache gives the logits of the whole pass: `start` with a prompt, then `step` token by token.

    Args:
      batch: targets without padding.
      prompt: tokens of the target that `start` reads; the others are given to `step`.
    """
    inputs = Batch(batch.source, batch.target)
    length = batch.target.tokens.shape[1]
    whole = apply(module)(variables, inputs)
    first = inputs._replace(target=jax.tree.map(lambda x: x[:, :prompt], batch.target))
    start = jax.jit(lambda batch: module.apply(variables, batch, length, method=module.start))
    logits, state = start(first)
    chex.assert_trees_all_close(logits, whole[:, prompt - 1], rtol=rtol, atol=atol)
    step = apply(module, module.step)
    for i in range(prompt, length):
        logits, state = step(variables, batch.target.tokens[:, i : i + 1], state)
        chex.assert_trees_all_close(logits, whole[:, i], rtol=rtol, atol=atol)


def assert_sharded_equals_single(
    module: nn.Module, variables: PyTree, batch: Batch, mesh: Mesh, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """The module computes on `mesh` what it computes on one device.

    Parameters and batch are laid out as in training. The mesh's data axes must divide the rows of `batch`.
    """
    inputs = Batch(*(stream and jax.tree.map(np.asarray, stream) for stream in (batch.source, batch.target)))
    single = jax.device_get(apply(module)(variables, inputs))
    with jax.set_mesh(mesh):
        layout = rules.shardings(build.shapes(module), mesh)
        placed = jax.tree.map(jax.device_put, dict(variables), layout)
        sharded = jax.device_get(apply(module)(placed, steps.place(inputs, mesh)))
    chex.assert_trees_all_close(sharded, single, rtol=rtol, atol=atol)


# Properties of a task.


def assert_sums_add_up(task: Task, config: Config, outputs: Array, batch: Batch, rtol: float = RTOL) -> None:
    """A task's loss and measures of a batch are those of its rows, added: microbatches then equal one batch.

    Args:
      outputs: what the task's `loss` reads of the batch: logits `[B, T, V]` or `[B, C]`.
    """
    for sums in (task.loss, task.metrics):
        whole = sums(config, outputs, batch)
        total: Sums = {}
        for i in range(len(outputs)):
            row = sums(config, outputs[i : i + 1], jax.tree.map(lambda x: x[i : i + 1], batch))  # noqa: B023
            total = metrics.add(total, row) if total else row
        chex.assert_trees_all_close(dict(total), dict(whole), rtol=rtol, atol=1e-5)


def assert_weights_select(task: Task, config: Config, outputs: Array, batch: Batch) -> None:
    """Outputs and labels of weight 0 change neither the loss nor the measures."""
    off = np.asarray(batch.weights) == 0.0
    if not off.any():
        raise ValueError("assert_weights_select: got weights without a 0, expected some; set a few to 0")
    spread = off.reshape(*off.shape, *(1,) * (np.ndim(outputs) - off.ndim))
    other = jnp.where(spread, 7.0 - outputs, outputs)
    changed = batch._replace(labels=np.where(off, (np.asarray(batch.labels) + 1) % outputs.shape[-1], batch.labels))
    for sums in (task.loss, task.metrics):
        chex.assert_trees_all_equal(dict(sums(config, outputs, batch)), dict(sums(config, other, changed)))
