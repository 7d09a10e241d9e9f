"""Opens the tokenizer of a Hugging Face directory, and adds the special tokens of its architecture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as fast
from tokenizers import implementations

from jaxformer.data import chat
from jaxformer.data.tokenizer_files import read_file, unreadable
from jaxformer.data.tokenizers import ROLES, SENTENCEPIECE_FILES, PairTemplate, Tokenizer, Tokenizers
from jaxformer.data.vocabularies import MAX_IDS, LibraryVocabulary, SentencePieceVocabulary, is_library_error
from jaxformer.errors import ConfigError
from jaxformer.hf import reading
from jaxformer.hf.table import CallConvention, Settings

SETTINGS_FILES = ("tokenizer_config.json", Tokenizers.TEMPLATE)
"""Files beside the vocabulary that are read."""


PAIR_FOLDERS = ("encoder", "decoder")
"""Folders with a tokenizer.json each, beside the weights of a pair whose two sides have tokens of their own."""


class FramedText(NamedTuple):
    """A text with special tokens.

    Attributes:
      ids: token ids.
      token_types: one token type for each id.
      offsets: begin and end of each token's characters in the text; empty if unknown.
    """

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int]]


class RemappedSentencePiece:
    """A SentencePiece model with the ids of a vocab.json (Marian)."""

    def __init__(self, sentences: SentencePieceVocabulary, ids: dict[str, int]) -> None:
        self.kind, self.sentences, self._ids = "file", sentences, ids
        pieces = [""] * (max(ids.values()) + 1)
        for piece, index in ids.items():
            pieces[index] = piece
        self.pieces = tuple(pieces)
        self._unknown = ids.get("<unk>", 0)
        self._rows = {piece: row for row, piece in enumerate(sentences.pieces)}

    def encode(self, text: str) -> list[int]:
        return self._to_ids(self.sentences.encode(text))

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        rows, spans = self.sentences.encode_with_spans(text)
        return self._to_ids(rows), spans

    def _to_ids(self, rows: list[int]) -> list[int]:
        return [self._ids.get(self.sentences.pieces[row], self._unknown) for row in rows]

    def decode(self, ids: list[int]) -> str:
        return self.sentences.decode([self._rows[self.pieces[i]] for i in ids if self.pieces[i] in self._rows])

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return self.encode(text)

    is_expressible = False

    def to_library(self) -> fast.Tokenizer:
        raise ValueError("tokenizer: got Marian's two files, which the tokenizers library cannot read; use theirs")

    def to_json(self) -> Any:
        raise ConfigError("tokenizer: got Marian's two files, expected a tokenizer.json to save; keep the directory")


def open_tokenizers(directory: Path, settings: Settings) -> Tokenizers | None:
    """The tokenizers of `tokenizer.json`, a SentencePiece file or older vocabulary files; None if there is none.

    config.json decides which tokens pad a text, end it, and start a decoder (<bos> here).
    """
    tokenizers = _open_any(directory, settings)
    if tokenizers is None:
        return None
    ends = settings("eos_token_id", None)
    special = {"pad": settings("pad_token_id", None), "eos": ends[0] if isinstance(ends, list) else ends}
    if settings("is_encoder_decoder", False):
        special["bos"] = settings("decoder_start_token_id", None)
    source = tokenizers.source.with_special_tokens(**special)
    target = source if tokenizers.joint else tokenizers.target.with_special_tokens(**special)
    return Tokenizers(source, target, _chat_template(directory, target))


def _chat_template(directory: Path, tokenizer: Tokenizer) -> str | None:
    """The chat template of chat_template.jinja or tokenizer_config.json; of several the one called default.

    Special tokens that tokenizer_config.json names otherwise than the tokenizer are set in its first lines.
    """
    settings: Mapping[str, Any] = {}
    if (directory / "tokenizer_config.json").exists():
        settings = reading.read_config(directory, "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    if (directory / Tokenizers.TEMPLATE).exists():
        template = read_file(directory / Tokenizers.TEMPLATE).decode("utf-8", "replace")
    if not isinstance(template, str):
        return None
    tokens = chat.template_tokens(tokenizer)
    for role in ROLES:
        name = f"{role}_token"
        if name not in settings:
            continue
        value = settings[name].get("content") if isinstance(settings[name], dict) else settings[name]
        value = value if isinstance(value, str) else ""
        if value != tokens.get(name, ""):
            template = f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n{template}"
    return template


def _open_any(directory: Path, settings: Settings) -> Tokenizers | None:
    first, second = (directory / side / "tokenizer.json" for side in PAIR_FOLDERS)
    if os.path.lexists(first) and os.path.lexists(second):
        return Tokenizers(Tokenizer.load(first), Tokenizer.load(second))
    if os.path.lexists(directory / "tokenizer.json"):
        return _joint(Tokenizer.load(directory / "tokenizer.json"))
    for name in SENTENCEPIECE_FILES:
        if (directory / name).exists():
            return _joint(Tokenizer.load(directory / name))
    if (directory / "source.spm").exists() and (directory / "vocab.json").exists():
        return _open_marian(directory)
    if (directory / "merges.txt").exists() and (directory / "vocab.json").exists():
        return _joint(_open_byte_pairs(directory, settings("add_prefix_space", False)))
    if (directory / "vocab.txt").exists():
        return _joint(_open_word_pieces(directory))
    return None


def tokenizer_files(names: Collection[str]) -> list[str]:
    """The files that hold the vocabulary in a directory with these files, in the order in which they are tried."""
    alternatives = [
        ("tokenizer.json",),
        *[(name,) for name in SENTENCEPIECE_FILES],
        ("source.spm", "target.spm", "vocab.json"),
        ("merges.txt", "vocab.json"),
        ("vocab.txt",),
    ]
    return next((list(files) for files in alternatives if all(name in names for name in files)), [])


def _open_marian(directory: Path) -> Tokenizers:
    ids = _read_vocabulary(directory / "vocab.json")

    def vocabulary(path: Path) -> RemappedSentencePiece:
        return RemappedSentencePiece(SentencePieceVocabulary(read_file(path)), ids)

    return Tokenizers(_load(directory / "source.spm", vocabulary), _load(directory / "target.spm", vocabulary))


def _open_byte_pairs(directory: Path, prefix_space: bool) -> Tokenizer:
    _read_vocabulary(directory / "vocab.json")
    read_file(directory / "merges.txt")

    def vocabulary(merges: Path) -> LibraryVocabulary:
        files = str(directory / "vocab.json"), str(merges)
        return _library_vocabulary(implementations.ByteLevelBPETokenizer(*files, add_prefix_space=prefix_space))

    return _load(directory / "merges.txt", vocabulary)


def _open_word_pieces(directory: Path) -> Tokenizer:
    lowercase = _is_lowercased(directory)
    read_file(directory / "vocab.txt")

    def vocabulary(path: Path) -> LibraryVocabulary:
        return _library_vocabulary(implementations.BertWordPieceTokenizer(str(path), lowercase=lowercase))

    return _load(directory / "vocab.txt", vocabulary)


def _joint(tokenizer: Tokenizer) -> Tokenizers:
    """One tokenizer for source and target."""
    return Tokenizers(tokenizer, tokenizer)


def _library_vocabulary(tokenizer: Any) -> LibraryVocabulary:
    return LibraryVocabulary("file", fast.Tokenizer.from_str(tokenizer.to_str()))


def _load(path: Path, make: Callable[[Path], Any]) -> Tokenizer:
    """The tokenizer of a file; `make` builds its vocabulary.

    Raises:
      ConfigError: the file is damaged.
    """
    try:
        return Tokenizer(make(path))
    except ConfigError:
        raise
    except BaseException as error:  # the two libraries raise bare Exception and RuntimeError, and Rust panics
        if not is_library_error(error):
            raise
        raise unreadable(path, error) from error


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(read_file(path))
        vocabulary = {str(piece): int(index) for piece, index in ids.items()}
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{path}: got {type(error).__name__}, expected a JSON object of pieces and ids") from error
    if not vocabulary or min(vocabulary.values()) < 0 or max(vocabulary.values()) >= MAX_IDS:
        raise ConfigError(f"{path}: got no ids from 0 to {MAX_IDS - 1}, expected a JSON object of pieces and ids")
    return vocabulary


def _is_lowercased(directory: Path) -> bool:
    """`do_lower_case` of tokenizer_config.json; True without it, since most models with a vocab.txt are uncased."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return True
    return bool(reading.read_config(directory, path.name).get("do_lower_case", True))


def frame(tokenizer: Tokenizer, convention: CallConvention, text: str) -> FramedText:
    """A text with the special tokens of the model's training.

    A tokenizer.json that adds special tokens decides; otherwise `convention` does.
    """
    if isinstance(tokenizer.vocabulary, LibraryVocabulary):
        encoding = tokenizer.vocabulary.encode_framed(text)
        adds_tokens = tokenizer.vocabulary.model.num_special_tokens_to_add(False)
        if adds_tokens or not (convention.prefix_tokens or convention.suffix_tokens):
            return FramedText(encoding.ids, encoding.type_ids, encoding.offsets)
    prefix, suffix = (_special_ids(tokenizer, names) for names in (convention.prefix_tokens, convention.suffix_tokens))
    ids = [*prefix, *tokenizer.parse(text), *suffix]
    token_types = [0] * len(ids)
    if convention.last_token_type is not None:
        token_types[-1] = convention.last_token_type
    return FramedText(ids, token_types, [])


def pairing(tokenizer: Tokenizer, convention: CallConvention) -> PairTemplate:
    """The special tokens around two texts: of a tokenizer.json with a pair template, or of `convention`."""
    if tokenizer.has_pair_template:
        return tokenizer.pair_template
    names = (convention.prefix_tokens, convention.separator_tokens, convention.suffix_tokens)
    prefix, separator, suffix = (_special_ids(tokenizer, tokens) for tokens in names)
    suffix_types = [1] * len(suffix)
    if suffix_types and convention.last_token_type is not None:
        suffix_types[-1] = convention.last_token_type
    return PairTemplate(prefix, separator, suffix, ([0] * len(prefix), 0, [0] * len(separator), 1, suffix_types))


def _special_ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """The ids of special tokens, without those that the vocabulary lacks."""
    pieces = tokenizer.vocabulary.pieces
    return [pieces.index(name) for name in names if name in pieces]
