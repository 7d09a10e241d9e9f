"""Shared by ALBERT and ELECTRA: BERT whose embeddings have a width of their own, projected after their norm."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.hf.families import _bert
from jaxformer.hf.table import Row, Settings, linear_rows


def stack_config(settings: Settings, head: str, always: bool = False) -> StackConfig:
    """The layers, with their embedding.

    Args:
      always: there is a projection where both widths are equal, too.
    """
    stack = _bert.stack_config(settings, head)
    width = settings.size("embedding_size", 128)
    if width == stack.width and not always:
        return stack
    embed = dataclasses.replace(stack.embed, width=width, projection="sum", projection_bias=True)
    return dataclasses.replace(stack, embed=embed)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = _bert.stack_of(model)
    return {**_bert.write_config(model, head), "embedding_size": stack.embed.sum_width or stack.width}


def embedding_rows(model: ModelConfig, prefix: str, projection: str) -> list[Row]:
    """Rows of the tables, their norm and the projection, a module of the body."""
    rows = _bert.embedding_rows(model, prefix)
    if _bert.stack_of(model).embed.sum_width is not None:
        rows += linear_rows(f"{prefix}.{projection}", f"{_bert.paths_of(model)[0]}/embed_projection")
    return rows
