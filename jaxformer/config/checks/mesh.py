"""Checks that the mesh axes divide the sizes that they shard."""

from __future__ import annotations

from typing import Mapping

from jaxformer.config.checks.fields import invalid
from jaxformer.config.layer_groups import has_unlike_layers, unlike_option
from jaxformer.config.schema import AXES, Config, RecurrentConfig


def check_mesh(config: Config) -> None:
    """Checks the sizes of the mesh against the model and the batch.

    Raises:
      ConfigError: an axis is not positive, two are -1, or one does not divide what it shards.
    """
    for path, mesh in (("config.mesh", config.mesh), ("config.mesh.dcn", config.mesh.dcn)):
        axes = {name: getattr(mesh, name) for name in AXES}
        if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
            got = ", ".join(f"{name}={size}" for name, size in axes.items())
            raise invalid(path, got, "sizes of at least 1, and -1 at most once")
    sizes = {name: max(getattr(config.mesh, name), 1) * max(getattr(config.mesh.dcn, name), 1) for name in AXES}
    if sizes["context"] > 1:
        check_context(config, sizes["context"])
    check_divisibility(config, sizes)
    rows = config.train.accumulation * sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["stage"]
    if config.data.tokens is None and config.data.batch % rows:
        ways = "accumulation and the mesh's data, fsdp, expert and stage"
        raise invalid("config.data.batch", config.data.batch, f"a multiple of {rows} ({ways})")


def check_context(config: Config, size: int) -> None:
    """Refuses what does not work with sharded sequences, whose slots may come in any order.

    Raises:
      ConfigError: the model needs slots in order, or a length is no multiple of the axis.
    """
    model = config.model
    ordered = {
        "a series (model.series)": model.series is not None,
        "a recurrent model": model.recurrent_encoder is not None or model.recurrent_decoder is not None,
        "a convolution (encoder.conv)": any(stack.conv is not None for stack in model.stacks.values()),
        "blocks of slots (attention.sparse, attention.summary)": any(
            stack.attention.sparse is not None or stack.attention.summary is not None for stack in model.stacks.values()
        ),
        "the gated delta rule (decoder.delta)": any(stack.delta is not None for stack in model.stacks.values()),
        "permutations (model.permutation)": model.permutation is not None,
        "a mixture of experts of limited capacity (moe.capacity)": any(
            stack.moe is not None and stack.moe.capacity is not None for stack in model.stacks.values()
        ),
        "multi-token prediction (model.multi_token)": model.multi_token is not None,
        "head.pooling last or end": model.head.pooling in ("last", "end")
        and (model.head.kind in ("classes", "pooled") or model.head.relation),
    }
    for part, is_present in ordered.items():
        if is_present:
            raise invalid("config.mesh.context", size, f"1 with {part}, which needs whole sequences in order")
    for path, length in [("length", config.data.length), *(("buckets", bucket) for bucket in config.data.buckets)]:
        if length % size:
            raise invalid(f"config.data.{path}", length, f"a multiple of mesh.context ({size})", "change one of them")


def check_divisibility(config: Config, sizes: Mapping[str, int]) -> None:
    """Checks that axes of these sizes divide the dimensions that they shard.

    Small parameters are replicated instead: norms, biases, and key heads where they are fewer than the tensor axis.

    Raises:
      ConfigError: layers, heads, widths, a vocabulary or lengths that an axis does not divide; stages for a model that
        has no pipeline.
    """
    model, stages = config.model, sizes["stage"]
    if stages > 1 and (model.permutation is not None or model.recurrent_encoder or model.recurrent_decoder):
        kind = "permutation" if model.permutation is not None else "recurrent"
        raise invalid("config.mesh.stage", stages, f"1 for a {kind} model, which has no pipeline")
    recurrent = {name: getattr(model, name) for name in model.parts if name not in model.stacks}
    if stages > 1 and model.multi_token is not None:
        raise invalid("config.mesh.stage", stages, "1 for model.multi_token, whose modules are one layer each")
    for name, part in {**recurrent, **model.stacks}.items():
        path = f"config.model.{name}"
        sharded = [("width", part.width, "fsdp"), ("embed.vocab", part.embed.vocab, "tensor")]
        if isinstance(part, RecurrentConfig):
            width = part.width // 2 if part.bidirectional else part.width
            sharded.append(("width", width, "tensor"))
        elif part.layers:
            sharded += [("layers", part.layers, "stage"), ("microbatches", part.microbatches, "stage")]
            heads = part.attention.kv_heads or 0
            sharded.append(("attention.heads", part.attention.heads, "tensor"))
            if part.attention.input == "chunk":
                sharded.append(("width // attention.heads", part.width // part.attention.heads, "fsdp"))
            sharded.append(("attention.kv_heads", heads if heads > sizes["tensor"] else None, "tensor"))
            if part.ffn is not None:
                sharded.append(("ffn.width", part.ffn.width or 4 * part.width, "tensor"))
            if part.moe is not None:
                sharded.append(("moe.dense_width", part.moe.dense_width, "tensor"))
                sharded.append(("moe.shared_width", part.moe.shared_width, "tensor"))
                sharded.append(("moe.experts", part.moe.experts, "expert"))
            if part.delta is not None:
                sharded.append(("delta.key_heads", part.delta.key_heads, "tensor"))
                sharded.append(("delta.value_heads", part.delta.heads, "tensor"))
            if stages > 1 and part.share_layers:
                raise invalid(
                    "config.mesh.stage", stages, f"1 for {name}.share_layers: stages divide parameters by layer"
                )
            if stages > 1 and has_unlike_layers(part):
                option = unlike_option(part)[0]
                raise invalid("config.mesh.stage", stages, f"1 for {name}.{option}: stages divide layers of one form")
            if stages > 1 and part.attention.value_residual is not None:
                expected = f"1 for {name}.attention.value_residual: stages do not send the first layer's values"
                raise invalid("config.mesh.stage", stages, expected)
            if stages > 1 and part.norm.kind == "batch":
                raise invalid(f"{path}.norm.kind", "batch", "layer, rms or none: a pipeline never sees a whole batch")
        for field, size, axis in sharded:
            if size is not None and size % sizes[axis]:
                raise invalid(
                    f"{path}.{field}", size, f"a multiple of mesh.{axis} ({sizes[axis]})", "change one of them"
                )
