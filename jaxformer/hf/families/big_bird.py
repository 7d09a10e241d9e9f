"""BigBird (Zaheer et al. 2020): BERT whose attention is between blocks of slots, for long texts.

Rows of at most (5 + 2 * `num_random_blocks`) * `block_size` slots have full attention, as in the library. In inference
the library draws no random blocks: each of them is the first block, and so it is here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import HeadConfig, ModelConfig, SparseConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _bert
from jaxformer.hf.table import CallConvention, Family, Row, Settings, linear_rows, norm_rows, require_ffn


def read_config(settings: Settings, head: str) -> ModelConfig:
    if head == "causal_lm":  # blocks see those ahead
        settings.expect("attention_type", "original_full")
    return read_any_attention(settings, head)


def read_any_attention(settings: Settings, head: str) -> ModelConfig:
    """The config with blocks under a causal language model's head as well, which then sees the tokens ahead."""
    settings.expect("attention_type", "block_sparse", "original_full")
    is_sparse = settings("attention_type", "block_sparse") == "block_sparse"
    random = settings("num_random_blocks", 3)
    if random < 0:
        raise ConfigError(f"{settings.path}: got num_random_blocks {random}, expected 0 or more; fix the file")
    sparse = SparseConfig(settings.size("block_size", 64), random)
    stack, activation = _bert.stack_config(settings, head), settings.activation("hidden_act", "gelu_new")
    attention = dataclasses.replace(
        stack.attention,
        bias=settings("use_bias", True),
        output_bias=True,
        sparse=sparse if is_sparse else None,
    )
    embed = dataclasses.replace(stack.embed, scale=settings("rescale_embeddings", False), dropout_first=True)
    stack = dataclasses.replace(
        stack,
        attention=attention,
        ffn=dataclasses.replace(require_ffn(stack), activation=activation),  # the default is not BERT's
        embed=embed,
        causal=False if is_sparse and head == "causal_lm" else None,
    )
    settings("sep_token_id", 66)  # read by a call for spans
    if head == "qa":
        top = HeadConfig(
            kind="slots",
            tied=False,
            classes=2,
            residual_width=require_ffn(stack).width,
            hidden=activation,
            epsilon=stack.norm.epsilon,
            input_dropout=stack.dropout,
            dropout=stack.dropout,
        )
    else:
        top = _bert.head_config(settings, head, stack, activation, input_dropout=True)
        top = dataclasses.replace(top, hidden=activation) if head == "sequence" else top
    return _bert.model_config(stack, head, top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = _bert.stack_of(model)
    sparse = stack.attention.sparse
    blocks = {} if sparse is None else {"block_size": sparse.size, "num_random_blocks": sparse.random}
    return {
        **_bert.write_config(model, head),
        "attention_type": "original_full" if sparse is None else "block_sparse",
        "use_bias": stack.attention.bias,
        "rescale_embeddings": stack.embed.scale,
        **blocks,
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    pooler = linear_rows("bert.pooler", "head/hidden")
    tokens = _bert.prediction_rows(model)
    by_head = {
        "masked_lm": tokens,
        "causal_lm": tokens,
        "pretraining": [*tokens, *pooler, *linear_rows("cls.seq_relationship", "head/decision")],
        "sequence": [
            *linear_rows("classifier.dense", "head/hidden"),
            *linear_rows("classifier.out_proj", "head/decision"),
        ],
        "token": linear_rows("classifier", "head/decision"),
        "multiple_choice": [*pooler, *linear_rows("classifier", "head/decision")],
        "qa": [
            *linear_rows("qa_classifier.intermediate.dense", "head/in"),
            *linear_rows("qa_classifier.output.dense", "head/out"),
            *norm_rows("qa_classifier.output.LayerNorm", "head/residual_norm"),
            *linear_rows("qa_classifier.qa_outputs", "head/decision"),
        ],
        "model": pooler,
        "bare": [],
    }
    return _bert.body_rows(model, "bert") + by_head[head]


FAMILY = Family(
    model_types=("big_bird",),
    heads={**_bert.head_classes("BigBird"), "pretraining": "BigBirdForPreTraining"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="bert.",
    droppable_tensors=(r"cls\..*", r"bert\.pooler\..*", r"classifier\..*", r"qa_classifier\..*"),
    ignored_tensors=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
    duplicate_tensors=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    tied_tensors=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    convention=CallConvention(
        scales_embeddings=True,
        prefix_tokens=("[CLS]",),
        separator_tokens=("[SEP]",),
        suffix_tokens=("[SEP]",),
        hides_question=True,
    ),
)
