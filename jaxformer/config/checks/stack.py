"""Checks that the fields of a stack agree: its attention, feed-forward layers, experts, positions and embedding."""

from __future__ import annotations

from jaxformer import registry
from jaxformer.config.checks.fields import invalid
from jaxformer.config.schema import (
    Config,
    DeltaConfig,
    EmbedConfig,
    FeedForwardConfig,
    MoEConfig,
    RecurrentConfig,
    RopeScalingConfig,
    StackConfig,
)

GENERATOR = "config.model.generator.encoder"
"""Path of the encoder of a generator, whose table may be wider than its layers."""


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
