"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import Convention, Family, Row, Settings, linear, norm


def read(settings: Settings, head: str) -> ModelConfig:
    encoder = _bert.encoder(settings)
    return ModelConfig(
        encoder=encoder, head=_bert.top(settings, head, encoder, settings.activation("hidden_act", "gelu"))
    )


def rows(model: ModelConfig, head: str) -> list[Row]:
    pooler = linear("bert.pooler.dense", "head/hidden")
    untied = [] if model.head.tied else [Row("cls.predictions.decoder.weight", "head/kernel", "V D -> D V")]
    tops = {
        "masked_lm": [
            *linear("cls.predictions.transform.dense", "head/transform"),
            *norm("cls.predictions.transform.LayerNorm", "head/transform_norm"),
            Row("cls.predictions.bias", "head/bias"),
            *untied,
        ],
        "sequence": [*pooler, *linear("classifier", "head/decision")],
        "token": linear("classifier", "head/decision"),
        "qa": linear("qa_outputs", "head/decision"),
        "model": pooler,
        "bare": [],
    }
    return _bert.body(model, "bert") + tops[head]


FAMILY = Family(
    types=("bert",),
    heads=_bert.architectures("Bert"),
    read=read,
    write=_bert.write,
    rows=rows,
    prefix="bert.",
    spare=(r"cls\..*", r"bert\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored=(r"bert\.embeddings\.position_ids",),
    twins=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    output=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    convention=Convention(before=("[CLS]",), between=("[SEP]",), after=("[SEP]",)),
)
