"""RoFormer (Su et al. 2021): BERT with rotary positions, of queries, keys and (`rotary_value`) values."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import EncodingConfig, ModelConfig
from jaxformer.hf.families import _bert, _projected
from jaxformer.hf.table import (
    NO_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    choice_head,
    linear_rows,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    stack, activation = _bert.stack_config(settings, head), settings.activation("hidden_act", "gelu")
    encoding = EncodingConfig(
        "rope",
        max_length=stack.encoding.max_length,
        interleaved=True,
        rotate_values=settings("rotary_value", False),
    )
    width = settings.size("embedding_size", None) or stack.width
    embed = stack.embed
    if width != stack.width:
        embed = dataclasses.replace(embed, width=width, projection="sum", projection_bias=True)
    stack = dataclasses.replace(stack, encoding=encoding, embed=embed)
    if head == "model":
        top = NO_HEAD
    elif head == "multiple_choice":  # keys that the config class does not have, and the modelling code asks for
        settings.expect("summary_type", "last")
        settings.expect("summary_use_proj", False)
        settings.expect("summary_proj_to_labels", False)
        settings.expect("summary_activation", None)
        settings.expect("summary_first_dropout", 0.0)
        settings.expect("summary_last_dropout", 0.0)
        top = choice_head(pooling="end")
    else:
        top = _bert.head_config(settings, head, stack, activation, input_dropout=True)
        top = dataclasses.replace(top, hidden=activation) if head == "sequence" else top
    return _bert.model_config(stack, head, top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    settings = _projected.write_config(model, head) | {
        "rotary_value": _bert.stack_of(model).encoding.rotate_values,
    }
    settings.pop("classifier_dropout", None)  # classifiers have the dropout of the layers
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    body = _projected.embedding_rows(model, "roformer", "embeddings_project") + _bert.layer_rows(model, "roformer")
    decision = linear_rows("classifier", "head/decision")
    tokens = _bert.prediction_rows(model)
    by_head = {
        "masked_lm": tokens,
        "causal_lm": tokens,
        "sequence": [
            *linear_rows("classifier.dense", "head/hidden"),
            *linear_rows("classifier.out_proj", "head/decision"),
        ],
        "token": decision,
        "multiple_choice": decision,
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + by_head[head]


FAMILY = Family(
    model_types=("roformer",),
    heads={head: name for head, name in _bert.head_classes("RoFormer").items() if head != "bare"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="roformer.",
    droppable_tensors=(r"cls\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored_tensors=(r"roformer\.encoder\.embed_positions\.weight",),
    duplicate_tensors=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    tied_tensors=("cls.predictions.decoder.weight", "roformer.embeddings.word_embeddings.weight"),
    convention=CallConvention(
        takes_position_ids=False,
        prefix_tokens=("[CLS]",),
        separator_tokens=("[SEP]",),
        suffix_tokens=("[SEP]",),
    ),
)
