"""T5 (Raffel et al. 2020), v1.1 and T0 (Sanh et al. 2022): pre-norm, relative buckets, no score scale, no biases."""

from __future__ import annotations

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
from jaxformer.hf.table import HIDDEN, Convention, Family, Row, Settings, norm, projections, side, their_activation

TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def read(settings: Settings, head: str) -> ModelConfig:
    if head == "encoder":
        settings("is_encoder_decoder", False)  # of one side, whatever it says
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

    if head == "encoder":
        return ModelConfig(encoder=stack(layers), head=HIDDEN)
    tied = settings("tie_word_embeddings", True)
    top = HeadConfig(tied=tied, scale=settings("scale_decoder_outputs", tied))
    return ModelConfig(
        encoder=stack(layers),
        decoder=stack(settings.size("num_decoder_layers", layers)),
        share_embeddings=True,
        head=top if head == "seq2seq" else HIDDEN,
    )


def _feed_forward(settings: Settings) -> tuple[str, bool]:
    """Activation and gate of `feed_forward_proj`: "relu", "gated-gelu" (the tanh form), "gated-silu", ..."""
    named = settings("feed_forward_proj", "relu")
    gated = named.startswith("gated-")
    name = named.removeprefix("gated-")
    if named == "gated-gelu":
        name = "gelu_new"
    settings.expect("dense_act_fn", name)  # what the library derives of the first and writes beside it
    settings.expect("is_gated_act", gated)
    return Settings({"feed_forward_proj": name}, settings.where).activation("feed_forward_proj", "relu"), gated


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder = side(model, "encoder")
    decoder, ffn = model.decoder or encoder, encoder.ffn
    if ffn is None:
        raise ConfigError("export: got an encoder without feed-forward layers, expected them for this family")
    activation = their_activation(ffn.activation)
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
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    one = head == "encoder" or model.share_embeddings
    tables = (
        (TABLES[:1], ("source_embed/table",)) if one else (TABLES[1:], ("source_embed/table", "target_embed/table"))
    )
    found = [*map(Row, *tables), *_stack(side(model, "encoder"), "encoder", False)]
    if head != "encoder":
        found += _stack(side(model, "decoder"), "decoder", True)
    if head == "seq2seq" and not model.head.tied:
        found.append(Row("lm_head.weight", "head/kernel", "V D -> D V"))
    return found


def _stack(stack: StackConfig, name: str, cross: bool) -> list[Row]:
    layer, ours = f"{name}.block.{{layer}}.layer", f"{name}/blocks"
    last = 2 if cross else 1
    found = [
        Row(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{name}/shared/table"),
        *norm(f"{layer}.0.layer_norm", f"{ours}/attention_norm", bias=False),
        *projections(f"{layer}.0.SelfAttention", f"{ours}/attention", stack.attention, stack.width),
        *norm(f"{layer}.{last}.layer_norm", f"{ours}/ffn_norm", bias=False),
        Row(f"{layer}.{last}.DenseReluDense.wo.weight", f"{ours}/ffn/out/kernel", "D F -> F D"),
        *norm(f"{name}.final_layer_norm", f"{name}/final_norm", bias=False),
    ]
    inputs = (("wi_0", "gate"), ("wi_1", "in")) if stack.ffn.gated else (("wi", "in"),)
    for theirs, part in inputs:
        found.append(Row(f"{layer}.{last}.DenseReluDense.{theirs}.weight", f"{ours}/ffn/{part}/kernel", "F D -> D F"))
    if cross:
        found += norm(f"{layer}.1.layer_norm", f"{ours}/cross_norm", bias=False)
        found += projections(f"{layer}.1.EncDecAttention", f"{ours}/cross", stack.attention, stack.width)
    return found


FAMILY = Family(
    types=("t5",),
    heads={"seq2seq": "T5ForConditionalGeneration", "model": "T5Model", "encoder": "T5EncoderModel"},
    read=read,
    write=write,
    rows=rows,
    spare=(r"lm_head\..*", r"decoder\..*"),
    free={"classifier_dropout": "of a head that is not read (T5ForSequenceClassification)"},
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    output=("lm_head.weight", "shared.weight"),
    tables=TABLES,
    convention=Convention(between=("</s>",), after=("</s>",)),
)
