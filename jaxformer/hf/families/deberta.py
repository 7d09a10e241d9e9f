"""DeBERTa (He et al. 2021): one matrix for queries, keys and values, head by head, and keys without a bias."""

from __future__ import annotations

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _deberta
from jaxformer.hf.table import Convention, Family, Row, Settings, attention_sizes, linear, side


def read(settings: Settings, head: str) -> ModelConfig:
    settings.expect("talking_head", False)
    stack = _deberta.encoder(settings, (768, 12, 12, 3072), 50265, key_bias=False)
    return _deberta.model(settings, head, stack)


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    return _deberta.write(model, ("c2p", "p2c"))


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack = side(model, "encoder")
    theirs, ours = "deberta.encoder.layer.{layer}.attention", "encoder/blocks/attention"
    sizes = attention_sizes(stack.attention, stack.width)
    taken = {"H": sizes["H"], "K": sizes["K"]}
    three = tuple(f"{ours}/{part}/kernel" for part in ("query", "key", "value"))
    found = [
        Row(f"{theirs}.self.in_proj.weight", three, "(H n K) D -> n D H K", taken),
        Row(f"{theirs}.self.q_bias", f"{ours}/query/bias", "(H K) -> H K", taken),
        Row(f"{theirs}.self.v_bias", f"{ours}/value/bias", "(H K) -> H K", taken),
        *linear(f"{theirs}.output.dense", f"{ours}/out", "D (H K) -> H K D", **taken),
    ]
    if stack.encoding.kind == "deberta" and stack.encoding.content_to_position:
        path = f"{ours}/position/key/kernel"
        found.append(Row(f"{theirs}.self.pos_proj.weight", path, "(H K) D -> D H K", taken))
    if stack.encoding.kind == "deberta" and stack.encoding.position_to_content:
        path = f"{ours}/position/query"
        found += linear(f"{theirs}.self.pos_q_proj", path, "(H K) D -> D H K", "(H K) -> H K", **taken)
    return _deberta.body(model) + found + _deberta.top(model, head)


FAMILY = Family(
    types=("deberta",),
    heads=_deberta.heads("Deberta"),
    read=read,
    write=write,
    rows=rows,
    prefix="deberta.",
    spare=_deberta.SPARE,
    ignored=_deberta.IGNORED,
    twins=_deberta.TWINS,
    renamed=_deberta.RENAMED,
    output=("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    convention=Convention(before=("[CLS]",), between=("[SEP]",), after=("[SEP]",)),
)
