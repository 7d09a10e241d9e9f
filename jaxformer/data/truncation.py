"""Counts of the text that does not fit into `data.length`, over encoded examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import packing
from jaxformer.data.packing import Features


class Truncation(NamedTuple):
    """Tokens and labels that were truncated from the examples of a split.

    Attributes:
      examples: number of examples counted.
      cut_examples: examples longer than `data.length`.
      tokens: tokens of all examples, with special tokens and truncated ones.
      cut_tokens: truncated tokens.
      words: tagged words of all examples; 0 unless the task is tagging.
      unread_labels: labels without a token, int32 `[n]`: tags of words that were truncated or have no token.
      empty_examples: examples of which nothing is left to learn, such as conversations without their reply.
    """

    examples: int = 0
    cut_examples: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    words: int = 0
    unread_labels: np.ndarray = np.zeros(0, np.int32)
    empty_examples: int = 0

    def counts(self) -> dict[str, int]:
        """The counts under the names that they have in `eval-<split>.json`."""
        counts = {"cut_examples": self.cut_examples, "cut_tokens": self.cut_tokens}
        counts |= {"cut_words": len(self.unread_labels)} if self.words else {}
        return counts | ({"empty_examples": self.empty_examples} if self.empty_examples else {})

    def sentence(self, where: str, length: int, of: int | None = None, lost: str = "cut off") -> str:
        """One line for the log; "" if nothing was truncated.

        Args:
          where: name of the split.
          length: `data.length`.
          of: number of examples in the split, where only a sample of them was counted.
          lost: what happens to these tokens, "cut off" or "left out".
        """
        if not self.cut_examples and not len(self.unread_labels):
            return ""
        some = "" if of is None or of == self.examples else f", counted in {self.examples:,} of {of:,} examples"
        tokens = f"{self.cut_tokens:,} of {self.tokens:,} tokens ({_percent(self.cut_tokens, self.tokens)})"
        line = (
            f"{where}: {self.cut_examples:,} of {self.examples:,} examples are longer than data.length ({length}); "
            f"{tokens} are {lost}{some}"
        )
        if len(self.unread_labels):
            line += f"; {len(self.unread_labels):,} of {self.words:,} words have no token and count as tagged O"
        if self.empty_examples:
            line += f"; {self.empty_examples:,} examples have no token of a reply left, and are not learned or measured"
        return line


def to_json(count: Truncation) -> dict[str, Any]:
    """`count` as values of JSON."""
    return {**count._asdict(), "unread_labels": count.unread_labels.tolist()}


def from_json(content: dict[str, Any]) -> Truncation:
    """The counts that `to_json` returned as JSON."""
    return Truncation(**content)._replace(unread_labels=np.array(content["unread_labels"], np.int32))


def count_truncated(examples: Iterable[Features]) -> Truncation:
    """Counts the tokens that the task truncated, from the features "cut" and "unread" of encoded examples."""
    total, cut_examples, tokens, cut_tokens, words, empty = 0, 0, 0, 0, 0, 0
    unread: list[np.ndarray] = []
    for features in examples:
        missing = int(features.get("cut", 0))
        total += 1
        cut_examples += missing > 0
        cut_tokens += missing
        empty += int(features.get("empty", 0))
        tokens += missing + sum(len(features[stream]) for stream in ("source", "target") if stream in features)
        if "unread" in features:
            unread.append(features["unread"])
            words += int(np.count_nonzero(features["weights"])) + len(unread[-1])
    labels = np.concatenate(unread).astype(np.int32) if unread else np.zeros(0, np.int32)
    return Truncation(total, cut_examples, tokens, cut_tokens, words, labels, empty)


def count_skipped(examples: Iterable[Features], length: int) -> Truncation:
    """Counts the examples above `length`, which `data.skip_long` leaves out. They must be encoded without a limit."""
    lengths = [packing.slot_count(features) for features in examples]
    skipped = [n for n in lengths if n > length]
    return Truncation(len(lengths), len(skipped), sum(lengths), sum(skipped))


def _percent(count: int, total: int) -> str:
    return f"{count / max(total, 1):.1%}"
