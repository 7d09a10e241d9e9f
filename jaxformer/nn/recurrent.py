"""Recurrent layers, the encoder and decoder made of them, and attention between the two: what transformers replaced.

One decoding step is the same code over a single slot.
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
from jaxformer.nn.cache import place
from jaxformer.nn.cells import CELLS, Carry, Cell, Dot, Marks, batch_major, ends, marks, orthogonal, over_time, zeros
from jaxformer.nn.layers import Dense, Dropout, Norm
from jaxformer.nn.products import dot
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Slots

Consts = dict[str, PyTree]
"""What all steps read: the recurrent product's `bias` `[G, W]` and dropout's `keep` `[B, W]`, or None; and what a step
with attention needs, its `memory` and a parameter."""


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
        """The input's share of all gates, computed before the loop as one matmul; the recurrent kernel; and the
        constants that `recur` reads."""
        cell, width = CELLS[self.cell], self.width
        names = ("embed", None, "ffn")
        inputs = Dense((x.shape[-1], cell.gates, width), names, name="input")(x.swapaxes(0, 1))
        kernel = self.param("recurrent", nn.with_logical_partitioning(orthogonal, names), (width, cell.gates, width))
        consts: Consts = {"bias": None, "keep": None}
        if cell.bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, "ffn"))
            consts["bias"] = self.param("recurrent_bias", init, (cell.gates, width))
        if self.dropout and self.has_rng("dropout"):
            consts["keep"] = Dropout(self.dropout)(jnp.ones((x.shape[0], width)))
        return inputs, kernel.reshape(width, -1).astype(x.dtype), consts


def recur(cell: Cell, dot: Dot, consts: Consts, carry: Carry, inputs: Float[Array, "B G W"]) -> Carry:
    """One step of `cell` from `carry`, given the input's share of the gates."""
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
        self, x: Float[Array, "B T D"], marks: Marks, carry: Carry | None = None, first: Carry | None = None
    ) -> tuple[Float[Array, "B T W"], Carry, Carry]:
        """Reads `x`.

        Args:
          marks: of the slots, read in this layer's direction.
          carry: state `[B, W]` before the first slot; None: zeros.
          first: state `[B, T, W]` that a segment starting at a slot starts from; None: zeros.

        Returns:
          Outputs (zero at padding), the state after every slot `[B, T, W]`, and the last state `[B, W]`.
        """
        cell = CELLS[self.cell]
        inputs, kernel, consts = Gates(self.cell, self.width, self.recurrent_dropout, name="gates")(x)

        def body(dot: Dot, consts: PyTree, carry: Carry, inputs: Array):
            return recur(cell, dot, consts, carry, inputs), None

        carry = zeros(cell, x.shape[0], self.width) if carry is None else carry
        first = None if first is None else batch_major(first)
        kernels = {"recurrent": kernel}
        last, (states, _) = over_time(body, kernels, consts, carry, inputs, marks, first, self.reverse)
        states = batch_major(states)
        y = jnp.where(marks.real[:, :, None], states[0], 0.0).astype(x.dtype)
        return constrain(y, "batch", None, "act_embed"), states, last


class Encoded(NamedTuple):
    """What an encoder read: `outputs` `[B, S, D]`; by layer and direction, the carries after every slot `[B, S, W]`;
    and the slots' `segment` `[B, S]`."""

    outputs: Array
    states: tuple[tuple[Carry, ...], ...]
    segment: Array


class Front(nn.Module):
    """The norm and the dropout on embeddings that `config.embed` asks for."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.config.embed.norm:
            x = Norm(NormConfig(), name="norm")(x)
        return Dropout(self.config.embed.dropout)(x)


class Encoder(nn.Module):
    """Stacked layers, each reading the sequence in one direction or in both (Schuster and Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B S D"], slots: Slots) -> Encoded:
        """Reads embeddings. Outputs are `[B, S, D]`, in two directions the halves [forward; backward]."""
        config = self.config
        directions = ("forward", "backward") if config.bidirectional else ("forward",)
        width = config.width // len(directions)
        x = Front(config, name="front")(x)
        states = []
        for index in range(config.layers):
            ys, carries = [], []
            for direction in directions:
                reverse = direction == "backward"
                layer = Layer(config.cell, width, config.recurrent_dropout, reverse, name=f"{direction}_{index}")
                y, carry, _ = layer(x, marks(slots.segment, reverse))
                ys.append(y)
                carries.append(carry)
            x = Dropout(config.dropout)(jnp.concatenate(ys, axis=-1))
            states.append(tuple(carries))
        return Encoded(x, tuple(states), slots.segment)


def summary(
    directions: tuple[Float[Array, "B S W"], ...], source: Int[Array, "B S"], target: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The whole source as the last thing each direction has read, for every target slot's segment.

    Args:
      directions: what was read forwards and, if there is a second, backwards.
      source, target: segments.
    """
    return jnp.concatenate([ends(x, source, target, last=i == 0) for i, x in enumerate(directions)], axis=-1)


class Memory(NamedTuple):
    """What a decoder attends to: `keys` `[B, S, W]`, computed once a source, and `values` `[B, S, E]`."""

    keys: Array
    values: Array


# Checkpointed: else the backward pass keeps tanh(...), `[T, B, S, W]` in all, which is slower than computing it anew.
@jax.checkpoint
def additive_scores(
    query: Float[Array, "B W"], keys: Float[Array, "B S W"], vector: Float[Array, " W"]
) -> Float32[Array, "B S"]:
    """Bahdanau et al. (2015): e_j = v^T tanh(W s + U h_j), of W s, U h and v."""
    hidden = jnp.tanh(query.astype(keys.dtype)[:, None] + keys)
    return jnp.einsum("bsw,w->bs", hidden, vector.astype(keys.dtype), preferred_element_type=jnp.float32)


def dot_scores(query: Float[Array, "B W"], keys: Float[Array, "B S W"]) -> Float32[Array, "B S"]:
    """Luong et al. (2015), "general": e_j = s^T W h_j, of s and W h."""
    return jnp.einsum("bw,bsw->bs", query.astype(keys.dtype), keys, preferred_element_type=jnp.float32)


def probabilities(scores: Float32[Array, "B S"], visible: Bool[Array, "B S"]) -> Float32[Array, "B S"]:
    """Softmax over the visible slots; zeros where none is."""
    probs = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.where(visible, probs, 0.0)


def look(probs: Float[Array, "B S"], values: Float[Array, "B S E"]) -> Float32[Array, "B E"]:
    """The context: the mean of `values` under `probs`."""
    return jnp.einsum("bs,bse->be", probs.astype(values.dtype), values, preferred_element_type=jnp.float32)


def additive_step(cell: Cell, dot: Dot, consts: PyTree, carry: Carry, slot: PyTree) -> tuple[Carry, PyTree]:
    """Attention before the cell (Bahdanau et al. 2015): alpha_i = attend(s_{i-1}), s_i = cell(s_{i-1}, [y_i; c_i])."""
    inputs, visible = slot
    scores = additive_scores(dot("query", carry[0]), consts["memory"].keys, consts["vector"])
    probs = probabilities(scores, visible)
    context = look(probs, consts["memory"].values)
    inputs = inputs + dot("context", context).reshape(inputs.shape)
    return recur(cell, dot, consts, carry, inputs), (context, probs)


def dot_step(cell: Cell, dot: Dot, consts: PyTree, carry: Carry, slot: PyTree) -> tuple[Carry, PyTree]:
    """Attention after the cell, with input feeding (Luong et al. 2015).

    s_i = cell(s_{i-1}, [y_i; o_{i-1}]), alpha_i = attend(s_i), o_i = tanh(W_c [s_i; c_i]).
    """
    (*state, fed), (inputs, visible) = carry, slot
    inputs = inputs + dot("context", fed).reshape(inputs.shape)
    state = recur(cell, dot, consts, tuple(state), inputs)
    probs = probabilities(dot_scores(state[0], consts["memory"].keys), visible)
    context = look(probs, consts["memory"].values)
    output = jnp.tanh(dot("combine", jnp.concatenate([state[0], context], axis=-1)) + consts["shift"])
    return (*state, output), (context, probs)


class AttendingLayer(nn.Module):
    """A layer that looks at the encoder's outputs once a step, the bottom one of a decoder with attention.

    Its output is o_i = tanh(W_c [s_i; c_i]) for state s_i and context c_i = sum_j alpha_ij h_j. See `additive_step`
    and `dot_step`. The weights alpha `[B, T, S]` are sown as the intermediate "attention".
    """

    cell: str
    width: int
    attention: str
    recurrent_dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        marks: Marks,
        memory: Memory,
        visible: Bool[Array, "B T S"],
        carry: Carry | None = None,
        first: Carry | None = None,
    ) -> tuple[Float[Array, "B T W"], Carry]:
        """Reads `x`; `visible` says which memory slots each slot may look at.

        Returns:
          Outputs (zero at padding) and the last carry.
        """
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
        last, (states, (contexts, probs)) = over_time(body, kernels, consts, carry, xs, marks, first)
        if additive:
            # The output does not return into the recurrence, so it is one matmul after the loop.
            both = jnp.concatenate([states[0], contexts], axis=-1)
            y = jnp.tanh(dot(both.astype(x.dtype), combine, bias=shift))
        else:
            y = states[-1]
        self.sow("intermediates", "attention", batch_major(probs))
        y = jnp.where(marks.real[:, :, None], batch_major(y), 0.0).astype(x.dtype)
        return constrain(y, "batch", None, "act_embed"), last

    def kernel(
        self, name: str, shape: tuple[int, ...], names: tuple[str | None, ...], init: Any = None
    ) -> Float[Array, "..."]:
        out = tuple(range(1, len(shape)))
        init = init or nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0,), out_axis=out)
        return self.param(name, nn.with_logical_partitioning(init, names), shape)


@flax.struct.dataclass
class RecurrentState:
    """Decoding state: what the decoder remembers of each row, however much it has read.

    Attributes:
      layers: the carry of every layer, `[B, W]` each.
      memory: keys and values of the source, or None.
      visible: bool `[B, S]`, the source slots of the row's last segment, or None.
    """

    layers: tuple[Carry, ...]
    memory: Memory | None = None
    visible: Array | None = None

    def rows(self, index: Int[Array, " B"]) -> RecurrentState:
        """The state whose row `i` is this one's row `index[i]`."""
        return jax.tree.map(lambda x: x[index], self)

    def put(self, index: Int[Array, " R"], other: RecurrentState) -> RecurrentState:
        """The state whose row `index[i]` is row i of `other`, whose sources may be shorter.

        Indices beyond the rows are left out.
        """
        return jax.tree.map(lambda x, new: place(x, index, new), self, other)


class Decoder(nn.Module):
    """Stacked layers in one direction: a language model or, given an encoder, the other half of a seq2seq model.

    What the encoder read enters as the first state of every segment: handed over layer by layer where encoder and
    decoder are alike and read forwards (Sutskever et al. 2014), otherwise tanh(W [last forward; last backward]) of the
    encoder's top layer, with its own W for every layer and state (after Bahdanau et al. 2015). With attention the
    bottom layer, besides, attends (Wu et al. 2016 for stacks).

    Attributes:
      encoder: the encoder's config, or None for a language model.
    """

    config: RecurrentConfig
    encoder: RecurrentConfig | None = None

    def setup(self) -> None:
        config, encoder = self.config, self.encoder
        cell = CELLS[config.cell]
        self.front = Front(config)
        plain = partial(Layer, config.cell, config.width, config.recurrent_dropout)
        attends = config.attention != "none"
        bottom = (
            AttendingLayer(config.cell, config.width, config.attention, config.recurrent_dropout)
            if attends
            else plain()
        )
        self.layers = (bottom, *(plain() for _ in range(config.layers - 1)))
        self.dropout = Dropout(config.dropout)
        if attends:
            # Bahdanau's U has a bias, Luong's W has none.
            shape = (encoder.width, config.width)
            self.key = Dense(shape, ("embed", "ffn"), bias=config.attention == "additive")
        if encoder is not None and not self.alike():
            shape = (encoder.width, config.layers * cell.states, config.width)
            self.bridge = Dense(shape, ("embed", None, "ffn"))

    def alike(self) -> bool:
        """Can the encoder's states be handed over as they are?"""
        config, encoder = self.config, self.encoder
        same = all(getattr(config, name) == getattr(encoder, name) for name in ("cell", "layers", "width"))
        return same and not encoder.bidirectional

    def first(self, encoded: Encoded, target: Int[Array, "B T"]) -> tuple[Carry, ...]:
        """By layer, the state `[B, T, W]` that a segment starting at a target slot (segments `[B, T]`) starts from."""
        source = encoded.segment
        if self.alike():
            return tuple(tuple(ends(x, source, target, last=True) for x in forward) for (forward,) in encoded.states)
        top = summary(tuple(carry[0] for carry in encoded.states[-1]), source, target)
        made = jnp.tanh(self.bridge(top.astype(encoded.outputs.dtype)).astype(jnp.float32))
        states = CELLS[self.config.cell].states
        arrays = jnp.moveaxis(made, 2, 0)
        return tuple(tuple(arrays[i * states : (i + 1) * states]) for i in range(self.config.layers))

    def memory(self, encoded: Encoded) -> Memory | None:
        """What the attention reads; None without attention."""
        if self.config.attention == "none":
            return None
        return Memory(*(constrain(x, "batch", None, None) for x in (self.key(encoded.outputs), encoded.outputs)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        marks: Marks,
        memory: Memory | None = None,
        visible: Bool[Array, "B T S"] | None = None,
        carry: tuple[Carry, ...] | None = None,
        first: tuple[Carry, ...] | None = None,
    ) -> tuple[Float[Array, "B T W"], tuple[Carry, ...]]:
        """Reads embeddings.

        Args:
          memory, visible: with attention: what to look at, and which of it each slot may see.
          carry: by layer, the state `[B, W]` before the first slot; None: nothing was read.
          first: by layer, see `first`; None: zeros.

        Returns:
          Outputs and the last carries.
        """
        y, last = self.front(x), []
        for index, layer in enumerate(self.layers):
            before = None if carry is None else carry[index]
            begin = None if first is None else first[index]
            if isinstance(layer, AttendingLayer):
                y, after = layer(y, marks, memory, visible, before, begin)
            else:
                y, _, after = layer(y, marks, before, begin)
            y = self.dropout(y)
            last.append(after)
        return y, tuple(last)
