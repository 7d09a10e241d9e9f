"""From text to token ids and back: byte, character, word, BPE and unigram vocabularies, and loaded ones.

A `Tokenizer` is a `Vocabulary` (see `vocabularies.py`) with the roles of its special tokens and the padded size the
model's table has.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import string
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import tokenizers as hf

from jaxformer import files
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import vocabularies
from jaxformer.data.vocabularies import Fast, Sentences, Vocabulary

ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "cls": ("<cls>", "[CLS]", "<s>"),
    "sep": ("<sep>", "[SEP]", "</s>"),
}
"""What each special token is called, most specific name first. RoBERTa has no [CLS] of its own: its <s> serves."""

MAX_BYTES = 64 << 20
"""Of a tokenizer's file. The largest published ones, of 2**18 tokens, have 35 MB."""

SAMPLE = 2**18
"""At most so many examples, evenly spaced over the split, are read to learn a vocabulary."""


class Pairing(NamedTuple):
    """Special tokens before, between and after two texts, and token types of these and of the texts, in their order."""

    before: list[int]
    between: list[int]
    after: list[int]
    kinds: tuple[list[int], int, list[int], int, list[int]]


class Tokenizer:
    """A vocabulary with special tokens.

    Attributes:
      size: real rows. `vocab`: rows of the model's table, `size` rounded up to a multiple.
      pad, bos, eos, unk, mask, cls, sep: ids of the special tokens, None where a loaded vocabulary has none. Those
        trained here have all of them, as ids 0 to 6.
    """

    def __init__(self, vocabulary: Vocabulary, multiple: int = 1, chosen: Mapping[str, int] | None = None):
        """`chosen` names ids for roles ("pad", "bos", ...) whose tokens have other names than the usual."""
        self.vocabulary = vocabulary
        self.multiple = multiple
        self.chosen = dict(chosen or {})
        self.size = len(vocabulary.pieces)
        if multiple < 1 or any(not 0 <= index < self.size for index in self.chosen.values()):
            what = f"got multiple {multiple} and chosen ids {self.chosen}"
            raise ValueError(f"{what}, expected a multiple of at least 1 and ids below {self.size}")
        self.vocab = -(-self.size // multiple) * multiple
        known = {piece: index for index, piece in reversed(list(enumerate(vocabulary.pieces)))}
        roles = {role: next((n for n in names if n in known), None) for role, names in ROLES.items()}
        self.pad, self.bos, self.eos, self.unk, self.mask, self.cls, self.sep = (known.get(n) for n in roles.values())
        for role, index in self.chosen.items():
            setattr(self, role, index)
            roles[role] = vocabulary.pieces[index]
        self.names = {role: name for role, name in roles.items() if name is not None}  # role -> piece
        self._specials = {name: known[name] for name in self.names.values() if name in known}
        self._hidden = set(self._specials.values()) - {self.unk}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens around it. Special tokens' names inside it are ordinary text."""
        return self.vocabulary.encode(text)

    def parse(self, text: str) -> list[int]:
        """As `encode`, but a special token's name in the text ("the <mask> sat") is that token."""
        return self.vocabulary.parse(text, self._specials)

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode`, and of each the characters of `text` that it stands for: (first, one past the last).

        White space at their ends is left out; what is nothing else is an empty span.
        """
        ids, spans = self.vocabulary.located(text)
        return ids, vocabularies.trimmed(text, spans)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Special tokens and the rows that only pad the vocabulary are skipped; <unk> is shown."""
        return self.vocabulary.decode([i for i in map(int, ids) if i < self.size and i not in self._hidden])

    @functools.cached_property
    def pairing(self) -> Pairing:
        """How two texts are framed for one model: as a tokenizer.json says, else `<cls> text <sep> text <sep>`."""
        if not self.says_pairing:
            before, after = ([] if token is None else [token] for token in (self.cls, self.sep))
            return Pairing(before, after, after, ([0] * len(before), 0, [0] * len(after), 1, [1] * len(after)))
        found = self.vocabulary.whole("a", "a")
        parts = found.sequence_ids
        first, second = ([i for i, part in enumerate(parts) if part == text] for text in (0, 1))
        cuts = (slice(0, first[0]), slice(first[-1] + 1, second[0]), slice(second[-1] + 1, None))
        before, between, after = (found.type_ids[cut] for cut in cuts)
        kinds = (before, found.type_ids[first[0]], between, found.type_ids[second[0]], after)
        return Pairing(*(found.ids[cut] for cut in cuts), kinds)

    @property
    def says_pairing(self) -> bool:
        """Whether the vocabulary itself frames pairs, as a tokenizer.json may."""
        fast = isinstance(self.vocabulary, Fast)
        return fast and self.vocabulary.model.num_special_tokens_to_add(True) > 0

    def word_starts(self, ids: Sequence[int]) -> list[bool]:
        """Whether each piece begins a word, for whole-word masking.

        Where words are joined pieces, a piece begins one when it begins with white space (also in its disguises "Ġ"
        and "▁") or with punctuation; WordPiece marks the opposite with "##".
        """
        starts = self._starts
        return [position == 0 or starts[i] for position, i in enumerate(ids)]

    @functools.cached_property
    def _starts(self) -> list[bool]:
        pieces = self.vocabulary.pieces
        if self.vocabulary.kind == "word":
            return [True] * len(pieces)
        if isinstance(self.vocabulary, Fast) and isinstance(self.vocabulary.model.model, hf.models.WordPiece):
            return [not piece.startswith("##") for piece in pieces]
        begin = tuple("Ġ▁Ċĉč" + string.whitespace + string.punctuation)
        return [piece.startswith(begin) for piece in pieces]

    def remembering(self, budget: int) -> Tokenizer:
        """The same tokenizer, keeping the ids of texts it has seen in up to `budget` bytes of memory."""
        return Remembering(self.vocabulary, self.multiple, budget, self.chosen)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when the mapping from text to ids does."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:16]

    def _json(self) -> dict[str, Any]:
        chosen = {"chosen": self.chosen} if self.chosen else {}
        return {
            "kind": self.vocabulary.kind,
            "multiple": self.multiple,
            **chosen,
            "vocabulary": self.vocabulary.payload(),
        }

    def _text(self) -> str:
        return json.dumps(self._json(), ensure_ascii=False)

    @classmethod
    def _of(cls, content: Any, multiple: int) -> Tokenizer:
        if "added_tokens" in content:
            return cls(Fast.of("file", content), multiple)
        kind = content["kind"]
        return cls(vocabularies.KINDS[kind].of(kind, content["vocabulary"]), content["multiple"], content.get("chosen"))

    def choosing(self, **ids: int | None) -> Tokenizer:
        """The same tokenizer with other tokens in some roles: `choosing(bos=0)`.

        None leaves a role as it is, and so does an id that is no token's: published configs say -1 for none.
        """
        chosen = {role: index for role, index in ids.items() if index is not None and 0 <= index < self.size}
        return Tokenizer(self.vocabulary, self.multiple, {**self.chosen, **chosen})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON file. The same tokenizer always gives the same bytes."""
        write(Path(path), self._text())

    @classmethod
    def load(cls, path: str | os.PathLike[str], multiple: int = 1) -> Tokenizer:
        """Reads what `save` wrote, a `tokenizer.json` of the `tokenizers` library or a SentencePiece `.model`.

        Args:
          path: the file.
          multiple: what the vocabulary is padded to, unless the file says it.

        Raises:
          ConfigError: the file is missing or is none of these.
        """
        path = Path(path)
        content = read_file(path)
        try:
            if path.suffix == ".model":
                return cls(Sentences(content), multiple)
            return cls._of(files.parse(content.decode("utf-8")), multiple)
        except BaseException as error:  # the two libraries raise bare Exception and RuntimeError, and Rust panics
            if not vocabularies.failed(error):
                raise
            raise unreadable(path, error) from error

    @property
    def is_exportable(self) -> bool:
        """Whether the `tokenizers` library can express it, so that it gives the same ids.

        Two things are its own: it takes names of special tokens in a text for these tokens, unless its
        `encode_special_tokens` is set (of whole words even then), and special tokens are put around a text by hand.
        """
        return self.vocabulary.is_in_library

    def export(self, path: str | os.PathLike[str], closing: bool = False, framing: bool = False) -> None:
        """Writes a `tokenizer.json` that the `tokenizers` library loads.

        Args:
          closing: it ends each text with <eos>.
          framing: it puts <cls> and <sep> around texts and pairs, as the tasks of an encoder do here, unless the
            vocabulary has a frame of its own.

        Raises:
          ValueError: that library cannot express the tokenizer.
        """
        if not self.is_exportable:
            kind = self.vocabulary.kind
            raise ValueError(f"tokenizer: got kind {kind!r}, which the tokenizers library cannot express; use save")
        model = hf.Tokenizer.from_str(self.vocabulary.library().to_str())
        if closing and self.eos is not None:
            end = self.vocabulary.pieces[self.eos]
            model.post_processor = hf.processors.TemplateProcessing(
                single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, self.eos)]
            )
        if framing and not self.says_pairing and self.cls is not None and self.sep is not None:
            first, last = (self.vocabulary.pieces[token] for token in (self.cls, self.sep))
            model.post_processor = hf.processors.TemplateProcessing(
                single=f"{first} $A {last}",
                pair=f"{first} $A {last} $B:1 {last}:1",
                special_tokens=[(first, self.cls), (last, self.sep)],
            )
        write(Path(path), model.to_str(pretty=True))


class Remembering(Tokenizer):
    """A tokenizer that does not split the same text twice: training sees every text once an epoch."""

    def __init__(self, vocabulary: Vocabulary, multiple: int, budget: int, chosen: Mapping[str, int] | None = None):
        super().__init__(vocabulary, multiple, chosen)
        self._budget = budget
        self._seen: dict[str, array[int]] = {}
        self._placed: dict[str, array[int]] = {}

    def encode(self, text: str) -> list[int]:
        known = self._seen.get(text)
        if known is not None:
            return known.tolist()
        ids = super().encode(text)
        # Once full it stays as it is: with epochs in random order, what is kept is as good as what would replace it.
        if self._budget > 0:
            self._seen[text] = array("i", ids)
            self._budget -= 4 * len(ids) + len(text) + 200  # about 200 bytes go to the two objects and the table
        return ids

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        known = self._placed.get(text)
        if known is not None:
            return known[::3].tolist(), list(zip(known[1::3].tolist(), known[2::3].tolist(), strict=True))
        ids, spans = super().located(text)
        if self._budget > 0:
            self._placed[text] = array("i", [n for i, span in zip(ids, spans, strict=True) for n in (i, *span)])
            self._budget -= 12 * len(ids) + len(text) + 200
        return ids, spans


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the two sides; one object when the vocabulary is joint or there is one side only."""

    source: Tokenizer
    target: Tokenizer

    FILE = "jaxformer_tokenizer.json"
    """Everything that is needed to read and write text as the run does."""
    LIBRARY = "tokenizer.json"
    """The same for programs that use the `tokenizers` library, where that can express it. Runs of earlier versions have
    what is now in `FILE` under this name."""

    @property
    def joint(self) -> bool:
        return self.target is self.source

    @classmethod
    def build(cls, config: DataConfig, examples: Any, roles: Sequence[str]) -> Self:
        """Loads or learns what `config.tokenizer` describes.

        Args:
          config: the data section.
          examples: the training split.
          roles: what the task reads of an example ("source", "target", "text", "pair", "question", "context").

        Raises:
          ConfigError: unknown kind, a vocabulary too small for its kind, a missing file.
        """
        settings = config.tokenizer
        sides = ("source", "target") if not settings.joint and "target" in roles else ("joint",)
        if settings.kind == "file":
            paths = settings.path.split(",") if len(sides) == 2 else [settings.path]
            if len(paths) != len(sides) or not all(paths):
                wanted = "two files, source,target" if len(sides) == 2 else "a tokenizer.json or a .model file"
                raise ConfigError(f"data.tokenizer.path: got {settings.path!r}, expected {wanted}; set it")
            built = [Tokenizer.load(path, settings.multiple) for path in paths]
        else:
            texts = _texts(config, examples, roles)
            if sides == ("joint",):
                texts = {"joint": [text for side in texts.values() for text in side]}
            built = [Tokenizer(vocabularies.learn(settings, texts[side]), settings.multiple) for side in sides]
        return cls(built[0], built[-1])

    def remembering(self, budget: int) -> Tokenizers:
        """Both with a memory of the texts they have seen, of `budget` bytes together."""
        if self.joint:
            one = self.source.remembering(budget)
            return Tokenizers(one, one)
        return Tokenizers(self.source.remembering(budget // 2), self.target.remembering(budget // 2))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `jaxformer_tokenizer.json`: the tokenizer, or {"source": ..., "target": ...} where they differ.

        Beside it goes `tokenizer.json` in the format of the `tokenizers` library, if there is one tokenizer and that
        library can express it.
        """
        path = Path(directory) / self.FILE
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
          ConfigError: there is no such file, or it is damaged.
        """
        path = Path(directory) / cls.FILE
        if not path.exists() and (Path(directory) / cls.LIBRARY).exists():
            path = Path(directory) / cls.LIBRARY
        try:
            content = files.parse(read_file(path).decode("utf-8"))
            if "source" not in content:
                one = Tokenizer._of(content, multiple)
                return cls(one, one)
            return cls(*(Tokenizer._of(content[side], multiple) for side in ("source", "target")))
        except ConfigError:
            raise
        except BaseException as error:
            if not vocabularies.failed(error):
                raise
            raise unreadable(path, error) from error


def _texts(config: DataConfig, examples: Any, roles: Sequence[str]) -> dict[str, list[str]]:
    """The texts of a sample of `examples`, by side."""
    texts: dict[str, list[str]] = {"source": [], "target": []}
    if config.tokenizer.kind == "byte":
        return texts
    for example in _sample(examples, config.examples):
        for role in ("source", "text", "pair", "question", "context", "target"):
            if role in roles or (role == "pair" and "text" in roles and role in example):
                texts["target" if role == "target" else "source"].append(example[role])
    return texts


def _sample(examples: Any, limit: int | None) -> Iterator[Any]:
    count = len(examples) if limit is None else min(limit, len(examples))
    return (examples[index] for index in range(0, count, max(-(-count // SAMPLE), 1)))


def read_file(path: Path) -> bytes:
    """The bytes of a vocabulary's file.

    Raises:
      ConfigError: it cannot be read, is no regular file (a device has no end), or is larger than any vocabulary.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device never ends, and a pipe waits for a writer
            raise ConfigError(f"tokenizer: got {path}, which is no file, expected a tokenizer.json or a .model file")
        if found.st_size > MAX_BYTES:
            size = f"{found.st_size / 2**20:,.0f} MiB"
            raise ConfigError(
                f"tokenizer: got {path} of {size}, expected at most {MAX_BYTES >> 20}; is it another file?"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer: got {path}, expected a readable file ({error.strerror}); check it") from error


def unreadable(path: Path, error: BaseException) -> ConfigError:
    """The error of a vocabulary's file that its library does not understand."""
    reason = " ".join(str(error).split())[:120]
    return ConfigError(f"tokenizer: got {path}, expected a tokenizer.json or a .model file ({reason}); check it")


def write(path: Path, text: str) -> None:
    """Writes `text` atomically: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)
