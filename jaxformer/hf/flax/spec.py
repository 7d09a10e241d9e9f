"""A class with a config, as hashable values: the module, the table of its old tree, and functions that compute it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import HeadConfig, ModelConfig, StackConfig
from jaxformer.hf.families import big_bird, encoder_decoder
from jaxformer.hf.flax import bart_decoder, layout, names, old
from jaxformer.hf.flax.layout import Entry, Path
from jaxformer.hf.forward import reads_end_token, with_slot_head
from jaxformer.hf.origin import BODIES
from jaxformer.hf.outputs import named_outputs
from jaxformer.hf.table import CallConvention, Family, Settings, family_of, require_stack
from jaxformer.models import build
from jaxformer.types import Array, Batch, PyTree


@functools.cache
def family(model_type: str, head: str) -> Family:
    """The family's table, for this head."""
    found = family_of(Settings({"model_type": model_type}))
    if (model_type, head) == ("big_bird", "causal_lm"):  # its blocks saw the tokens ahead
        return dataclasses.replace(found, read_config=big_bird.read_any_attention)
    return bart_decoder.FAMILY if (model_type, head) == ("bart", "causal_lm") else found


@dataclass(frozen=True)
class Spec:
    """A class and a config: everything that is static when its functions are compiled.

    Attributes:
      model_type, head: the class.
      config: the model here.
      sides: `model_type`s of the encoder and the decoder of a pair; (): it is none.
    """

    model_type: str
    head: str
    config: ModelConfig
    sides: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        """The family's table."""
        return encoder_decoder.pair_family(*self.sides) if self.sides else family(self.model_type, self.head)

    def type_of(self, side: str) -> str:
        """The `model_type` of the encoder or the decoder."""
        return self.sides[("encoder", "decoder").index(side)] if self.sides else self.model_type

    @property
    def convention(self) -> CallConvention:
        """The names by which the old classes are called; where newer ones differ, the old ones count."""
        from_source = self.config.is_seq2seq and self.model_type not in names.T5_TYPES and not self.sides
        return dataclasses.replace(self.family.convention, decoder_input_from_source=from_source)

    @property
    def module(self) -> nn.Module:
        """The Linen module of this package that computes the class."""
        return build.build(self.config)

    @property
    def stack(self) -> StackConfig:
        """The stack below the head."""
        return require_stack(self.config, "encoder" if self.config.decoder is None else "decoder")

    @property
    def first_position(self) -> int:
        """The number that `position_ids` give to the first position: RoBERTa's begin after the padding's id."""
        pad = self.stack.embed.pad
        return pad + 1 if self.convention.of_decoder.positions == "ids" and pad is not None else 0

    @property
    def first_row(self) -> int:
        """Rows of the position table before the one of its first position that generation skips: pairs begin at 0."""
        return self.first_position if self.sides else 0

    @property
    def has_dropout(self) -> bool:
        """True if some dropout rate is above 0."""
        rates = [self.config.head.dropout, self.config.head.input_dropout]
        for stack in (self.config.encoder, self.config.decoder):
            if stack is not None:
                rates += [stack.dropout, stack.embed.dropout, stack.attention.dropout]
                rates += [] if stack.ffn is None else [stack.ffn.dropout]
        return any(rate > 0 for rate in rates)

    @property
    def table(self) -> tuple[Entry, ...]:
        """The table of the old tree."""
        return _table(self)

    @property
    def leaves(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Shapes of the leaves of the old tree, those that nothing here reads included."""
        return dict(_leaves(self))

    def params(self, tree: PyTree) -> PyTree:
        """Our parameters, in float32, from an old tree."""
        params = old.params_of(self.config, layout.to_params(self.table, tree))
        return jax.tree.map(lambda x: x.astype(jnp.float32), params)


@functools.lru_cache(maxsize=64)
def _table(spec: Spec) -> tuple[Entry, ...]:
    shapes = nn.meta.unbox(build.shapes(spec.module))["params"]
    prefix = spec.family.prefix if spec.head in BODIES else ""
    norm = "weight" if spec.stack.norm.kind == "rms" else "scale"
    return tuple(layout.entries(spec.family.rows(old.tree_model(spec.config), spec.head), shapes, norm, prefix))


@functools.lru_cache(maxsize=64)
def _leaves(spec: Spec) -> dict[Path, jax.ShapeDtypeStruct]:
    shapes = nn.meta.unbox(build.shapes(spec.module))["params"]
    unread = bart_decoder.unread_leaves(spec.config) if spec.family is bart_decoder.FAMILY else {}
    unread |= pair_pooler(spec) if spec.sides else {}
    return {**layout.shapes_of(spec.table, shapes), **unread}


def pair_pooler(spec: Spec) -> dict[Path, jax.ShapeDtypeStruct]:
    """Leaves of the encoder's pooler: the old trees of pairs hold it, and nothing reads it."""
    encoder, width = family(spec.sides[0], "model"), require_stack(spec.config, "encoder").width
    model = ModelConfig(encoder=spec.config.encoder, head=HeadConfig(kind="pooled", tied=False, width=width))
    rows = [row for row in encoder.rows(model, "model") if row.param_paths[0].startswith("head/")]
    rows = [dataclasses.replace(row, hf_name=f"encoder.{row.hf_name.removeprefix(encoder.prefix)}") for row in rows]
    float32 = jax.numpy.float32
    hidden = {"kernel": jax.ShapeDtypeStruct((width, width), float32), "bias": jax.ShapeDtypeStruct((width,), float32)}
    shapes = {"head": {"hidden": hidden}}
    return layout.shapes_of(layout.entries(rows, shapes), shapes) if rows else {}


@functools.partial(jax.jit, static_argnames=("spec",))
def converted(spec: Spec, tree: PyTree) -> PyTree:
    """`spec.params`, compiled."""
    return spec.params(tree)


@functools.partial(jax.jit, static_argnames=("spec", "flags"))
def forward(spec: Spec, tree: PyTree, batch: Batch, key: Array | None, flags: tuple[bool, bool]) -> dict[str, Any]:
    """The outputs of a call by the names of the newer library, as `Outputs` but without a loss.

    A classifier that reads the last end token of its source gives logits for every slot.

    Args:
      tree: parameters in the old layout.
      key: of dropout; None: without.
      flags: whether attentions and hidden states are asked for.
    """
    wished = dict(zip(("output_attentions", "output_hidden_states"), flags, strict=True))
    rngs = {} if key is None else {"dropout": key}
    variables = {"params": spec.params(tree)}
    by_slot = reads_end_token(spec.config, spec.head)
    module = build.build(with_slot_head(spec.config)) if by_slot else spec.module
    logits, sown = module.apply(variables, batch, rngs=rngs, mutable=["intermediates"])
    if spec.head == "pretraining" and spec.config.head.kind == "slots":
        logits = logits[..., 0]
    values = dict(named_outputs(spec.head, spec.config, logits, None, sown["intermediates"], wished))
    for name in ("encoder", "decoder"):
        field = f"{name}_hidden_states" if spec.config.is_seq2seq else "hidden_states"
        if field in values and getattr(spec.config, name) is not None:
            values[field] = old.hidden_states(spec.type_of(name), sown["intermediates"][name])
    return values
