"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import HIDDEN, SPANS, Family, Row, Settings, classifier, linear, norm


def read(settings: Settings, head: str) -> ModelConfig:
    encoder = _bert.encoder(settings)
    heads = {
        "masked_lm": lambda: HeadConfig(
            tied=settings("tie_word_embeddings", True),
            bias=True,
            transform=True,
            activation=settings.activation("hidden_act", "gelu"),
            epsilon=encoder.norm.epsilon,
        ),
        "sequence": lambda: classifier(settings, "classes", width=encoder.width),
        "token": lambda: classifier(settings, "slots"),
        "qa": lambda: SPANS,
        "model": lambda: HeadConfig(kind="pooled", tied=False, width=encoder.width),
        "bare": lambda: HIDDEN,
    }
    return ModelConfig(encoder=encoder, head=heads[head]())


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
    heads={
        "masked_lm": "BertForMaskedLM",
        "sequence": "BertForSequenceClassification",
        "token": "BertForTokenClassification",
        "qa": "BertForQuestionAnswering",
        "model": "BertModel",
        "bare": "BertModel",
    },
    read=read,
    write=_bert.write,
    rows=rows,
    prefix="bert.",
    spare=(r"cls\..*", r"bert\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored=(r"bert\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    output=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
)
