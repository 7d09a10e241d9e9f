"""Pegasus (Zhang et al. 2020): Marian in pre-norm order. Pre-norm translators trained here are exported as it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import NO_HEAD, CallConvention, Family, Row, Settings, require_stack
from jaxformer.nn.encodings.sinusoidal import sinusoids


def read_config(settings: Settings, head: str) -> ModelConfig:
    positions, vocab = settings.size("max_position_embeddings", 1024), settings.size("vocab_size", 50265)
    encoding = EncodingConfig("sinusoidal", max_length=positions, concatenated=True)
    settings = settings.with_values({"pad_token_id": 0, **settings.values})
    encoder, decoder = (
        _bart.stack_config(settings, name, encoding, vocab, order="pre") for name in ("encoder", "decoder")
    )
    top = HeadConfig(tied=settings("tie_word_embeddings", True), bias=True) if head == "seq2seq" else NO_HEAD
    return ModelConfig(encoder=encoder, decoder=decoder, share_embeddings=True, head=top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    return _bart.write_config(model, head) | {
        "max_position_embeddings": require_stack(model, "encoder").encoding.max_length,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    top = _bart.output_rows(model) if head == "seq2seq" else []
    return [
        *_bart.body_rows(model),
        *top,
    ]


def constants(model: ModelConfig) -> dict[str, np.ndarray]:
    """The sinusoids of encoder and decoder, which the library stores in the file."""
    tables = {}
    for name in ("encoder", "decoder"):
        stack = require_stack(model, name)
        positions = jnp.arange(stack.encoding.max_length)
        table = sinusoids(positions, stack.width, stack.encoding.base, concatenated=True)
        tables[f"model.{name}.embed_positions.weight"] = np.asarray(table)
    return tables


FAMILY = Family(
    model_types=("pegasus",),
    heads={"seq2seq": "PegasusForConditionalGeneration", "model": "PegasusModel"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"final_logits_bias"),
    embedding_tables=_bart.EMBEDDING_TABLES,
    ignored_tensors=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    constant_tensors=constants,
    tied_tensors=("lm_head.weight", "model.shared.weight"),
    convention=CallConvention(decoder_scales_embeddings=True, suffix_tokens=("</s>",)),
)
