"""The model of a config as a diagram: blocks in the order of computation, with the shapes and counts of its parameters.

Every parameter of the built module belongs to exactly one block, so the counts add up to the model's. The order of the
blocks, the residual connections and the words come from the config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from flax import linen as nn

from jaxformer.analysis.draw.diagram import Block, Column, Diagram, Group, Layers
from jaxformer.config import HeadConfig, ModelConfig, RecurrentConfig, StackConfig
from jaxformer.config.layer_groups import layer_groups
from jaxformer.models import build
from jaxformer.nn.stack import has_final_norm
from jaxformer.types import leaf_path

LETTERS = {
    "vocab": "V",
    "embed": "D",
    "heads": "H",
    "kv_heads": "G",
    "head": "K",
    "ffn": "F",
    "experts": "E",
    "buckets": "R",
}
"""Letters of `types.py` by the logical names of parameters' axes; other axes are shown by their size."""

VECTOR_WORDS = ("bias", "scale")
"""Last words of the names of vectors, whose shapes are not listed beside those of kernels."""


@dataclass(frozen=True)
class Leaf:
    """A parameter of one layer: the components of its path in its block, logical names of its axes, and its shape."""

    words: tuple[str, ...]
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


ORDER = ("query_down", "query", "down", "up", "key", "value", "router", "in", "gate", "out")
"""Names of kernels in the order of computation; others follow by name."""

NAMES = {
    "bridge": "first state, from the encoder",
    "key": "keys of the attention",
    "mask_embed": "start of the query stream",
}
"""Words for parts of a model whose names in the tree of parameters do not say what they are."""

MAX_LISTED_LAYERS = 6
"""More layers with a window are counted and not listed."""

Leaves = dict[tuple[str, ...], list[Leaf]]
"""Parameters by their block: ("source_embed",), ("encoder", "blocks", "attention"), ("encoder", "final_norm")."""


def diagram(model: ModelConfig, title: str) -> Diagram:
    """The diagram of a model whose sizes are resolved (`build.resolve`). No array is made: shapes are traced.

    Raises:
      ConfigError: the parts of the config do not fit together.
    """
    module = build.build(model)
    leaves = group_leaves(model, nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module))
    columns: list[Column] = []
    if model.generator is not None:
        inner = {path[1:]: leaves.pop(path) for path in list(leaves) if path[0] == "generator"}
        base = _source_embedding(model.generator.encoder, inner, "source_embed", model.generator.sharing == "tied")
        head = _head(model.generator.head, inner, "source_embed")
        columns.append(_stack_column("generator", "encoder", model.generator.encoder, inner, base, head))
    for side in ("encoder", "decoder"):
        part = getattr(model, f"{side}_part")
        if part is None:
            continue
        is_last = side == "decoder" or model.decoder_part is None
        before = _input_blocks(model, side, leaves)
        after = [*_head(model.head, leaves, _tied_table(model)), *_copying(leaves)] if is_last else _memory(leaves)
        if isinstance(part, StackConfig):
            columns.append(_stack_column(side, side, part, leaves, before, after))
        else:
            columns.append(_recurrent_column(side, part, leaves, before, after))
    if model.linear is not None:
        blocks = [_block(path[-1], "ffn", leaves.pop(path)) for path in list(leaves) if path[0] != "series"]
        columns.append(Column("linear forecast", tuple(_series_blocks(leaves)), (), tuple(blocks)))
    columns = _with_rest(columns, leaves)
    arrow = "tokens" if model.generator is not None else "memory" if model.is_seq2seq else ""
    return Diagram(title, tuple(columns), arrow)


def group_leaves(model: ModelConfig, params: Mapping, names: Mapping) -> Leaves:
    """The parameters of a module by block, and of stacked layers the shape in one layer.

    The axis of an embedding table is the model width D where it has that size.
    """
    found: Leaves = {}
    part, generator = model.encoder_part or model.decoder_part, model.generator
    width = 0 if part is None else part.width
    axes_of = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    for (keys, leaf), axes in zip(jax.tree_util.tree_leaves_with_path(params), axes_of, strict=True):
        path = leaf_path(keys)
        axes, shape = axes or (None,) * len(leaf.shape), tuple(leaf.shape)
        if axes[:1] == ("layers",):
            axes, shape = axes[1:], shape[1:]
        own = generator.encoder.width if generator is not None and path[0] == "generator" else width
        axes = tuple("embed" if axis == "table" and size == own else axis for axis, size in zip(axes, shape))
        depth = _depth(path)
        found.setdefault(path[:depth], []).append(Leaf(path[depth:], axes, shape))
    return found


def _depth(path: tuple[str, ...]) -> int:
    """Number of words of a parameter's path that name its block."""
    start = 1 if path[0] == "generator" else 0
    if path[start] not in ("encoder", "decoder"):
        return start + 1
    return min(start + (3 if path[start + 1].startswith(("dense_blocks", "blocks")) else 2), len(path))


# --- columns ----------------------------------------------------------------------------------------------------------


def _stack_column(
    title: str, side: str, stack: StackConfig, leaves: Leaves, before: list[Block], after: list[Block]
) -> Column:
    """A transformer stack. Uses up its leaves."""
    before = [*before, *_position_blocks(side, stack, leaves)]
    if stack.conv is not None and (side, "conv") in leaves:
        before.append(_block("convolution, added after layer 1", "ffn", leaves.pop((side, "conv"))))
    groups, layers = layer_groups(stack), []
    for group in groups:
        form = group.stack if len(groups) == 1 else _own_windows(group.stack, stack, group.first)
        layers.append(Layers(_layer_groups((side, group.name), form, leaves), form.layers, stack.share_layers))
    ends: list[Block] = []
    if has_final_norm(stack) and stack.norm.kind != "none":
        ends.append(_block(f"{stack.norm.kind} norm", "norm", leaves.pop((side, "final_norm"), [])))
    if stack.output_width is not None:
        ends.append(_block("last projection", "head", leaves.pop((side, "output_projection"))))
    return Column(title, tuple(before), tuple(layers), (*ends, *after))


def _own_windows(part: StackConfig, stack: StackConfig, start: int) -> StackConfig:
    """The layers `part` of `stack`, with the windows of its own layers; they are numbered from `start`."""
    if stack.attention.window is None:
        return part
    numbers = tuple(number for number in stack.windowed_layers if start <= number < start + part.layers)
    window = stack.attention.window if numbers else None
    own = dataclasses.replace(part.attention, window=window, window_layers=numbers, window_every=1)
    return dataclasses.replace(part, attention=own)


def _layer_groups(prefix: tuple[str, str], stack: StackConfig, leaves: Leaves) -> tuple[Group, ...]:
    """The sub-layers of one of the layers at `prefix`, with norms and residual connections as in the config."""
    sublayers = [("attention", "self-attention", "attention", stack.residual_attention)]
    if stack.delta is not None:
        leaves[(*prefix, "attention")] = leaves.pop((*prefix, "gated_delta"), [])
        sublayers = [("attention", "gated delta rule", "recurrent", stack.residual_attention)]
    if (*prefix, "cross") in leaves:
        sublayers.append(("cross", "cross-attention", "cross", stack.residual_cross))
    if stack.ffn is not None:
        name = "feed-forward" if stack.moe is None else "mixture of experts"
        sublayers.append(("ffn", name, "ffn", stack.residual_ffn))
    groups = []
    for key, name, kind, residual in sublayers:
        core = _block(name, kind, leaves.pop((*prefix, key), []), _sublayer_words(key, stack))
        shares_norm = key == "ffn" and stack.sublayers == "parallel_one_norm"
        has_none = shares_norm or (key == "attention" and not stack.first_norm)
        first = [] if has_none else _norm(stack, leaves.pop((*prefix, f"{key}_norm"), []))
        last = _norm(stack, leaves.pop((*prefix, f"{key}_post_norm"), []))
        if stack.norm.order == "post":
            groups += [Group((core,), residual), *([Group(tuple(first))] if first else [])]
        elif stack.norm.order == "res_post":
            groups.append(Group((core, *first), residual))
        else:
            groups.append(Group((*first, core, *(last if stack.norm.order == "sandwich" else [])), residual))
    for path in [path for path in leaves if path[:2] == prefix]:
        groups.append(Group((_rest_block(path, leaves),)))
    return tuple(groups)


def _norm(stack: StackConfig, leaves: list[Leaf]) -> list[Block]:
    return [] if stack.norm.kind == "none" else [_block(f"{stack.norm.kind} norm", "norm", leaves)]


def _sublayer_words(key: str, stack: StackConfig) -> list[str]:
    """Lines about a sub-layer that its shapes do not say: heads, encoding, window, activation, experts."""
    attention, ffn, moe = stack.attention, stack.ffn, stack.moe
    if key == "ffn" and ffn is not None:
        words = f"{'gated ' if ffn.gated else ''}{ffn.activation}"
        words = words if moe is None else f"{words}, {moe.top_k} of {moe.experts} experts a token"
        beside = {
            "sequential": [],
            "parallel": ["beside attention: reads the layer's input"],
            "parallel_one_norm": ["beside attention: reads what it reads"],
        }
        return [words, *beside[stack.sublayers]]
    if stack.delta is not None and key == "attention":
        delta, of_keys = (
            stack.delta,
            f", {stack.delta.key_heads} for keys" * (stack.delta.key_heads != stack.delta.heads),
        )
        size = f"{delta.key_width} x {delta.value_width}"
        return [f"{delta.heads} heads{of_keys}, states of {size}, convolution of {delta.conv_kernel} slots"]
    heads, groups = attention.heads, attention.kv_heads or attention.heads
    words = [f"{heads} head{'s' * (heads > 1)}"]
    words += [f"{groups} for keys and values"] if groups != heads else []
    words += [f"keys and values from {attention.latent.rank} latent channels"] if attention.latent is not None else []
    if key == "attention":
        words += [stack.encoding.kind] if stack.encoding.kind not in ("none", "sinusoidal", "learned") else []
        words += [f"window {attention.window}{_window_layers(stack)}"] if attention.window is not None else []
        words += [f"blocks of {attention.sparse.size}"] if attention.sparse is not None else []
        words += [f"summaries of {attention.summary} slots"] if attention.summary is not None else []
        words += ["temperature by position"] if attention.temperature is not None else []
        words += ["gated"] if attention.gate else []
        words += ["values mixed with the first layer's"] if attention.value_residual is not None else []
    after_norm = ["the residual starts after the norm"] if stack.residual_after_norm else []
    return [", ".join(words), *after_norm]


def _window_layers(stack: StackConfig) -> str:
    """Words for the layers that have the window, where others have none."""
    numbers = stack.windowed_layers
    if len(numbers) == stack.layers:
        return ""
    if len(numbers) > MAX_LISTED_LAYERS:
        return f" in {len(numbers)} of {stack.layers} layers"
    return f" in layer{'s' * (len(numbers) > 1)} {', '.join(str(number + 1) for number in numbers)}"


def _recurrent_column(
    side: str, part: RecurrentConfig, leaves: Leaves, before: list[Block], after: list[Block]
) -> Column:
    """A recurrent stack, whose layers differ and are drawn one by one. Uses up its leaves."""
    blocks, layers = [], {}
    for path in [path for path in leaves if path[0] == side]:
        number = path[1].rpartition("_")[2]
        if number.isdecimal():  # both directions of a layer are one block
            layers.setdefault(int(number), []).extend(leaves.pop(path))
        else:
            block = _block(NAMES.get(path[1], path[1]), "recurrent", leaves.pop(path))
            blocks.append(Block(block.name, block.kind, block.parameters, block.detail, is_aside=True))
    for number, own in sorted(layers.items()):
        words = [f"{part.attention} attention"] if part.attention != "none" and number == 0 else []
        words += ["both directions, each of"] if part.bidirectional else []
        blocks.append(_block(f"{part.cell} layer {number + 1}", "recurrent", own, words))
    return Column(side, tuple(before), (), (*blocks, *after))


def _with_rest(columns: list[Column], leaves: Leaves) -> list[Column]:
    """The columns, with a block for every parameter that none of them has, in the first or the one of its side."""
    for path in list(leaves):
        titles = [column.title for column in columns]
        number = titles.index(path[0]) if path[0] in titles else len(columns) - 1
        before = (*columns[number].before, _rest_block(path, leaves))
        columns[number] = dataclasses.replace(columns[number], before=before)
    return columns


def _rest_block(path: tuple[str, ...], leaves: Leaves) -> Block:
    """A block for parameters that no other has, by the words of their path."""
    return _block(NAMES.get(path[-1], " ".join(path).replace("_", " ")), "position", leaves.pop(path))


# --- blocks -----------------------------------------------------------------------------------------------------------


def _input_blocks(model: ModelConfig, side: str, leaves: Leaves) -> list[Block]:
    """The embedding of one side, or the patches of a series."""
    name = "source_embed" if side == "encoder" else "target_embed"
    part = getattr(model, f"{side}_part")
    if side == "encoder" and model.series is not None:
        return [
            *_series_blocks(leaves),
            _block(
                f"patches of {model.series.patch} step{'s' * (model.series.patch > 1)}",
                "embedding",
                leaves.pop((name,), []),
            ),
        ]
    if (name,) not in leaves:  # one table for both sides
        return [Block("embedding", "embedding", 0, ("the encoder's table",))]
    is_shared = model.generator is not None and model.generator.sharing == "disentangled"
    return _source_embedding(part, leaves, name, False, "plus the generator's table" if is_shared else "")


def _source_embedding(
    part: StackConfig | RecurrentConfig, leaves: Leaves, name: str, is_tied: bool, note: str = ""
) -> list[Block]:
    words = ["times sqrt(D)"] if part.embed.scale else []
    words += ["the model's table"] if is_tied else []
    words += [note] if note else []
    return [_block("embedding", "embedding", leaves.pop((name,), []), words)]


def _series_blocks(leaves: Leaves) -> list[Block]:
    return [_block("normalised series", "norm", leaves.pop(("series",)))] if ("series",) in leaves else []


def _position_blocks(side: str, stack: StackConfig, leaves: Leaves) -> list[Block]:
    """Positions that are added to the input or shared by the layers, and the norm of the input."""
    kind, blocks = stack.encoding.kind, []
    own = leaves.pop((side, "position"), [])
    if kind in ("sinusoidal", "learned") or own:
        blocks.append(_block(f"{kind} positions, added", "position", own))
    if (side, "shared") in leaves:
        blocks.append(_block(f"{kind} positions, for all layers", "position", leaves.pop((side, "shared"))))
    if stack.embed.norm and stack.norm.kind != "none":
        blocks.append(_block(f"{stack.norm.kind} norm", "norm", leaves.pop((side, "embed_norm"), [])))
    if stack.embed.sum_width is not None:
        blocks.append(_block("projection of the sum", "embedding", leaves.pop((side, "embed_projection"))))
    return blocks


def _tied_table(model: ModelConfig) -> str:
    shared = model.share_embeddings and model.has_encoder
    return "target_embed" if model.has_decoder and not shared else "source_embed"


def _head(head: HeadConfig, leaves: Leaves, table: str) -> list[Block]:
    """The output layer."""
    own = leaves.pop(("head",), [])
    if head.kind == "none" and not own:
        return []
    outputs = {
        "tokens": "logits over the vocabulary",
        "slots": f"{head.classes} classes a slot",
        "classes": f"{head.classes} classes",
        "pooled": "a vector",
        "pair": "a vector of each text",
        "forecast": f"{head.horizon} steps",
    }
    words = [outputs.get(head.kind, head.kind)]
    if head.kind == "tokens" and not head.projection:
        words.append("hidden states as they are")
    elif head.kind == "tokens" and head.tied:
        words.append("with the embedding table")
    return [_block("head", "head", own, words)]


def _memory(leaves: Leaves) -> list[Block]:
    """The projection of the encoder's output to the width of the decoder."""
    own = leaves.pop(("memory_projection",), [])
    return [_block("projection to the decoder's width", "head", own)] if own else []


def _copying(leaves: Leaves) -> list[Block]:
    """The mixture of the head's distribution with one over the tokens of the source."""
    own = leaves.pop(("copying",), [])
    words = ["mixes the head's probabilities with those of the source's tokens"]
    return [_block("copying", "head", own, words)] if own else []


def _block(name: str, kind: str, leaves: Sequence[Leaf], words: Sequence[str] = ()) -> Block:
    """A block with a line for each shape of its kernels, and one for its vectors beside kernels."""
    leaves = sorted(leaves, key=lambda leaf: [ORDER.index(w) if w in ORDER else len(ORDER) for w in leaf.words])
    kernels = [leaf for leaf in leaves if not _is_vector(leaf)]
    vectors = [leaf for leaf in leaves if _is_vector(leaf)]
    shapes: dict[str, list[str]] = {}
    for leaf in kernels if kernels else vectors:
        names = shapes.setdefault(_shape(leaf), [])
        names += [_leaf_name(leaf)] if _leaf_name(leaf) not in names else []
    lines = [f"{', '.join(names)}  {shape}" if any(names) else shape for shape, names in shapes.items()]
    if kernels and vectors:
        lines.append(f"biases and scales  {sum(leaf.size for leaf in vectors):,}")
    return Block(name, kind, sum(leaf.size for leaf in leaves), (*filter(None, words), *lines))


def _is_vector(leaf: Leaf) -> bool:
    return bool(leaf.words) and leaf.words[-1].endswith(VECTOR_WORDS)


def _leaf_name(leaf: Leaf) -> str:
    words = [word for word in leaf.words if word not in ("kernel", "table", "batch")]
    return " ".join(words).replace("_", " ")


def _shape(leaf: Leaf) -> str:
    """ "D x H x K = 512 x 8 x 64"; without letters for axes that have none."""
    sizes = " x ".join(f"{size:,}" for size in leaf.shape) or "1"
    letters = [LETTERS.get(axis or "", "") for axis in leaf.axes]
    if not any(letters):
        return sizes
    named = " x ".join(letter or f"{size:,}" for letter, size in zip(letters, leaf.shape, strict=True))
    return f"{named} = {sizes}"
