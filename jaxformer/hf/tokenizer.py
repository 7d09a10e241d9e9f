"""The tokenizer that lies in a directory of the other library, and how each architecture frames a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as fast
from tokenizers import implementations

from jaxformer.config import ConfigError
from jaxformer.data.tokenizers import Pairing, Tokenizer, Tokenizers, read_file, unreadable
from jaxformer.data.vocabularies import MAX_IDS, Fast, Sentences, failed
from jaxformer.hf import files
from jaxformer.hf.table import Convention, Settings

SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model")


class Framed(NamedTuple):
    """A text with special tokens: ids, token types, and where known each token's characters."""

    ids: list[int]
    kinds: list[int]
    offsets: list[tuple[int, int]]


class Mapped:
    """A SentencePiece model whose pieces have the ids of a vocab.json (Marian)."""

    def __init__(self, sentences: Sentences, ids: dict[str, int]) -> None:
        self.kind, self.sentences, self._ids = "file", sentences, ids
        pieces = [""] * (max(ids.values()) + 1)
        for piece, index in ids.items():
            pieces[index] = piece
        self.pieces = tuple(pieces)
        self._unknown = ids.get("<unk>", 0)
        self._rows = {piece: row for row, piece in enumerate(sentences.pieces)}

    def encode(self, text: str) -> list[int]:
        return self._named(self.sentences.encode(text))

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        rows, spans = self.sentences.located(text)
        return self._named(rows), spans

    def _named(self, rows: list[int]) -> list[int]:
        return [self._ids.get(self.sentences.pieces[row], self._unknown) for row in rows]

    def decode(self, ids: list[int]) -> str:
        return self.sentences.decode([self._rows[self.pieces[i]] for i in ids if self.pieces[i] in self._rows])

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return self.encode(text)

    is_in_library = False

    def library(self) -> fast.Tokenizer:
        raise ValueError("tokenizer: got Marian's two files, which the tokenizers library cannot read; use theirs")

    def payload(self) -> Any:
        raise ConfigError("tokenizer: got Marian's two files, expected a tokenizer.json to save; keep the directory")


def open_tokenizers(directory: Path, settings: Settings) -> Tokenizers | None:
    """From `tokenizer.json`, a SentencePiece file, or the older vocabulary files; None where there is none.

    Their config.json decides which tokens pad, end a text, and start a decoder (which is our <bos>).
    """
    found = _find(directory, settings)
    if found is None:
        return None
    ends = settings("eos_token_id", None)
    chosen = {"pad": settings("pad_token_id", None), "eos": ends[0] if isinstance(ends, list) else ends}
    if settings("is_encoder_decoder", False):
        chosen["bos"] = settings("decoder_start_token_id", None)
    one = found.source.choosing(**chosen)
    return Tokenizers(one, one if found.joint else found.target.choosing(**chosen))


def _find(directory: Path, settings: Settings) -> Tokenizers | None:
    if os.path.lexists(directory / "tokenizer.json"):
        return _one(Tokenizer.load(directory / "tokenizer.json"))
    for name in SENTENCEPIECE:
        if (directory / name).exists():
            return _one(Tokenizer.load(directory / name))
    if (directory / "source.spm").exists() and (directory / "vocab.json").exists():
        ids = _vocabulary(directory / "vocab.json")
        sides = (directory / f"{side}.spm" for side in ("source", "target"))
        return Tokenizers(*(_made(side, lambda side: Mapped(Sentences(read_file(side)), ids)) for side in sides))
    if (directory / "merges.txt").exists() and (directory / "vocab.json").exists():
        prefix = settings("add_prefix_space", False)
        _vocabulary(directory / "vocab.json")
        read_file(directory / "merges.txt")

        def pairs(merges: Path) -> Fast:
            both = str(directory / "vocab.json"), str(merges)
            return _loaded(implementations.ByteLevelBPETokenizer(*both, add_prefix_space=prefix))

        return _one(_made(directory / "merges.txt", pairs))
    if (directory / "vocab.txt").exists():
        lower = _lowercase(directory)
        read_file(directory / "vocab.txt")

        def words(path: Path) -> Fast:
            return _loaded(implementations.BertWordPieceTokenizer(str(path), lowercase=lower))

        return _one(_made(directory / "vocab.txt", words))
    return None


def _one(tokenizer: Tokenizer) -> Tokenizers:
    return Tokenizers(tokenizer, tokenizer)


def _loaded(made: Any) -> Fast:
    return Fast("file", fast.Tokenizer.from_str(made.to_str()))


def _made(path: Path, make: Callable[[Path], Any]) -> Tokenizer:
    """A tokenizer of a file.

    Raises:
      ConfigError: the file is damaged.
    """
    try:
        return Tokenizer(make(path))
    except ConfigError:
        raise
    except BaseException as error:  # the two libraries raise bare Exception and RuntimeError, and Rust panics
        if not failed(error):
            raise
        raise unreadable(path, error) from error


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(read_file(path))
        found = {str(piece): int(index) for piece, index in ids.items()}
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{path}: got {type(error).__name__}, expected a JSON object of pieces and ids") from error
    if not found or min(found.values()) < 0 or max(found.values()) >= MAX_IDS:
        raise ConfigError(f"{path}: got no ids from 0 to {MAX_IDS - 1}, expected a JSON object of pieces and ids")
    return found


def _lowercase(directory: Path) -> bool:
    """What tokenizer_config.json says; uncased is what that file's models mostly were."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return True
    return bool(files.read_config(directory, path.name).get("do_lower_case", True))


def frame(tokenizer: Tokenizer, convention: Convention, text: str) -> Framed:
    """`text` with the special tokens that the model was trained with.

    A tokenizer.json says itself which, if it adds any; otherwise `convention` does.
    """
    if isinstance(tokenizer.vocabulary, Fast):
        found = tokenizer.vocabulary.whole(text)
        says = tokenizer.vocabulary.model.num_special_tokens_to_add(False)
        if says or not (convention.before or convention.after):
            return Framed(found.ids, found.type_ids, found.offsets)
    before, after = (_special(tokenizer, names) for names in (convention.before, convention.after))
    ids = [*before, *tokenizer.parse(text), *after]
    kinds = [0] * len(ids)
    if convention.last_kind is not None:
        kinds[-1] = convention.last_kind
    return Framed(ids, kinds, [])


def pairing(tokenizer: Tokenizer, convention: Convention) -> Pairing:
    """How it frames two texts: as a tokenizer.json says, if it does, otherwise as `convention` does."""
    if tokenizer.says_pairing:
        return tokenizer.pairing
    names = (convention.before, convention.between, convention.after)
    before, between, after = (_special(tokenizer, each) for each in names)
    kinds = [1] * len(after)
    if kinds and convention.last_kind is not None:
        kinds[-1] = convention.last_kind
    return Pairing(before, between, after, ([0] * len(before), 0, [0] * len(between), 1, kinds))


def _special(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """The ids of special tokens, leaving out those that the vocabulary lacks."""
    pieces = tokenizer.vocabulary.pieces
    return [pieces.index(name) for name in names if name in pieces]
