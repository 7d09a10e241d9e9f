"""Models and their parameters as a notebook displays them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxformer import display
from jaxformer.config import Config
from jaxformer.models.build import count_params
from jaxformer.types import Array, PyTree, leaf_path

MAX_ROWS = 200
"""Parameters that a table shows; it says how many more there are."""


class Parameters(Mapping[str, Array]):
    """Arrays by path, "decoder/blocks/ffn/in/kernel". Layers are stacked: the first axis of a block's array is L."""

    def __init__(self, params: PyTree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._arrays = {"/".join(leaf_path(path)): leaf for path, leaf in leaves}

    def __getitem__(self, path: str) -> Array:
        return self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"Parameters({len(self)} arrays, {count_params(self._arrays):,} numbers)"

    def _repr_html_(self) -> str:
        rows = [parameter_row(path, array) for path, array in list(self._arrays.items())[:MAX_ROWS]]
        hidden = len(self) - len(rows)
        note = f"{hidden:,} more arrays are not shown." if hidden else ""
        head = ("parameter", "shape", "type", "numbers", "mean", "standard deviation", "largest")
        return display.box(repr(self), display.table(head, rows), note=note)


def parameter_row(path: str, array: Any) -> tuple[object, ...]:
    """Path, shape, type, size, mean, standard deviation and largest absolute value of an array."""
    shape, dtype, size = array.shape, str(array.dtype), int(np.prod(array.shape))
    values = np.asarray(array, np.float32)
    return path, str(list(shape)), dtype, size, float(values.mean()), float(values.std()), float(np.abs(values).max())


def summary(config: Config, params: PyTree) -> str:
    """A model: its parts, its task, and how many parameters each part has."""
    model = config.model
    parts: dict[str, Any] = {**model.stacks}
    recurrent = {"recurrent_encoder": model.recurrent_encoder, "recurrent_decoder": model.recurrent_decoder}
    parts |= {name: part for name, part in recurrent.items() if part is not None}
    rows = []
    for name, part in parts.items():
        attention = getattr(part, "attention", None)
        heads = getattr(attention, "heads", None)
        words = f"{heads} heads" if heads else str(attention or "none")
        rows.append((name, part.layers, part.width, words, part.embed.vocab or "-"))
    counts = [(name, count_params(part)) for name, part in params.items()]
    title = f"jaxformer model for {config.task.name}: {count_params(params):,} parameters"
    return display.box(
        title,
        display.table(("part", "layers", "width", "attention", "vocabulary"), rows),
        display.details("Parameters by part", display.table(("part", "numbers"), counts)),
        note=f"head {model.head.kind}, {model.dtype}. See .parameters, .attention([...]), .lens([...]), "
        ".ablate([...]).",
    )
