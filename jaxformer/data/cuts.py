"""How much of the text does not fit into `data.length`, counted over encoded examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxformer.data import packing
from jaxformer.data.packing import Features


class Cut(NamedTuple):
    """What was cut off the examples of a split.

    Attributes:
      examples: how many were counted.
      cut_examples: how many of them are too long.
      tokens: of all of them, special tokens and those cut off included.
      cut_tokens: how many of these were cut off.
      words: tags of all of them (tagging only, else 0).
      unread: the labels that no slot carries, int32 `[n]`: tags of words that were cut off or have no token.
    """

    examples: int = 0
    cut_examples: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    words: int = 0
    unread: np.ndarray = np.zeros(0, np.int32)

    def counts(self) -> dict[str, int]:
        """What is missing, by the names that it has among the measures."""
        found = {"cut_examples": self.cut_examples, "cut_tokens": self.cut_tokens}
        return {**found, "cut_words": len(self.unread)} if self.words else found

    def sentence(self, where: str, length: int, of: int | None = None, lost: str = "cut off") -> str:
        """One line for people; "" where nothing was cut.

        Args:
          where: the name of the split.
          length: `data.length`.
          of: how many examples the split has, where only some were counted.
          lost: what becomes of these tokens.
        """
        if not self.cut_examples and not len(self.unread):
            return ""
        some = "" if of is None or of == self.examples else f", counted in {self.examples:,} of {of:,} examples"
        tokens = f"{self.cut_tokens:,} of {self.tokens:,} tokens ({_share(self.cut_tokens, self.tokens)})"
        line = (
            f"{where}: {self.cut_examples:,} of {self.examples:,} examples are longer than data.length ({length}); "
            f"{tokens} are {lost}{some}"
        )
        if len(self.unread):
            line += f"; {len(self.unread):,} of {self.words:,} words have no token and count as tagged O"
        return line


def count(examples: Iterable[Features]) -> Cut:
    """What encoded examples say about themselves: `cut`, the tokens that did not fit, and `unread` labels."""
    total, cut_examples, tokens, cut_tokens, words = 0, 0, 0, 0, 0
    unread: list[np.ndarray] = []
    for features in examples:
        missing = int(features.get("cut", 0))
        total += 1
        cut_examples += missing > 0
        cut_tokens += missing
        tokens += missing + sum(len(features[stream]) for stream in ("source", "target") if stream in features)
        if "unread" in features:
            unread.append(features["unread"])
            words += int(np.count_nonzero(features["weights"])) + len(unread[-1])
    labels = np.concatenate(unread).astype(np.int32) if unread else np.zeros(0, np.int32)
    return Cut(total, cut_examples, tokens, cut_tokens, words, labels)


def too_long(examples: Iterable[Features], length: int) -> Cut:
    """The same of examples that were encoded uncut, and of which training leaves out those above `length`."""
    sizes = [packing.size(features) for features in examples]
    long = [size for size in sizes if size > length]
    return Cut(len(sizes), len(long), sum(sizes), sum(long))


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"
