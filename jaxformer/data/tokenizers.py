"""Tokenizers: text to token ids and back, with byte, character, word, BPE, unigram and loaded vocabularies.

A `Tokenizer` is a `Vocabulary` (`vocabularies.py`) with the roles of its special tokens, and with the padded size of
the model's embedding table.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import string
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import tokenizers as hf

from jaxformer.config import DataConfig
from jaxformer.data import cache, derived, vocabularies, vocabulary_learning
from jaxformer.data.encoded_text import EncodedText
from jaxformer.data.sources import Example, Examples
from jaxformer.data.tokenizer_files import read_file, unreadable, write
from jaxformer.data.vocabularies import LibraryVocabulary, LookupVocabulary, SentencePieceVocabulary, Vocabulary
from jaxformer.errors import ConfigError
from jaxformer.runtime import files, hub

ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "cls": ("<cls>", "[CLS]", "<s>"),
    "sep": ("<sep>", "[SEP]", "</s>"),
}
"""Names of each special token, the most specific first. RoBERTa has no [CLS] and uses <s> instead."""

OTHER, CLOSED, MARK, SENTENCE_END, LINE_END = range(5)
"""Kinds of pieces to `Tokenizer.sentence_starts`: words, closing and end marks, words with an end mark, line ends."""

CLOSING = "\"'\u201d\u2019\u00bb)]"
"""Characters that may stand between the end of a sentence and the blank after it."""

MAX_SAMPLED_EXAMPLES = 2**18
"""Examples that a vocabulary is learned from, evenly spaced over the split."""

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "spm.model")
"""Names of a SentencePiece file in directories of the other library."""


class PairTemplate(NamedTuple):
    """Special tokens around a pair of texts: `prefix text separator text suffix`.

    Attributes:
      prefix, separator, suffix: token ids.
      token_types: token types of the prefix, the first text, the separator, the second text and the suffix.
    """

    prefix: list[int]
    separator: list[int]
    suffix: list[int]
    token_types: tuple[list[int], int, list[int], int, list[int]]


class Tokenizer:
    """A vocabulary with special tokens.

    Attributes:
      size: number of tokens.
      vocab: rows of the model's embedding table: `size` rounded up to a multiple.
      pad, bos, eos, unk, mask, cls, sep: ids of the special tokens; None if a loaded vocabulary has none. Vocabularies
        learned here have all of them, as ids 0 to 6.
      sentinels: ids of the tokens <extra_id_0>, <extra_id_1>, ..., which stand for dropped spans of a text.

    Args:
      vocabulary: the vocabulary.
      multiple: `vocab` is a multiple of this.
      special_ids: ids by role ("pad", "bos", ...) for special tokens with unusual names.
    """

    def __init__(self, vocabulary: Vocabulary, multiple: int = 1, special_ids: Mapping[str, int] | None = None):
        self.vocabulary = vocabulary
        self.multiple = multiple
        self.special_ids = dict(special_ids or {})
        self.size = len(vocabulary.pieces)
        if multiple < 1 or any(not 0 <= index < self.size for index in self.special_ids.values()):
            what = f"got multiple {multiple} and special ids {self.special_ids}"
            raise ValueError(f"{what}, expected a multiple of at least 1 and ids below {self.size}")
        self.vocab = -(-self.size // multiple) * multiple
        known = {piece: index for index, piece in reversed(list(enumerate(vocabulary.pieces)))}
        roles = {role: next((n for n in names if n in known), None) for role, names in ROLES.items()}
        self.pad, self.bos, self.eos, self.unk, self.mask, self.cls, self.sep = (known.get(n) for n in roles.values())
        for role, index in self.special_ids.items():
            setattr(self, role, index)
            roles[role] = vocabulary.pieces[index]
        self.names = {role: name for role, name in roles.items() if name is not None}  # role -> piece
        sentinels = itertools.takewhile(known.__contains__, map(vocabulary_learning.sentinel_name, itertools.count()))
        self.sentinels = tuple(known[name] for name in sentinels)
        self._specials = {name: known[name] for name in self.names.values() if name in known}
        self._specials |= {vocabulary.pieces[index]: index for index in self.sentinels}
        self._hidden = set(self._specials.values()) - {self.unk}

    @property
    def counts(self) -> tuple[int, ...] | None:
        """How often each token occurs in the text that a vocabulary of words was learned from; None for others."""
        return self.vocabulary.counts if isinstance(self.vocabulary, LookupVocabulary) else None

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """Ids of all special tokens, <unk> and sentinels included, in order."""
        return tuple(sorted(set(self._specials.values())))

    @functools.cached_property
    def special_names(self) -> frozenset[str]:
        """Names that `parse` reads as special tokens; <unk> is no such name, since corpora hold it as a word."""
        names = set(self._specials)
        if isinstance(self.vocabulary, LibraryVocabulary):
            added = self.vocabulary.model.get_added_tokens_decoder().values()
            names |= {token.content for token in added if token.special}
        return frozenset(names - {self.names.get("unk")})

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens around it. Names of special tokens inside it are ordinary text."""
        return text.ids if isinstance(text, EncodedText) else self.vocabulary.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text: faster for models of the `tokenizers` library."""
        return self.vocabulary.encode_batch(texts)

    def parse(self, text: str) -> list[int]:
        """Ids of `text`, in which the name of a special token ("the <mask> sat") becomes that token."""
        return self.vocabulary.parse(text, self._specials)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode`, and the span of characters in `text` of each: (first, one past the last).

        Spans have no white space at their ends; a token of white space only has an empty span.
        """
        ids, spans = self.vocabulary.encode_with_spans(text)
        return ids, vocabularies.trim_spans(text, spans)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Special tokens and padding rows of the vocabulary are skipped; <unk> is kept."""
        return self.vocabulary.decode([i for i in map(int, ids) if i < self.size and i not in self._hidden])

    def settled_count(self, ids: Sequence[int]) -> int:
        """Number of leading ids whose text stays the same whatever ids follow, but for a last incomplete character.

        A decoder with byte fallback reads a run of bytes ("<0xE4>") as a whole: one wrong byte makes all of them wrong.
        """
        count = len(ids)
        while self._fallback_bytes and count and (ids[count - 1] in self._fallback_bytes | self._hidden):
            count -= 1
        return count

    @functools.cached_property
    def _fallback_bytes(self) -> frozenset[int]:
        """Ids of the single bytes of a model of the `tokenizers` library with byte fallback."""
        if not isinstance(self.vocabulary, LibraryVocabulary):
            return frozenset()
        pieces = enumerate(self.vocabulary.pieces)
        return frozenset(index for index, piece in pieces if re.fullmatch("<0x[0-9A-F]{2}>", piece))

    def decode_with_sentinels(self, ids: Iterable[int]) -> str:
        """The text of `ids` with the names of sentinels and of the mask token in it, single spaces around them."""
        named, parts = {*self.sentinels, self.mask}, []
        for is_named, group in itertools.groupby(map(int, ids), named.__contains__):
            tokens = list(group)
            parts += [self.vocabulary.pieces[i] for i in tokens] if is_named else [self.decode(tokens).strip()]
        return " ".join(filter(None, parts))

    @functools.cached_property
    def pair_template(self) -> PairTemplate:
        """Special tokens around a pair of texts: those of a tokenizer.json, else `<cls> text <sep> text <sep>`."""
        if not self.has_pair_template or not isinstance(self.vocabulary, LibraryVocabulary):
            prefix, suffix = ([] if token is None else [token] for token in (self.cls, self.sep))
            types = ([0] * len(prefix), 0, [0] * len(suffix), 1, [1] * len(suffix))
            return PairTemplate(prefix, suffix, suffix, types)
        encoding = self.vocabulary.encode_framed("a", "a")
        first, second = ([i for i, part in enumerate(encoding.sequence_ids) if part == text] for text in (0, 1))
        special = (slice(0, first[0]), slice(first[-1] + 1, second[0]), slice(second[-1] + 1, None))
        prefix, separator, suffix = (encoding.type_ids[part] for part in special)
        types = (prefix, encoding.type_ids[first[0]], separator, encoding.type_ids[second[0]], suffix)
        return PairTemplate(*(encoding.ids[part] for part in special), types)

    @property
    def has_pair_template(self) -> bool:
        """True if the vocabulary itself adds special tokens to pairs, as a tokenizer.json may."""
        is_library = isinstance(self.vocabulary, LibraryVocabulary)
        return is_library and self.vocabulary.model.num_special_tokens_to_add(True) > 0

    def word_starts(self, ids: Sequence[int]) -> list[bool]:
        """True for each token that begins a word, for whole-word masking.

        A piece begins a word if it starts with white space (also written "Ġ" or "▁") or punctuation. In WordPiece, a
        piece begins a word unless it starts with "##".
        """
        starts = self._starts
        return [position == 0 or starts[i] for position, i in enumerate(ids)]

    @functools.cached_property
    def _starts(self) -> list[bool]:
        pieces = self.vocabulary.pieces
        if self.vocabulary.kind == "word":
            return [True] * len(pieces)
        if isinstance(self.vocabulary, LibraryVocabulary) and isinstance(
            self.vocabulary.model.model, hf.models.WordPiece
        ):
            return [not piece.startswith("##") for piece in pieces]
        begin = tuple("Ġ▁Ċĉč" + string.whitespace + string.punctuation)
        return [piece.startswith(begin) for piece in pieces]

    def sentence_starts(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """True for each token that begins a sentence or a line, bool `[n]`.

        A sentence begins at the first token, at a word after a piece that ends in ".", "!" or "?" (a quotation mark or
        bracket may close it), and after a line end.
        """
        if not len(ids):
            return np.zeros(0, bool)
        kind = self._sentence_kinds[np.asarray(ids)]
        opened = np.maximum.accumulate(np.where(kind == CLOSED, 0, np.arange(len(kind))))  # before closing marks
        before, here = kind[opened][:-1], kind[1:]
        words = np.asarray(self.word_starts(np.asarray(ids).tolist()))[1:]
        after_end = np.isin(before, (MARK, SENTENCE_END)) & words & np.isin(here, (OTHER, SENTENCE_END))
        starts = after_end | ((before == LINE_END) & (here != LINE_END))
        return np.concatenate([[True], starts])

    @functools.cached_property
    def _sentence_kinds(self) -> np.ndarray:
        """Kind of each piece (LINE_END, SENTENCE_END, ...) as `sentence_starts` reads it, int8 `[size]`."""

        def kind(piece: str) -> int:
            if piece.endswith(("\n", "Ċ")):
                return LINE_END
            bare = piece.rstrip(CLOSING)
            if not bare.endswith((".", "!", "?")):
                return CLOSED if piece and not bare else OTHER
            return SENTENCE_END if bare.strip(".!?") else MARK

        return np.array([kind(piece) for piece in self.vocabulary.pieces], np.int8)

    def cached(self, budget: int) -> Tokenizer:
        """The same tokenizer with a cache of the ids of seen texts, of up to `budget` bytes."""
        return CachingTokenizer(self.vocabulary, self.multiple, budget, self.special_ids)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the mapping from text to ids."""
        content = self._json()
        if self.counts is not None:  # they do not change an id
            content["vocabulary"].pop("counts")
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()[:16]

    @functools.cached_property
    def vocabulary_fingerprint(self) -> str:
        """Hash of the mapping from text to ids alone: neither roles of special tokens nor padding change it."""
        content = self._json()["vocabulary"]
        if self.counts is not None:
            content.pop("counts")
        return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:16]

    def _json(self) -> dict[str, Any]:
        chosen = {"chosen": self.special_ids} if self.special_ids else {}
        return {
            "kind": self.vocabulary.kind,
            "multiple": self.multiple,
            **chosen,
            "vocabulary": self.vocabulary.to_json(),
        }

    def _text(self) -> str:
        return json.dumps(self._json(), ensure_ascii=False)

    @classmethod
    def _of(cls, content: Any, multiple: int) -> Tokenizer:
        if "added_tokens" in content:
            return cls(LibraryVocabulary.from_json("file", content), multiple)
        kind = content["kind"]
        return cls(
            vocabularies.KINDS[kind].from_json(kind, content["vocabulary"]), content["multiple"], content.get("chosen")
        )

    def with_special_tokens(self, **ids: int | None) -> Tokenizer:
        """The same tokenizer with other special tokens: `with_special_tokens(bos=0)`.

        None leaves a role unchanged. So does an id that is no token: published configs have -1 for none.
        """
        special_ids = {role: index for role, index in ids.items() if index is not None and 0 <= index < self.size}
        return Tokenizer(self.vocabulary, self.multiple, {**self.special_ids, **special_ids})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON file; equal tokenizers write equal bytes."""
        write(Path(path), self._text())

    @classmethod
    def load(cls, path: str | os.PathLike[str], multiple: int = 1) -> Tokenizer:
        """Reads what `save` wrote, a `tokenizer.json` of the `tokenizers` library or a SentencePiece `.model`.

        Args:
          path: the file.
          multiple: `vocab` is a multiple of this, unless the file has its own.

        Raises:
          ConfigError: the file is missing, or has none of these formats.
        """
        path = Path(path)
        content = read_file(path)
        try:
            if path.suffix == ".model":
                return cls(SentencePieceVocabulary(content), multiple)
            return cls._of(files.parse_json(content.decode("utf-8")), multiple)
        except BaseException as error:  # the two libraries raise bare Exception and RuntimeError, and Rust panics
            if not vocabularies.is_library_error(error):
                raise
            raise unreadable(path, error) from error

    @property
    def is_exportable(self) -> bool:
        """True if the `tokenizers` library can express the tokenizer, so that it gives the same ids.

        It differs in two points. It reads names of special tokens in a text as these tokens, unless its
        `encode_special_tokens` is set (complete words even then). And it adds no special tokens around a text.
        """
        return self.vocabulary.is_expressible

    def export(self, path: str | os.PathLike[str], closing: bool = False, framing: bool = False) -> None:
        """Writes a `tokenizer.json` that the `tokenizers` library loads.

        Args:
          closing: True to end each text with <eos>.
          framing: True to add <cls> and <sep> to texts and pairs, as encoder tasks do, unless the vocabulary has its
            own template.

        Raises:
          ValueError: that library cannot express the tokenizer.
        """
        if not self.is_exportable:
            kind = self.vocabulary.kind
            raise ValueError(f"tokenizer: got kind {kind!r}, which the tokenizers library cannot express; use save")
        model = hf.Tokenizer.from_str(self.vocabulary.to_library().to_str())
        if closing and self.eos is not None:
            end = self.vocabulary.pieces[self.eos]
            model.post_processor = hf.processors.TemplateProcessing(
                single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, self.eos)]
            )
        if framing and not self.has_pair_template and self.cls is not None and self.sep is not None:
            first, last = (self.vocabulary.pieces[token] for token in (self.cls, self.sep))
            model.post_processor = hf.processors.TemplateProcessing(
                single=f"{first} $A {last}",
                pair=f"{first} $A {last} $B:1 {last}:1",
                special_tokens=[(first, self.cls), (last, self.sep)],
            )
        write(Path(path), model.to_str(pretty=True))


class CachingTokenizer(Tokenizer):
    """A tokenizer with a cache of texts and their ids: training encodes every text once per epoch."""

    def __init__(
        self, vocabulary: Vocabulary, multiple: int, budget: int, special_ids: Mapping[str, int] | None = None
    ):
        super().__init__(vocabulary, multiple, special_ids)
        self._budget = budget
        self._seen: dict[str, array[int]] = {}
        self._spans: dict[str, array[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache: another process fills its own."""
        return {**self.__dict__, "_seen": {}, "_spans": {}}

    def encode(self, text: str) -> list[int]:
        if isinstance(text, EncodedText):
            return text.ids
        known = self._seen.get(text)
        if known is not None:
            return known.tolist()
        ids = super().encode(text)
        # No eviction when full: epochs are in random order, so any other text would be as good.
        if self._budget > 0:
            self._seen[text] = array("i", ids)
            self._budget -= 4 * len(ids) + len(text) + 200  # about 200 bytes for the two objects and the table
        return ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        known = self._spans.get(text)
        if known is not None:
            return known[::3].tolist(), list(zip(known[1::3].tolist(), known[2::3].tolist(), strict=True))
        ids, spans = super().encode_with_spans(text)
        if self._budget > 0:
            self._spans[text] = array("i", [n for i, span in zip(ids, spans, strict=True) for n in (i, *span)])
            self._budget -= 12 * len(ids) + len(text) + 200
        return ids, spans


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of source and target; one object if the vocabulary is joint or there is one side only."""

    source: Tokenizer
    target: Tokenizer
    chat_template: str | None = None
    """Jinja text that writes conversations (`jaxformer.data.chat`); None: there is none."""

    FILE = "jaxformer_tokenizer.json"
    """File with the complete tokenizers of a run."""
    LIBRARY = "tokenizer.json"
    """File for programs that use the `tokenizers` library, if it can express the tokenizer. In runs of earlier versions
    it has the content of `FILE`."""
    TEMPLATE = "chat_template.jinja"
    """File with the chat template, if there is one."""

    @property
    def joint(self) -> bool:
        return self.target is self.source

    @classmethod
    def build(cls, config: DataConfig, examples: Examples, roles: Sequence[str]) -> Self:
        """Loads or learns what `config.tokenizer` describes.

        Args:
          config: the data section.
          examples: the training split.
          roles: roles that the task reads ("source", "target", "text", "pair", "question", "context", "messages",
            "chosen", "rejected").

        Raises:
          ConfigError: the kind is unknown, the vocabulary is too small for it, or a file is missing.
        """
        settings = config.tokenizer
        sides = ("source", "target") if not settings.joint and "target" in roles else ("joint",)
        if settings.kind == "file":
            paths = settings.path.split(",") if len(sides) == 2 else [settings.path]
            if len(paths) != len(sides) or not all(paths):
                expected = "two files, source,target" if len(sides) == 2 else "a tokenizer.json or a .model file"
                raise ConfigError(f"data.tokenizer.path: got {settings.path!r}, expected {expected}; set it")
            built = [Tokenizer.load(_tokenizer_file(path), settings.multiple) for path in paths]
        else:
            find = functools.cache(lambda: _texts(config, examples, roles))
            built = []
            for side in sides:
                texts = functools.partial(_of_side, find, side)
                drawn = derived.drawn(examples)
                known = None if drawn is None else [*drawn, len(examples), config.examples, list(roles), side]
                built.append(Tokenizer(_learn(config, texts, known), settings.multiple))
        return cls(built[0], built[-1])

    def cached(self, budget: int) -> Tokenizers:
        """Both tokenizers with caches of seen texts, of `budget` bytes together."""
        if self.joint:
            one = self.source.cached(budget)
            return Tokenizers(one, one, self.chat_template)
        return Tokenizers(self.source.cached(budget // 2), self.target.cached(budget // 2), self.chat_template)

    def differing_side(self, other: Tokenizers) -> str | None:
        """The first side, "source" or "target", whose texts get other ids from `other`; None: there is none.

        Special tokens around texts, and padding, may differ.
        """
        for side in ("source", "target"):
            if getattr(self, side).vocabulary_fingerprint != getattr(other, side).vocabulary_fingerprint:
                return side
        return None

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `jaxformer_tokenizer.json`: the tokenizer, or {"source": ..., "target": ...} if they differ.

        Also writes `tokenizer.json` in the format of the `tokenizers` library, if there is one tokenizer and that
        library can express it, and `chat_template.jinja`, if there is a chat template.
        """
        path = Path(directory) / self.FILE
        if self.chat_template is not None:
            write(Path(directory) / self.TEMPLATE, self.chat_template)
        if self.joint:
            if self.source.is_exportable:
                self.source.export(Path(directory) / self.LIBRARY)
            self.source.save(path)
        else:
            both = {"source": self.source._json(), "target": self.target._json()}
            write(path, json.dumps(both, ensure_ascii=False))

    @classmethod
    def load(cls, directory: str | os.PathLike[str], multiple: int = 1) -> Self:
        """Reads what `save` wrote.

        Raises:
          ConfigError: the file is missing or damaged.
        """
        path = Path(directory) / cls.FILE
        if not path.exists() and (Path(directory) / cls.LIBRARY).exists():
            path = Path(directory) / cls.LIBRARY
        if not path.exists():
            raise ConfigError(
                f"tokenizer: got no {cls.FILE} in {directory}, expected one; a model imported from a directory without "
                "a tokenizer has none, and takes token ids in Python"
            )
        template = Path(directory) / cls.TEMPLATE
        try:
            chat_template = read_file(template).decode("utf-8") if template.exists() else None
            content = files.parse_json(read_file(path).decode("utf-8"))
            if "source" not in content:
                one = Tokenizer._of(content, multiple)
                return cls(one, one, chat_template)
            source, target = (Tokenizer._of(content[side], multiple) for side in ("source", "target"))
            return cls(source, target, chat_template)
        except ConfigError:
            raise
        except BaseException as error:
            if not vocabularies.is_library_error(error):
                raise
            raise unreadable(path, error) from error


def _tokenizer_file(path: str) -> Path:
    """The file that `data.tokenizer.path` names: a path, or the tokenizer of a model on the hub ("org/name")."""
    if "/" not in path or path.endswith((".json", ".model")) or not hub.is_name(path):
        return Path(path)

    def choose(names: Collection[str], read_json: hub.ReadJson) -> list[str]:
        found = [name for name in ("tokenizer.json", *SENTENCEPIECE_FILES) if name in names]
        if not found:
            raise ConfigError(f"none of tokenizer.json, {', '.join(SENTENCEPIECE_FILES)}, expected one")
        chosen[:] = found[:1]
        return chosen

    chosen: list[str] = []
    directory = hub.find(path, choose, what="data.tokenizer.path")
    return directory / chosen[0]


def _learn(config: DataConfig, texts: Callable[[], list[str]], known: list[Any] | None) -> Vocabulary:
    """The vocabulary that `config.tokenizer` describes: one that was learned of the same texts before, or a new one.

    Args:
      known: what decides the texts; None: they have to be read to know.
    """
    settings = config.tokenizer
    if settings.kind not in vocabularies.SLOW_TO_LEARN:
        return vocabularies.learn(settings, texts())
    code = derived.code_digest(*(Path(module.__file__) for module in (vocabularies, vocabulary_learning)))
    chosen = [settings.kind, settings.vocab, settings.lowercase, settings.sentinels]
    depends_on = {"texts": known or derived.content_digest(texts()), "settings": chosen, "code": code}
    content = derived.keep(
        cache.cache_directory(config),
        "vocabularies",
        depends_on,
        lambda: vocabularies.learn(settings, texts()).to_json(),
    )
    return vocabularies.KINDS[settings.kind].from_json(settings.kind, content)


def _of_side(find: Callable[[], dict[str, list[str]]], side: str) -> list[str]:
    """The texts of one side, or of both for the side "joint"."""
    texts = find()
    return [text for each in texts.values() for text in each] if side == "joint" else texts[side]


def _texts(config: DataConfig, examples: Examples, roles: Sequence[str]) -> dict[str, list[str]]:
    """Texts to learn a vocabulary from, by side: those of a sample of `examples`."""
    texts: dict[str, list[str]] = {"source": [], "target": []}
    if config.tokenizer.kind == "byte":
        return texts
    for example in _sample(examples, config.examples):
        for role in ("source", "text", "pair", "question", "context", "target"):
            if role in example and (role in roles or (role == "pair" and "text" in roles)):
                texts["target" if role == "target" else "source"].append(example[role])
        if "messages" in roles:  # a template writes the names of roles, too
            texts["source"] += [message[key] for message in example["messages"] for key in ("role", "content")]
        if "chosen" in roles:  # the replies to these messages
            texts["source"] += ["assistant", example["chosen"], example["rejected"]]
    return texts


def _sample(examples: Examples, limit: int | None) -> Iterator[Example]:
    """At most `MAX_SAMPLED_EXAMPLES` of the first `limit` examples, evenly spaced."""
    count = len(examples) if limit is None else min(limit, len(examples))
    return (examples[index] for index in range(0, count, max(-(-count // MAX_SAMPLED_EXAMPLES), 1)))
