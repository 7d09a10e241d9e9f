"""ELECTRA (Clark et al. 2020): a discriminator, the generator of its tokens, and encoders trained from the former."""

from __future__ import annotations

from typing import Any

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _bert, _projected
from jaxformer.hf.table import (
    NO_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    choice_head,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    stack = _projected.stack_config(settings, head)
    activation = settings.activation("hidden_act", "gelu")
    if head == "model":
        top = NO_HEAD
    elif head == "pretraining":
        top = HeadConfig(kind="slots", tied=False, classes=1, width=stack.width, hidden=activation)
    elif head == "multiple_choice":
        top = _summary(settings, stack.width)
    elif head == "sequence":
        dropout = settings("classifier_dropout", None)
        dropout = stack.dropout if dropout is None else settings("classifier_dropout", 0.0)
        fields = {"width": stack.width, "hidden": "gelu", "dropout": dropout, "input_dropout": dropout}
        top = classifier_head(settings, "classes", **fields)
    else:  # the generator's activation is gelu, whatever that of the layers
        top = _bert.head_config(settings, head, stack, "gelu")
    return _bert.model_config(stack, head, top)


def _summary(settings: Settings, width: int) -> HeadConfig:
    """The head of a choice: the first slot, a dense layer with activation (or neither), and the decision."""
    settings.expect("summary_type", "first")
    settings.expect("summary_proj_to_labels", False)
    projected, activation = settings("summary_use_proj", True), settings.raw("summary_activation", "gelu")
    if projected != bool(activation):
        expected = "an activation" if projected else "''"
        raise ConfigError(
            f"{settings.path}: got summary_activation {activation!r} with summary_use_proj {projected}, expected "
            f"{expected}; this variant is not supported"
        )
    return choice_head(
        width=width if projected else None,
        hidden=settings.activation("summary_activation", "gelu") if projected else "gelu",
        input_dropout=settings("summary_first_dropout", 0.0),
        dropout=settings("summary_last_dropout", 0.1),
    )


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    settings, top = _projected.write_config(model, head), model.head
    if head == "multiple_choice":
        projected = top.width is not None
        settings |= {
            "summary_use_proj": projected,
            "summary_activation": hf_activation(top.hidden) if projected else "",
            "summary_first_dropout": top.input_dropout,
            "summary_last_dropout": top.dropout,
        }
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    body = _projected.embedding_rows(model, "electra", "embeddings_project") + _bert.layer_rows(model, "electra")
    decision = linear_rows("classifier", "head/decision")
    summary = [] if model.head.width is None else linear_rows("sequence_summary.summary", "head/hidden")
    tokens = [
        *linear_rows("generator_predictions.dense", "head/transform"),
        *norm_rows("generator_predictions.LayerNorm", "head/transform_norm"),
        Row("generator_lm_head.bias", "head/bias"),
        *([] if model.head.tied else [Row("generator_lm_head.weight", "head/kernel", "V E -> E V")]),
    ]
    by_head = {
        "masked_lm": tokens,
        "causal_lm": tokens,
        "pretraining": [
            *linear_rows("discriminator_predictions.dense", "head/hidden"),
            *linear_rows("discriminator_predictions.dense_prediction", "head/decision"),
        ],
        "sequence": [
            *linear_rows("classifier.dense", "head/hidden"),
            *linear_rows("classifier.out_proj", "head/decision"),
        ],
        "token": decision,
        "multiple_choice": [*summary, *decision],
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + by_head[head]


FAMILY = Family(
    model_types=("electra",),
    heads={
        **{head: name for head, name in _bert.head_classes("Electra").items() if head != "bare"},
        "pretraining": "ElectraForPreTraining",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="electra.",
    droppable_tensors=(
        r"generator_predictions\..*",
        r"generator_lm_head\..*",
        r"discriminator_predictions\..*",
        r"sequence_summary\..*",
        r"classifier\..*",
        r"qa_outputs\..*",
    ),
    ignored_tensors=(r"electra\.embeddings\.position_ids",),
    tied_tensors=("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
    convention=CallConvention(prefix_tokens=("[CLS]",), separator_tokens=("[SEP]",), suffix_tokens=("[SEP]",)),
)
