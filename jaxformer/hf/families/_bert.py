"""Shared by BERT, RoBERTa and their relatives: learned positions, a norm over the embedding sum, a stack of layers.

With head "causal_lm" the same layers are a decoder (the library's `is_decoder`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.config.schema import Activation
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    Row,
    Settings,
    attention_rows,
    choice_head,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_stack,
)

PROJECTIONS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
)


CROSS_PROJECTIONS = tuple(f"cross{name}" for name in PROJECTIONS)
"""Those of a decoder that reads an encoder's output, which stand between self-attention and feed-forward layer."""


def stack_config(
    settings: Settings, head: str, offset: int = 0, kinds: int = 2, order: Literal["pre", "post"] = "post"
) -> StackConfig:
    """The layers, with their embedding.

    Args:
      offset: row of the first position.
      kinds: token types if config.json names none.
      order: place of the norms.
    """
    settings.expect("position_embedding_type", "absolute")
    settings.expect("is_decoder", head == "causal_lm")
    settings.expect("add_cross_attention", False)
    dropout = settings("hidden_dropout_prob", 0.1)
    return StackConfig(
        layers=settings.size("num_hidden_layers", 12),
        width=settings.size("hidden_size", 768),
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", 30522),
            kinds=settings("type_vocab_size", kinds),
            norm=True,
            dropout=dropout,
            pad=settings("pad_token_id", 0),
        ),
        encoding=EncodingConfig("learned", max_length=settings.size("max_position_embeddings", 512), offset=offset),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", 12), dropout=settings("attention_probs_dropout_prob", 0.1)
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 3072), activation=settings.activation("hidden_act", "gelu")
        ),
        norm=NormConfig(order=order, epsilon=settings("layer_norm_eps", 1e-12)),
        dropout=dropout,
    )


def model_config(stack: StackConfig, head: str, top: HeadConfig) -> ModelConfig:
    """The model of these layers: an encoder, or a decoder under a causal language model's head."""
    return ModelConfig(decoder=stack, head=top) if head == "causal_lm" else ModelConfig(encoder=stack, head=top)


def stack_of(model: ModelConfig) -> StackConfig:
    """The layers of a model that `model_config` made."""
    return require_stack(model, "encoder" if model.decoder is None else "decoder")


def paths_of(model: ModelConfig) -> tuple[str, str]:
    """Paths of the layers' parameters and of the embedding's."""
    return ("encoder", "source_embed") if model.decoder is None else ("decoder", "target_embed")


def head_config(
    settings: Settings, head: str, stack: StackConfig, activation: Activation, input_dropout: bool = False
) -> HeadConfig:
    """The head config of an encoder.

    Args:
      activation: activation function of the masked language model's transform.
      input_dropout: a sequence classifier has dropout before its hidden layer, too, and the choice between texts the
        dropout of the layers (RoBERTa).
    """
    dropout = settings("classifier_dropout", None)
    dropout = stack.dropout if dropout is None else settings("classifier_dropout", 0.0)
    tokens = HeadConfig(
        tied=settings("tie_word_embeddings", True),
        bias=True,
        transform=True,
        activation=activation,
        epsilon=stack.norm.epsilon,
    )
    heads = {
        "masked_lm": lambda: tokens,
        "causal_lm": lambda: tokens,
        "pretraining": lambda: dataclasses.replace(tokens, relation=True, width=stack.width),
        "sequence": lambda: classifier_head(
            settings, "classes", width=stack.width, dropout=dropout, input_dropout=dropout if input_dropout else 0.0
        ),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "multiple_choice": lambda: choice_head(width=stack.width, dropout=stack.dropout if input_dropout else dropout),
        "next_sentence": lambda: HeadConfig(kind="classes", tied=False, classes=2, width=stack.width),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: HeadConfig(kind="pooled", tied=False, width=stack.width),
        "bare": lambda: NO_HEAD,
    }
    return heads[head]()


def head_classes(name: str, causal: str = "ForCausalLM") -> dict[str, str]:
    """Head -> class name, for a family whose class names begin with `name`."""
    heads = {
        "masked_lm": "ForMaskedLM",
        "causal_lm": causal,
        "sequence": "ForSequenceClassification",
        "token": "ForTokenClassification",
        "qa": "ForQuestionAnswering",
        "multiple_choice": "ForMultipleChoice",
        "model": "Model",
        "bare": "Model",
    }
    return {head: name + ending for head, ending in heads.items()}


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = stack_of(model)
    return {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.attention.heads,
        "intermediate_size": 4 * stack.width if stack.ffn is None else stack.ffn.width or 4 * stack.width,
        "hidden_act": "gelu" if stack.ffn is None else hf_activation(stack.ffn.activation),
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention.dropout,
        "layer_norm_eps": stack.norm.epsilon,
        "max_position_embeddings": stack.encoding.max_length,
        "vocab_size": stack.embed.vocab,
        "type_vocab_size": stack.embed.kinds,
        "pad_token_id": stack.embed.pad,
        "tie_word_embeddings": model.head.tied or head not in ("masked_lm", "causal_lm", "pretraining"),
        **({"is_decoder": True} if head == "causal_lm" else {}),
        **({"classifier_dropout": model.head.dropout} if head in ("sequence", "token") else {}),
    }


def prediction_rows(model: ModelConfig) -> list[Row]:
    """Rows of the head that predicts tokens, as BERT names its tensors."""
    untied = [] if model.head.tied else [Row("cls.predictions.decoder.weight", "head/kernel", "V D -> D V")]
    return [
        *linear_rows("cls.predictions.transform.dense", "head/transform"),
        *norm_rows("cls.predictions.transform.LayerNorm", "head/transform_norm"),
        Row("cls.predictions.bias", "head/bias"),
        *untied,
    ]


def body_rows(model: ModelConfig, prefix: str) -> list[Row]:
    """Rows of embeddings and layers."""
    return embedding_rows(model, prefix) + layer_rows(model, prefix)


def layer_rows(model: ModelConfig, prefix: str) -> list[Row]:
    """Rows of the layers. Norms before a sub-layer stand elsewhere in the file than norms after it."""
    stack, (side, _) = stack_of(model), paths_of(model)
    hf_layer, param_layer = prefix + ".encoder.layer.{layer}", f"{side}/blocks"
    pre = stack.norm.order == "pre"
    return [
        *attention_rows(hf_layer, f"{param_layer}/attention", stack.attention, stack.width, PROJECTIONS),
        *norm_rows(
            f"{hf_layer}.attention.LayerNorm" if pre else f"{hf_layer}.attention.output.LayerNorm",
            f"{param_layer}/attention_norm",
        ),
        *linear_rows(f"{hf_layer}.intermediate.dense", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.output.dense", f"{param_layer}/ffn/out"),
        *norm_rows(
            f"{hf_layer}.intermediate.LayerNorm" if pre else f"{hf_layer}.output.LayerNorm", f"{param_layer}/ffn_norm"
        ),
        *(norm_rows(f"{prefix}.LayerNorm", f"{side}/final_norm") if pre else []),
        *(cross_rows(stack, hf_layer) if model.is_seq2seq else []),
    ]


def cross_rows(decoder: StackConfig, hf_layer: str) -> list[Row]:
    """Rows of cross-attention, in a decoder that has an encoder beside it."""
    norm = f"{hf_layer}.crossattention." + ("LayerNorm" if decoder.norm.order == "pre" else "output.LayerNorm")
    cross, own = "decoder/blocks/cross", decoder.attention
    return [
        *attention_rows(hf_layer, cross, own, decoder.width, CROSS_PROJECTIONS),
        *norm_rows(norm, f"{cross}_norm"),
    ]


def embedding_rows(model: ModelConfig, prefix: str) -> list[Row]:
    """Rows of the tables of tokens, positions and token types, and of the norm of their sum."""
    stack, (side, embed) = stack_of(model), paths_of(model)
    positions = [Row(f"{prefix}.embeddings.position_embeddings.weight", f"{side}/position/table")]
    kinds = [Row(f"{prefix}.embeddings.token_type_embeddings.weight", f"{embed}/kinds")] if stack.embed.kinds else []
    return [
        Row(f"{prefix}.embeddings.word_embeddings.weight", f"{embed}/table"),
        *(positions if stack.encoding.kind == "learned" else []),
        *kinds,
        *norm_rows(f"{prefix}.embeddings.LayerNorm", f"{side}/embed_norm"),
    ]
