"""The layers of a transformer one at a time: what each attends to and puts out, with parts of it edited.

The host walks over the layers. One program serves all layers of a stack: it gets the parameters of the layer at hand,
so at any time the device holds those of one layer beside the embeddings and the head, and the probabilities of one
layer. Parameters on the host (numpy arrays, views of a file) are copied layer by layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.config.layer_groups import layer_groups
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import Attention
from jaxformer.nn.block import Block
from jaxformer.nn.convolution import Convolved
from jaxformer.nn.kernels import dense
from jaxformer.nn.latent_attention import LatentAttention
from jaxformer.nn.stack import RowInputs, Stack
from jaxformer.types import Array, Batch, DeferredLogits, PyTree, RelationLogits, Slots, Stream

Side = Literal["encoder", "decoder"]
STREAMS: dict[str, Literal["source", "target"]] = {"encoder": "source", "decoder": "target"}
"""Stream that each side reads."""
MAX_FREE_MAP = 256
"""Up to this length probabilities are always computed: that costs less than to compile a program without them."""

LOGIT_HEADS = ("tokens", "slots", "classes")
"""Kinds of heads whose outputs are logits."""


class PartOutputs(NamedTuple):
    """Outputs of a layer's parts, before a norm or dropout that follows them.

    Attributes:
      heads: `[B, T, H, K]`, each head's output, before the output projection.
      attention: `[B, T, D]`, the output of self-attention.
      mlp: `[B, T, D]`, the feed-forward layer's; None without one.
    """

    heads: Array
    attention: Array
    mlp: Array | None


class Replacement(NamedTuple):
    """Outputs of another text's parts, and where they replace a layer's own.

    Attributes:
      source: outputs of one row.
      heads: bool `[B, H]`, the heads that are replaced at all slots.
      attention, mlp: bool `[B, T]`, the slots at which the outputs are replaced.
    """

    source: PartOutputs
    heads: Array
    attention: Array
    mlp: Array


class Edits(NamedTuple):
    """Factors of the parts of a layer, one for each row of the batch: 0 removes a part, 1 leaves it.

    Attributes:
      attention, cross: `[B, H]`, of each head's output, before the output projection.
      mlp: `[B]`, of the feed-forward layer's output.
      replacement: outputs that take the place of the layer's own; None: none.
    """

    attention: Array
    cross: Array
    mlp: Array
    replacement: Replacement | None = None


class LayerOutput(NamedTuple):
    """Output of a layer: `x` `[B, T, D]`, and probabilities `[B, H, T, S]` of attention and cross-attention."""

    x: Array
    attention: Array | None = None
    cross: Array | None = None


class SideInputs(NamedTuple):
    """Inputs that all layers of a side share: slots, token types, the encoder's output (decoders), a convolution."""

    slots: Slots
    token_type: Array | None
    memory: Array | None = None
    memory_slots: Slots | None = None
    convolved: Convolved | None = None

    @property
    def rows(self) -> RowInputs:
        return RowInputs(self.slots, self.token_type, self.memory, self.memory_slots, self.convolved)


class Visit(NamedTuple):
    """A layer after it has run.

    Attributes:
      side: "encoder" or "decoder".
      layer: index from 0; -1 for the input of the first layer.
      output: its results.
      inputs: what all layers of the side read.
    """

    side: Side
    layer: int
    output: LayerOutput
    inputs: SideInputs


ATTENTION = (Attention, LatentAttention)
Replace = Callable[[Side, int, Array], Array]
"""`(side, layer, x) -> x`: the residual stream to go on with after a layer (-1: the input of the first)."""


@dataclass(frozen=True, eq=False)
class Reader:
    """A transformer whose layers run one at a time.

    Attributes:
      module: `models.transformer.Transformer` or one of its kind.
      variables: its variables, with "params" among them.

    Raises:
      ConfigError: layers read values of the first layer (`attention.value_residual`).
    """

    module: nn.Module
    variables: Mapping[str, PyTree]

    def __post_init__(self) -> None:
        for side in self.sides:
            if getattr(self.config, side).attention.value_residual is not None:
                expected = "None: a layer that runs alone has no values of the first one"
                raise ConfigError(f"analysis of layers: got {side}.attention.value_residual, expected {expected}")

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.module.config
        return config

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides of the model in their order."""
        sides: tuple[Side, ...] = ("encoder", "decoder")
        return tuple(side for side in sides if getattr(self.config, side) is not None)

    @functools.cached_property
    def rest(self) -> dict[str, PyTree]:
        """The variables without those of the layers."""
        return {name: _without_blocks(part) for name, part in self.variables.items()}

    def layer_variables(self, side: Side, layer: int) -> dict[str, PyTree]:
        """The variables of one layer."""
        group = next(group for group in layer_groups(getattr(self.config, side)) if layer in group.numbers)
        layer -= group.first
        collections = ((name, part.get(side, {})) for name, part in self.variables.items())
        stacked = {name: part[group.name] for name, part in collections if group.name in part}
        if getattr(self.config, side).share_layers:  # with nothing beside parameters: batch norm is refused
            return {"params": stacked["params"]}
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(stacked)):
            return select_layer(stacked, layer)
        return jax.tree.map(lambda x: x[layer], stacked)  # on the host: the device gets this layer alone

    def layers(self, side: Side) -> int:
        """Number of layers of a side."""
        return getattr(self.config, side).layers

    def heads(self, side: Side) -> int:
        """Number of query heads of a side."""
        return getattr(self.config, side).attention.heads

    def attention_layers(self, side: Side) -> tuple[int, ...]:
        """Numbers of the layers of a side that have attention, and not the gated delta rule."""
        stack: StackConfig = getattr(self.config, side)
        return tuple(number for number in range(stack.layers) if number not in stack.delta_layers)

    def check_heads(self, method: str) -> None:
        """Raises a ConfigError, which begins with `method`, if a layer has no attention."""
        for side in self.sides:
            if getattr(self.config, side).delta is not None:
                expected = "None: layers with the gated delta rule attend to no slots"
                raise ConfigError(f"{method}: got {side}.delta, expected {expected}; use model.lens")

    def no_edits(self, side: Side, rows: int) -> Edits:
        """Edits that change nothing."""
        ones = jnp.ones((rows, self.heads(side)))
        return Edits(ones, ones, jnp.ones(rows))

    def walk(
        self,
        batch: Batch,
        edits: Mapping[tuple[Side, int], Edits] | None = None,
        maps: Callable[[Side, int], bool] = lambda side, layer: False,
        replace: Replace | None = None,
    ) -> Iterator[Visit]:
        """Runs all layers, those of the encoder first, and yields each, preceded by the input of its side.

        Args:
          edits: of the layers that are changed.
          maps: True for the layers whose probabilities are wanted; others may have them, too.
          replace: changes the residual stream between layers.
        """
        memory: Array | None = None
        memory_slots: Slots | None = None
        for side in self.sides:
            stream = batch.side(STREAMS[side])
            x, convolved = embed(self.module, self.rest, stream, side)
            inputs = SideInputs(stream.slots, stream.token_type, memory, memory_slots, convolved)
            for visit in self.resume(side, -1, x, inputs, edits, maps, replace):
                yield visit
                x = visit.output.x
            if side == "encoder":
                memory, memory_slots = finish(self.module, self.rest, x, stream.slots, side), stream.slots

    def resume(
        self,
        side: Side,
        layer: int,
        x: Array,
        inputs: SideInputs,
        edits: Mapping[tuple[Side, int], Edits] | None = None,
        maps: Callable[[Side, int], bool] = lambda side, layer: False,
        replace: Replace | None = None,
    ) -> Iterator[Visit]:
        """The layers of one side after `layer`, whose output is `x`; that one is yielded first."""
        x = x if replace is None else replace(side, layer, x)
        yield Visit(side, layer, LayerOutput(x), inputs)
        for index in range(layer + 1, self.layers(side)):
            edit = (edits or {}).get((side, index)) or self.no_edits(side, x.shape[0])
            weights = self.layer_variables(side, index)
            with_maps = maps(side, index) or (x.shape[0] == 1 and x.shape[1] <= MAX_FREE_MAP)
            output = run_layer(self.module, self.rest, weights, jnp.int32(index), x, inputs, edit, side, with_maps)
            x = output.x if replace is None else replace(side, index, output.x)
            yield Visit(side, index, output._replace(x=x), inputs)

    def part_outputs(self, previous: Visit, visit: Visit) -> PartOutputs:
        """Outputs of the parts of a layer whose input is the output of `previous`."""
        weights = self.layer_variables(visit.side, visit.layer)
        layer, x = jnp.int32(visit.layer), previous.output.x
        return run_parts(self.module, self.rest, weights, layer, x, visit.inputs, visit.side)

    def logits(self, x: Float[Array, "B T D"], slots: Slots) -> Float32[Array, "B ..."]:
        """Logits of a residual stream after the final norm and the head: `[B, T, V]`, or `[B, C]` of a classifier."""
        return read_out(self.module, self.rest, x, slots, self.sides[-1])

    def finish(self, side: Side, last: Visit) -> Float[Array, "B T D"]:
        """Output of a side whose last layer was `last`."""
        return finish(self.module, self.rest, last.output.x, last.inputs.slots, side)

    def decoder_input(self, batch: Batch, rows: int) -> tuple[Float[Array, "B T D"], SideInputs]:
        """Input of the decoder's first layer for `rows` copies of a batch's only row; its slots, without a memory."""
        stream = batch.side("target")
        stream = repeat_rows(stream, rows)
        x, convolved = embed(self.module, self.rest, stream, "decoder")
        return x, SideInputs(stream.slots, stream.token_type, convolved=convolved)

    def check_logits(self, method: str) -> None:
        """Raises a ConfigError, which begins with `method`, if the head gives no logits."""
        kind = self.config.head.kind
        if kind not in LOGIT_HEADS:
            raise ConfigError(f"{method}: got a head of kind {kind!r}, expected one of {', '.join(LOGIT_HEADS)}")


def _without_blocks(part: PyTree) -> PyTree:
    """A collection without the layers of its sides."""
    kept = {
        side: {k: v for k, v in part[side].items() if not k.startswith(("dense_blocks", "blocks"))}
        for side in STREAMS
        if side in part
    }
    return {**part, **kept}


def apply(module: nn.Module, variables: PyTree, function: Callable[[Any], Any]) -> Any:
    """Result of a function of the bound module."""
    return module.apply(variables, method=function)


@jax.jit
def select_layer(stacked: PyTree, layer: Int[Array, ""] | int) -> PyTree:
    """One layer of arrays `[L, ...]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacked)


@functools.partial(jax.jit, static_argnums=1)
def repeat_rows(tree: PyTree, rows: int) -> PyTree:
    """Arrays of one row with that row `rows` times."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), tree)


@jax.jit
def select_row(tree: PyTree, row: Int[Array, ""] | int) -> PyTree:
    """Arrays of one of many rows, with an axis of one row."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), tree)


def _stack(module: Any, side: Side) -> Stack:
    return module.encoder if side == "encoder" else module.decoder


def _block(stack: Stack, weights: PyTree) -> Block:
    """The module of a layer with these variables, which tell its form where layers have several."""
    params, config = weights["params"], stack.resolved

    def has_form(form: StackConfig) -> bool:
        if not config.first_norm:
            return form.first_norm == ("attention_norm" in params)
        has_experts, has_delta = "router" in params.get("ffn", {}), "gated_delta" in params
        return (form.moe is not None) == has_experts and (form.delta is not None) == has_delta

    return Block(next(group.stack for group in layer_groups(config) if has_form(group.stack)), parent=None)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def embed(
    module: nn.Module, rest: PyTree, stream: Stream, side: Side
) -> tuple[Float[Array, "B T D"], Convolved | None]:
    """Input of the first layer, and the convolution of it that the first layer adds (None for most models)."""

    def run(model: Any) -> tuple[Array, Convolved | None]:
        table, stack = model.source_embed if side == "encoder" else model.input_embed(), _stack(model, side)
        x = stack.prepare_input(table(stream), stream.slots)
        return x, None if stack.config.conv is None else stack.conv(x, stream.slots.segment)

    return apply(module, rest, run)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def finish(module: nn.Module, rest: PyTree, x: Float[Array, "B T D"], slots: Slots, side: Side) -> Array:
    """The output of a side `[B, T, _]`: its last layer's after the final norm and the last projection, if any.

    An encoder's is in the width of the decoder that reads it.
    """

    def output(model: Any) -> Array:
        y = _stack(model, side).finish(x, slots)
        return model.memory(y) if side == "encoder" and model.config.is_seq2seq else y

    return apply(module, rest, output)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def read_out(module: nn.Module, rest: PyTree, x: Float[Array, "B T D"], slots: Slots, side: Side) -> Array:
    """The head's logits of a residual stream, after the final norm."""
    return apply(module, rest, lambda model: logits_of(model, x, slots, side))


def logits_of(model: Any, x: Float[Array, "B T D"], slots: Slots, side: Side) -> Float32[Array, "B ..."]:
    """`read_out` of a bound module.

    Raises:
      ConfigError: the head copies from the source, whose keys the residual stream does not hold.
    """
    if model.config.head.copy:
        expected = "False: its predictions are not those of a residual stream alone"
        raise ConfigError(f"analysis of predictions: got a model with head.copy True, expected {expected}")
    y = model.head(_stack(model, side).finish(x, slots), slots, model.output_embed())
    if isinstance(y, RelationLogits):
        y = y.tokens
    if isinstance(y, DeferredLogits):
        raise TypeError("head: got deferred logits, expected all of them")
    return y


@functools.partial(jax.jit, static_argnames=("module", "side", "with_maps"))
def run_layer(
    module: nn.Module,
    rest: PyTree,
    weights: PyTree,
    layer: Int[Array, ""],
    x: Float[Array, "B T D"],
    inputs: SideInputs,
    edits: Edits,
    side: Side,
    with_maps: bool,
) -> LayerOutput:
    """One layer; `with_maps` computes its probabilities."""

    def run(model: Any) -> LayerOutput:
        stack = _stack(model, side)
        block, context = _block(stack, weights), stack.layer_context(inputs.rows)
        with nn.intercept_methods(functools.partial(apply_edits, edits)):
            ((y, _), _), sown = block.apply(
                weights, (x, None), layer, None, context, mutable=["intermediates"] if with_maps else []
            )
        found = sown.get("intermediates", {})
        maps = {name: found[name]["probabilities"][0] for name in ("attention", "cross") if name in found}
        return LayerOutput(y, **maps)

    return apply(module, rest, run)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def run_parts(
    module: nn.Module,
    rest: PyTree,
    weights: PyTree,
    layer: Int[Array, ""],
    x: Float[Array, "B T D"],
    inputs: SideInputs,
    side: Side,
) -> PartOutputs:
    """One layer, and the outputs of its parts."""

    def run(model: Any) -> PartOutputs:
        stack, found = _stack(model, side), dict[str, Array]()
        block, context = _block(stack, weights), stack.layer_context(inputs.rows)
        with nn.intercept_methods(functools.partial(record_part, found)):
            block.apply(weights, (x, None), layer, None, context)
        return PartOutputs(found["heads"], found["attention"], found.get("mlp"))

    return apply(module, rest, run)


def part_name(context: nn.module.InterceptorContext) -> str:
    """The part whose output a method returns, a field of `PartOutputs` or "cross"; "" for other methods."""
    module, method = context.module, context.method_name
    if isinstance(module, ATTENTION) and method == "attend":
        return "cross" if module.name == "cross" else "heads"
    if isinstance(module, ATTENTION) and method == "__call__" and module.name == "attention":
        return "attention"
    return "mlp" if module.name == "ffn" and method == "__call__" else ""


def record_part(
    found: dict[str, Array], function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """An interceptor that keeps the outputs of a layer's parts in `found`."""
    y, name = function(*args, **kwargs), part_name(context)
    if name:
        found[name] = y[0] if name == "attention" else y
    return y


def apply_edits(edits: Edits, function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """An interceptor that multiplies heads and feed-forward layers by `edits`, and replaces their outputs."""
    y, name, replacement = function(*args, **kwargs), part_name(context), edits.replacement
    if name in ("heads", "cross"):
        factor = edits.cross if name == "cross" else edits.attention
        y = y * factor[:, None, :, None].astype(y.dtype)
    if name == "mlp":
        y = y * edits.mlp[:, None, None].astype(y.dtype)
    if replacement is None or name in ("", "cross"):
        return y
    source = getattr(replacement.source, name)
    if name == "heads":
        return jnp.where(replacement.heads[:, None, :, None], source, y)
    if name == "mlp":
        return jnp.where(replacement.mlp[:, :, None], source, y)
    y, cache = y
    return jnp.where(replacement.attention[:, :, None], source, y), cache


# --- gradients --------------------------------------------------------------------------------------------------------


class LayerGradient(NamedTuple):
    """Gradients of a scalar: of a layer's input `[B, T, D]`, of the memory, and of its probabilities `[B, H, T, S]`."""

    x: Array
    memory: Array | None
    attention: Array
    cross: Array | None


@functools.partial(jax.jit, static_argnames=("module", "side"))
def layer_gradient(
    module: nn.Module,
    rest: PyTree,
    weights: PyTree,
    layer: Int[Array, ""],
    x: Float[Array, "B T D"],
    inputs: SideInputs,
    cotangent: Float[Array, "B T D"],
    side: Side,
) -> LayerGradient:
    """Backward pass of one layer from the gradient of its output, by dense attention."""
    heads, (rows, length) = getattr(module.config, side).attention.heads, x.shape[:2]
    probes = {"attention": jnp.zeros((rows, heads, length, length))}
    if inputs.memory is not None:
        probes["cross"] = jnp.zeros((rows, heads, length, inputs.memory.shape[1]))

    def output(x: Array, memory: Array | None, probes: dict[str, Array]) -> Array:
        def run(model: Any) -> Array:
            stack = _stack(model, side)
            context = stack.layer_context(inputs._replace(memory=memory).rows)
            with nn.intercept_methods(functools.partial(add_probes, probes)):
                ((y, _), _) = _block(stack, weights).apply(weights, (x, None), layer, None, context)
            return y

        return apply(module, rest, run)

    _, backward = jax.vjp(output, x, inputs.memory, probes)
    dx, dmemory, dprobes = backward(cotangent)
    return LayerGradient(dx, dmemory, dprobes["attention"], dprobes.get("cross"))


def add_probes(
    probes: Mapping[str, Array], function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """An interceptor that adds arrays (of zeros) to the probabilities, so that these have gradients."""
    module = context.module
    if not isinstance(module, ATTENTION) or context.method_name != "apply_kernel":
        return function(*args, **kwargs)
    q, k, v, mask, *rest = args
    bias = rest[0] if rest else None
    sink = getattr(module, "sink", None)  # latent attention has none
    probs = dense.kernel_weights(q, k, mask, bias, module.config, sink) + probes[str(module.name)]
    values = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bhts,bshk->bthk", probs.astype(v.dtype), values).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def head_gradient(
    module: nn.Module,
    rest: PyTree,
    x: Float[Array, "B T D"],
    slots: Slots,
    position: Int[Array, ""],
    index: Int[Array, ""],
    side: Side,
) -> Float[Array, "B T D"]:
    """Gradient of logit `index` at `position` (of a classifier: of the row) with respect to the last layer's output."""

    def logit(x: Array) -> Array:
        logits = apply(module, rest, lambda model: logits_of(model, x, slots, side))
        return logits[0, index] if logits.ndim == 2 else logits[0, position, index]

    return jax.grad(logit)(x)


@functools.partial(jax.jit, static_argnames=("module", "side"))
def finish_gradient(
    module: nn.Module, rest: PyTree, x: Array, slots: Slots, cotangent: Array, side: Side
) -> Float[Array, "B T D"]:
    """Backward pass of `finish`."""
    return jax.vjp(lambda x: finish(module, rest, x, slots, side), x)[1](cotangent)[0]
