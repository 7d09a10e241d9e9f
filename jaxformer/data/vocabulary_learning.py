"""Learns a vocabulary from text. The same texts give the same vocabulary on any machine and in any process.

BPE and unigram work on bytes (in GPT-2's visible alphabet) inside the pieces of GPT-2's splitting pattern. A space is
added before the text and removed after decoding. So every text can be encoded, decoding restores it (in Unicode's NFC
form), and a word has the same pieces at the beginning of a sentence as inside one.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import sentencepiece
import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>", "<cls>", "<sep>")
"""Special tokens of every learned vocabulary, in the order of their ids."""

SENTINEL = re.compile(r"<extra_id_\d+>")
"""Name of a token that stands for a dropped span of a text, as T5's vocabulary has them."""

BYTES = 256

ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))

MAX_PREALLOCATED_ROWS = 2**20
"""Vocabulary size for which BPE's trainer may allocate memory (about 100 MB) before it reads the text."""


def sentinel_pieces(count: int) -> tuple[str, ...]:
    """Names of `count` sentinels, which stand for dropped spans: "<extra_id_1>", "<extra_id_0>" at the end, as T5's."""
    return tuple(sentinel_name(number) for number in reversed(range(count)))


def sentinel_name(number: int) -> str:
    """Name of a sentinel."""
    return f"<extra_id_{number}>"


def with_sentinels(tokenizer: hf.Tokenizer, count: int) -> hf.Tokenizer:
    """The tokenizer with `count` sentinels after its last id."""
    tokenizer.add_special_tokens([hf.AddedToken(name, special=True) for name in sentinel_pieces(count)])
    return tokenizer


def split_words(text: str) -> list[str]:
    """The whitespace-separated words of a text in NFC form."""
    return unicodedata.normalize("NFC", text).split()


def byte_pieces() -> tuple[str, ...]:
    """The 256 bytes after the special tokens: ASCII as itself, the others as "<0xE4>"."""
    return SPECIALS + tuple(chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256))


def characters(texts: Iterable[str], lowercase: bool) -> tuple[str, ...]:
    """Every character that occurs, in code point order."""
    seen: set[str] = set()
    for text in texts:
        seen.update(text.lower() if lowercase else text)
    return SPECIALS + tuple(sorted(seen))


def frequent_words(texts: Iterable[str], size: int, lowercase: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The most frequent words, ties in alphabetical order, `size` tokens with the special ones; and their counts.

    <unk> occurs as often as all other words together, the other special tokens do not.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text.lower() if lowercase else text))
    reserved = {word for word in counts if word in SPECIALS or SENTINEL.fullmatch(word)}
    ranked = sorted((word for word in counts if word not in reserved), key=lambda word: (-counts[word], word))
    words = ranked[: max(size - len(SPECIALS), 0)]
    kept = [counts[word] for word in words]
    others = {"<unk>": counts.total() - sum(kept)}
    return (*SPECIALS, *words), (*(others.get(name, 0) for name in SPECIALS), *kept)


def bpe(texts: Iterable[str], size: int, lowercase: bool) -> hf.Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909) over bytes."""
    tokenizer = _byte_level_tokenizer(models.BPE(), lowercase)
    if size > MAX_PREALLOCATED_ROWS:
        texts = list(texts)
        size = min(size, _max_learnable_rows(tokenizer, texts))
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=list(ALPHABET),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_specials(tokenizer)


def _max_learnable_rows(tokenizer: hf.Tokenizer, texts: Iterable[str]) -> int:
    """Upper bound of the tokens that BPE can learn from `texts`: each merge joins two pieces within a word."""
    pieces: set[str] = set()
    for text in texts:
        pieces.update(
            piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        )
    return len(SPECIALS) + len(ALPHABET) + sum(len(piece) - 1 for piece in pieces)


def unigram(texts: Iterable[str], size: int, lowercase: bool) -> hf.Tokenizer:
    """The unigram language model of Kudo 2018 (https://arxiv.org/abs/1804.10959) over bytes.

    The trainer of the `tokenizers` library depends on a randomly seeded hash map, so its result differs each time.
    SentencePiece's trainer is deterministic with one thread; its pieces go into a model of the `tokenizers` library.
    """
    tokenizer = _byte_level_tokenizer(models.Unigram(), lowercase)
    counts = Counter(ALPHABET)  # every byte once, so that every text can be encoded
    for text in texts:
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        counts.update(piece for piece, _ in pieces)
    learned = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{counts[word]}" for word in sorted(counts)),
        input_format="tsv",  # a word and its count
        model_writer=learned,
        model_type="unigram",
        vocab_size=size,
        hard_vocab_limit=False,  # fewer pieces from a small text
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,  # the words are split already
        split_by_number=False,
        split_by_whitespace=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        control_symbols=["<mask>", "<cls>", "<sep>"],
        num_threads=1,  # several threads sum counts in varying order
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=learned.getvalue())
    # A 17-digit number changes its last digit when the library saves and loads it; a rounded one does not.
    scores = [(model.id_to_piece(index), round(model.get_score(index), 6)) for index in range(len(model))]
    tokenizer.model = models.Unigram(scores, unk_id=SPECIALS.index("<unk>"))
    return _with_specials(tokenizer)


def lookup_tokenizer(kind: str, pieces: Sequence[str]) -> hf.Tokenizer:
    """A look-up table of bytes, characters or words as a model of the `tokenizers` library."""
    if kind == "word":
        tokenizer = hf.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Split(hf.Regex(r"[\s\x1c-\x1f\x85]+"), "removed")
    else:
        if kind == "byte":  # pre-tokenization replaces each byte by a visible character
            sentinels = pieces[len(SPECIALS) + BYTES :]
            pieces = (*SPECIALS, *(_byte_character(byte) for byte in range(BYTES)), *sentinels)
        tokenizer = hf.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
        if kind == "byte":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer.decoder = decoders.Fuse()
    sentinels = [piece for piece in pieces if SENTINEL.fullmatch(piece)]
    tokenizer = _with_specials(tokenizer)
    tokenizer.add_special_tokens([hf.AddedToken(name, special=True) for name in sentinels])
    return tokenizer


def _byte_character(byte: int) -> str:
    """Character of a byte in GPT-2's alphabet: itself if it is printable, else a character from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + byte - sum(b < byte for b in printable))


def _byte_level_tokenizer(model: models.Model, lowercase: bool) -> hf.Tokenizer:
    """A byte-level tokenizer around `model`: normalizer, pre-tokenizer and decoder."""
    tokenizer = hf.Tokenizer(model)
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else []), normalizers.Prepend(" ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _with_specials(tokenizer: hf.Tokenizer) -> hf.Tokenizer:
    # Without <unk>, so that decoding keeps it in the text.
    tokenizer.add_special_tokens([hf.AddedToken(name, special=True) for name in SPECIALS if name != "<unk>"])
    return tokenizer
