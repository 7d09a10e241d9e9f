"""Differences of the old Flax classes from today's library; these modules follow the old classes.

Edits of config.json's keys before a family reads them, of the model after it, and of outputs. docs/migration.md lists
them for users.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import traverse_util

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.flax.names import T5_TYPES
from jaxformer.hf.table import Settings, require_stack
from jaxformer.types import Array, PyTree

log = logging.getLogger("jaxformer")

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
PLAIN_ROPE = {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}

ROTARY_TYPES = ("llama", "mistral", "gemma")

NOT_READ: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    "opt": {"enable_bias": True, "layer_norm_elementwise_affine": True},
    "marian": {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None},
    "electra": {"summary_type": "first"},
}
"""`model_type` -> keys that the old class did not read, with the values with which it computed."""

DEFAULT_KIND = {"electra": 1}
"""`model_type` -> the token type of a call without `token_type_ids`, where it is not 0."""


def old_values(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json as the old class read them.

    Keys that it did not read have the values with which it computed; one warning names those that say otherwise.
    """
    edits: dict[str, Any] = {}
    if model_type in ROTARY_TYPES:  # a base of 10000, and no scaling
        given = values.get("rope_parameters") or {}
        edits |= PLAIN_ROPE if given.get("rope_theta", values.get("rope_theta", 10000.0)) != 10000.0 else {}
        edits |= PLAIN_ROPE if given.get("rope_type", "default") != "default" or values.get("rope_scaling") else {}
    if model_type in ("llama", "mistral"):
        edits |= {"tie_word_embeddings": False} if values.get("tie_word_embeddings") else {}
        edits |= {"mlp_bias": False} if values.get("mlp_bias") else {}
        width = values.get("hidden_size", 4096) // values.get("num_attention_heads", 32)
        edits |= {"head_dim": width} if values.get("head_dim") not in (None, width) else {}
    unread = {**NOT_READ.get(model_type, {}), "position_embedding_type": "absolute"}
    edits |= {name: value for name, value in unread.items() if values.get(name, value) != value}
    if values.get("decoder_vocab_size") == values.get("vocab_size"):
        edits.pop("decoder_vocab_size", None)
    if model_type == "roformer":  # the width of the layers
        width = values.get("hidden_size", 768)
        edits |= {"embedding_size": None} if values.get("embedding_size") not in (None, width) else {}
    if model_type == "big_bird" and values.get("attention_type") == "original_full":
        edits |= {} if values.get("use_bias", True) else {"use_bias": True}
    if edits:
        log.warning("config: got %s, which the old class of %s did not read", ", ".join(edits), model_type)
    kept = {name: value for name, value in values.items() if name not in ROPE_KEYS or model_type not in ROTARY_TYPES}
    if model_type in ROTARY_TYPES:
        kept |= PLAIN_ROPE
    if model_type == "gemma":  # the newer library reads hidden_act, and "gelu" there as its tanh form
        named = values.get("hidden_activation") or "gelu_pytorch_tanh"
        kept["hidden_act"] = "gelu_python" if named == "gelu" else named
        kept.pop("hidden_activation", None)
    return {**kept, **edits}


def old_pair(values: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Any]:
    """The keys of a pair's config.json as the old classes of its sides read theirs."""
    configs = {side: values[side] for side in sides if isinstance(values.get(side), Mapping)}
    return {**values, **{side: old_values(str(own.get("model_type")), own) for side, own in configs.items()}}


def old_model(model_type: str, head: str, settings: Settings, model: ModelConfig) -> ModelConfig:
    """The model as the old class computed it."""
    top = model.head
    if model_type in T5_TYPES and head == "seq2seq":
        return dataclasses.replace(model, head=dataclasses.replace(top, scale=top.tied))
    if model_type == "electra" and top.transform:
        activation = settings.activation("hidden_act", "gelu")
        return dataclasses.replace(model, head=dataclasses.replace(top, activation=activation))
    if model_type == "roformer" and head == "multiple_choice":
        dropout = require_stack(model, "encoder").dropout
        return dataclasses.replace(model, head=dataclasses.replace(top, dropout=dropout))
    if model_type == "big_bird":
        return _sparse_when_short(model)
    if model_type == "blenderbot-small":
        return _scaled_before_norm(model)
    if model_type == "mistral":  # a window of w keys saw one more, and none saw the token itself alone
        decoder = require_stack(model, "decoder")
        window = 1 if decoder.attention.window is None else decoder.attention.window + 1
        attention = dataclasses.replace(decoder.attention, window=window)
        return dataclasses.replace(model, decoder=dataclasses.replace(decoder, attention=attention))
    return model


def _sparse_when_short(model: ModelConfig) -> ModelConfig:
    """BigBird's Flax classes had blocks however short a text was."""
    side = "encoder" if model.decoder is None else "decoder"
    stack = require_stack(model, side)
    if stack.attention.sparse is None:
        return model
    sparse = dataclasses.replace(stack.attention.sparse, short="sparse")
    own = dataclasses.replace(stack.attention, sparse=sparse)
    return dataclasses.replace(model, **{side: dataclasses.replace(stack, attention=own)})


MIN_BLOCKS = 4
"""Blocks that a text needs: the old BigBird's code read four, and was wrong for fewer."""


def check_length(model: ModelConfig, length: int) -> None:
    """Refuses the lengths of texts that the old class refused.

    Raises:
      ConfigError: BigBird's blocks do not divide it, or are too few.
    """
    sparse = require_stack(model, "encoder" if model.decoder is None else "decoder").attention.sparse
    if sparse is not None and (length % sparse.size or length < MIN_BLOCKS * sparse.size):
        raise ConfigError(
            f"call: got {length} slots, expected a multiple of block_size ({sparse.size}) and at least {MIN_BLOCKS} "
            "blocks; pad the text, or set attention_type to original_full"
        )


def tree_model(model: ModelConfig) -> ModelConfig:
    """The model whose parameters the old tree holds: without the table that `_scaled_before_norm` adds."""
    return dataclasses.replace(model, share_embeddings=True) if _has_scaled_table(model) else model


def params_of(model: ModelConfig, params: PyTree) -> PyTree:
    """Parameters of a model, from those of its `tree_model`: the decoder's table is the encoder's times sqrt(D)."""
    if not _has_scaled_table(model):
        return params
    table = params["source_embed"]["table"]
    return {**params, "target_embed": {"table": table * require_stack(model, "decoder").width ** 0.5}}


def _has_scaled_table(model: ModelConfig) -> bool:
    decoder = model.decoder
    return (
        model.is_seq2seq and not model.share_embeddings and decoder is not None and decoder.embed.norm_before_positions
    )


def _scaled_before_norm(model: ModelConfig) -> ModelConfig:
    """BlenderbotSmall's decoder scaled its tokens before their norm, where today's torch class does not.

    The decoder gets a scaled table of its own, of which a tied head takes the scale back.
    """
    decoder = require_stack(model, "decoder")
    if not decoder.embed.scale:
        return model
    decoder = dataclasses.replace(decoder, embed=dataclasses.replace(decoder.embed, scale=False))
    head = dataclasses.replace(model.head, scale=model.head.tied)
    return dataclasses.replace(model, decoder=decoder, share_embeddings=False, head=head)


def hidden_states(model_type: str, sown: PyTree) -> tuple[Array, ...]:
    """Embeddings, then every layer's output: L + 1 arrays `[B, T, D]`, the last one after the final norm.

    RoBERTa-PreLayerNorm's last one was before it.

    Args:
      sown: intermediates of a stack.
    """
    layers = sown["blocks"]["output"][0]
    last = layers[-1] if model_type == "roberta-prelayernorm" else sown["output"][0]
    return (sown["input"][0], *layers[:-1], last)


HEAD_MASK_TYPES = ("bert", "big_bird", "electra", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta")
"""`model_type`s whose calls read a `head_mask`."""

OUTPUT_KERNEL = ("attention", "output", "dense", "kernel")
"""End of the path of a layer's output projection in their trees; the layer's number stands before it."""


def checked_heads(model_type: str, stack: StackConfig, heads: Any) -> Array | None:
    """A call's `head_mask` as an array `[L, H]`; None if the class never read it.

    Raises:
      ConfigError: the class has no such argument in effect, or the shape is another.
    """
    if model_type not in HEAD_MASK_TYPES:
        raise ConfigError(f"call: got a head_mask, expected None: the old class of {model_type} did not read it")
    heads, expected = jnp.asarray(heads), (stack.layers, stack.attention.heads)
    if heads.shape != expected:
        raise ConfigError(f"call: got a head_mask {list(heads.shape)}, expected [layers, heads], {list(expected)}")
    return None if stack.attention.sparse is not None else heads  # BigBird's blocks never read it


def without_heads(params: PyTree, heads: Array) -> PyTree:
    """An old tree whose output projections have the factors `heads` `[L, H]` in them.

    A head's probabilities times a factor is its output times the factor: rows of the kernel that reads it.
    """
    leaves = traverse_util.flatten_dict(params)
    for path, kernel in leaves.items():
        if path[-4:] == OUTPUT_KERNEL:
            factors = jnp.repeat(heads[int(path[-5])], kernel.shape[0] // heads.shape[1])
            leaves[path] = kernel * factors[:, None].astype(kernel.dtype)
    return traverse_util.unflatten_dict(leaves)


def masked_attentions(attentions: Sequence[Array], heads: Array) -> tuple[Array, ...]:
    """Probabilities `[B, H, T, S]` of each layer, times the factors of the heads."""
    return tuple(layer * factors[:, None, None] for layer, factors in zip(attentions, heads, strict=True))
