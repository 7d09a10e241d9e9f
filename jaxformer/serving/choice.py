"""One output of a request: tokens become text, which ends at an end token, a stop sequence or the limit."""

from __future__ import annotations

from collections.abc import Sequence

from jaxformer.data.tokenizers import Tokenizer
from jaxformer.decode.engine import Piece
from jaxformer.tasks import _generation
from jaxformer.tasks._generation import TextStream


class Choice:
    """An output in progress.

    Attributes:
      text: what has been given out.
      reason: why it has ended, "stop" or "length"; None: it has not.
      tokens: the tokens, with the end token, or up to the one that completes a stop sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], ends: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        """Begins with no tokens; `ends` are the end tokens."""
        self.tokenizer, self.prompt_ids, self.ends, self.stops = tokenizer, prompt_ids, ends, stops
        self.text, self.reason = "", None
        self.tokens: list[int] = []
        self._stream = TextStream(tokenizer, prompt_ids)
        self._held = ""

    def add(self, piece: Piece) -> str:
        """Adds tokens; the text that is certain because of them. A text that may begin a stop sequence is held back."""
        before, tokens = len(self.tokens), piece.tokens.tolist()
        self.tokens += tokens
        held = self._held + self._stream.push(tokens)
        if piece.finished:
            held += self._stream.end()
            self.reason = "stop" if self.tokens and self.tokens[-1] in self.ends else "length"
        stop = first_stop(held, self.stops)
        if stop is not None:
            end = len(self.text) + stop[1]
            del self.tokens[next(n for n in range(before, len(self.tokens) + 1) if self._has_text(n, end)) :]
            self.reason = "stop"
            return self._give(held[: stop[0]], "")
        keep = 0 if piece.finished else held_back(held, self.stops)
        return self._give(held[: len(held) - keep], held[len(held) - keep :])

    def _give(self, text: str, held: str) -> str:
        self.text, self._held = self.text + text, held
        return text

    def _has_text(self, count: int, end: int) -> bool:
        """True if the first tokens settle the first `end` characters."""
        if count == len(self.tokens):
            return True
        return len(_generation.final_text(self.tokenizer, self.prompt_ids, self.tokens[:count])) >= end


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the stop sequence that is complete first; None if there is none.

    It does not depend on the pieces in which the text has come.
    """
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[::-1] if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop sequence."""
    lengths = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(lengths, default=0)
