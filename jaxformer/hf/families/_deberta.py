"""What DeBERTa and DeBERTa v2 share: post-norm encoder, scores of content and distance, heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.hf.families import _bert
from jaxformer.hf.table import HIDDEN, SPANS, Row, Settings, classifier, linear, norm, side, their_activation

MAX_DISTANCE = 2**20  # a table of all distances up to it is computed

TERMS = {"c2p": "content_to_position", "p2c": "position_to_content"}
"""Their word for a term of the score -> our field."""

SPARE = (
    r"cls\..*",
    r"mask_predictions\..*",
    r"pooler\..*",
    r"classifier\..*",
    r"qa_outputs\..*",
    r"deberta\.embeddings\.position_embeddings\..*",
)
IGNORED = (r"deberta\.embeddings\.position_ids",)
TWINS = (("cls.predictions.decoder.bias", "cls.predictions.bias"),)
RENAMED = (  # the head of `legacy: false`: the same function under other names
    (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
)


def model(settings: Settings, head: str, stack: StackConfig) -> ModelConfig:
    """`stack` under the head that `head` names."""
    dropout = settings("hidden_dropout_prob", 0.1)
    tied = settings("tie_word_embeddings", True) or not settings("legacy", True)
    heads = {
        "masked_lm": lambda: HeadConfig(
            tied=tied,
            bias=True,
            transform=True,
            activation=settings.activation("hidden_act", "gelu"),
            epsilon=stack.norm.epsilon,
        ),
        "sequence": lambda: classifier(
            settings,
            "classes",
            width=_pooler_width(settings, stack.width),
            hidden=settings.activation("pooler_hidden_act", "gelu"),
            dropout=settings("cls_dropout", dropout),
            input_dropout=settings("pooler_dropout", 0.0),
        ),
        "token": lambda: classifier(settings, "slots", dropout=dropout),
        "qa": lambda: SPANS,
        "model": lambda: HIDDEN,
    }
    if head == "masked_lm" and stack.embed.width is not None:
        raise ConfigError(
            f"{settings.where}: got embedding_size {stack.embed.width} with a masked language model, expected that of "
            "the hidden states; this variant is not supported"
        )
    return ModelConfig(encoder=stack, head=heads[head]())


def _pooler_width(settings: Settings, width: int) -> int:
    settings.expect("pooler_hidden_size", width)
    return width


def encoder(
    settings: Settings, sizes: tuple[int, int, int, int], vocab: int, key_bias: bool, **relative: Any
) -> StackConfig:
    """The encoder of a config.json.

    Args:
      sizes: their defaults of width, layers, heads and feed-forward width.
      vocab: their default.
      relative: more fields of the encoding, where positions are relative.
    """
    width, dropout = settings.size("hidden_size", sizes[0]), settings("hidden_dropout_prob", 0.1)
    inner, kinds = settings.size("embedding_size", width), settings("type_vocab_size", 0)
    biased = settings("position_biased_input", True)
    if inner != width and (kinds or biased):
        raise ConfigError(
            f"{settings.where}: got embedding_size {inner} with position_biased_input {biased} and type_vocab_size "
            f"{kinds}, expected {width}, or neither of the two; this variant is not supported"
        )
    settings.expect("attention_head_size", width // settings.size("num_attention_heads", sizes[2]))
    return StackConfig(
        layers=settings.size("num_hidden_layers", sizes[1]),
        width=width,
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", vocab),
            width=None if inner == width else inner,
            kinds=kinds,
            norm=True,
            dropout=dropout,
            pad=settings("pad_token_id", 0),
        ),
        encoding=_encoding(settings, biased, dropout, relative),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", sizes[2]),
            key_bias=None if key_bias else False,
            average_padding=True,
            dropout=settings("attention_probs_dropout_prob", 0.1),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", sizes[3]), activation=settings.activation("hidden_act", "gelu")
        ),
        norm=NormConfig(order="post", epsilon=settings("layer_norm_eps", 1e-7)),
        dropout=dropout,
    )


def _encoding(settings: Settings, biased: bool, dropout: float, relative: dict[str, Any]) -> EncodingConfig:
    length, named = settings.size("max_position_embeddings", 512), settings("pos_att_type", None) or []
    longest = settings("max_relative_positions", -1)
    if longest > MAX_DISTANCE:
        raise ConfigError(
            f"{settings.where}: got max_relative_positions {longest}, expected at most {MAX_DISTANCE}; fix the file"
        )
    named = [word.strip() for word in named.lower().split("|")] if isinstance(named, str) else named
    if not set(named) <= set(TERMS) or bool(named) != settings("relative_attention", False):
        raise ConfigError(
            f"{settings.where}: got pos_att_type {named!r} with relative_attention "
            f"{settings('relative_attention', False)}, expected some of c2p and p2c exactly if it is true; "
            "this variant is not supported"
        )
    if not named:
        return EncodingConfig("learned" if biased else "none", max_length=length)
    return EncodingConfig(
        "deberta",
        max_length=length,
        max_distance=length if longest < 1 else longest,
        absolute=biased,
        dropout=dropout,
        **{field: word in named for word, field in TERMS.items()},
        **{"buckets": None, **relative},
    )


def write(model: ModelConfig, terms: Sequence[str]) -> dict[str, Any]:
    """Their config.json. `terms` are the words for the score's, in the order in which they are usually listed."""
    stack = side(model, "encoder")
    encoding, ffn = stack.encoding, stack.ffn
    if ffn is None:
        raise ConfigError("export: got an encoder without feed-forward layers, expected them for this family")
    relative = encoding.kind == "deberta"
    listed = [word for word in terms if relative and getattr(encoding, TERMS[word])]
    settings = {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.attention.heads,
        "intermediate_size": ffn.width or 4 * stack.width,
        "hidden_act": their_activation(ffn.activation),
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention.dropout,
        "layer_norm_eps": stack.norm.epsilon,
        "vocab_size": stack.embed.vocab,
        "type_vocab_size": stack.embed.kinds,
        "pad_token_id": stack.embed.pad,
        "max_position_embeddings": encoding.max_length,
        "relative_attention": relative,
        "pos_att_type": listed or None,
        "position_biased_input": encoding.absolute if relative else encoding.kind == "learned",
        "legacy": True,
        "tie_word_embeddings": model.head.tied or model.head.kind != "tokens",
    }
    if relative:
        same = encoding.max_distance == encoding.max_length
        settings["max_relative_positions"] = -1 if same else encoding.max_distance
    if stack.embed.width is not None:
        settings["embedding_size"] = stack.embed.width
    if model.head.kind == "classes":
        settings["pooler_hidden_size"] = model.head.width
        settings["pooler_hidden_act"] = their_activation(model.head.hidden)
        settings["pooler_dropout"] = model.head.input_dropout
        settings["cls_dropout"] = model.head.dropout
    return settings


def body(model: ModelConfig) -> list[Row]:
    """Rows of embeddings, table of distances, and layers, but for what makes queries, keys and values."""
    stack = side(model, "encoder")
    theirs, ours = "deberta.encoder.layer.{layer}", "encoder/blocks"
    found = [
        Row("deberta.embeddings.word_embeddings.weight", "source_embed/table"),
        *norm("deberta.embeddings.LayerNorm", "encoder/embed_norm"),
        *norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_norm"),
        *linear(f"{theirs}.intermediate.dense", f"{ours}/ffn/in"),
        *linear(f"{theirs}.output.dense", f"{ours}/ffn/out"),
        *norm(f"{theirs}.output.LayerNorm", f"{ours}/ffn_norm"),
    ]
    if stack.embed.width is not None:
        found.append(Row("deberta.embeddings.embed_proj.weight", "source_embed/up", "D E -> E D"))
    if stack.embed.kinds:
        found.append(Row("deberta.embeddings.token_type_embeddings.weight", "source_embed/kinds"))
    if stack.encoding.kind == "learned":
        found.append(Row("deberta.embeddings.position_embeddings.weight", "encoder/position/table"))
    if stack.encoding.kind == "deberta":
        found.append(Row("deberta.encoder.rel_embeddings.weight", "encoder/shared/table"))
        if stack.encoding.absolute:
            found.append(Row("deberta.embeddings.position_embeddings.weight", "encoder/position/learned/table"))
    return found


def top(model: ModelConfig, head: str) -> list[Row]:
    """Rows of the head."""
    untied = [] if model.head.tied else [Row("cls.predictions.decoder.weight", "head/kernel", "V D -> D V")]
    tops = {
        "masked_lm": [
            *linear("cls.predictions.transform.dense", "head/transform"),
            *norm("cls.predictions.transform.LayerNorm", "head/transform_norm"),
            Row("cls.predictions.bias", "head/bias"),
            *untied,
        ],
        "sequence": [*linear("pooler.dense", "head/hidden"), *linear("classifier", "head/decision")],
        "token": linear("classifier", "head/decision"),
        "qa": linear("qa_outputs", "head/decision"),
        "model": [],
    }
    return tops[head]


def heads(name: str) -> dict[str, str]:
    """Our word for a head -> their class: BERT's, whose bare model has no pooler to leave out."""
    return {head: theirs for head, theirs in _bert.architectures(name).items() if head != "bare"}
