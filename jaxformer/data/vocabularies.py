"""Three kinds of vocabulary: a look-up table, a model of the `tokenizers` library, a SentencePiece model."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import sentencepiece
import tokenizers as hf

from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.data import learning
from jaxformer.data.learning import SPECIALS

MAX_IDS = 2**24
"""Token ids are below it. A table has a row for every id, used or not; the largest published ones have 2**18."""


LONG_RUNS = ("a" * 64 + "!", " " * 64 + "x", "0" * 64 + "x", "ab" * 32 + "-")
"""Texts on which a pattern that backtracks without end does so."""


def failed(error: BaseException) -> bool:
    """True for what a library raises on bad input, and not for Ctrl-C.

    Where the Rust code of `tokenizers` panics, its exception is no `Exception`, and has no public name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _silent_panics() -> Iterator[None]:
    """Keeps the report that Rust writes to stderr, before its exception says the same, from the user."""
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed: there is nothing to keep silent
        yield
        return
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class Vocabulary(Protocol):
    """Pieces of text and how a text becomes a sequence of them."""

    kind: str
    pieces: Sequence[str]

    def encode(self, text: str) -> list[int]: ...

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same ids, and the characters of `text` that each stands for, white space around them perhaps included."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def parse(self, text: str, specials: dict[str, int]) -> list[int]: ...

    def payload(self) -> Any: ...

    @property
    def is_in_library(self) -> bool:
        """Whether the `tokenizers` library can express it."""
        ...

    def library(self) -> hf.Tokenizer:
        """The same as a model of the `tokenizers` library, where that `is_in_library`."""
        ...


def _between(text: str, specials: dict[str, int], vocabulary: Vocabulary, space: str) -> list[int]:
    """Ids of a text in which the names of `specials` stand for themselves.

    `space` is what is dropped next to a special token: vocabularies that put a space before every text would double it.
    """
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")", text):
        if part in specials:
            ids.append(specials[part])
        elif part := part.removeprefix(space if ids else "").removesuffix(space if part else ""):
            ids.extend(vocabulary.encode(part))
    return ids


def trimmed(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of characters without white space at their ends, and with the marks that belong to their last letter."""
    found = []
    for begin, end in spans:
        while begin < end and text[begin].isspace():
            begin += 1
        while begin < end and text[end - 1].isspace():
            end -= 1
        while begin < end < len(text) and unicodedata.combining(text[end]):  # composed, it is a part of that letter
            end += 1
        found.append((begin, end))
    return found


class Table:
    """Look-up: every byte, every character or every whitespace-separated word is one token."""

    def __init__(self, kind: str, pieces: Sequence[str], lowercase: bool):
        self.kind = kind
        self.pieces = tuple(pieces)
        self._lowercase = lowercase
        self._unk = self.pieces.index("<unk>")
        # A word of the data that looks like a special token must not become one, except that <unk> is what it says:
        # published corpora (WikiText-2) carry it.
        hidden = set(SPECIALS) - {"<unk>"}
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if piece not in hidden}

    def encode(self, text: str) -> list[int]:
        text = text.lower() if self._lowercase else text
        if self.kind == "byte":
            return [byte + len(SPECIALS) for byte in text.encode()]
        get, unk = self._ids.get, self._unk
        return [get(piece, unk) for piece in (learning.words(text) if self.kind == "word" else text)]

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self.kind == "word":
            return self.encode(text), [match.span() for match in re.finditer(r"\S+", text)]
        # Small letters can be more characters than their capital: "\u0130" becomes two.
        pieces = [(place, piece.lower() if self._lowercase else piece) for place, piece in enumerate(text)]
        width = (lambda piece: len(piece.encode())) if self.kind == "byte" else len
        return self.encode(text), [(place, place + 1) for place, piece in pieces for _ in range(width(piece))]

    def decode(self, ids: list[int]) -> str:
        if self.kind == "byte":
            return bytes(i - len(SPECIALS) for i in ids if i >= len(SPECIALS)).decode(errors="replace")
        return (" " if self.kind == "word" else "").join(self.pieces[i] for i in ids)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _between(text, specials, self, "")

    def payload(self) -> Any:
        pieces = [] if self.kind == "byte" else list(self.pieces)
        return {"pieces": pieces, "lowercase": self._lowercase}

    @property
    def is_in_library(self) -> bool:
        return not self._lowercase  # a capital sigma at the end of a word has another small letter there

    def library(self) -> hf.Tokenizer:
        return learning.table(self.kind, self.pieces)

    @classmethod
    def of(cls, kind: str, payload: Any) -> Table:
        return cls(kind, learning.byte_pieces() if kind == "byte" else payload["pieces"], payload["lowercase"])


class Fast:
    """A model of the `tokenizers` library, as a file has it (kind file)."""

    def __init__(self, kind: str, model: hf.Tokenizer):
        model.no_truncation()  # a loaded file may cut and pad, which is the pipeline's work
        model.no_padding()
        model.encode_special_tokens = True  # "</s>" in the data is four characters, not the end
        self.kind = kind
        self.model = model
        ids = set(model.get_vocab(with_added_tokens=True).values())
        if not ids or max(ids) >= MAX_IDS:
            got = f"token id {max(ids)}" if ids else "no token"
            raise ValueError(f"got {got}, expected some, with ids below {MAX_IDS}")
        self.pieces = tuple((model.id_to_token(index) or "") if index in ids else "" for index in range(max(ids) + 1))

    @functools.cached_property
    def _parser(self) -> hf.Tokenizer:
        return hf.Tokenizer.from_str(self.model.to_str())  # the setting above is not part of the file

    def encode(self, text: str) -> list[int]:
        return _encoded(self.model, text, add_special_tokens=False).ids

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = _encoded(self.model, text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids, skip_special_tokens=True)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _encoded(self._parser, text, add_special_tokens=False).ids

    def whole(self, text: str, pair: str | None = None) -> hf.Encoding:
        """A text or pair with the special tokens that the file puts around them; their names in it are those tokens."""
        return _encoded(self._parser, text, pair)

    def payload(self) -> Any:
        return json.loads(self.model.to_str())

    is_in_library = True

    def library(self) -> hf.Tokenizer:
        return self.model

    @classmethod
    def of(cls, kind: str, payload: Any) -> Fast:
        _check_charsmaps(payload)
        with _silent_panics():
            model = hf.Tokenizer.from_str(json.dumps(payload))
            for text in LONG_RUNS:
                with contextlib.suppress(Exception):  # a text without a token: only panics end the loading
                    model.encode(text, add_special_tokens=False)
        return cls(kind, model)


def _check_charsmaps(content: Any) -> None:
    """Refuses a normalizer's table that is shorter than it says: the library would reserve memory for what it says.

    Raises:
      ValueError: there is one.
    """
    if isinstance(content, list):
        for each in content:
            _check_charsmaps(each)
    elif isinstance(content, dict):
        table = content.get("precompiled_charsmap")
        if isinstance(table, str):
            raw = base64.b64decode(table)
            if len(raw) < 4 or int.from_bytes(raw[:4], "little") > len(raw) - 4:
                raise ValueError("got a precompiled_charsmap that is cut off")
        for name in ("normalizer", "normalizers"):
            _check_charsmaps(content.get(name))


def _encoded(model: hf.Tokenizer, *texts: str | None, **options: Any) -> hf.Encoding:
    """The library's encoding of a text, or of a pair of texts.

    Raises:
      ConfigError: it cannot encode them, as where a pattern takes too long, or an unknown character has no token.
    """
    try:
        return model.encode(*texts, **options)
    except BaseException as error:  # a pattern that gives up is a panic of Rust's: no `Exception`
        if not failed(error):
            raise
        reason = " ".join(str(error).split())[:120]
        what = f"tokenizer: got a text that it cannot split ({str(texts[0])[:40]!a}: {reason})"
        raise ConfigError(f"{what}, expected one that splits every text; mend its tokenizer.json") from None


class Learnt(Fast):
    """A model that `learning` made: kinds bpe and unigram.

    These put a space before the text, and a single space between two words always begins a piece. So such words are
    split one by one, and a word seen before is looked up: texts of Multi30k whose words are known take a fifth of the
    time.
    """

    KEPT, LONGEST = 2**16, 32
    """Words that are kept, and the characters of the longest: in a script without spaces, lines would be words."""

    def __init__(self, kind: str, model: hf.Tokenizer):
        super().__init__(kind, model)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        words = text.split(" ")
        if words != text.split():  # other white space than single spaces, which pieces may hold several of
            return super().encode(text)
        ids: list[int] = []
        for word in words:
            known = self._known.get(word)
            if known is None:
                known = super().encode(word)
                if len(self._known) < self.KEPT and len(word) <= self.LONGEST:
                    self._known[word] = known
            ids += known
        return ids

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _between(text, specials, self, " ")


class Sentences:
    """A loaded SentencePiece model."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        if not model:  # the library would take it, and then say nothing but errors
            raise ValueError("an empty file")
        self._bytes = model
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.pieces = tuple(self._model.id_to_piece(index) for index in range(len(self._model)))

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._model.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def parse(self, text: str, specials: dict[str, int]) -> list[int]:
        return _between(text, specials, self, " ")

    def payload(self) -> Any:
        return base64.b64encode(self._bytes).decode()

    is_in_library = False

    def library(self) -> hf.Tokenizer:
        raise ValueError("tokenizer: got a SentencePiece model, which the tokenizers library cannot read; use save")

    @classmethod
    def of(cls, kind: str, payload: Any) -> Sentences:
        return cls(base64.b64decode(payload))


KINDS: dict[str, type[Table] | type[Fast] | type[Sentences]] = {
    "byte": Table, "character": Table, "word": Table, "bpe": Learnt, "unigram": Learnt, "file": Fast,
    "sentencepiece": Sentences,
}  # fmt: skip


def learn(config: TokenizerConfig, texts: Iterable[str]) -> Vocabulary:
    """The vocabulary that `config` describes, from `texts`."""
    if config.kind == "byte":
        return Table("byte", learning.byte_pieces(), config.lowercase)
    if config.kind == "character":
        return Table("character", learning.characters(texts, config.lowercase), config.lowercase)
    if config.kind == "word":
        return Table("word", learning.frequent_words(texts, config.vocab, config.lowercase), config.lowercase)
    if config.kind in ("bpe", "unigram"):
        smallest = len(SPECIALS) + 256
        if config.vocab < smallest:
            raise ConfigError(
                f"data.tokenizer.vocab: got {config.vocab}, expected at least {smallest} for {config.kind} "
                f"(256 bytes and {len(SPECIALS)} special tokens); raise it or use kind byte or character"
            )
        train = learning.bpe if config.kind == "bpe" else learning.unigram
        return Learnt(config.kind, train(texts, config.vocab, config.lowercase))
    kinds = "byte, character, word, bpe, unigram, file"
    raise ConfigError(f"data.tokenizer.kind: got {config.kind!r}, expected one of {kinds}; change it")
