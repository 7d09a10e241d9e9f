"""Vocabularies: look-up tables, models of the `tokenizers` library, and SentencePiece models."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import unicodedata
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import sentencepiece
import tokenizers as hf

from jaxformer.config import TokenizerConfig
from jaxformer.data import vocabulary_learning
from jaxformer.data.vocabulary_learning import SPECIALS
from jaxformer.errors import ConfigError

MAX_IDS = 2**24
"""Upper bound of token ids. An embedding table has a row for every id; the largest published ones have 2**18."""


BACKTRACKING_PROBES = ("a" * 64 + "!", " " * 64 + "x", "0" * 64 + "x", "ab" * 32 + "-")
"""Texts on which a pattern with catastrophic backtracking shows it."""


def is_library_error(error: BaseException) -> bool:
    """True for errors that a library raises on bad input, False for Ctrl-C and the like.

    A panic in the Rust code of `tokenizers` is not an `Exception`, and its class has no public name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _silent_panics() -> Generator[None, None, None]:
    """Hides what a Rust panic writes to stderr; its exception has the same text."""
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class Vocabulary(Protocol):
    """Pieces of text, and how a text is split into them.

    Attributes:
      kind: `data.tokenizer.kind`, or "sentencepiece".
      pieces: the text of each id.
    """

    @property
    def kind(self) -> str: ...

    @property
    def pieces(self) -> Sequence[str]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text."""
        ...

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode`, and the span of characters of each in `text`, perhaps with white space around it."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        ...

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        """Ids of a text in which the names of `specials` (name -> id) become those tokens."""
        ...

    def to_json(self) -> Any:
        """The vocabulary as JSON values, which `from_json` reads."""
        ...

    @property
    def is_expressible(self) -> bool:
        """True if the `tokenizers` library can express it."""
        ...

    def to_library(self) -> hf.Tokenizer:
        """The same vocabulary as a model of the `tokenizers` library. Requires `is_expressible`."""
        ...


def _encode_around_specials(text: str, specials: dict[str, int], vocabulary: Vocabulary, space: str) -> list[int]:
    """Ids of a text in which the names of `specials` become those tokens, and the parts between them are encoded.

    Args:
      text: the text.
      specials: id by name.
      vocabulary: encodes the parts between special tokens.
      space: dropped next to a special token; vocabularies that add a space before every text would double it.
    """
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")", text):
        if part in specials:
            ids.append(specials[part])
        elif part := part.removeprefix(space if ids else "").removesuffix(space if part else ""):
            ids.extend(vocabulary.encode(part))
    return ids


def trim_spans(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans without white space at their ends, extended by the combining marks of their last letter."""
    trimmed = []
    for begin, end in spans:
        while begin < end and text[begin].isspace():
            begin += 1
        while begin < end and text[end - 1].isspace():
            end -= 1
        while begin < end < len(text) and unicodedata.combining(text[end]):
            end += 1
        trimmed.append((begin, end))
    return trimmed


class LookupVocabulary:
    """A look-up table: every byte, character or whitespace-separated word is one token.

    Attributes:
      counts: how often each piece occurs in the text it was learned from; None if that is not known.
    """

    def __init__(
        self,
        kind: str,
        pieces: Sequence[str],
        lowercase: bool,
        sentinels: int = 0,
        counts: Sequence[int] | None = None,
    ):
        if counts is not None and len(counts) != len(pieces):
            raise ValueError(f"got {len(counts)} counts for {len(pieces)} pieces")
        self.kind = kind
        self.pieces = (*pieces, *vocabulary_learning.sentinel_pieces(sentinels))
        self.counts = None if counts is None else (*counts, *[0] * sentinels)
        self._sentinels = sentinels
        self._lowercase = lowercase
        self._unk = self.pieces.index("<unk>")
        # A word that looks like a special token must not become one. <unk> is an exception: published corpora
        # (WikiText-2) contain it with that meaning.
        hidden = {*SPECIALS, *vocabulary_learning.sentinel_pieces(sentinels)} - {"<unk>"}
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if piece not in hidden}

    def encode(self, text: str) -> list[int]:
        text = text.lower() if self._lowercase else text
        if self.kind == "byte":
            return [byte + len(SPECIALS) for byte in text.encode()]
        get, unk = self._ids.get, self._unk
        return [get(piece, unk) for piece in (vocabulary_learning.split_words(text) if self.kind == "word" else text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self.kind == "word":
            return self.encode(text), [match.span() for match in re.finditer(r"\S+", text)]
        # A lower-case letter can have more characters than its capital: "\u0130" becomes two.
        pieces = [(index, piece.lower() if self._lowercase else piece) for index, piece in enumerate(text)]
        width = (lambda piece: len(piece.encode())) if self.kind == "byte" else len
        return self.encode(text), [(index, index + 1) for index, piece in pieces for _ in range(width(piece))]

    def decode(self, ids: list[int]) -> str:
        if self.kind == "byte":
            first, end = len(SPECIALS), len(SPECIALS) + vocabulary_learning.BYTES
            return bytes(i - first for i in ids if first <= i < end).decode(errors="replace")
        return (" " if self.kind == "word" else "").join(self.pieces[i] for i in ids)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _encode_around_specials(text, specials, self, "")

    def to_json(self) -> Any:
        kept = len(self.pieces) - self._sentinels
        pieces = [] if self.kind == "byte" else list(self.pieces[:kept])
        sentinels = {"sentinels": self._sentinels} if self._sentinels else {}
        counts = {} if self.counts is None else {"counts": list(self.counts[:kept])}
        return {"pieces": pieces, "lowercase": self._lowercase, **sentinels, **counts}

    @property
    def is_expressible(self) -> bool:
        return not self._lowercase  # the library lower-cases a final capital sigma differently

    def to_library(self) -> hf.Tokenizer:
        return vocabulary_learning.lookup_tokenizer(self.kind, self.pieces)

    @classmethod
    def from_json(cls, kind: str, payload: Any) -> LookupVocabulary:
        pieces = vocabulary_learning.byte_pieces() if kind == "byte" else payload["pieces"]
        return cls(kind, pieces, payload["lowercase"], payload.get("sentinels", 0), payload.get("counts"))


class LibraryVocabulary:
    """A model of the `tokenizers` library, loaded from a file (kind file)."""

    def __init__(self, kind: str, model: hf.Tokenizer):
        model.no_truncation()  # a loaded file may truncate and pad, which the pipeline does
        model.no_padding()
        model.encode_special_tokens = True  # "</s>" in a text is four characters, not the end token
        self.kind = kind
        self.model = model
        ids = set(model.get_vocab(with_added_tokens=True).values())
        if not ids or max(ids) >= MAX_IDS:
            got = f"token id {max(ids)}" if ids else "no token"
            raise ValueError(f"got {got}, expected some, with ids below {MAX_IDS}")
        self.pieces = tuple((model.id_to_token(index) or "") if index in ids else "" for index in range(max(ids) + 1))

    @functools.cached_property
    def _parser(self) -> hf.Tokenizer:
        return hf.Tokenizer.from_str(self.model.to_str())  # encode_special_tokens is not stored in the JSON

    def encode(self, text: str) -> list[int]:
        return _encoded(self.model, text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [found.ids for found in self.model.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:
            if not is_library_error(error):
                raise
            return [self.encode(text) for text in texts]  # raises for the text that cannot be encoded

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = _encoded(self.model, text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids, skip_special_tokens=True)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _encoded(self._parser, text, add_special_tokens=False).ids

    def encode_framed(self, text: str, pair: str | None = None) -> hf.Encoding:
        """Encoding of a text or pair with the file's special tokens. Their names in the text become those tokens."""
        return _encoded(self._parser, text, pair)

    def to_json(self) -> Any:
        return json.loads(self.model.to_str())

    is_expressible = True

    def to_library(self) -> hf.Tokenizer:
        return self.model

    @classmethod
    def from_json(cls, kind: str, payload: Any) -> LibraryVocabulary:
        _check_charsmaps(payload)
        with _silent_panics():
            model = hf.Tokenizer.from_str(json.dumps(payload))
            for text in BACKTRACKING_PROBES:
                with contextlib.suppress(
                    Exception
                ):  # a text that cannot be encoded is fine; only panics end the loading
                    model.encode(text, add_special_tokens=False)
        return cls(kind, model)


def _check_charsmaps(content: Any) -> None:
    """Checks the length of each normalizer's table: the library would allocate the stated size.

    Raises:
      ValueError: a table is shorter than it states.
    """
    if isinstance(content, list):
        for part in content:
            _check_charsmaps(part)
    elif isinstance(content, dict):
        table = content.get("precompiled_charsmap")
        if isinstance(table, str):
            raw = base64.b64decode(table)
            if len(raw) < 4 or int.from_bytes(raw[:4], "little") > len(raw) - 4:
                raise ValueError("got a precompiled_charsmap that is cut off")
        for name in ("normalizer", "normalizers"):
            _check_charsmaps(content.get(name))


def _encoded(model: hf.Tokenizer, text: str, pair: str | None = None, add_special_tokens: bool = True) -> hf.Encoding:
    """The library's encoding of a text, or of a pair of texts.

    Raises:
      ConfigError: it cannot encode them: a pattern takes too long, or an unknown character has no token.
    """
    try:
        return model.encode(text, pair, add_special_tokens=add_special_tokens)
    except BaseException as error:  # a Rust panic is not an `Exception`
        if not is_library_error(error):
            raise
        reason = " ".join(str(error).split())[:120]
        what = f"tokenizer: got a text that it cannot split ({text[:40]!a}: {reason})"
        raise ConfigError(f"{what}, expected one that splits every text; mend its tokenizer.json") from None


class LearnedVocabulary(LibraryVocabulary):
    """A model that `vocabulary_learning` trained: kinds bpe and unigram.

    It adds a space before the text, and a single space between two words always begins a piece. So a text is encoded
    word by word with a cache of words, which takes a fifth of the time on Multi30k.
    """

    MAX_CACHED_WORDS = 2**16
    MAX_CACHED_CHARACTERS = 32
    """Longer words are not cached: in a script without spaces, lines would be words."""

    def __init__(self, kind: str, model: hf.Tokenizer):
        super().__init__(kind, model)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        words = text.split(" ")
        if words != text.split():  # other white space than single spaces may be inside a piece
            return super().encode(text)
        ids: list[int] = []
        for word in words:
            known = self._known.get(word)
            if known is None:
                known = super().encode(word)
                if len(self._known) < self.MAX_CACHED_WORDS and len(word) <= self.MAX_CACHED_CHARACTERS:
                    self._known[word] = known
            ids += known
        return ids

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _encode_around_specials(text, specials, self, " ")


class SentencePieceVocabulary:
    """A loaded SentencePiece model."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        if not model:  # the library would accept it, and fail at every call
            raise ValueError("an empty file")
        self._bytes = model
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.pieces = tuple(self._model.id_to_piece(index) for index in range(len(self._model)))

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)  # a build has a process for each core

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._model.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _encode_around_specials(text, specials, self, " ")

    def to_json(self) -> Any:
        return base64.b64encode(self._bytes).decode()

    is_expressible = False

    def to_library(self) -> hf.Tokenizer:
        raise ValueError("tokenizer: got a SentencePiece model, which the tokenizers library cannot read; use save")

    @classmethod
    def from_json(cls, kind: str, payload: Any) -> SentencePieceVocabulary:
        return cls(base64.b64decode(payload))


KINDS: dict[str, type[LookupVocabulary] | type[LibraryVocabulary] | type[SentencePieceVocabulary]] = {
    "byte": LookupVocabulary,
    "character": LookupVocabulary,
    "word": LookupVocabulary,
    "bpe": LearnedVocabulary,
    "unigram": LearnedVocabulary,
    "file": LibraryVocabulary,
    "sentencepiece": SentencePieceVocabulary,
}


SLOW_TO_LEARN = ("word", "bpe", "unigram")
"""Kinds that count words, which takes seconds; bytes and characters are read off the text."""


def learn(config: TokenizerConfig, texts: Iterable[str]) -> Vocabulary:
    """Learns the vocabulary that `config` describes from `texts`."""
    kind, lowercase, sentinels = config.kind, config.lowercase, config.sentinels
    if kind == "byte":
        return LookupVocabulary(kind, vocabulary_learning.byte_pieces(), lowercase, sentinels)
    if kind == "character":
        return LookupVocabulary(kind, vocabulary_learning.characters(texts, lowercase), lowercase, sentinels)
    if kind == "word":
        words, counts = vocabulary_learning.frequent_words(texts, config.vocab, lowercase)
        return LookupVocabulary(kind, words, lowercase, sentinels, counts)
    if kind in ("bpe", "unigram"):
        min_size = len(SPECIALS) + 256
        if config.vocab < min_size:
            raise ConfigError(
                f"data.tokenizer.vocab: got {config.vocab}, expected at least {min_size} for {config.kind} "
                f"(256 bytes and {len(SPECIALS)} special tokens); raise it or use kind byte or character"
            )
        train = vocabulary_learning.bpe if kind == "bpe" else vocabulary_learning.unigram
        model = vocabulary_learning.with_sentinels(train(texts, config.vocab, lowercase), sentinels)
        return LearnedVocabulary(kind, model)
    kinds = "byte, character, word, bpe, unigram, file"
    raise ConfigError(f"data.tokenizer.kind: got {config.kind!r}, expected one of {kinds}; change it")
