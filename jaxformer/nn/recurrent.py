"""Recurrent layers, encoders and decoders made of them, and attention from decoder to encoder.

A decoding step runs the same code on a single slot.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.config import NormConfig, RecurrentConfig
from jaxformer.nn.cache import scatter_rows
from jaxformer.nn.cells import (
    CELLS,
    Boundaries,
    Carry,
    Cell,
    Dot,
    at_segment_edge,
    batch_major,
    orthogonal,
    scan_time,
    segment_boundaries,
    zeros,
)
from jaxformer.nn.layers import Dense, Dropout, Norm, parameter, zeros_parameter
from jaxformer.nn.products import dot
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Slots, is_zero

Consts = dict[str, PyTree]
"""Inputs that are equal at all steps: `bias` `[G, W]` of the recurrent product and `keep` `[B, W]` of its dropout (or
None). With attention also `memory`, and a parameter of the scores."""


class Gates(nn.Module):
    """The parameters of one cell: `[D, G, W]` for the input, `[W, G, W]` for the recurrence.

    Attributes:
      dropout: rate on the recurrent product's input, one mask a sequence (Gal and Ghahramani 2016).
    """

    cell: str
    width: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "T B G W"], Float[Array, "W GW"], Consts]:
        """Input part `x W + b` of all gates `[T, B, G, W]`, recurrent kernel `[W, G W]`, constants of `cell_step`."""
        cell, width = CELLS[self.cell], self.width
        names = ("embed", None, "ffn")
        inputs = Dense((x.shape[-1], cell.gates, width), names, name="input")(x.swapaxes(0, 1))
        kernel = parameter(self, "recurrent", orthogonal, names, (width, cell.gates, width))
        consts: Consts = {"bias": None, "keep": None}
        if cell.bias:
            consts["bias"] = zeros_parameter(self, "recurrent_bias", (None, "ffn"), (cell.gates, width))
        if not is_zero(self.dropout) and self.has_rng("dropout"):
            consts["keep"] = Dropout(self.dropout)(jnp.ones((x.shape[0], width)))
        return inputs, kernel.reshape(width, -1).astype(x.dtype), consts


def cell_step(cell: Cell, dot: Dot, consts: Consts, carry: Carry, inputs: Float[Array, "B G W"]) -> Carry:
    """The carry after one step of `cell`, for the input part of the gates."""
    h = carry[0] if consts["keep"] is None else carry[0] * consts["keep"]
    recurrent = dot("recurrent", h).reshape(inputs.shape)
    if consts["bias"] is not None:
        recurrent = recurrent + consts["bias"]
    return cell.step(inputs.astype(jnp.float32), recurrent, carry)


class Layer(nn.Module):
    """A recurrent layer in one direction."""

    cell: str
    width: int
    recurrent_dropout: float = 0.0
    reverse: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], boundaries: Boundaries, carry: Carry | None = None, first: Carry | None = None
    ) -> tuple[Float[Array, "B T W"], Carry, Carry]:
        """Outputs (zero at padding), states after each slot `[B, T, W]`, and the last state `[B, W]`.

        Args:
          boundaries: segment boundaries in the direction of this layer.
          carry: state `[B, W]` before the first slot; None for zeros.
          first: initial state `[B, T, W]` of a segment that starts at a slot; None for zeros.
        """
        cell = CELLS[self.cell]
        inputs, kernel, consts = Gates(self.cell, self.width, self.recurrent_dropout, name="gates")(x)

        def body(dot: Dot, consts: PyTree, carry: Carry, inputs: Array):
            return cell_step(cell, dot, consts, carry, inputs), None

        carry = zeros(cell, x.shape[0], self.width) if carry is None else carry
        first = None if first is None else batch_major(first)
        kernels = {"recurrent": kernel}
        last, (states, _) = scan_time(body, kernels, consts, carry, inputs, boundaries, first, self.reverse)
        states = batch_major(states)
        y = jnp.where(boundaries.real[:, :, None], states[0], 0.0).astype(x.dtype)
        return constrain(y, "batch", None, "act_embed"), states, last


class EncoderOutput(NamedTuple):
    """Result of a recurrent encoder.

    Attributes:
      outputs: `[B, S, D]`.
      states: carries after each slot `[B, S, W]`, by layer and direction.
      segment: segment ids `[B, S]`.
    """

    outputs: Array
    states: tuple[tuple[Carry, ...], ...]
    segment: Array


class InputLayers(nn.Module):
    """Norm (optional) and dropout of the embeddings, as in `config.embed`."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.config.embed.norm:
            x = Norm(NormConfig(), name="norm")(x)
        return Dropout(self.config.embed.dropout)(x)


class Encoder(nn.Module):
    """Stacked recurrent layers in one direction, or in both (Schuster and Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B S D"], slots: Slots) -> EncoderOutput:
        """Outputs `[B, S, D]` and states for embeddings `x`. Two directions are concatenated as [forward; backward]."""
        config = self.config
        directions = ("forward", "backward") if config.bidirectional else ("forward",)
        width = config.width // len(directions)
        x = InputLayers(config, name="front")(x)
        states = []
        for index in range(config.layers):
            ys, carries = [], []
            for direction in directions:
                reverse = direction == "backward"
                layer = Layer(config.cell, width, config.recurrent_dropout, reverse, name=f"{direction}_{index}")
                y, carry, _ = layer(x, segment_boundaries(slots.segment, reverse))
                ys.append(y)
                carries.append(carry)
            x = Dropout(config.dropout)(jnp.concatenate(ys, axis=-1))
            states.append(tuple(carries))
        return EncoderOutput(x, tuple(states), slots.segment)


def source_summary(
    directions: tuple[Float[Array, "B S W"], ...], source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Final state of each direction over the source segment of each target slot, concatenated: `[B, T, D]`.

    Args:
      directions: states of the forward and (if there is one) the backward direction.
      source, target: segment ids.
    """
    return jnp.concatenate([at_segment_edge(x, source, target, last=i == 0) for i, x in enumerate(directions)], axis=-1)


class Memory(NamedTuple):
    """Memory that a decoder attends to: `keys` `[B, S, W]`, projected once, and `values` `[B, S, E]`."""

    keys: Array
    values: Array


# Checkpointed: storing tanh(...) for the backward pass, `[T, B, S, W]` in all, is slower than recomputing it.
@jax.checkpoint
def additive_scores(
    query: Float[Array, "B W"], keys: Float[Array, "B S W"], vector: Float[Array, " W"]
) -> Float32[Array, "B S"]:
    """Additive scores e_j = v^T tanh(W s + U h_j): `[B, S]` (Bahdanau et al. 2015), for `query` W s and `keys` U h."""
    hidden = jnp.tanh(query.astype(keys.dtype)[:, None] + keys)
    return jnp.einsum("bsw,w->bs", hidden, vector.astype(keys.dtype), preferred_element_type=jnp.float32)


def dot_scores(query: Float[Array, "B W"], keys: Float[Array, "B S W"]) -> Float32[Array, "B S"]:
    """Dot-product scores e_j = s^T W h_j: `[B, S]` (Luong et al. 2015, "general"), for `query` s and `keys` W h."""
    return jnp.einsum("bw,bsw->bs", query.astype(keys.dtype), keys, preferred_element_type=jnp.float32)


def probabilities(scores: Float32[Array, "B S"], visible: Bool[Array, "B S"]) -> Float32[Array, "B S"]:
    """Softmax over the visible slots; 0 in rows without any."""
    probs = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.where(visible, probs, 0.0)


def context_vector(probs: Float[Array, "B S"], values: Float[Array, "B S E"]) -> Float32[Array, "B E"]:
    """Context vector `[B, E]`: the mean of `values` weighted by `probs`."""
    return jnp.einsum("bs,bse->be", probs.astype(values.dtype), values, preferred_element_type=jnp.float32)


def additive_step(cell: Cell, dot: Dot, consts: PyTree, carry: Carry, slot: PyTree) -> tuple[Carry, PyTree]:
    """One step with attention before the cell: alpha_i = attend(s_{i-1}), s_i = cell(s_{i-1}, [y_i; c_i]).

    Bahdanau et al. 2015, appendix A.
    """
    inputs, visible = slot
    scores = additive_scores(dot("query", carry[0]), consts["memory"].keys, consts["vector"])
    probs = probabilities(scores, visible)
    context = context_vector(probs, consts["memory"].values)
    inputs = inputs + dot("context", context).reshape(inputs.shape)
    return cell_step(cell, dot, consts, carry, inputs), (context, probs)


def dot_step(cell: Cell, dot: Dot, consts: PyTree, carry: Carry, slot: PyTree) -> tuple[Carry, PyTree]:
    """One step with attention after the cell and input feeding (Luong et al. 2015, section 3.3).

    s_i = cell(s_{i-1}, [y_i; o_{i-1}]), alpha_i = attend(s_i), o_i = tanh(W_c [s_i; c_i]).
    """
    (*state, fed), (inputs, visible) = carry, slot
    inputs = inputs + dot("context", fed).reshape(inputs.shape)
    state = cell_step(cell, dot, consts, tuple(state), inputs)
    probs = probabilities(dot_scores(state[0], consts["memory"].keys), visible)
    context = context_vector(probs, consts["memory"].values)
    output = jnp.tanh(dot("combine", jnp.concatenate([state[0], context], axis=-1)) + consts["shift"])
    return (*state, output), (context, probs)


class AttendingLayer(nn.Module):
    """A recurrent layer with attention to the encoder's outputs: the bottom layer of a decoder with attention.

    The output is o_i = tanh(W_c [s_i; c_i]) for state s_i and context c_i = sum_j alpha_ij h_j; see `additive_step` and
    `dot_step`. The probabilities alpha `[B, T, S]` are sown as the intermediate "attention".
    """

    cell: str
    width: int
    attention: str
    recurrent_dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        boundaries: Boundaries,
        memory: Memory,
        visible: Bool[Array, "B T S"],
        carry: Carry | None = None,
        first: Carry | None = None,
    ) -> tuple[Float[Array, "B T W"], Carry]:
        """Outputs (zero at padding) and the last carry. `visible` is True where a slot sees a memory slot."""
        cell, width, source = CELLS[self.cell], self.width, memory.values.shape[-1]
        additive = self.attention == "additive"
        inputs, recurrent, consts = Gates(self.cell, width, self.recurrent_dropout, name="gates")(x)
        fed = source if additive else width
        context = self.kernel("context", (fed, cell.gates, width), ("embed", None, "ffn"))
        combine = self.kernel("combine", (width + source, width), ("embed", None)).astype(x.dtype)
        shift = self.kernel("combine_bias", (width,), (None,), nn.initializers.zeros_init())
        kernels = {"recurrent": recurrent, "context": context.reshape(fed, -1).astype(x.dtype)}
        consts |= {"memory": memory}
        if additive:
            kernels["query"] = self.kernel("query", (width, width), ("embed", "ffn")).astype(x.dtype)
            consts["vector"] = self.kernel("vector", (width,), ("ffn",), nn.initializers.normal(width**-0.5))
        else:
            kernels["combine"] = combine
            consts["shift"] = shift
        if carry is None:
            carry = zeros(cell, x.shape[0], width) + (() if additive else (jnp.zeros((x.shape[0], width)),))
        first = None if first is None else batch_major(first)
        body = partial(additive_step if additive else dot_step, cell)
        xs = (inputs, visible.swapaxes(0, 1))
        last, (states, (contexts, probs)) = scan_time(body, kernels, consts, carry, xs, boundaries, first)
        if additive:
            # The output is not fed back, so it is one product after the loop.
            both = jnp.concatenate([states[0], contexts], axis=-1)
            y = jnp.tanh(dot(both.astype(x.dtype), combine, bias=shift))
        else:
            y = states[-1]
        self.sow("intermediates", "attention", batch_major(probs))
        y = jnp.where(boundaries.real[:, :, None], batch_major(y), 0.0).astype(x.dtype)
        return constrain(y, "batch", None, "act_embed"), last

    def kernel(
        self, name: str, shape: tuple[int, ...], names: tuple[str | None, ...], init: Any = None
    ) -> Float[Array, "..."]:
        out = tuple(range(1, len(shape)))
        init = init or nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0,), out_axis=out)
        return parameter(self, name, init, names, shape)


class RecurrentState(flax.struct.PyTreeNode):
    """Decoding state of a recurrent model; its size does not depend on the number of tokens read.

    Attributes:
      layers: carry of each layer, `[B, W]` arrays.
      memory: keys and values of the source, or None.
      visible: bool `[B, S]`, the source slots of the row's last segment, or None.
    """

    layers: tuple[Carry, ...]
    memory: Memory | None = None
    visible: Array | None = None

    def rows(self, index: Int[Array, " B"]) -> RecurrentState:
        """The state whose row i is row `index[i]` of this one."""
        return jax.tree.map(lambda x: x[index], self)

    def replace_rows(self, index: Int[Array, " R"], other: RecurrentState) -> RecurrentState:
        """The state with row `index[i]` replaced by row i of `other`, whose sources may be shorter.

        Indices beyond the last row are ignored.
        """
        return jax.tree.map(lambda x, new: scatter_rows(x, index, new), self, other)


class Decoder(nn.Module):
    """Stacked recurrent layers in one direction: a language model, or the decoder of a seq2seq model.

    The encoder's final states determine the initial state of each segment. If both sides have the same cell, layers
    and width, and the encoder reads forwards only, the states are copied layer by layer (Sutskever et al. 2014).
    Otherwise the initial state is tanh(W [last forward; last backward]) of the encoder's top layer, with a separate W
    for each layer and state (after Bahdanau et al. 2015). With attention, the bottom layer also attends to the
    encoder's outputs (Wu et al. 2016, section 3).

    Attributes:
      encoder: config of the encoder, or None for a language model.
    """

    config: RecurrentConfig
    encoder: RecurrentConfig | None = None

    def setup(self) -> None:
        config, encoder = self.config, self.encoder
        cell = CELLS[config.cell]
        self.front = InputLayers(config)
        plain = partial(Layer, config.cell, config.width, config.recurrent_dropout)
        attends = config.attention != "none"
        bottom = (
            AttendingLayer(config.cell, config.width, config.attention, config.recurrent_dropout)
            if attends
            else plain()
        )
        self.layers = (bottom, *(plain() for _ in range(config.layers - 1)))
        self.dropout = Dropout(config.dropout)
        if attends and encoder is not None:
            # Bahdanau's U has a bias, Luong's W does not.
            shape = (encoder.width, config.width)
            self.key = Dense(shape, ("embed", "ffn"), bias=config.attention == "additive")
        if encoder is not None and not self.can_copy_states():
            shape = (encoder.width, config.layers * cell.states, config.width)
            self.bridge = Dense(shape, ("embed", None, "ffn"))

    def can_copy_states(self) -> bool:
        """True if the encoder's final states fit the decoder's layers as they are."""
        config, encoder = self.config, self.encoder
        if encoder is None:
            return False
        same = all(getattr(config, name) == getattr(encoder, name) for name in ("cell", "layers", "width"))
        return same and not encoder.bidirectional

    def initial_states(self, encoded: EncoderOutput, target: Int[Array, "B T"]) -> tuple[Carry, ...]:
        """Initial states `[B, T, W]` by layer, for a segment that starts at a slot of `target` (segment ids)."""
        source = encoded.segment
        if self.can_copy_states():
            return tuple(
                tuple(at_segment_edge(x, source, target, last=True) for x in forward) for (forward,) in encoded.states
            )
        top = source_summary(tuple(carry[0] for carry in encoded.states[-1]), source, target)
        initial = jnp.tanh(self.bridge(top.astype(encoded.outputs.dtype)).astype(jnp.float32))
        states = CELLS[self.config.cell].states
        arrays = jnp.moveaxis(initial, 2, 0)
        return tuple(tuple(arrays[i * states : (i + 1) * states]) for i in range(self.config.layers))

    def memory(self, encoded: EncoderOutput) -> Memory | None:
        """Keys and values of the encoder's outputs; None without attention."""
        if self.config.attention == "none":
            return None
        return Memory(*(constrain(x, "batch", None, None) for x in (self.key(encoded.outputs), encoded.outputs)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        boundaries: Boundaries,
        memory: Memory | None = None,
        visible: Bool[Array, "B T S"] | None = None,
        carry: tuple[Carry, ...] | None = None,
        first: tuple[Carry, ...] | None = None,
    ) -> tuple[Float[Array, "B T W"], tuple[Carry, ...]]:
        """Outputs `[B, T, W]` for embeddings `x`, and the last carry of each layer.

        Args:
          memory, visible: with attention, the memory and the memory slots that each slot sees.
          carry: by layer, the state `[B, W]` before the first slot; None for zeros.
          first: by layer, see `initial_states`; None for zeros.
        """
        y, last = self.front(x), []
        for index, layer in enumerate(self.layers):
            before = None if carry is None else carry[index]
            begin = None if first is None else first[index]
            if isinstance(layer, AttendingLayer):
                if memory is None or visible is None:
                    raise ValueError("recurrent_decoder.attention: got no memory, expected one; pass an encoder's")
                y, after = layer(y, boundaries, memory, visible, before, begin)
            else:
                y, _, after = layer(y, boundaries, before, begin)
            y = self.dropout(y)
            last.append(after)
        return y, tuple(last)
