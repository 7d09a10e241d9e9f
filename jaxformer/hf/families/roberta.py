"""RoBERTa (Liu et al. 2019): BERT with positions that begin after the padding token's id."""

from __future__ import annotations

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import CallConvention, Family, Row, Settings, linear_rows, norm_rows


def read_config(settings: Settings, head: str) -> ModelConfig:
    pad = settings("pad_token_id", 1)
    encoder = _bert.encoder_config(settings.with_values({**settings.values, "pad_token_id": pad}), pad + 1)
    return ModelConfig(encoder=encoder, head=_bert.head_config(settings, head, encoder, "gelu", input_dropout=True))


def rows(model: ModelConfig, head: str) -> list[Row]:
    untied = [] if model.head.tied else [Row("lm_head.decoder.weight", "head/kernel", "V D -> D V")]
    by_head = {
        "masked_lm": [
            *linear_rows("lm_head.dense", "head/transform"),
            *norm_rows("lm_head.layer_norm", "head/transform_norm"),
            Row("lm_head.bias", "head/bias"),
            *untied,
        ],
        "sequence": [
            *linear_rows("classifier.dense", "head/hidden"),
            *linear_rows("classifier.out_proj", "head/decision"),
        ],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": linear_rows("roberta.pooler.dense", "head/hidden"),
        "bare": [],
    }
    return _bert.body_rows(model, "roberta") + by_head[head]


FAMILY = Family(
    model_types=("roberta",),
    heads=_bert.head_classes("Roberta"),
    read_config=read_config,
    write_config=_bert.write_config,
    rows=rows,
    prefix="roberta.",
    droppable_tensors=(r"lm_head\..*", r"roberta\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored_tensors=(r"roberta\.embeddings\.position_ids",),
    duplicate_tensors=(("lm_head.decoder.bias", "lm_head.bias"),),
    renamed_tensors=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    tied_tensors=("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    convention=CallConvention(
        positions="ids", prefix_tokens=("<s>",), separator_tokens=("</s>", "</s>"), suffix_tokens=("</s>",)
    ),
)
