"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import CallConvention, Family, Row, Settings, linear_rows


def read_config(settings: Settings, head: str) -> ModelConfig:
    stack = _bert.stack_config(settings, head)
    top = _bert.head_config(settings, head, stack, settings.activation("hidden_act", "gelu"))
    return _bert.model_config(stack, head, top)


def rows(model: ModelConfig, head: str) -> list[Row]:
    pooler = linear_rows("bert.pooler.dense", "head/hidden")
    tokens = _bert.prediction_rows(model)
    by_head = {
        "masked_lm": tokens,
        "causal_lm": tokens,
        "pretraining": [*tokens, *pooler, *linear_rows("cls.seq_relationship", "head/decision")],
        "next_sentence": [*pooler, *linear_rows("cls.seq_relationship", "head/decision")],
        "sequence": [*pooler, *linear_rows("classifier", "head/decision")],
        "token": linear_rows("classifier", "head/decision"),
        "multiple_choice": [*pooler, *linear_rows("classifier", "head/decision")],
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": pooler,
        "bare": [],
    }
    return _bert.body_rows(model, "bert") + by_head[head]


FAMILY = Family(
    model_types=("bert",),
    heads={
        **_bert.head_classes("Bert", "LMHeadModel"),
        "pretraining": "BertForPreTraining",
        "next_sentence": "BertForNextSentencePrediction",
    },
    other_classes={"BertForCausalLM": "causal_lm"},
    read_config=read_config,
    write_config=_bert.write_config,
    rows=rows,
    prefix="bert.",
    droppable_tensors=(r"cls\..*", r"bert\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored_tensors=(r"bert\.embeddings\.position_ids",),
    duplicate_tensors=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    renamed_tensors=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    tied_tensors=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    convention=CallConvention(prefix_tokens=("[CLS]",), separator_tokens=("[SEP]",), suffix_tokens=("[SEP]",)),
)
