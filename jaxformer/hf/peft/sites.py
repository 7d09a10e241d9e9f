"""Where adapters can be: linear maps of the other library, and our kernels in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxformer.hf.table import Row
from jaxformer.models import adapters

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

TASK_HEADS = {
    "CAUSAL_LM": "causal_lm",
    "SEQ_2_SEQ_LM": "seq2seq",
    "SEQ_CLS": "sequence",
    "TOKEN_CLS": "token",
    "QUESTION_ANS": "qa",
    "FEATURE_EXTRACTION": "model",
}
"""`task_type` -> head."""


class Site(NamedTuple):
    """A linear map of the other library that can have an adapter, and our kernels in it.

    Attributes:
      name: of its module; `{layer}` stands for the layer's number.
      paths: of our linear maps: one, or several that it computes together.
      layout_a, layout_b: einops patterns from their A and B to ours; of several, B begins with an axis `n` over them.
      sizes: lengths of axes in parentheses in the patterns.
      transposed: the other library's weight is `[in, out]` (GPT-2's Conv1D).
      first_layer: number in the file of the first layer of our linear maps. A map that is in several groups of layers
        has a site for each.
    """

    name: str
    paths: tuple[adapters.Path, ...]
    layout_a: str
    layout_b: str
    sizes: Mapping[str, int]
    transposed: bool
    first_layer: int = 0

    @property
    def is_stacked(self) -> bool:
        """True if there is one such map in every layer."""
        return "{layer}" in self.name

    def module(self, layer: int) -> str:
        """Name of the module in a layer, by its number in the group."""
        return self.name.replace("{layer}", str(self.first_layer + layer))

    def pattern_sizes(self, side: str) -> dict[str, int]:
        """The sizes that occur in one side of a pattern, with the number of maps that are computed together."""
        sizes = {**self.sizes, "n": len(self.paths)}
        return {name: sizes[name] for name in re.findall(r"\w+", side) if name in sizes}


def find_sites(rows: Sequence[Row], layers: adapters.Layers) -> list[Site]:
    """The linear maps that both libraries have."""
    found = []
    for row in rows:
        paths = tuple(tuple(path.split("/")[:-1]) for path in row.param_paths)
        is_map = all(path in layers for path in paths) and all(path.endswith("/kernel") for path in row.param_paths)
        if is_map and not row.splits and row.hf_name.endswith(".weight") and "{expert}" not in row.hf_name:
            site = _site(row, paths, layers[paths[0]].inputs)
            if site is not None:
                found.append(site)
    return found


def _site(row: Row, paths: tuple[adapters.Path, ...], inputs: int) -> Site | None:
    """The site of a row; None if its tensor is no matrix with inputs on one side and outputs on the other."""
    left, _, right = (row.layout or "I O -> I O").partition(" -> ")
    groups = re.findall(r"\([^)]*\)|\w+", left)
    axes = [name for name in right.split() if name != "n" or len(paths) == 1]
    of_group = [set(re.findall(r"\w+", group)) - ({"n"} if len(paths) > 1 else set()) for group in groups]
    if len(groups) != 2 or {*axes[:inputs]} not in of_group or {*axes[inputs:]} not in of_group:
        return None
    side = of_group.index({*axes[:inputs]})
    several = "n " if len(paths) > 1 else ""
    return Site(
        row.hf_name.removesuffix(".weight"),
        paths,
        f"r {groups[side]} -> {' '.join(axes[:inputs])} r",
        f"{groups[1 - side]} r -> {several}r {' '.join(axes[inputs:])}",
        row.sizes,
        side == 0,
        row.first_layer,
    )
