"""A model as columns of blocks, and that as text for a terminal. `model.py` makes it from a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """One box of a diagram.

    Attributes:
      name: "self-attention".
      kind: "embedding", "position", "norm", "attention", "cross", "ffn", "recurrent" or "head": its colour.
      parameters: number of its parameters; in a layer that repeats, of one layer.
      detail: words about it, and shapes as "query, value  D x H x K = 512 x 8 x 64".
      is_aside: it reads something else than the output of the block before it, which passes by.
    """

    name: str
    kind: str
    parameters: int
    detail: tuple[str, ...] = ()
    is_aside: bool = False


@dataclass(frozen=True)
class Group:
    """Blocks of which the last gives what the next group reads.

    Attributes:
      blocks: in the order of computation.
      residual: the input of the first is added to the output of the last.
    """

    blocks: tuple[Block, ...]
    residual: bool = False


@dataclass(frozen=True)
class Layers:
    """Layers with the same parts.

    Attributes:
      groups: those of one layer, in the order of computation.
      count: number of layers.
      shares: True if the layers have one set of parameters.
    """

    groups: tuple[Group, ...]
    count: int
    shares: bool = False

    @property
    def one(self) -> int:
        """Number of parameters of one layer."""
        return sum(block.parameters for group in self.groups for block in group.blocks)

    @property
    def parameters(self) -> int:
        """Number of parameters of all of them."""
        return self.one * (min(self.count, 1) if self.shares else self.count)


@dataclass(frozen=True)
class Column:
    """One part of a model, from its input to its output.

    Attributes:
      title: "encoder".
      before: blocks before the layers.
      layers: layers that repeat; an entry more where the first ones have other parts than the others.
      after: blocks after the layers.
    """

    title: str
    before: tuple[Block, ...]
    layers: tuple[Layers, ...]
    after: tuple[Block, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole column."""
        parts = (*self.before, *self.layers, *self.after)
        return sum(part.parameters for part in parts)


@dataclass(frozen=True)
class Diagram:
    """A model as columns.

    Attributes:
      title: name of the recipe.
      columns: in the order of computation; the last has the head.
      arrow: what the first column gives to the last: "memory" to its cross-attention or attention, "tokens" as its
        input, or "".
    """

    title: str
    columns: tuple[Column, ...]
    arrow: str = ""

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(column.parameters for column in self.columns)


def to_text(diagram: Diagram, width: int = 80, details: bool = True) -> str:
    """The diagram for a terminal: a line for each block with its number of parameters, and its shapes where they fit.

    Args:
      width: columns of the terminal; lines are cut at it.
    """
    lines = []
    number = max(len(f"{diagram.parameters:,}"), 10)

    def add(indent: int, name: str, parameters: int | None) -> None:
        count = "" if parameters is None else f"{parameters:,}"
        room = max(width - number - 2, 12)
        lines.append(f"{(' ' * indent + name)[:room]:<{room}}  {count:>{number}}"[:width].rstrip())

    def add_block(indent: int, block: Block) -> None:
        add(indent, block.name, block.parameters)
        for line in block.detail if details else ():
            lines.append((" " * (indent + 2) + line)[:width].rstrip())

    for column in diagram.columns:
        add(0, column.title, column.parameters)
        for block in column.before:
            add_block(2, block)
        for layers in column.layers:
            plural = "s, of which each has" if layers.count > 1 else ""
            plural = "s, which share" if layers.shares and plural else plural
            add(2, f"{layers.count} layer{plural}", layers.one)
            for group in layers.groups:
                for block in group.blocks:
                    add_block(4, block)
                if group.residual:
                    add(4, "+ input of the sub-layer", None)
        for block in column.after:
            add_block(2, block)
    add(0, "all parameters", diagram.parameters)
    return "\n".join(lines)
