"""Text from tokens: pieces of a stream add up to the whole, and none of them is taken back."""

import numpy as np
import pytest
import tokenizers as library
from task_toys import learned

from jaxformer.config import ConfigError, TokenizerConfig
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.vocabularies import LibraryVocabulary
from jaxformer.tasks._generation import INCOMPLETE, new_text, texts

TEXT = "the cat sat \u2014 on \u4f60\u597d the mat, it's 50% \u20acuro \n\n  two  blanks \U0001f600"
KINDS = {"byte": 8, "character": 8, "word": 50, "bpe": 300, "unigram": 320}


def with_byte_fallback() -> Tokenizer:
    """A tokenizer as Llama's: what it does not know is bytes, of which one wrong one spoils a whole run."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "cat", "s"]
    model = library.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    decoders = library.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(LibraryVocabulary("file", tokenizer))


@pytest.mark.parametrize("kind", [*KINDS, "byte_fallback"])
def test_pieces_add_up_to_the_text_of_all_tokens(kind):
    tokenizer = (
        with_byte_fallback()
        if kind == "byte_fallback"
        else learned(TokenizerConfig(kind=kind, vocab=KINDS[kind]), TEXT).target
    )
    rng, counts = np.random.default_rng(0), []
    for trial in range(60):
        ids = rng.integers(tokenizer.size, size=rng.integers(20)).tolist()
        if trial % 2:
            ids = tokenizer.encode(TEXT[rng.integers(20) :])[: rng.integers(60)] + ids[:2]
        prompt_ids = tokenizer.encode(["", "the cat", "a \u4f60"][trial % 3])
        cuts = [0, *sorted(rng.integers(len(ids) + 1, size=5).tolist()), len(ids)]
        for bounds in (range(len(ids) + 1), cuts):
            pieces = [np.array(ids[a:b], np.int32) for a, b in zip(bounds, list(bounds)[1:], strict=False)]
            found = list(texts(tokenizer, prompt_ids, pieces))
            assert "".join(found) == new_text(tokenizer, prompt_ids, ids)
            assert all(found)
            counts.append(len(found))
    assert np.mean(counts) > (1 if kind == "byte_fallback" else 3), "text comes before the end"


def test_half_a_character_waits_for_its_other_half():
    tokenizer = learned(TokenizerConfig(kind="byte")).target
    ids = tokenizer.encode("a\U0001f600b\u20ac")
    found = list(texts(tokenizer, [], [np.array([token]) for token in ids]))
    assert found == ["a", "\U0001f600", "b", "\u20ac"]
    assert list(texts(tokenizer, [], [np.array(ids[:3])])) == ["a", INCOMPLETE], "what stays incomplete is shown so"
    wrong = [np.array([ids[1]])] * 5  # five bytes that begin a character, and never a second half
    assert list(texts(tokenizer, [], wrong)) == [INCOMPLETE, INCOMPLETE, 3 * INCOMPLETE]


def test_a_tokenizer_that_takes_text_back_is_refused():
    class Reversing:
        def decode(self, ids):
            return "".join("abc"[i] for i in reversed(list(ids)))

        def settled_count(self, ids):
            return len(ids)

    with pytest.raises(ConfigError, match="got a tokenizer that changes text which it has decoded"):
        list(texts(Reversing(), [], [np.array([0]), np.array([1])]))
