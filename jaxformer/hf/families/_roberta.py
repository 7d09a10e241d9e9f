"""Shared by RoBERTa (Liu et al. 2019) and its relatives: BERT with positions that begin after the padding's id."""

from __future__ import annotations

import re
from typing import Literal

from jaxformer.config import ModelConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import CallConvention, Family, Row, Settings, linear_rows, norm_rows


def family(model_type: str, class_prefix: str, prefix: str, order: Literal["pre", "post"] = "post") -> Family:
    """The family of this `model_type`, whose class names begin with `class_prefix`.

    Args:
      prefix: module of the body in tensor names.
      order: place of the layers' norms.
    """

    def read_config(settings: Settings, head: str) -> ModelConfig:
        pad = settings("pad_token_id", 1)
        settings = settings.with_values({**settings.values, "pad_token_id": pad})
        stack = _bert.stack_config(settings, head, offset=pad + 1, order=order)
        return _bert.model_config(stack, head, _bert.head_config(settings, head, stack, "gelu", input_dropout=True))

    def rows(model: ModelConfig, head: str) -> list[Row]:
        untied = [] if model.head.tied else [Row("lm_head.decoder.weight", "head/kernel", "V D -> D V")]
        pooler = linear_rows(f"{prefix}.pooler.dense", "head/hidden")
        tokens = [
            *linear_rows("lm_head.dense", "head/transform"),
            *norm_rows("lm_head.layer_norm", "head/transform_norm"),
            Row("lm_head.bias", "head/bias"),
            *untied,
        ]
        by_head = {
            "masked_lm": tokens,
            "causal_lm": tokens,
            "sequence": [
                *linear_rows("classifier.dense", "head/hidden"),
                *linear_rows("classifier.out_proj", "head/decision"),
            ],
            "token": linear_rows("classifier", "head/decision"),
            "multiple_choice": [*pooler, *linear_rows("classifier", "head/decision")],
            "qa": linear_rows("qa_outputs", "head/decision"),
            "model": pooler,
            "bare": [],
        }
        return _bert.body_rows(model, prefix) + by_head[head]

    body = re.escape(prefix)
    return Family(
        model_types=(model_type,),
        heads=_bert.head_classes(class_prefix),
        read_config=read_config,
        write_config=_bert.write_config,
        rows=rows,
        prefix=f"{prefix}.",
        droppable_tensors=(r"lm_head\..*", rf"{body}\.pooler\..*", r"classifier\..*", r"qa_outputs\..*"),
        ignored_tensors=(rf"{body}\.embeddings\.position_ids",),
        duplicate_tensors=(("lm_head.decoder.bias", "lm_head.bias"),),
        renamed_tensors=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        tied_tensors=("lm_head.decoder.weight", f"{prefix}.embeddings.word_embeddings.weight"),
        convention=CallConvention(
            positions="ids", prefix_tokens=("<s>",), separator_tokens=("</s>", "</s>"), suffix_tokens=("</s>",)
        ),
    )
