"""The tokenizer that lies in a directory of the other library."""

from __future__ import annotations

from pathlib import Path

from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.hf.table import Settings

JOINT = ("tokenizer.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model")
PAIR = ("source.spm", "target.spm")


def open_tokenizers(directory: Path, settings: Settings) -> Tokenizers | None:
    """From `tokenizer.json` or a SentencePiece file, the first that exists; None where there is none."""
    for name in JOINT:
        if (directory / name).exists():
            one = Tokenizer.load(directory / name)
            return Tokenizers(one, one)
    return None
