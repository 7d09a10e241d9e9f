"""Checks that the fields of a model section agree."""

from __future__ import annotations

import math
from typing import Any

from jaxformer import registry
from jaxformer.config.checks.fields import invalid
from jaxformer.config.layer_groups import has_unlike_layers, unlike_option
from jaxformer.config.schema import (
    AdapterConfig,
    Config,
    DeltaConfig,
    EmbedConfig,
    FeedForwardConfig,
    GeneratorConfig,
    ModelConfig,
    MoEConfig,
    RecurrentConfig,
    RopeScalingConfig,
    StackConfig,
)

GENERATOR = "config.model.generator.encoder"


def check_stack(stack: StackConfig, path: str, config: Config) -> None:
    """Checks a transformer stack.

    Raises:
      ConfigError: widths, heads, positions, experts or the kernel contradict each other or `data.length`.
    """
    attention, encoding = stack.attention, stack.encoding
    latent = attention.latent
    if stack.layers and latent is None and attention.head_width is None and stack.width % attention.heads:
        raise invalid(
            f"{path}.width", stack.width, f"a multiple of attention.heads ({attention.heads})",
            "change one of them, or set attention.head_width",
        )  # fmt: skip
    kv_heads = attention.heads if attention.kv_heads is None else attention.kv_heads
    if attention.heads % kv_heads:
        raise invalid(f"{path}.attention.kv_heads", kv_heads, f"a divisor of heads ({attention.heads})")
    if attention.input == "chunk":
        _check_chunks(stack, path)
    head_width = stack.width // attention.heads if attention.head_width is None else attention.head_width
    if latent is not None:
        _check_latent(stack, path)
        head_width = latent.rope_width  # what the encoding sees
    elif encoding.scaling is not None and encoding.scaling.score_scale:
        expected = "0 without attention.latent, which alone reads it"
        raise invalid(f"{path}.encoding.scaling.score_scale", encoding.scaling.score_scale, expected)
    if not attention.output and attention.heads * head_width != stack.width:
        raise invalid(
            f"{path}.attention.output", "False",
            f"heads * head_width ({attention.heads} * {head_width}) to equal the width ({stack.width})",
            "set output=True or change the head width",
        )  # fmt: skip
    if encoding.kind == "rope":
        rotated = int(head_width * encoding.fraction)
        _check_long_rope(encoding.scaling, rotated // 2, f"{path}.encoding.scaling")
        if rotated % 2 or rotated < 2:
            raise invalid(
                f"{path}.encoding.fraction", encoding.fraction,
                f"an even rotated width (head width {head_width} * fraction = {rotated})",
            )  # fmt: skip
    has_table = encoding.kind == "learned" or (encoding.kind == "deberta" and encoding.absolute)
    length = config.model.slots(path.rpartition(".")[2], config.data.length)
    if has_table and encoding.max_length - encoding.offset < length:
        slots = "data.length" if length == config.data.length else "the patches of data.length"
        expected = f"at least {slots} ({length})" + (" and the offset" if encoding.offset else "")
        raise invalid(f"{path}.encoding.max_length", encoding.max_length, expected)
    if encoding.kind == "transformer_xl" and stack.width % 2:
        raise invalid(f"{path}.width", stack.width, "an even width: sines and as many cosines", "change it")
    if encoding.kind == "t5" and encoding.buckets is None:
        raise invalid(f"{path}.encoding.buckets", None, "a number for t5")
    if encoding.kind == "deberta" and attention.heads * head_width != stack.width:
        expected = f"heads * head_width to equal the width ({stack.width}) with encoding.kind deberta"
        raise invalid(f"{path}.attention.head_width", head_width, expected)
    if stack.conv is not None and stack.conv.kernel % 2 == 0:
        raise invalid(f"{path}.conv.kernel", stack.conv.kernel, "an odd number, with a slot in the middle")
    if stack.conv is not None and stack.width % stack.conv.groups:
        raise invalid(f"{path}.conv.groups", stack.conv.groups, f"a divisor of the width ({stack.width})")
    ffn = stack.ffn
    if ffn is not None and not ffn.output and (ffn.width or 4 * stack.width) != stack.width:
        expected = f"the model width ({stack.width}), since ffn.output is False"
        raise invalid(f"{path}.ffn.width", ffn.width, expected, "change it, or set ffn.output")
    _check_sublayers(stack, path)
    _check_whole_rows(stack, path, config)
    if stack.moe is not None:
        _check_moe(stack.moe, ffn, f"{path}.moe")
        _check_dense_layers(stack, stack.moe, f"{path}.moe")
    if stack.delta is not None:
        _check_delta(stack, stack.delta, path)
    if stack.layers == 0:
        _check_no_layers(stack, path)
    if stack.share_layers and stack.norm.kind == "batch":
        raise invalid(f"{path}.share_layers", True, "False with norm.kind batch: running statistics are of one layer")
    if stack.norm.order in ("sandwich", "res_post") and stack.norm.kind == "none":
        raise invalid(f"{path}.norm.kind", "none", f"a norm, since norm.order is {stack.norm.order}")
    if attention.norm is None and attention.norm_over != "head":
        raise invalid(f"{path}.attention.norm_over", attention.norm_over, "head where attention.norm is None")
    for name in ("sink", "gate"):
        if getattr(attention, name) and attention.latent is not None:
            raise invalid(f"{path}.attention.{name}", True, "False with attention.latent")
    if attention.value_residual is not None:
        _check_value_residual(stack, path)
    if ffn is not None:
        _check_gates(ffn, f"{path}.ffn")
    # The generator's table may be wider than its layers: it has the width of the model's, which may be shared.
    _check_embedding(stack.embed, stack.width, path, may_be_wider=path == GENERATOR)
    if attention.kernel != "auto":
        kernel = registry.member("jaxformer.nn.kernels", attention.kernel, "KERNEL")
        bias = registry.member("jaxformer.nn.encodings", encoding.kind, "ENCODING").bias is not None
        reason = kernel.needs(attention, bias, attention.dropout > 0)
        if reason:
            raise invalid(f"{path}.attention.kernel", attention.kernel, "a kernel for this layer", reason)


def _check_value_residual(stack: StackConfig, path: str) -> None:
    """Raises ConfigError for values of the first layer where layers have no values of their own, or further ones."""
    own = stack.attention
    refused = {
        "with attention.latent, whose cache holds no values": own.latent is not None,
        "with attention.summary, whose values are of blocks": own.summary is not None,
        "where layers is below 2": stack.layers < 2,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid(f"{path}.attention.value_residual", "a section", f"None {reason}")


def _check_gates(ffn: FeedForwardConfig, path: str) -> None:
    """Raises ConfigError for what only some activations and gated layers read."""
    if ffn.slope != 1.0 and ffn.activation != "silu":
        raise invalid(f"{path}.slope", ffn.slope, f"1.0 with ffn.activation {ffn.activation}: only silu has one")
    for name, unset in (("limit", None), ("offset", 0.0)):
        if getattr(ffn, name) != unset and not ffn.gated:
            raise invalid(f"{path}.{name}", getattr(ffn, name), f"{unset} where ffn.gated is False")


def _check_sublayers(stack: StackConfig, path: str) -> None:
    """Raises ConfigError for orders of sub-layers, residual connections and windows that contradict each other."""
    own, order = stack.attention, stack.norm.order
    if stack.sublayers != "sequential":
        needed = {
            "norm.order": (order, "pre"),
            "ffn": ("a section" if stack.ffn else None, "a section"),
            "residual_after_norm": (stack.residual_after_norm, False),
            "residual_attention": (stack.residual_attention, True),
            "residual_ffn": (stack.residual_ffn, True),
        }
        for name, (value, expected) in needed.items():
            if value != expected:
                raise invalid(f"{path}.{name}", value, f"{expected} with sublayers {stack.sublayers}")
    if own.scale_width is not None and not own.scale:
        raise invalid(f"{path}.attention.scale_width", own.scale_width, "None where attention.scale is False")
    if stack.encoding.window_base is not None:
        if stack.encoding.kind != "rope":
            expected = f"None with encoding.kind {stack.encoding.kind}: only rope has it"
            raise invalid(f"{path}.encoding.window_base", stack.encoding.window_base, expected)
        if own.window is None:
            expected = "None where attention.window is None: no layer has it"
            raise invalid(f"{path}.encoding.window_base", stack.encoding.window_base, expected)
    if stack.residual_after_norm and order != "pre":
        raise invalid(f"{path}.residual_after_norm", True, f"False with norm.order {order}, which has no such norm")
    if not stack.first_norm:
        needed = {
            "norm.order": (order, "pre"),
            "sublayers": (stack.sublayers, "sequential"),
            "residual_after_norm": (stack.residual_after_norm, False),
            "share_layers": (stack.share_layers, False),
            "moe": ("a section" if stack.moe else None, None),
        }
        for name, (value, expected) in needed.items():
            if value != expected:
                raise invalid(f"{path}.{name}", value, f"{expected} where first_norm is False")
    if own.window_layers:
        if own.window is None:
            raise invalid(f"{path}.attention.window_layers", own.window_layers, "() where attention.window is None")
        if own.window_every != 1:
            raise invalid(f"{path}.attention.window_every", own.window_every, "1 where window_layers names the layers")
        numbers = set(own.window_layers)
        if len(numbers) < len(own.window_layers) or not numbers <= set(range(stack.layers)):
            expected = f"different numbers from 0 to {stack.layers - 1}"
            raise invalid(f"{path}.attention.window_layers", own.window_layers, expected)


def _check_whole_rows(stack: StackConfig, path: str, config: Config) -> None:
    """Raises ConfigError for blocks of a row's slots (sparse, summary) where slots are not those of one whole text."""
    own, encoding = stack.attention, stack.encoding
    present = [name for name in ("sparse", "summary") if getattr(own, name) is not None]
    if not present:
        return
    name, got = f"{path}.attention.{present[0]}", "a section" if own.sparse else own.summary
    causal = path.endswith("decoder") if stack.causal is None else stack.causal
    table = registry.member("jaxformer.nn.encodings", encoding.kind, "ENCODING")
    moves = table.rotate is not None or (table.bias is not None and encoding.kind != "t5")
    refused = {
        "with both": len(present) == 2,
        "in a causal stack, where slots ahead are hidden": bool(causal),
        "with data.packing, which puts several texts into a row": config.data.packing != "none",
        "with a window: the blocks are one already": own.sparse is not None and own.window is not None,
        f"with encoding.kind {encoding.kind}: a summary has no position": own.summary is not None and moves,
        "with attention.average_padding, whose padding sees all slots": own.average_padding,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid(name, got, f"None {reason}")


def _check_output_width(model: ModelConfig) -> None:
    """Raises ConfigError for a last projection whose result nothing can read."""
    for name, stack in model.stacks.items():
        if stack.output_width is None:
            continue
        path, decodes = f"config.model.{name}", model.decoder is not None
        if (name == "encoder" and decodes) or model.permutation is not None or model.generator is not None:
            raise invalid(f"{path}.output_width", stack.output_width, "None, unless the head alone reads this stack")
        tokens = model.head.kind == "tokens"
        if tokens and not model.head.projection:
            raise invalid(f"{path}.output_width", stack.output_width, "None, since head.projection is False")
        if tokens and model.head.tied and stack.output_width != (stack.embed.width or stack.width):
            expected = f"the width of the table of the tied head ({stack.embed.width or stack.width})"
            raise invalid(f"{path}.output_width", stack.output_width, expected, "change it, or untie the head")


def _check_chunks(stack: StackConfig, path: str) -> None:
    """Raises ConfigError for heads of chunks that do not divide the width, and for encodings that use projections."""
    own, expected = stack.attention, "a multiple of the heads, each of which reads a chunk of it"
    for heads in (own.heads, own.kv_heads or own.heads):
        if stack.width % heads:
            raise invalid(f"{path}.width", stack.width, expected, "change it, or set attention.input to whole")
    if registry.member("jaxformer.nn.encodings", stack.encoding.kind, "ENCODING").layer is not None:
        expected = f"whole for encoding.kind {stack.encoding.kind}, which projects positions of the model width"
        raise invalid(f"{path}.attention.input", "chunk", expected)


def _check_no_layers(stack: StackConfig, path: str) -> None:
    """Raises ConfigError for what only layers read."""
    encoding = registry.member("jaxformer.nn.encodings", stack.encoding.kind, "ENCODING")
    if encoding.embed is None and stack.encoding.kind != "none":
        expected = "none, or an encoding that is added to the embeddings, where layers is 0"
        raise invalid(f"{path}.encoding.kind", stack.encoding.kind, expected)
    for name in ("moe", "conv"):
        if getattr(stack, name) is not None:
            raise invalid(f"{path}.{name}", "a section", "None where layers is 0")


def _check_moe(moe: MoEConfig, ffn: FeedForwardConfig | None, path: str) -> None:
    if ffn is None:
        raise invalid(path, "a section", "None where there is no feed-forward layer", "set ffn too")
    if not ffn.output:
        raise invalid(path, "a section", "None where ffn.output is False: an expert has an output projection")
    if moe.top_k > moe.experts:
        raise invalid(f"{path}.top_k", moe.top_k, f"at most the experts ({moe.experts})")
    if moe.top_k == 1 and moe.normalise and moe.experts > 1:
        raise invalid(f"{path}.normalise", "True", "False with top_k 1: the only weight would always be 1")
    for name, unset in (("shared_width", None), ("shared_gate", False)):
        if getattr(moe, name) != unset and not moe.shared:
            raise invalid(f"{path}.{name}", getattr(moe, name), f"{unset} where moe.shared is 0")
    if moe.correction_rate and not moe.correction:
        raise invalid(f"{path}.correction_rate", moe.correction_rate, "0 where moe.correction is False")
    _check_groups(moe, path)


def _check_groups(moe: MoEConfig, path: str) -> None:
    """Raises ConfigError for groups of experts that do not divide them, or leave too few of them to a token."""
    if moe.experts % moe.groups:
        raise invalid(f"{path}.groups", moe.groups, f"a divisor of the experts ({moe.experts})")
    size, chosen = moe.experts // moe.groups, moe.top_groups or moe.groups
    if chosen > moe.groups:
        raise invalid(f"{path}.top_groups", chosen, f"at most the groups ({moe.groups})")
    if chosen < moe.groups and chosen * size < moe.top_k:
        expected = f"enough groups of {size} experts for top_k ({moe.top_k})"
        raise invalid(f"{path}.top_groups", chosen, expected)
    if moe.group_score == "top2" and chosen < moe.groups and size < 2:
        raise invalid(f"{path}.group_score", "top2", "max where a group has one expert")


def _check_dense_layers(stack: StackConfig, moe: MoEConfig, path: str) -> None:
    """Raises ConfigError for first layers without experts where all layers must have the same parameters."""
    if moe.dense_at:
        _check_dense_at(stack, moe, path)
    elif not moe.dense_layers and moe.dense_width is not None:
        raise invalid(f"{path}.dense_width", moe.dense_width, "None where dense_layers is 0")
    if not moe.dense_layers:
        return
    if stack.layers and moe.dense_layers >= stack.layers:
        expected = f"fewer than the layers ({stack.layers})"
        raise invalid(f"{path}.dense_layers", moe.dense_layers, expected, "set moe to None for dense layers alone")
    if stack.share_layers:
        raise invalid(f"{path}.dense_layers", moe.dense_layers, "0 with share_layers: layers then have one form")


def _check_dense_at(stack: StackConfig, moe: MoEConfig, path: str) -> None:
    """Raises ConfigError for numbers of dense layers that are none, or leave no layer with experts."""
    numbers = set(moe.dense_at)
    if len(numbers) < len(moe.dense_at) or not numbers <= set(range(moe.dense_layers, stack.layers)):
        expected = f"different numbers from {moe.dense_layers} to {stack.layers - 1}"
        raise invalid(f"{path}.dense_at", moe.dense_at, expected)
    if len(stack.dense_numbers) >= stack.layers:
        expected = f"fewer numbers than the layers ({stack.layers})"
        raise invalid(f"{path}.dense_at", moe.dense_at, expected, "set moe to None for dense layers alone")
    if stack.share_layers:
        raise invalid(f"{path}.dense_at", moe.dense_at, "() with share_layers: layers then have one form")


def _check_delta(stack: StackConfig, delta: DeltaConfig, path: str) -> None:
    """Raises ConfigError for heads and layers of the delta rule that contradict each other, and where it cannot be."""
    name, causal = f"{path}.delta", path.endswith("decoder") if stack.causal is None else stack.causal
    if delta.heads % delta.key_heads:
        expected = f"a multiple of key_heads ({delta.key_heads}), each of which serves as many of them"
        raise invalid(f"{name}.value_heads", delta.heads, expected)
    if delta.attention_layers is not None:
        if delta.attention_every != DeltaConfig.attention_every:
            expected = f"{DeltaConfig.attention_every} where attention_layers names the layers"
            raise invalid(f"{name}.attention_every", delta.attention_every, expected)
        numbers = set(delta.attention_layers)
        if len(numbers) < len(delta.attention_layers) or not numbers <= set(range(stack.layers)):
            expected = f"different numbers from 0 to {stack.layers - 1}"
            raise invalid(f"{name}.attention_layers", delta.attention_layers, expected)
    refused = {
        "in a stack that is not causal: the rule reads slots in order": not causal,
        "where no layer has it": not stack.delta_layers,
        "with share_layers: layers then have one form": stack.share_layers,
        "where first_norm is False": not stack.first_norm,
        "with attention.value_residual: layers without attention have no values": (
            stack.attention.value_residual is not None
        ),
        "with conv": stack.conv is not None,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid(name, "a section", f"None {reason}")


def _check_latent(stack: StackConfig, path: str) -> None:
    """Raises ConfigError for options of attention that latent attention does not have."""
    own, encoding = stack.attention, stack.encoding
    hooks = registry.member("jaxformer.nn.encodings", encoding.kind, "ENCODING")
    where = f"{path}.attention"
    needed = {
        f"{where}.kv_heads": (own.kv_heads, None),
        f"{where}.head_width": (own.head_width, None),
        f"{where}.input": (own.input, "whole"),
        f"{where}.output": (own.output, True),
        f"{where}.key_bias": (own.key_bias, None),
        f"{where}.norm": (own.norm, None),
        f"{where}.scale_by_layer": (own.scale_by_layer, False),
        f"{where}.temperature": ("a section" if own.temperature else None, None),
        f"{where}.sparse": (own.sparse, None),
        f"{where}.summary": (own.summary, None),
        f"{where}.average_padding": (own.average_padding, False),
        f"{path}.encoding.rotate_values": (encoding.rotate_values, False),
    }
    for name, (got, expected) in needed.items():
        if got != expected:
            raise invalid(name, got, f"{expected} with attention.latent, which does not have it")
    if hooks.bias is not None or hooks.layer is not None:
        expected = "rope, or an encoding that is added to the embeddings, with attention.latent"
        raise invalid(f"{path}.encoding.kind", encoding.kind, expected)
    if encoding.scaling is not None and encoding.scaling.score_scale and encoding.scaling.kind != "yarn":
        raise invalid(f"{path}.encoding.scaling.score_scale", encoding.scaling.score_scale, "0 where kind is not yarn")


def _check_long_rope(scaling: RopeScalingConfig | None, pairs: int, path: str) -> None:
    """Raises ConfigError for divisors of frequencies that are not one for each pair, or that no scaling reads."""
    if scaling is None:
        return
    count = pairs if scaling.kind == "longrope" else 0
    for name in ("short", "long"):
        divisors = getattr(scaling, name)
        if len(divisors) != count:
            expected = f"{count} numbers, one for each rotated pair" if count else f"() with kind {scaling.kind}"
            raise invalid(f"{path}.{name}", divisors, expected)
    if count and scaling.original < 2:
        raise invalid(f"{path}.original", scaling.original, "at least 2 with kind longrope")


def check_recurrent(stack: RecurrentConfig, path: str) -> None:
    """Raises ConfigError if the widths of a recurrent stack contradict each other."""
    if stack.bidirectional and stack.width % 2:
        raise invalid(f"{path}.width", stack.width, "an even width, half for each direction")
    _check_embedding(stack.embed, stack.width, path)


def _check_first_layers(model: ModelConfig) -> None:
    """Raises ConfigError for layers of two forms, or latent attention, where a part of a model has no such layers."""
    for name, stack in model.stacks.items():
        path = f"config.model.{name}"
        if model.permutation is not None and stack.attention.latent is not None:
            raise invalid(f"{path}.attention.latent", "a section", "None with model.permutation")
        if not has_unlike_layers(stack):
            continue
        refused = {
            "in a decoder with an encoder, whose output every layer projects": name == "decoder" and model.is_seq2seq,
            "with model.permutation": model.permutation is not None,
            "with adapter.layers, which counts equal layers": model.adapter is not None and bool(model.adapter.layers),
        }
        for reason, is_wrong in refused.items():
            if is_wrong:
                option, got, expected = unlike_option(stack)
                raise invalid(f"{path}.{option}", got, f"{expected} {reason}")


def _check_projected_sums(model: ModelConfig) -> None:
    """Raises ConfigError for embeddings whose sum is projected where another part expects the model width."""
    for name in model.parts:
        part: StackConfig | RecurrentConfig = getattr(model, name)
        if part.embed.projection == "table":
            continue
        path = f"config.model.{name}.embed.projection"
        if part.embed.width is None:
            raise invalid(path, "sum", "table where embed.width is None, or a width to project from")
        if isinstance(part, RecurrentConfig) or model.permutation is not None or part.layers == 0:
            raise invalid(path, "sum", "table for recurrent parts, permutations and stacks without layers")
        head, is_last = model.head, name == ("encoder" if model.decoder is None else "decoder")
        reads_table = head.kind == "tokens" and head.tied and head.projection and is_last
        if reads_table and not head.transform and (part.output_width or part.width) != part.embed.width:
            raise invalid(path, "sum", "table, or head.transform to give the tied head the width of the table")
        if head.kind == "tokens" and is_last and not head.projection and head.transform:
            raise invalid(path, "sum", "table, since head.projection is False")
    sides = [part.embed for part in (model.encoder, model.decoder) if part is not None]
    if model.share_embeddings and len({(embed.projection, embed.kinds) for embed in sides}) > 1:
        raise invalid("config.model.share_embeddings", True, "the same embed.projection and embed.kinds on both sides")


def _check_copying(model: ModelConfig) -> None:
    """Raises ConfigError for a head that copies where there is no source of tokens, or no distribution to mix with."""
    head, encoder, decoder = model.head, model.encoder, model.decoder
    if encoder is None or decoder is None or model.series is not None or head.kind != "tokens":
        expected = "False, except for a head of tokens of a transformer encoder and decoder that read texts"
        raise invalid("config.model.head.copy", True, expected)
    if not head.projection:
        raise invalid("config.model.head.copy", True, "False where head.projection is False")
    if head.chunk is not None:
        raise invalid("config.model.head.chunk", head.chunk, "None with head.copy, whose mixture needs all logits")
    if encoder.embed.vocab != decoder.embed.vocab:
        got = f"vocabularies of {encoder.embed.vocab} and {decoder.embed.vocab} tokens"
        raise invalid("config.model.head.copy", f"True with {got}", "equal vocabularies, so that ids can be copied")


def _check_matches(model: ModelConfig) -> None:
    """Raises ConfigError for tokens to compare where no whole pair of texts is read at once."""
    parts: dict[str, StackConfig | RecurrentConfig] = {name: getattr(model, name) for name in model.parts}
    if model.generator is not None:
        parts["generator.encoder"] = model.generator.encoder
    others = [name for name in ("decoder_part", "permutation", "generator") if getattr(model, name) is not None]
    for name, part in parts.items():
        if part.embed.matches and (others or (isinstance(part, StackConfig) and part.causal)):
            expected = "False, except for an encoder alone that sees both texts of a pair"
            raise invalid(f"config.model.{name}.embed.matches", True, expected)


def _check_embedding(embed: EmbedConfig, width: int, path: str, may_be_wider: bool = False) -> None:
    may_be_wider = may_be_wider or embed.projection == "sum"
    if embed.width is not None and embed.width > width and not may_be_wider:
        raise invalid(f"{path}.embed.width", embed.width, f"at most the model width ({width})")
    if embed.norm_before_positions and not embed.norm:
        raise invalid(f"{path}.embed.norm_before_positions", True, "False where embed.norm is False")
    if embed.dropout_first and (not embed.norm or embed.norm_before_positions):
        raise invalid(f"{path}.embed.dropout_first", True, "False, unless embed.norm is of the sum with positions")
    if embed.projection_bias and embed.width in (None, width) and embed.sum_width is None:
        raise invalid(f"{path}.embed.projection_bias", True, f"embed.width below the model width ({width}), or False")
    if embed.matches and embed.kinds < 2:
        expected = f"False with embed.kinds {embed.kinds}: only token types say where a text ends and the other begins"
        raise invalid(f"{path}.embed.matches", True, expected, "set embed.kinds=2")
    if embed.unmatched is not None and not embed.matches:
        raise invalid(f"{path}.embed.unmatched", embed.unmatched, "None where embed.matches is False")


def check_model(model: ModelConfig) -> None:
    """Checks that the sections of a model fit together.

    Raises:
      ConfigError: there are none, or of two families; attention without an encoder; embeddings that cannot be shared; a
        pooling that the encoder does not allow; adapters that are not described as they should be.
    """
    recurrent = [part for part in model.parts if part.startswith("recurrent_")]
    transformer = [part for part in model.parts if part not in recurrent]
    if model.series is not None or model.linear is not None or model.head.kind == "forecast":
        _check_series(model)
    if model.is_empty:
        raise invalid(
            "config.model", "no encoder and no decoder", "at least one", "add one in the recipe with section()"
        )
    if transformer and recurrent:
        raise invalid(
            "config.model", " and ".join(transformer + recurrent), "parts of one family",
            "set the transformer parts or the recurrent ones to None",
        )  # fmt: skip
    encoder, decoder = model.encoder_part, model.decoder_part
    reads_pairs = model.encoder is not None and decoder is None and model.permutation is None
    if model.head.residual_width is not None and (model.head.kind != "slots" or model.head.width is not None):
        expected = "None, unless head.kind is slots and head.width None"
        raise invalid("config.model.head.residual_width", model.head.residual_width, expected)
    if model.head.relation and not (model.head.kind == "tokens" and reads_pairs):
        expected = "False, unless a transformer encoder alone has a head of kind tokens"
        raise invalid("config.model.head.relation", True, expected)
    if model.recurrent_decoder is not None:
        if model.recurrent_decoder.bidirectional:
            raise invalid("config.model.recurrent_decoder.bidirectional", "True", "False: a decoder reads forwards")
        if model.recurrent_decoder.attention != "none" and encoder is None:
            raise invalid(
                "config.model.recurrent_decoder.attention", model.recurrent_decoder.attention,
                "none where there is no encoder",
            )  # fmt: skip
    if model.recurrent_encoder is not None and model.recurrent_encoder.attention != "none":
        attention = model.recurrent_encoder.attention
        raise invalid("config.model.recurrent_encoder.attention", attention, "none: it is the decoder that attends")
    if model.decoder is not None and model.decoder.causal is False and encoder is not None:
        raise invalid("config.model.decoder.causal", "False", "True or None: a decoder cannot see what it predicts")
    if model.decoder is not None and model.decoder.layers == 0 and encoder is not None:
        raise invalid("config.model.decoder.layers", 0, "at least 1 beside an encoder, which nothing would read")
    head = model.head
    if head.kind == "tokens" and not head.projection:
        for name in ("bias", "scale", "transform", "chunk"):
            if getattr(head, name):
                expected = "no such part, since head.projection is False"
                raise invalid(f"config.model.head.{name}", getattr(head, name), expected)
    if head.transform and head.kind not in ("tokens", "slots", "classes"):
        raise invalid("config.model.head.transform", True, f"False with head.kind {head.kind}")
    if head.transform and head.kind != "tokens" and (head.width is not None or head.residual_width is not None):
        raise invalid("config.model.head.transform", True, "False with another layer before the decision")
    for name in ("transform_bias", "transform_norm_bias"):
        if not getattr(head, name) and not head.transform:
            raise invalid(f"config.model.head.{name}", False, "True where head.transform is False: there is none")
    if model.head.soft_cap is not None and (model.head.kind != "tokens" or not model.head.projection):
        expected = "None: only logits of tokens, from an output matrix, are capped"
        raise invalid("config.model.head.soft_cap", model.head.soft_cap, expected)
    _check_output_width(model)
    _check_projected_sums(model)
    _check_matches(model)
    if model.head.copy:
        _check_copying(model)
    _check_first_layers(model)
    if model.decoder is not None and encoder is not None and model.decoder.sublayers != "sequential":
        expected = "sequential beside an encoder: cross-attention stands between the two sub-layers"
        raise invalid("config.model.decoder.sublayers", model.decoder.sublayers, expected)
    if model.share_embeddings:
        _check_shared_embeddings(encoder, decoder)
    if model.multi_token is not None:
        _check_multi_token(model)
    if model.permutation is not None:
        _check_permutation(model)
    if model.generator is not None:
        _check_generator(model, model.generator)
    if model.adapter is not None:
        check_adapter(model.adapter)
        if model.adapter.layers and any(stack.share_layers for stack in model.stacks.values()):
            raise invalid("config.model.adapter.layers", model.adapter.layers, "() where layers share their parameters")
        if model.generator is not None:
            raise invalid("config.model.adapter", "a section", "None beside config.model.generator", "take one away")
    if model.head.pooling == "end" and (model.head.kind != "classes" or model.encoder is None or model.decoder):
        expected = "first, mean or last, unless a transformer encoder alone has a head of kind classes"
        raise invalid("config.model.head.pooling", "end", expected)
    pools_last = model.head.pooling == "last" and model.head.kind in ("classes", "pair")
    bidirectional = model.recurrent_encoder is not None and model.recurrent_encoder.bidirectional
    if pools_last and bidirectional and model.head.kind == "pair":  # the backward direction has read one token there
        raise invalid("config.model.head.pooling", "last", "first or mean for pairs that are read in both directions")
    if (
        pools_last and model.encoder is not None and model.encoder.encoding.kind != "transformer_xl"
    ):  # XLNet's is the last
        raise invalid("config.model.head.pooling", "last", "first or mean for a transformer encoder")


def _check_multi_token(model: ModelConfig) -> None:
    """Raises ConfigError for modules that predict further tokens where they cannot be the decoder's kin."""
    stack, head = model.decoder, model.head
    if stack is None or model.has_encoder:
        raise invalid("config.model.multi_token", "a section", "None unless the model is a transformer decoder alone")
    refused = {
        f"with head.kind {head.kind}": head.kind != "tokens",
        "with decoder.causal False": stack.causal is False,
        "where decoder.layers is 0": stack.layers == 0,
        "with decoder.output_width": stack.output_width is not None,
        "with decoder.embed.projection sum": stack.embed.sum_width is not None,
        "with decoder.embed.kinds": stack.embed.kinds > 0,
        "with decoder.encoding.kind deberta": stack.encoding.kind == "deberta",
        "with decoder.norm.kind batch": stack.norm.kind == "batch",
        "with decoder.attention.scale_by_layer": stack.attention.scale_by_layer,
        "with model.adapter": model.adapter is not None,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid("config.model.multi_token", "a section", f"None {reason}")


def _check_series(model: ModelConfig) -> None:
    """Raises ConfigError if a part that reads a series is missing, or cannot do what the config says."""
    path, series, linear, head = "config.model.series", model.series, model.linear, model.head
    if series is None:
        got = "a section" if linear is not None else "forecast"
        where = "config.model.linear" if linear is not None else "config.model.head.kind"
        raise invalid(where, got, "a series to forecast", "add config.model.series with section()")
    if (model.encoder is None) == (linear is None):
        got = "a section, with encoder and linear" if linear is not None else "a section, without encoder and linear"
        raise invalid(path, got, "one of encoder and linear, which read it", "set the other to None")
    others = {
        "permutation": model.permutation is not None,
        "generator": model.generator is not None,
        "share_embeddings": model.share_embeddings,
    }
    for other in (name for name, is_set in others.items() if is_set):
        raise invalid(f"config.model.{other}", "True or a section", "none of it for an encoder of a series")
    if series.affine and series.normalise != "instance":
        raise invalid(f"{path}.affine", True, "False, or series.normalise=instance, whose scale it learns")
    if linear is not None:
        if head.kind != "forecast" or model.decoder is not None:
            raise invalid("config.model.linear", "a section", "head.kind forecast and no decoder")
        if linear.trend is not None and linear.trend % 2 == 0:
            raise invalid("config.model.linear.trend", linear.trend, "an odd number, with a step in the middle")
        if series.patch != 1 or series.stride is not None or series.independent:
            expected = "1, and no stride or independent: a linear forecast reads no patches, and channels one by one"
            raise invalid(f"{path}.patch", series.patch, expected)
    if series.independent and head.kind != "forecast":
        raise invalid(f"{path}.independent", True, f"False for head.kind {head.kind}, which sees all channels")
    if head.kind == "forecast" and model.decoder is not None:
        raise invalid("config.model.head.kind", "forecast", "a head of tokens for a decoder")
    if head.kind == "slots" or (head.kind == "tokens" and model.decoder is None):
        raise invalid("config.model.head.kind", head.kind, "forecast, classes, pooled or none for a series")
    if model.encoder is not None:
        embed, default = model.encoder.embed, EmbedConfig()
        for name in ("vocab", "width", "projection", "projection_bias", "kinds", "deviation", "pad", "matches"):
            if getattr(embed, name) != getattr(default, name):
                value, expected = getattr(embed, name), f"{getattr(default, name)} for a series, which has no table"
                raise invalid(f"config.model.encoder.embed.{name}", value, expected)


def _check_generator(model: ModelConfig, generator: GeneratorConfig) -> None:
    encoder, head = model.encoder, generator.head
    if encoder is None or model.decoder is not None or model.permutation is not None:
        raise invalid("config.model.generator", "a section", "None unless the model is a transformer encoder alone")
    if head.kind != "tokens":
        raise invalid("config.model.generator.head.kind", head.kind, "tokens: a masked language model")
    if head.copy:
        raise invalid("config.model.generator.head.copy", True, "False: a generator has no source to copy from")
    if head.chunk is not None:
        raise invalid("config.model.generator.head.chunk", head.chunk, "None: tokens are sampled from whole logits")
    if "batch" in (encoder.norm.kind, generator.encoder.norm.kind):
        raise invalid("config.model.generator", "a section", "None, or norms of other kinds than batch")
    if generator.encoder.embed.vocab != encoder.embed.vocab:
        expected = f"{encoder.embed.vocab}, as config.model.encoder.embed.vocab"
        raise invalid(f"{GENERATOR}.embed.vocab", generator.encoder.embed.vocab, expected)
    own, table = (stack.embed.width or stack.width for stack in (generator.encoder, encoder))
    if generator.sharing != "none" and own != table:
        expected = f"{table}, the width of the model's table, for sharing {generator.sharing}"
        raise invalid(f"{GENERATOR}.embed.width", own, expected, "set it, or generator.sharing to none")


def check_adapter(adapter: AdapterConfig) -> None:
    """Checks the entries of an adapter section. Its patterns are compared with the model's paths when that is built.

    Raises:
      ConfigError: there are no targets, an entry is not PATTERN=NUMBER, or a layer is named twice.
    """
    path = "config.model.adapter"
    if not adapter.targets:
        raise invalid(f"{path}.targets", adapter.targets, "at least one pattern", "set adapter to None for no adapters")
    for field, kind in (("ranks", "a whole number of at least 1"), ("alphas", "a number above 0")):
        for entry in getattr(adapter, field):
            pattern, _, number = entry.rpartition("=")
            is_valid = number.isdecimal() and int(number) > 0 if field == "ranks" else _is_positive(number)
            if not pattern or not is_valid:
                raise invalid(f"{path}.{field}", entry, f"PATTERN=NUMBER with {kind}, as ffn/in=4")
    if len(set(adapter.layers)) < len(adapter.layers) or min(adapter.layers, default=0) < 0:
        raise invalid(f"{path}.layers", adapter.layers, "different numbers of at least 0")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_permutation(model: ModelConfig) -> None:
    path, encoder = "config.model.permutation", model.encoder
    if encoder is None or model.decoder is not None:
        raise invalid(path, "a section", "None unless the model is a transformer encoder alone")
    if encoder.share_layers:
        raise invalid("config.model.encoder.share_layers", True, "False for a permutation model")
    if encoder.encoding.kind != "transformer_xl":
        raise invalid(path, "a section", f"encoding.kind transformer_xl (it is {encoder.encoding.kind})")
    if encoder.norm.order != "post" or encoder.ffn is None or encoder.moe is not None:
        raise invalid(path, "a section", "layers with a dense feed-forward part, and norm.order post")


def _check_shared_embeddings(encoder: Any, decoder: Any) -> None:
    path = "config.model.share_embeddings"
    if encoder is None or decoder is None:
        raise invalid(path, "True", "False where there is only one side")
    widths = [side.embed.width or side.width for side in (encoder, decoder)]
    if widths[0] != widths[1] or encoder.width != decoder.width:
        raise invalid(path, "True", f"equal widths of both sides (they are {widths[0]} and {widths[1]})")
    if encoder.embed.vocab != decoder.embed.vocab:
        raise invalid(path, "True", f"equal vocabularies (they are {encoder.embed.vocab} and {decoder.embed.vocab})")
