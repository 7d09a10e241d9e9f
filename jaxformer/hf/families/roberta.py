"""RoBERTa (Liu et al. 2019): BERT whose positions start after the padding token's row."""

from __future__ import annotations

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import Convention, Family, Row, Settings, linear, norm


def read(settings: Settings, head: str) -> ModelConfig:
    pad = settings("pad_token_id", 1)
    encoder = _bert.encoder(settings.replaced({**settings.values, "pad_token_id": pad}), pad + 1)
    return ModelConfig(encoder=encoder, head=_bert.top(settings, head, encoder, "gelu", before=True))


def rows(model: ModelConfig, head: str) -> list[Row]:
    untied = [] if model.head.tied else [Row("lm_head.decoder.weight", "head/kernel", "V D -> D V")]
    tops = {
        "masked_lm": [
            *linear("lm_head.dense", "head/transform"),
            *norm("lm_head.layer_norm", "head/transform_norm"),
            Row("lm_head.bias", "head/bias"),
            *untied,
        ],
        "sequence": [
            *linear("classifier.dense", "head/hidden"),
            *linear("classifier.out_proj", "head/decision"),
        ],
        "token": linear("classifier", "head/decision"),
        "qa": linear("qa_outputs", "head/decision"),
        "model": linear("roberta.pooler.dense", "head/hidden"),
        "bare": [],
    }
    return _bert.body(model, "roberta") + tops[head]


FAMILY = Family(
    types=("roberta",),
    heads=_bert.architectures("Roberta"),
    read=read,
    write=_bert.write,
    rows=rows,
    prefix="roberta.",
    spare=(r"lm_head\..*", r"roberta\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored=(r"roberta\.embeddings\.position_ids",),
    twins=(("lm_head.decoder.bias", "lm_head.bias"),),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    output=("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    convention=Convention(positions="ids", before=("<s>",), between=("</s>", "</s>"), after=("</s>",)),
)
