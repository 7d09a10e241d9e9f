"""BART (Lewis et al. 2020): learned positions from row 2, a norm over the embedding sum."""

from __future__ import annotations

from typing import Any

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import HIDDEN, SPANS, Convention, Family, Row, Settings, classifier, linear

OFFSET = 2


def read(settings: Settings, head: str) -> ModelConfig:
    rows = settings.size("max_position_embeddings", 1024) + OFFSET
    encoding = EncodingConfig("learned", max_length=rows, offset=OFFSET)
    settings = settings.replaced({"pad_token_id": 1, **settings.values})
    dropout = settings("classifier_dropout", 0.0)
    vocab = settings.size("vocab_size", 50265)
    settings.expect("normalize_before", False)
    settings.expect("add_final_layer_norm", False)
    encoder, decoder = (
        _bart.stack(settings, name, encoding, vocab, embed_norm=True) for name in ("encoder", "decoder")
    )
    heads = {
        "seq2seq": lambda: HeadConfig(tied=settings("tie_word_embeddings", True), bias=True),
        "sequence": lambda: classifier(
            settings, "classes", pooling="last", width=decoder.width, dropout=dropout, input_dropout=dropout
        ),
        "qa": lambda: SPANS,
        "model": lambda: HIDDEN,
    }
    return ModelConfig(encoder=encoder, decoder=decoder, share_embeddings=True, head=heads[head]())


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    return _bart.write(model, head) | {
        "max_position_embeddings": model.encoder.encoding.max_length - OFFSET,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
        **({"classifier_dropout": model.head.dropout} if head == "sequence" else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    tops = {
        "seq2seq": _bart.output(model),
        "sequence": [
            *linear("classification_head.dense", "head/hidden"),
            *linear("classification_head.out_proj", "head/decision"),
        ],
        "qa": linear("qa_outputs", "head/decision"),
        "model": [],
    }
    return [*_bart.embeddings(model), *_bart.rows(model, "encoder"), *_bart.rows(model, "decoder"), *tops[head]]


FAMILY = Family(
    types=("bart",),
    heads={
        "seq2seq": "BartForConditionalGeneration",
        "sequence": "BartForSequenceClassification",
        "qa": "BartForQuestionAnswering",
        "model": "BartModel",
    },
    read=read,
    write=write,
    rows=rows,
    prefix="model.",
    spare=(r"lm_head\..*", r"final_logits_bias", r"classification_head\..*", r"qa_outputs\..*"),
    ignored=(r"model\.(encoder|decoder)\.version",),
    tables=_bart.TABLES,
    output=("lm_head.weight", "model.shared.weight"),
    convention=Convention(start=2, repeats=True, before=("<s>",), between=("</s>", "</s>"), after=("</s>",)),
)
