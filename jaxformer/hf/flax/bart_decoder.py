"""BART's decoder alone as a causal language model (`FlaxBartForCausalLM`), which only the old classes had."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen as nn

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.hf.families import _bart, bart
from jaxformer.hf.flax import layout
from jaxformer.hf.flax.layout import Path
from jaxformer.hf.table import Row, Settings, require_stack
from jaxformer.models import build


def read_config(settings: Settings, head: str) -> ModelConfig:
    """The decoder's config; the old class sets `is_decoder` and unsets `is_encoder_decoder`."""
    settings("is_decoder", True), settings("is_encoder_decoder", False)
    model = bart.read_config(settings, "seq2seq")
    head_config = HeadConfig(tied=model.head.tied)
    return dataclasses.replace(model, encoder=None, share_embeddings=False, head=head_config)


def rows(model: ModelConfig, head: str) -> list[Row]:
    """Rows of the decoder without its cross-attention, which has nothing to attend to."""
    stack = [row for row in _bart.stack_rows(model, "decoder") if "/cross" not in row.param_paths[0]]
    untied = [] if model.head.tied else [Row("lm_head.weight", "head/kernel", "V D -> D V")]
    return [Row("model.decoder.embed_tokens.weight", "target_embed/table"), *stack, *untied]


def unread_leaves(model: ModelConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Leaves of the cross-attention: the old trees hold them, and a decoder alone does not read them."""
    decoder = require_stack(model, "decoder")
    both = ModelConfig(
        encoder=decoder, decoder=decoder, share_embeddings=True, head=HeadConfig(kind="none", tied=False)
    )
    shapes = nn.meta.unbox(build.shapes(build.build(both)))["params"]
    cross = [row for row in _bart.stack_rows(both, "decoder") if "/cross" in row.param_paths[0]]
    return layout.shapes_of(layout.entries(cross, shapes), shapes)


FAMILY = dataclasses.replace(
    bart.FAMILY,
    heads={"causal_lm": "BartForCausalLM"},
    read_config=read_config,
    rows=rows,
    embedding_tables=None,
    tied_tensors=("lm_head.weight", "model.decoder.embed_tokens.weight"),
    droppable_tensors=(*bart.FAMILY.droppable_tensors, r"model\.decoder\.layers\.\d+\.encoder_attn.*"),
)
