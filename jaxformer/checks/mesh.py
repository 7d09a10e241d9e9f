"""Whether a mesh divides what it is there to divide."""

from __future__ import annotations

from typing import Mapping

from jaxformer.checks.tables import wrong
from jaxformer.config import AXES, Config, RecurrentConfig


def check(config: Config) -> None:
    for path, mesh in (("config.mesh", config.mesh), ("config.mesh.dcn", config.mesh.dcn)):
        given = {name: getattr(mesh, name) for name in AXES}
        if any(size < 1 and size != -1 for size in given.values()) or list(given.values()).count(-1) > 1:
            got = ", ".join(f"{name}={size}" for name, size in given.items())
            raise wrong(path, got, "sizes of at least 1, and -1 at most once")
    sizes = {name: max(getattr(config.mesh, name), 1) * max(getattr(config.mesh.dcn, name), 1) for name in AXES}
    if sizes["context"] > 1:
        context(config, sizes["context"])
    divides(config, sizes)
    rows = config.train.accumulation * sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["stage"]
    if config.data.tokens is None and config.data.batch % rows:
        ways = "accumulation and the mesh's data, fsdp, expert and stage"
        raise wrong("config.data.batch", config.data.batch, f"a multiple of {rows} ({ways})")


def context(config: Config, size: int) -> None:
    """Divided sequences: their slots may come in any order, and their number must come out even."""
    model = config.model
    ordered = {
        "a recurrent model": model.recurrent_encoder is not None or model.recurrent_decoder is not None,
        "a convolution (encoder.conv)": model.encoder is not None and model.encoder.conv is not None,
        "permutations (model.permutation)": model.permutation is not None,
        "a mixture of experts of limited capacity (moe.capacity)": any(
            stack is not None and stack.moe is not None and stack.moe.capacity is not None
            for stack in (model.encoder, model.decoder)
        ),
        "head.pooling last": model.head.pooling == "last" and model.head.kind in ("classes", "pooled"),
    }
    for what, there in ordered.items():
        if there:
            raise wrong("config.mesh.context", size, f"1 with {what}, which needs whole sequences in order")
    for path, length in [("length", config.data.length), *(("buckets", bucket) for bucket in config.data.buckets)]:
        if length % size:
            raise wrong(f"config.data.{path}", length, f"a multiple of mesh.context ({size})", "change one of them")


def divides(config: Config, sizes: Mapping[str, int]) -> None:
    """Judges a mesh of these sizes: it must divide what it is there to divide.

    What is small may stay whole: norms, biases, and key heads that are fewer than the tensor axis is long.

    Raises:
      ConfigError: layers, heads, widths, a vocabulary or lengths that an axis does not divide; stages for a model that
        has no pipeline.
    """
    model, stages = config.model, sizes["stage"]
    if stages > 1 and (model.permutation is not None or model.recurrent_encoder or model.recurrent_decoder):
        kind = "permutation" if model.permutation is not None else "recurrent"
        raise wrong("config.mesh.stage", stages, f"1 for a {kind} model, which has no pipeline")
    for name in model.parts:
        part, path = getattr(model, name), f"config.model.{name}"
        wanted = [("width", part.width, "fsdp"), ("embed.vocab", part.embed.vocab, "tensor")]
        if isinstance(part, RecurrentConfig):
            width = part.width // 2 if part.bidirectional else part.width
            wanted.append(("width", width, "tensor"))
        else:
            wanted += [("layers", part.layers, "stage"), ("microbatches", part.microbatches, "stage")]
            heads = part.attention.kv_heads or 0
            wanted.append(("attention.heads", part.attention.heads, "tensor"))
            wanted.append(("attention.kv_heads", heads if heads > sizes["tensor"] else None, "tensor"))
            if part.ffn is not None:
                wanted.append(("ffn.width", part.ffn.width or 4 * part.width, "tensor"))
            if part.moe is not None:
                wanted.append(("moe.experts", part.moe.experts, "expert"))
            if stages > 1 and part.norm.kind == "batch":
                raise wrong(f"{path}.norm.kind", "batch", "layer, rms or none: a pipeline never sees a whole batch")
        for field, size, axis in wanted:
            if size is not None and size % sizes[axis]:
                raise wrong(f"{path}.{field}", size, f"a multiple of mesh.{axis} ({sizes[axis]})", "change one of them")
