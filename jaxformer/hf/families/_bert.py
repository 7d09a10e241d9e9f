"""What BERT and RoBERTa share: post-norm encoder, learned positions, a norm over the embedding sum."""

from __future__ import annotations

from typing import Any

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
from jaxformer.hf.table import (
    HIDDEN,
    SPANS,
    Row,
    Settings,
    classifier,
    linear,
    norm,
    projections,
    side,
    their_activation,
)

PROJECTIONS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
)


def encoder(settings: Settings, offset: int = 0, kinds: int = 2) -> StackConfig:
    settings.expect("position_embedding_type", "absolute")
    settings.expect("is_decoder", False)
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
        norm=NormConfig(order="post", epsilon=settings("layer_norm_eps", 1e-12)),
        dropout=dropout,
    )


def top(settings: Settings, head: str, stack: StackConfig, activation: str, before: bool = False) -> HeadConfig:
    """The head of that name on an encoder.

    Args:
      activation: of the masked language model.
      before: a sequence classifier's dropout acts before its hidden layer too.
    """
    dropout = settings("classifier_dropout", None)
    dropout = stack.dropout if dropout is None else settings("classifier_dropout", 0.0)
    heads = {
        "masked_lm": lambda: HeadConfig(
            tied=settings("tie_word_embeddings", True),
            bias=True,
            transform=True,
            activation=activation,
            epsilon=stack.norm.epsilon,
        ),
        "sequence": lambda: classifier(
            settings, "classes", width=stack.width, dropout=dropout, input_dropout=dropout if before else 0.0
        ),
        "token": lambda: classifier(settings, "slots", dropout=dropout),
        "qa": lambda: SPANS,
        "model": lambda: HeadConfig(kind="pooled", tied=False, width=stack.width),
        "bare": lambda: HIDDEN,
    }
    return heads[head]()


def architectures(name: str) -> dict[str, str]:
    """Our word for a head -> their class, of the family whose classes begin with `name`."""
    heads = {
        "masked_lm": "ForMaskedLM",
        "sequence": "ForSequenceClassification",
        "token": "ForTokenClassification",
        "qa": "ForQuestionAnswering",
        "model": "Model",
        "bare": "Model",
    }
    return {head: name + ending for head, ending in heads.items()}


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = side(model, "encoder")
    return {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.attention.heads,
        "intermediate_size": 4 * stack.width if stack.ffn is None else stack.ffn.width or 4 * stack.width,
        "hidden_act": "gelu" if stack.ffn is None else their_activation(stack.ffn.activation),
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention.dropout,
        "layer_norm_eps": stack.norm.epsilon,
        "max_position_embeddings": stack.encoding.max_length,
        "vocab_size": stack.embed.vocab,
        "type_vocab_size": stack.embed.kinds,
        "pad_token_id": stack.embed.pad,
        "tie_word_embeddings": model.head.tied or head != "masked_lm",
        **({"classifier_dropout": model.head.dropout} if head in ("sequence", "token") else {}),
    }


def body(model: ModelConfig, prefix: str) -> list[Row]:
    """Rows of embeddings and layers."""
    stack = side(model, "encoder")
    theirs, ours = prefix + ".encoder.layer.{layer}", "encoder/blocks"
    kinds = (
        [Row(f"{prefix}.embeddings.token_type_embeddings.weight", "source_embed/kinds")] if stack.embed.kinds else []
    )
    return [
        Row(f"{prefix}.embeddings.word_embeddings.weight", "source_embed/table"),
        Row(f"{prefix}.embeddings.position_embeddings.weight", "encoder/position/table"),
        *kinds,
        *norm(f"{prefix}.embeddings.LayerNorm", "encoder/embed_norm"),
        *projections(theirs, f"{ours}/attention", stack.attention, stack.width, PROJECTIONS),
        *norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_norm"),
        *linear(f"{theirs}.intermediate.dense", f"{ours}/ffn/in"),
        *linear(f"{theirs}.output.dense", f"{ours}/ffn/out"),
        *norm(f"{theirs}.output.LayerNorm", f"{ours}/ffn_norm"),
    ]
