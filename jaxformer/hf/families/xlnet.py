"""XLNet (Yang et al. 2019): post-norm encoder with Transformer-XL positions, two streams and memories."""

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
    PermutationConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf import xlnet_call
from jaxformer.hf.table import (
    CallConvention,
    Family,
    Row,
    Settings,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("same_length", False)
    settings.expect("bi_data", False)
    settings.expect("attn_type", "bi", "uni")
    dropout, width = settings("dropout", 0.1), settings.size("d_model", 1024)
    heads = settings.size("n_head", 16)
    clamp = settings("clamp_len", -1)
    encoder = StackConfig(
        layers=settings.size("n_layer", 24),
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 32000), dropout=dropout),
        encoding=EncodingConfig("transformer_xl", clamp=clamp if clamp > 0 else None),
        attention=AttentionConfig(
            heads=heads, head_width=settings.size("d_head", max(width // heads, 1)), bias=False, dropout=dropout
        ),
        ffn=FeedForwardConfig(
            width=settings.size("d_inner", 4096),
            activation=settings.activation("ff_activation", "gelu"),
            dropout=dropout,
        ),
        norm=NormConfig(order="post", epsilon=settings("layer_norm_eps", 1e-12)),
        dropout=dropout,
        causal=True if settings("attn_type", "bi") == "uni" else None,
    )
    by_head = {
        "causal_lm": lambda: HeadConfig(tied=settings("tie_word_embeddings", True), bias=True, dropout=dropout),
        "sequence": lambda: _summary(settings, width, dropout),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "qa": lambda: HeadConfig(kind="slots", tied=False, classes=2, dropout=dropout),
        "model": lambda: HeadConfig(kind="none", tied=False, dropout=dropout),
    }
    memories = PermutationConfig(memory=_slots(settings, "mem_len", 512), reuse=_slots(settings, "reuse_len", None))
    return ModelConfig(encoder=encoder, permutation=memories, head=by_head[head]())


def _slots(settings: Settings, name: str, default: int | None) -> int | None:
    """A number of slots; null and 0 both mean all, and only an absent key means the default."""
    value = settings.raw(name, default)
    return None if value in (None, 0) else settings.size(name, value)


def _summary(settings: Settings, width: int, dropout: float) -> HeadConfig:
    """The library's SequenceSummary: one slot or the mean of all, a dense layer with tanh, and the decision."""
    settings.expect("summary_type", "last", "first", "mean")
    projected, activation = settings("summary_use_proj", True), settings.raw("summary_activation", "tanh")
    settings.expect("summary_proj_to_labels", False)
    if not projected and activation:
        raise ConfigError(
            f"{settings.path}: got summary_activation {activation!r} with summary_use_proj False, expected null; "
            "this variant is not supported"
        )
    first = settings("summary_first_dropout", 0.0)
    return classifier_head(
        settings,
        "classes",
        pooling=settings("summary_type", "last"),
        width=width if projected else None,
        hidden=settings.activation("summary_activation", "tanh") if projected else "tanh",
        input_dropout=1.0 - (1.0 - dropout) * (1.0 - first),  # the model's dropout, then the summary's
        dropout=settings("summary_last_dropout", 0.1),
    )


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder, memories = require_stack(model, "encoder"), model.permutation or PermutationConfig()
    attention, ffn = encoder.attention, require_ffn(encoder)
    settings = {
        "d_model": encoder.width,
        "n_layer": encoder.layers,
        "n_head": attention.heads,
        "d_head": attention.head_width or encoder.width // attention.heads,
        "d_inner": ffn.width or 4 * encoder.width,
        "ff_activation": hf_activation(ffn.activation),
        "attn_type": "uni" if encoder.causal else "bi",
        "clamp_len": -1 if encoder.encoding.clamp is None else encoder.encoding.clamp,
        "dropout": encoder.dropout,
        "layer_norm_eps": encoder.norm.epsilon,
        "vocab_size": encoder.embed.vocab,
        "mem_len": memories.memory,
        "reuse_len": memories.reuse,
        "tie_word_embeddings": model.head.tied or head != "causal_lm",
    }
    if head == "sequence":
        projected = model.head.width is not None
        settings |= {
            "summary_type": model.head.pooling,
            "summary_use_proj": projected,
            "summary_activation": hf_activation(model.head.hidden) if projected else None,
            "summary_last_dropout": model.head.dropout,
        }
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    hf_layer, param_layer = "transformer.layer.{layer}", "encoder/blocks"
    attention = {
        "q": "query/kernel",
        "k": "key/kernel",
        "v": "value/kernel",
        "r": "position/kernel",
        "r_w_bias": "position/content_bias",
        "r_r_bias": "position/position_bias",
        "r_s_bias": "position/kind_bias",
        "seg_embed": "position/relation",
    }
    body = [
        Row("transformer.word_embedding.weight", "source_embed/table"),
        Row("transformer.mask_emb", "mask_embed", "1 1 D -> D"),
        *(Row(f"{hf_layer}.rel_attn.{name}", f"{param_layer}/attention/{path}") for name, path in attention.items()),
        Row(f"{hf_layer}.rel_attn.o", f"{param_layer}/attention/out/kernel", "D H K -> H K D"),
        *norm_rows(f"{hf_layer}.rel_attn.layer_norm", f"{param_layer}/attention_norm"),
        *linear_rows(f"{hf_layer}.ff.layer_1", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.ff.layer_2", f"{param_layer}/ffn/out"),
        *norm_rows(f"{hf_layer}.ff.layer_norm", f"{param_layer}/ffn_norm"),
    ]
    untied = [] if model.head.tied else [Row("lm_loss.weight", "head/kernel", "V D -> D V")]
    summary = linear_rows("sequence_summary.summary", "head/hidden") if model.head.width is not None else []
    by_head = {
        "causal_lm": [Row("lm_loss.bias", "head/bias"), *untied],
        "sequence": [*summary, *linear_rows("logits_proj", "head/decision")],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + by_head[head]


FAMILY = Family(
    model_types=("xlnet",),
    heads={
        "causal_lm": "XLNetLMHeadModel",
        "sequence": "XLNetForSequenceClassification",
        "token": "XLNetForTokenClassification",
        "qa": "XLNetForQuestionAnsweringSimple",
        "model": "XLNetModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="transformer.",
    droppable_tensors=(
        r"lm_loss\..*",
        r"sequence_summary\..*",
        r"logits_proj\..*",
        r"classifier\..*",
        r"qa_outputs\..*",
        r"(start_logits|end_logits|answer_class)\..*",
    ),
    ignored_keys=dict.fromkeys(("start_n_top", "end_n_top"), "of a head that is not read (XLNetForQuestionAnswering)"),
    tied_tensors=("lm_loss.weight", "transformer.word_embedding.weight"),
    convention=CallConvention(
        separator_tokens=("<sep>",), suffix_tokens=("<sep>", "<cls>"), last_token_type=2, call=xlnet_call.call
    ),
)
