"""Checks of sizes by arithmetic on the config, before anything is traced or read.

All figures are lower bounds. They leave out biases, norms, gradients and nearly all activations, so a run that is
refused here cannot run, and one that passes may still not fit. `jaxformer plan` estimates the memory it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxformer.config.schema import (
    Config,
    DeltaConfig,
    EncodingConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.runtime.units import format_size

MAX_PARAMETERS = 10**14
"""Larger models are refused as typing errors. The largest published models have about 10^12 parameters."""

MAX_BATCH_TOKENS = 10**11
"""Larger batches are refused as typing errors. This is about a thousand times the largest published batches."""

FLOAT32, INT32 = 4, 4  # bytes
BATCH_ARRAYS = 5  # tokens, positions, segments, labels, weights
MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "muon": 1, "adafactor": 0, "sgd": 0}
"""Optimizer -> minimum number of float32 values that it keeps per parameter."""
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""Recurrent cell -> number of its gates, each with its own matrices."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def check_limits(config: Config) -> None:
    """Refuses sizes that no number of devices could hold.

    Raises:
      ConfigError: more than `MAX_PARAMETERS`, or a batch of more than `MAX_BATCH_TOKENS`.
    """
    count = min_parameters(config)
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"config.model: got at least {count:.3g} parameters, expected at most {MAX_PARAMETERS:.0e}; look at "
            "layers, width, vocab and experts"
        )
    for path, (rows, length) in _batches(config).items():
        if rows * length > MAX_BATCH_TOKENS:
            raise ConfigError(
                f"{path}: got {rows:,} rows of {length:,} tokens, expected at most {MAX_BATCH_TOKENS:.0e} tokens in a "
                "batch; lower it, or config.data.length"
            )


def check_memory(config: Config, mesh: Mapping[str, int], memory: int | None) -> None:
    """Refuses a run whose state, or whose batch, exceeds the memory of the devices it would train on.

    Args:
      mesh: sizes of the axes.
      memory: bytes of one device; None: unknown, and nothing is refused.

    Raises:
      ConfigError: parameters and optimizer state, or a batch, need more memory than a device has.
    """
    if memory is None:
        return
    ways = mesh["fsdp"] * mesh["tensor"] * mesh["expert"] * mesh["stage"]  # shards of the parameters
    copies = 1 / ways
    if not config.optimizer.freeze and config.model.adapter is None:  # frozen parameters have neither
        copies += (config.train.ema is not None) / ways
        copies += MOMENTS[config.optimizer.name] / (ways * (mesh["data"] if config.mesh.zero1 else 1))
    count = min_parameters(config)
    if count * FLOAT32 * copies > memory:
        needed = format_size(count * FLOAT32 * copies)
        raise ConfigError(
            f"config.model: got at least {count:.3g} parameters, which take {needed} a device with "
            f"{config.optimizer.name}, expected at most the {format_size(memory)} that it has; make the model "
            "smaller, or divide it by config.mesh.fsdp or tensor"
        )
    devices = math.prod(mesh.values())
    sides = [getattr(config.model, name) for name in config.model.parts]
    width = max((side.width for side in sides), default=0) * DTYPE_BYTES[config.model.dtype]
    for path, (rows, length) in _batches(config).items():
        hidden = width / (config.train.accumulation if path == "config.data.batch" else 1)
        need = rows * length * (BATCH_ARRAYS * INT32 + hidden) / devices
        if need > memory:
            raise ConfigError(
                f"{path}: got {rows:,} rows of {length:,} tokens, which take at least {format_size(need)} a device, "
                f"expected at most the {format_size(memory)} that it has; lower it, or config.data.length"
            )


def min_parameters(config: Config) -> int:
    """Lower bound of the number of parameters: tables and matrices, in the smallest sizes that the data may set."""
    model, total = config.model, 0
    for name in model.parts:
        part = getattr(model, name)
        has_embedding = "encoder" in name or not model.share_embeddings or len(model.parts) == 1
        total += _embedding(part, _vocab(part, config)) if has_embedding else 0
        if isinstance(part, RecurrentConfig):
            state = part.width // 2 if part.bidirectional else part.width  # of one direction
            total += part.layers * GATES[part.cell] * part.width * (part.width + state)
        else:
            total += _stack(part, crosses=name == "decoder" and model.encoder is not None)
    if model.generator is not None:
        part = model.generator.encoder
        total += _stack(part, crosses=False)
        total += 0 if model.generator.sharing == "tied" else _embedding(part, _vocab(part, config))
    if model.multi_token is not None:
        stack = model.multi_token_stack
        total += model.multi_token.depth * (2 * stack.width**2 + _stack(stack, crosses=False))
    return total + _head(model, config)


def _vocab(part: StackConfig | RecurrentConfig, config: Config) -> int:
    """Minimum rows of the embedding table. A tokenizer not yet built has at least one token, and is padded.

    An encoder of a series has a projection in place of a table, with a row for each number of a slot.
    """
    series = config.model.series
    if part is config.model.encoder and series is not None:
        return series.patch * _channels(config.model)
    return config.data.tokenizer.multiple if part.embed.vocab is None else part.embed.vocab


def _channels(model: ModelConfig) -> int:
    """Minimum number of a series' channels in one row."""
    return 1 if model.series is None or model.series.independent else model.series.channels or 1


def _embedding(part: StackConfig | RecurrentConfig, vocab: int) -> int:
    inner = part.embed.width or part.width
    up = inner * part.width if inner != (part.embed.sum_width or part.width) or part.embed.sum_width else 0
    bias = part.width if part.embed.projection_bias else 0
    rows = part.embed.kinds + 2 * part.embed.matches
    return vocab * inner + up + bias + rows * (part.embed.sum_width or part.width)


def _stack(stack: StackConfig, crosses: bool) -> int:
    width, own, first = stack.width, stack.attention, 0
    head_width = own.head_width or width // own.heads
    keys = own.kv_heads or own.heads
    inputs = own.heads + 2 * keys if own.input == "whole" else 3  # each head of a chunk has 1 / heads of the rows
    attention = width * head_width * (inputs + (own.heads if own.output else 0))
    if own.latent is not None:
        attention = _latent(own.latent, own.heads, width)
    crossing = attention
    attention += width * head_width * own.heads * own.gate
    if stack.encoding.kind == "transformer_xl":  # the projection of distances
        attention += width * head_width * own.heads
    layer = attention + (crossing if crosses else 0)
    if stack.ffn is not None:
        matrices = 1 + stack.ffn.gated + stack.ffn.output
        ffn = matrices * width * (stack.ffn.width or 4 * width)
        if stack.moe is not None:
            dense = matrices * width * (stack.moe.dense_width or stack.ffn.width or 4 * width)
            shared = matrices * width * stack.moe.shared_width if stack.moe.shared_width else stack.moe.shared * ffn
            ffn = stack.moe.experts * ffn + shared + width * (stack.moe.experts + stack.moe.shared_gate)
            first = len(stack.dense_numbers) * (dense - ffn)
        layer += ffn
    first += 0 if stack.delta is None else len(stack.delta_layers) * (_delta(stack.delta, width) - attention)
    conv = 0 if stack.conv is None else stack.conv.kernel * (width // stack.conv.groups) * width
    conv += width * (stack.output_width or 0)
    layers = min(stack.layers, 1) if stack.share_layers else stack.layers
    return layers * layer + first + conv + _encoding(stack.encoding, stack.embed.sum_width or width, own.heads)


def _delta(delta: DeltaConfig, width: int) -> int:
    """Parameters of the projections and convolutions of a layer with the gated delta rule."""
    values = delta.heads * delta.value_width
    return width * (delta.channels + 2 * values + 2 * delta.heads) + delta.conv_kernel * delta.channels


def _latent(latent: LatentConfig, heads: int, width: int) -> int:
    """Parameters of the projections of latent attention."""
    down = width * latent.cache_width + width * (latent.query_rank or 0)
    queries = heads * latent.query_width * (latent.query_rank or width)
    keys_values = latent.rank * heads * (latent.content_width + latent.values_width)
    return down + queries + keys_values + heads * latent.values_width * width


def _encoding(encoding: EncodingConfig, width: int, heads: int) -> int:
    """Parameters of the tables of positions and distances."""
    if encoding.kind == "learned":
        return encoding.max_length * width
    if encoding.kind == "t5":
        return (encoding.buckets or 0) * heads
    if encoding.kind == "deberta":
        absolute = encoding.max_length * width if encoding.absolute else 0
        return absolute + 2 * (encoding.max_distance if encoding.buckets is None else encoding.buckets) * width
    return 0


def _head(model: ModelConfig, config: Config) -> int:
    head = model.head
    side = model.decoder_part or model.encoder_part
    steps, horizon = head.look_back or config.data.length, head.horizon or config.data.horizon or 1
    if model.linear is not None and model.series is not None:
        own = (model.series.channels or 1) if model.linear.individual else 1
        return own * steps * horizon * (1 if model.linear.trend is None else 2)
    if side is None or head.kind == "none":
        return 0
    width = (side.output_width if isinstance(side, StackConfig) else None) or side.width
    if head.kind == "forecast":
        return model.slots("encoder", steps) * width * horizon * _channels(model)
    if head.kind == "tokens":
        relation = width * (head.width or 1) if head.relation else 0
        inner = (side.embed.sum_width if head.transform else None) or width
        relation += 2 * width * width if head.copy else 0  # query and key of copying
        return relation + (0 if head.tied or not head.projection else inner * _vocab(side, config))
    hidden = 0 if head.width is None else width * head.width
    if head.kind not in ("classes", "slots"):
        return hidden
    width = width if head.width is None else head.width
    return hidden + width * (head.classes or 1)


def _batches(config: Config) -> dict[str, tuple[int, int]]:
    """Field -> rows and length of the longest batch that it sets."""
    data = config.data
    rows = data.batch if data.tokens is None else min(data.batch, max(data.tokens // data.length, 1))
    return {"config.data.batch": (rows, data.length), "config.evaluate.batch": (config.evaluate.batch, data.length)}
