"""Property tests of sequence models and tasks, as functions for your own test suite.

Each `assert_` function takes a Linen module with its variables and a `Batch`, runs the module, and raises
`AssertionError` if the property does not hold. This project's own tests use them (tests/invariants/). Test a model of
this package like this::

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

A module from outside of this package works too. It must take a `Batch` and return logits `[B, T, V]` or outputs
`[B, ...]`; `assert_steps_equal_forward` also needs the methods `start` and `step` of `jaxformer.types.Decodable`. Give
its variables a batch to initialize with::

    from flax import linen as nn

    class PerToken(nn.Module):
        @nn.compact
        def __call__(self, batch):
            return nn.Dense(13)(nn.Embed(13, 8)(batch.target.tokens))

    outside = PerToken()
    variables = testing.random_variables(outside, batch=full)
    testing.assert_causal(outside, variables, full)
    testing.assert_packing_invariant(outside, variables, lengths=[3, 2], vocab=13, side="target")

A task is any `jaxformer.tasks.Task`; `assert_sums_add_up` and `assert_weights_select` test its loss and metrics.

The default tolerances are for float32 on a CPU. Give wider ones for other precisions and devices: `rtol` and `atol` are
the relative and absolute tolerance of every comparison.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import metrics
from jaxformer.config import Config, ModelConfig, RecurrentConfig, StackConfig
from jaxformer.models import build
from jaxformer.nn import masks
from jaxformer.nn.layers import Embed
from jaxformer.parallel import rules
from jaxformer.tasks import Task
from jaxformer.train import step as steps
from jaxformer.types import Array, Batch, PyTree, Slots, Stream, Sums

RTOL, ATOL = 1e-5, 1e-6
"""Relative and absolute tolerance of one forward pass in float32."""


# Inputs.


def _variable_shapes(module: nn.Module, batch: Batch | None) -> PyTree:
    """Boxed shapes of the variables; `batch` initializes modules from outside of `jaxformer.models`."""
    if batch is None or isinstance(getattr(module, "config", None), ModelConfig):
        return build.shapes(module)
    return jax.eval_shape(module.init, jax.random.key(0), Batch(batch.source, batch.target))


def _stream(tokens: np.ndarray, position: np.ndarray, segment: np.ndarray) -> Stream:
    """A stream of numpy arrays; jax accepts them wherever it takes its own."""
    return Stream(cast(Array, tokens), Slots(cast(Array, position), cast(Array, segment)))


def _vocab(part: StackConfig | RecurrentConfig | None) -> int:
    if part is None or part.embed.vocab is None:
        raise ValueError("random_batch: got embed.vocab None, expected a number")
    return part.embed.vocab


def _required(stream: Stream | None, function: str, name: str) -> Stream:
    if stream is None:
        raise ValueError(f"{function}: got a batch without {name}, expected one")
    return stream


def random_variables(
    module: nn.Module, seed: int = 0, deviation: float = 0.25, batch: Batch | None = None
) -> dict[str, PyTree]:
    """Normally distributed variables of a module: mean 1 for scales and variances, else 0.

    No parameter has its initial value, so an unused bias or scale changes results.

    Args:
      module: a module of `jaxformer.models`, or any module if `batch` is given.
      seed: seed of numpy's generator.
      deviation: standard deviation of the parameters. Batch-norm statistics keep their initial values.
      batch: a batch to initialize the module with; None for modules of `jaxformer.models`.

    Returns:
      The variables, as `module.init` returns them.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        mean = 1.0 if path[-1].key in ("scale", "var") else 0.0
        scale = deviation if path[0].key == "params" else 0.0
        return jnp.asarray(mean + scale * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(_variable_shapes(module, batch)))


def random_stream(rng: np.random.Generator, lengths: Sequence[int], vocab: int, length: int | None = None) -> Stream:
    """A stream of random tokens from 1 to `vocab` - 1, right-padded with 0.

    Args:
      rng: numpy's generator.
      lengths: number of tokens of each row.
      vocab: V.
      length: T; None: the length of the longest row.
    """
    segment = (np.arange(length or max(lengths)) < np.asarray(lengths)[:, None]).astype(np.int32)
    tokens = rng.integers(1, vocab, size=segment.shape).astype(np.int32) * segment
    position = np.where(segment == 0, 0, np.arange(segment.shape[1])).astype(np.int32)
    return _stream(tokens, position, segment)


def random_batch(config: ModelConfig, lengths: Sequence[int], length: int | None = None, seed: int = 0) -> Batch:
    """A random batch with the streams that a model of `config` reads, and labels and weights for its head.

    A source has one token more than the target of its row, so that mistaking one for the other fails.

    Args:
      config: the model.
      lengths: number of tokens of each row's target, or of its source if there is no target.
      length: T; None: the length of the longest row.
      seed: seed of numpy's generator.
    """
    rng = np.random.default_rng(seed)
    source = target = None
    if config.encoder_part is not None:
        source = random_stream(rng, [n + 1 for n in lengths], _vocab(config.encoder_part), length)
    if config.decoder_part is not None:
        target = random_stream(rng, lengths, _vocab(config.decoder_part), length)
    if config.head.kind == "classes":
        if config.head.classes is None:
            raise ValueError("random_batch: got head.classes None, expected a number")
        labels = rng.integers(0, config.head.classes, size=len(lengths)).astype(np.int32)
        weights = np.ones(len(lengths), np.float32)
    else:
        predicted = _required(target or source, "random_batch", "source or target")
        vocab = _vocab(config.decoder_part or config.encoder_part)
        labels = rng.integers(1, vocab, size=predicted.tokens.shape).astype(np.int32)
        weights = predicted.slots.segment.astype(np.float32)
    return Batch(source, target, cast(Array, labels), cast(Array, weights))


def apply(module: nn.Module, method: Callable | str | None = None) -> Callable[..., Any]:
    """The compiled function `(variables, *arguments) -> module.apply(variables, *arguments)`.

    Args:
      module: the module.
      method: a method of the module; None: `__call__`.
    """
    return jax.jit(lambda variables, *arguments: module.apply(variables, *arguments, method=method))


# Properties of a module.


def assert_causal(module: nn.Module, variables: PyTree, batch: Batch) -> None:
    """Logits of target position t depend on the embeddings of target positions 0..t and on no later one.

    Tested by gradients: d logits[t] / d embedding[s] is exactly 0 for s > t and not 0 for s = t.

    Args:
      module: a module that embeds the target once, with `jaxformer.nn.layers.Embed` (called with the stream) or
        `flax.linen.Embed` (called with the stream's tokens), and returns logits `[B, T, V]`.
      variables: its variables.
      batch: a batch with a target without padding.

    Raises:
      AssertionError: a position depends on a later one, or not on itself.
      ValueError: the target has padding, or the module does not embed it as described.
    """
    stream = _required(batch.target, "assert_causal", "target")
    rows, length = stream.tokens.shape
    if not np.all(np.asarray(stream.slots.segment) != 0):
        raise ValueError("assert_causal: got a batch with padding, expected full rows; give equal lengths")
    widths: list[int] = []

    def logits(delta: Array | None) -> Array:
        """Logits, with `delta` `[B, T, D]` added to the target's embeddings. Records D."""

        def add(call: Callable, arguments: tuple, keywords: dict, context: nn.module.InterceptorContext) -> Any:
            y = call(*arguments, **keywords)
            embeds = isinstance(context.module, (Embed, nn.Embed)) and context.method_name == "__call__"
            if not embeds or not any(arguments[0] is x for x in (batch.target, stream.tokens)):
                return y
            widths.append(y.shape[-1])
            return y if delta is None else y + delta

        with nn.intercept_methods(add):
            return cast(Array, module.apply(variables, batch))

    jax.eval_shape(logits, None)
    if not widths:
        raise ValueError("assert_causal: got a module that does not embed the target, expected one call of an Embed")
    zeros = jnp.zeros((rows, length, widths[0]))
    influence = jnp.abs(jax.jit(jax.jacrev(logits))(zeros)).sum(axis=(0, 2, 3, 5))  # [t, s], summed over the rest
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
    """Padding slots do not change the outputs of real slots, whatever token they contain.

    Args:
      module: the module.
      variables: its variables.
      batch: the batch, with or without padding.
      extra: number of padding slots to add at the right of every stream.
      token: token id in all padding slots.
      rtol, atol: tolerances.
    """

    def pad(stream: Stream | None) -> Stream | None:
        if stream is None:
            return None

        def wide(x: Array, fill: int) -> Array:
            return cast(Array, np.pad(np.asarray(x), ((0, 0), (0, extra)), constant_values=fill))

        slots = jax.tree.map(lambda ids: wide(ids, 0), stream.slots)
        tokens = np.where(slots.segment == 0, token, wide(stream.tokens, token)).astype(np.int32)
        types = None if stream.token_type is None else wide(stream.token_type, 0)
        return Stream(cast(Array, tokens), slots, types)

    inputs = Batch(batch.source, batch.target)
    run = apply(module)
    short = run(variables, inputs)
    long = run(variables, Batch(pad(batch.source), pad(batch.target)))
    if long.shape == short.shape:  # one output per row
        chex.assert_trees_all_close(long, short, rtol=rtol, atol=atol)
        return
    side = batch.source if batch.target is None else batch.target
    real = np.asarray(_required(side, "assert_padding_invariant", "source or target").slots.segment) != 0
    chex.assert_trees_all_close(long[:, : short.shape[1]][real], short[real], rtol=rtol, atol=atol)


def assert_batch_order_invariant(
    module: nn.Module, variables: PyTree, batch: Batch, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """The output of a row does not depend on its index in the batch.

    Args:
      module: the module.
      variables: its variables.
      batch: a batch of at least two rows.
      rtol, atol: tolerances.
    """
    inputs = Batch(batch.source, batch.target)
    rows = jax.tree.leaves(inputs)[0].shape[0]
    order = np.roll(np.arange(rows), 1)
    run = apply(module)
    moved = run(variables, jax.tree.map(lambda x: x[order], inputs))
    chex.assert_trees_all_close(moved, run(variables, inputs)[order], rtol=rtol, atol=atol)


def assert_packing_invariant(
    module: nn.Module,
    variables: PyTree,
    lengths: Sequence[int],
    vocab: int,
    rtol: float = RTOL,
    atol: float = ATOL,
    side: str | None = None,
) -> None:
    """Examples that are packed into one row have the same logits as in rows of their own.

    For models that read one stream (encoder-only or decoder-only).

    Args:
      module: the module.
      variables: its variables.
      lengths: lengths of the examples.
      vocab: upper bound of the token ids.
      rtol, atol: tolerances.
      side: the stream that the module reads, "source" or "target"; None: as its `config` says.
    """
    rng = np.random.default_rng(0)
    segment = np.concatenate([np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)])[None]
    tokens = rng.integers(1, vocab, size=segment.shape).astype(np.int32)
    row, ends = jax.tree.map(np.asarray, masks.slots_from_segments(jnp.asarray(segment))), np.cumsum(lengths)
    # Row 0 is packed. Each other row has one of its examples, padded to the same length, so one program runs all.
    shape = (1 + len(lengths), segment.shape[1])
    ids, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    ids[0], positions[0], segments[0] = tokens[0], row.position[0], row.segment[0]
    for i, (end, length) in enumerate(zip(ends, lengths), start=1):
        ids[i, :length] = tokens[0, end - length : end]
        positions[i, :length], segments[i, :length] = np.arange(length), 1
    stream = _stream(ids, positions, segments)
    if side is None:
        side = "target" if module.config.has_decoder else "source"
    batch = Batch(None, stream) if side == "target" else Batch(stream, None)
    logits = apply(module)(variables, batch)
    for i, (end, length) in enumerate(zip(ends, lengths), start=1):
        chex.assert_trees_all_close(logits[0, end - length : end], logits[i, :length], rtol=rtol, atol=atol)


def assert_steps_equal_forward(
    module: nn.Module, variables: PyTree, batch: Batch, prompt: int, rtol: float = 2e-5, atol: float = 2e-6
) -> None:
    """Decoding with a cache has the logits of one forward pass: `start` on a prompt, then `step` token by token.

    Args:
      module: a `jaxformer.types.Decodable`.
      variables: its variables.
      batch: a batch with a target without padding.
      prompt: number of tokens for `start`; the rest goes to `step`.
      rtol, atol: tolerances.
    """
    inputs = Batch(batch.source, batch.target)
    target = _required(batch.target, "assert_steps_equal_forward", "target")
    length = target.tokens.shape[1]
    forward = apply(module)(variables, inputs)
    first = inputs._replace(target=jax.tree.map(lambda x: x[:, :prompt], target))
    start = jax.jit(lambda batch: module.apply(variables, batch, length, method=module.start))
    logits, state = start(first)
    chex.assert_trees_all_close(logits, forward[:, prompt - 1], rtol=rtol, atol=atol)
    step = apply(module, module.step)
    for i in range(prompt, length):
        logits, state = step(variables, target.tokens[:, i : i + 1], state)
        chex.assert_trees_all_close(logits, forward[:, i], rtol=rtol, atol=atol)


def assert_sharded_equals_single(
    module: nn.Module, variables: PyTree, batch: Batch, mesh: Mesh, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """The outputs on `mesh` equal those on one device. Parameters and batch are sharded as in training.

    Args:
      module: the module.
      variables: its variables.
      batch: a batch whose number of rows the mesh's data axes divide.
      mesh: a mesh of several devices (`jaxformer.parallel.mesh.make`).
      rtol, atol: tolerances.
    """
    inputs = Batch(*(stream and jax.tree.map(np.asarray, stream) for stream in (batch.source, batch.target)))
    single = jax.device_get(apply(module)(variables, inputs))
    with jax.set_mesh(mesh):
        shardings = rules.shardings(_variable_shapes(module, inputs), mesh)
        placed = jax.tree.map(jax.device_put, dict(variables), shardings)
        sharded = jax.device_get(apply(module)(placed, steps.shard_batch(inputs, mesh)))
    chex.assert_trees_all_close(sharded, single, rtol=rtol, atol=atol)


# Properties of a task.


def assert_sums_add_up(task: Task, config: Config, outputs: Array, batch: Batch, rtol: float = RTOL) -> None:
    """The sums of a task's loss and metrics over a batch equal the sums over its rows, so microbatches equal one batch.

    Args:
      task: the task.
      config: a config for it.
      outputs: model outputs that the task's `loss` reads: logits `[B, T, V]` or `[B, C]`.
      batch: a batch with labels and weights.
      rtol: relative tolerance.
    """
    for sums in (task.loss, task.metrics):
        expected = sums(config, outputs, batch)
        total: Sums = {}
        for i in range(len(outputs)):
            row = sums(config, outputs[i : i + 1], jax.tree.map(lambda x: x[i : i + 1], batch))  # noqa: B023
            total = metrics.add(total, row) if total else row
        chex.assert_trees_all_close(dict(total), dict(expected), rtol=rtol, atol=1e-5)


def assert_weights_select(task: Task, config: Config, outputs: Array, batch: Batch) -> None:
    """Outputs and labels with weight 0 change neither the loss nor the metrics.

    Args:
      task: the task.
      config: a config for it.
      outputs: model outputs that the task's `loss` reads.
      batch: a batch with labels, and with weights of which some are 0.
    """
    if batch.labels is None or batch.weights is None:
        raise ValueError("assert_weights_select: got a batch without labels or weights, expected both")
    off = np.asarray(batch.weights) == 0.0
    if not off.any():
        raise ValueError("assert_weights_select: got weights without a 0, expected some; set a few to 0")
    mask = off.reshape(*off.shape, *(1,) * (np.ndim(outputs) - off.ndim))
    other = jnp.where(mask, 7.0 - outputs, outputs)
    labels = np.where(off, (np.asarray(batch.labels) + 1) % outputs.shape[-1], np.asarray(batch.labels))
    changed = batch._replace(labels=cast(Array, labels))
    for sums in (task.loss, task.metrics):
        chex.assert_trees_all_equal(dict(sums(config, outputs, batch)), dict(sums(config, other, changed)))
