"""The layers of a stack in groups of one form: consecutive layers whose parameters are stacked in one array."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.config.schema import StackConfig

UNNUMBERED = ("dense_blocks", "blocks")
NUMBERED = re.compile(r"blocks_\d+")
"""Names of groups that say the number of their first layer."""


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of one form.

    Attributes:
      name: name of the group's parameters below those of the stack.
      first: number from 0 of its first layer.
      stack: the config of the stack, as all layers of the group read it. `delta` is set if they have the delta rule in
        place of attention, `moe` if they have experts.
    """

    name: str
    first: int
    stack: StackConfig

    @property
    def numbers(self) -> range:
        """Numbers of the layers, from 0."""
        return range(self.first, self.first + self.stack.layers)


def layer_groups(stack: StackConfig) -> tuple[LayerGroup, ...]:
    """The groups in the order of the layers; () for a stack without layers.

    Layers that are alike are one group, "blocks". First layers without experts, or a first one without a norm, are
    "dense_blocks" before it. In a stack with `delta` or `moe.dense_at` forms may alternate, and a group that begins
    with layer n is "blocks_n".
    """
    if not stack.layers:
        return ()
    if stack.is_mixed:
        return _mixed_groups(stack)
    count = stack.first_layers
    if not count:
        return (LayerGroup("blocks", 0, stack),)
    if not stack.first_norm:
        first, rest = stack, replace(stack, first_norm=True)
    else:
        first, rest = _layer_form(stack, False, True), stack
    return (
        LayerGroup("dense_blocks", 0, replace(first, layers=count)),
        LayerGroup("blocks", count, replace(rest, layers=stack.layers - count)),
    )


def group_name(path: Iterable[str]) -> str:
    """Name of the group that a parameter stacked over layers belongs to, from its path.

    Raises:
      ValueError: it is in no group.
    """
    found = next((name for name in path if name in UNNUMBERED or NUMBERED.fullmatch(name)), None)
    if found is None:
        raise ValueError(f"layers: got the path {tuple(path)}, expected one with the name of a group")
    return found


def first_layers(counts: Mapping[str, int]) -> dict[str, int]:
    """Number from 0 of the first layer of each group of a stack, from the names of all groups and their layer counts.

    For trees of parameters whose config is not at hand. Names are those of `layer_groups`.
    """
    before = {"dense_blocks": 0, "blocks": counts.get("dense_blocks", 0)}
    return {name: before[name] if name in UNNUMBERED else int(name.removeprefix("blocks_")) for name in counts}


def has_unlike_layers(stack: StackConfig) -> bool:
    """True if the parameters of the layers are not one stack that is numbered from 0."""
    return bool(stack.first_layers) or stack.is_mixed


def unlike_option(stack: StackConfig) -> tuple[str, Any, Any]:
    """The field that gives layers unlike forms, its value for messages, and the value with which they are alike."""
    if stack.delta is not None:
        return "delta", "a section", None
    if not stack.first_norm:
        return "first_norm", False, True
    if stack.moe is not None and stack.moe.dense_at:
        return "moe.dense_at", stack.moe.dense_at, ()
    return "moe.dense_layers", stack.dense_layers, 0


def _mixed_groups(stack: StackConfig) -> tuple[LayerGroup, ...]:
    delta, dense = set(stack.delta_layers), set(stack.dense_numbers)
    forms = [(number in delta, number in dense) for number in range(stack.layers)]
    groups, first = [], 0
    for form, run in itertools.groupby(forms):
        count = len(list(run))
        group = replace(_layer_form(stack, *form), layers=count)
        groups.append(LayerGroup(f"blocks_{first}", first, group))
        first += count
    return tuple(groups)


def _layer_form(stack: StackConfig, is_delta: bool, is_dense: bool) -> StackConfig:
    """The stack with only layers of one form."""
    moe, ffn = stack.moe, stack.ffn
    if moe is not None and ffn is not None and is_dense:
        moe, ffn = None, replace(ffn, width=moe.dense_width or ffn.width)
    return replace(stack, delta=stack.delta if is_delta else None, moe=moe, ffn=ffn)
