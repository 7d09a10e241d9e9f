"""T5 (Raffel et al. 2020), v1.1 and T0 (Sanh et al. 2022): pre-norm, relative buckets, unscaled scores, no biases."""

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
from jaxformer.config.schema import Activation
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

ENCODER_HEADS = ("encoder", "token")
"""Heads of an encoder without a decoder."""
EMBEDDING_TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def read_config(settings: Settings, head: str) -> ModelConfig:
    alone = head in ENCODER_HEADS
    if alone:
        settings("is_encoder_decoder", False)  # an encoder alone, whatever the file says
    else:
        settings.expect("is_encoder_decoder", True)
    dropout, width = settings("dropout_rate", 0.1), settings.size("d_model", 512)
    activation, gated = _feed_forward(settings)
    layers = settings.size("num_layers", 6)

    def stack(layers: int) -> StackConfig:
        return StackConfig(
            layers=layers,
            width=width,
            embed=EmbedConfig(vocab=settings.size("vocab_size", 32128), dropout=dropout),
            encoding=EncodingConfig(
                "t5",
                buckets=settings.size("relative_attention_num_buckets", 32),
                max_distance=settings.size("relative_attention_max_distance", 128),
            ),
            attention=AttentionConfig(
                heads=settings.size("num_heads", 8),
                head_width=settings.size("d_kv", 64),
                scale=False,
                bias=False,
                dropout=dropout,
            ),
            ffn=FeedForwardConfig(
                width=settings.size("d_ff", 2048), activation=activation, gated=gated, bias=False, dropout=dropout
            ),
            norm=NormConfig("rms", epsilon=settings("layer_norm_epsilon", 1e-6)),
            dropout=dropout,
        )

    drop = settings("classifier_dropout", 0.0)
    tied = settings("tie_word_embeddings", True)
    heads = {
        "seq2seq": lambda: HeadConfig(tied=tied, scale=settings("scale_decoder_outputs", tied)),
        "sequence": lambda: classifier_head(
            settings, "classes", pooling="last", width=width, dropout=drop, input_dropout=drop
        ),
        "token": lambda: classifier_head(settings, "slots", dropout=drop),
        "qa": lambda: SPAN_HEAD,
    }
    top = heads.get(head, lambda: NO_HEAD)()
    if alone:
        return ModelConfig(encoder=stack(layers), head=top)
    return ModelConfig(
        encoder=stack(layers),
        decoder=stack(settings.size("num_decoder_layers", layers)),
        share_embeddings=True,
        head=top,
    )


def _feed_forward(settings: Settings) -> tuple[Activation, bool]:
    """Activation function of `feed_forward_proj` ("relu", "gated-gelu", "gated-silu", ...), and True if it is gated."""
    named = settings("feed_forward_proj", "relu")
    gated = named.startswith("gated-")
    name = named.removeprefix("gated-")
    if named == "gated-gelu":  # the tanh form
        name = "gelu_new"
    settings.expect("dense_act_fn", name)  # derived from feed_forward_proj and written beside it
    settings.expect("is_gated_act", gated)
    return Settings({"feed_forward_proj": name}, settings.path).activation("feed_forward_proj", "relu"), gated


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder = require_stack(model, "encoder")
    decoder, ffn = model.decoder or encoder, require_ffn(encoder)
    activation = hf_activation(ffn.activation)
    if ffn.gated:
        activation = "gated-gelu" if ffn.activation == "gelu_tanh" else f"gated-{activation}"
    return {
        "d_model": encoder.width,
        "d_kv": encoder.attention.head_width or encoder.width // encoder.attention.heads,
        "d_ff": ffn.width or 4 * encoder.width,
        "num_layers": encoder.layers,
        "num_decoder_layers": decoder.layers,
        "num_heads": encoder.attention.heads,
        "relative_attention_num_buckets": encoder.encoding.buckets,
        "relative_attention_max_distance": encoder.encoding.max_distance,
        "dropout_rate": encoder.dropout,
        "layer_norm_epsilon": encoder.norm.epsilon,
        "feed_forward_proj": activation,
        "vocab_size": encoder.embed.vocab,
        "is_encoder_decoder": model.decoder is not None,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
        "scale_decoder_outputs": model.head.scale if head == "seq2seq" else True,
        **({"classifier_dropout": model.head.dropout} if head in ("sequence", "token") else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    if head in ENCODER_HEADS or model.share_embeddings:
        rows = [Row(EMBEDDING_TABLES[0], "source_embed/table")]
    else:
        rows = [Row(EMBEDDING_TABLES[1], "source_embed/table"), Row(EMBEDDING_TABLES[2], "target_embed/table")]
    rows += _stack(require_stack(model, "encoder"), "encoder", False)
    if head not in ENCODER_HEADS:
        rows += _stack(require_stack(model, "decoder"), "decoder", True)
    if head == "seq2seq" and not model.head.tied:
        rows.append(Row("lm_head.weight", "head/kernel", "V D -> D V"))
    by_head = {
        "sequence": [
            *linear_rows("classification_head.dense", "head/hidden"),
            *linear_rows("classification_head.out_proj", "head/decision"),
        ],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
    }
    return rows + by_head.get(head, [])


def _stack(stack: StackConfig, name: str, cross: bool) -> list[Row]:
    layer, param_layer = f"{name}.block.{{layer}}.layer", f"{name}/blocks"
    last = 2 if cross else 1
    rows = [
        Row(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{name}/shared/table"),
        *norm_rows(f"{layer}.0.layer_norm", f"{param_layer}/attention_norm", has_bias=False),
        *attention_rows(f"{layer}.0.SelfAttention", f"{param_layer}/attention", stack.attention, stack.width),
        *norm_rows(f"{layer}.{last}.layer_norm", f"{param_layer}/ffn_norm", has_bias=False),
        Row(f"{layer}.{last}.DenseReluDense.wo.weight", f"{param_layer}/ffn/out/kernel", "D F -> F D"),
        *norm_rows(f"{name}.final_layer_norm", f"{name}/final_norm", has_bias=False),
    ]
    inputs = (("wi_0", "gate"), ("wi_1", "in")) if require_ffn(stack).gated else (("wi", "in"),)
    for module, part in inputs:
        rows.append(
            Row(f"{layer}.{last}.DenseReluDense.{module}.weight", f"{param_layer}/ffn/{part}/kernel", "F D -> D F")
        )
    if cross:
        rows += norm_rows(f"{layer}.1.layer_norm", f"{param_layer}/cross_norm", has_bias=False)
        rows += attention_rows(f"{layer}.1.EncDecAttention", f"{param_layer}/cross", stack.attention, stack.width)
    return rows


def head_classes(name: str) -> dict[str, str]:
    """Head -> class name."""
    return {
        "seq2seq": f"{name}ForConditionalGeneration",
        "sequence": f"{name}ForSequenceClassification",
        "token": f"{name}ForTokenClassification",
        "qa": f"{name}ForQuestionAnswering",
        "model": f"{name}Model",
        "encoder": f"{name}EncoderModel",
    }


FAMILY = Family(
    model_types=("t5",),
    heads=head_classes("T5"),
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    head_prefixes={"sequence": "transformer.", "token": "transformer."},
    droppable_tensors=(
        r"lm_head\..*",
        r"decoder\..*",
        r"classification_head\..*",
        r"classifier\..*",
        r"qa_outputs\..*",
    ),
    ignored_tensors=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    tied_tensors=("lm_head.weight", "shared.weight"),
    embedding_tables=EMBEDDING_TABLES,
    convention=CallConvention(
        takes_position_ids=False,
        decoder_input_from_source=("sequence", "qa"),
        separator_tokens=("</s>",),
        suffix_tokens=("</s>",),
    ),
)
