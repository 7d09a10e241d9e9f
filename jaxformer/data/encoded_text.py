"""Texts that bring their token ids along."""

from __future__ import annotations

from typing import Self


class EncodedText(str):
    """A text whose ids are known, as documents of token shards are: `Tokenizer.encode` returns them as they are.

    Decoding may lose what tokenization lost (capital letters, unknown words), so ids made anew could differ.
    """

    __slots__ = ("ids",)
    ids: list[int]

    def __new__(cls, text: str, ids: list[int]) -> Self:
        encoded = super().__new__(cls, text)
        encoded.ids = ids
        return encoded

    def __reduce__(self) -> tuple[type[EncodedText], tuple[str, list[int]]]:
        return EncodedText, (str(self), self.ids)
