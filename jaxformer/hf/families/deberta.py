"""DeBERTa (He et al. 2021): a fused query-key-value projection, interleaved by heads, and keys without bias."""

from __future__ import annotations

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _deberta
from jaxformer.hf.table import CallConvention, Family, Row, Settings, attention_sizes, linear_rows, require_stack


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("talking_head", False)
    stack = _deberta.encoder_config(settings, (768, 12, 12, 3072), 50265, key_bias=False)
    return _deberta.model_config(settings, head, stack)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    return _deberta.write_config(model, ("c2p", "p2c"))


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack = require_stack(model, "encoder")
    hf_attention, param_attention = "deberta.encoder.layer.{layer}.attention", "encoder/blocks/attention"
    axes = attention_sizes(stack.attention, stack.width)
    sizes = {"H": axes["H"], "K": axes["K"]}
    paths = tuple(f"{param_attention}/{part}/kernel" for part in ("query", "key", "value"))
    attention = [
        Row(f"{hf_attention}.self.in_proj.weight", paths, "(H n K) D -> n D H K", sizes),
        Row(f"{hf_attention}.self.q_bias", f"{param_attention}/query/bias", "(H K) -> H K", sizes),
        Row(f"{hf_attention}.self.v_bias", f"{param_attention}/value/bias", "(H K) -> H K", sizes),
        *linear_rows(f"{hf_attention}.output.dense", f"{param_attention}/out", "D (H K) -> H K D", sizes=sizes),
    ]
    if stack.encoding.kind == "deberta" and stack.encoding.content_to_position:
        path = f"{param_attention}/position/key/kernel"
        attention.append(Row(f"{hf_attention}.self.pos_proj.weight", path, "(H K) D -> D H K", sizes))
    if stack.encoding.kind == "deberta" and stack.encoding.position_to_content:
        path = f"{param_attention}/position/query"
        attention += linear_rows(
            f"{hf_attention}.self.pos_q_proj", path, "(H K) D -> D H K", "(H K) -> H K", sizes=sizes
        )
    return _deberta.body_rows(model) + attention + _deberta.head_rows(model, head)


FAMILY = Family(
    model_types=("deberta",),
    heads=_deberta.head_classes("Deberta"),
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="deberta.",
    droppable_tensors=_deberta.DROPPABLE_TENSORS,
    ignored_tensors=_deberta.IGNORED_TENSORS,
    duplicate_tensors=_deberta.DUPLICATE_TENSORS,
    renamed_tensors=_deberta.RENAMED_TENSORS,
    tied_tensors=("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    convention=CallConvention(
        labels_are_shares=True,
        prefix_tokens=("[CLS]",),
        separator_tokens=("[SEP]",),
        suffix_tokens=("[SEP]",),
    ),
)
