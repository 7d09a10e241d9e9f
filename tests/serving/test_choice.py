"""Tokens become text that does not depend on the pieces in which they come."""

import itertools

import numpy as np
import pytest

from jaxformer.config import DataConfig, TokenizerConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.decode.engine import Piece
from jaxformer.serving.choice import Choice, first_stop, held_back

TOKENIZER = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",)).target
TEXT = "aé€😀 stop here"
IDS = TOKENIZER.encode(TEXT)


def pieces(ids, sizes):
    """The ids in pieces of these sizes, the last with all that is left."""
    begins = [*itertools.accumulate(sizes, initial=0)]
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        tokens = np.array(ids[begin:end], np.int32)
        yield Piece(tokens, end == len(ids))


def collect(ids, sizes, stops=(), ends=()):
    """The parts of the text, and the choice, whose later pieces are left out once it has ended."""
    choice, parts = Choice(TOKENIZER, [], ends, stops), []
    for piece in pieces(ids, sizes):
        parts.append(choice.add(piece))
        if choice.reason is not None:
            break
    return parts, choice


def test_a_character_of_several_tokens_is_never_split():
    parts, choice = collect(IDS, [1] * (len(IDS) - 1))
    assert "".join(parts) == choice.text == TEXT
    assert "\ufffd" not in "".join(parts)
    assert parts[:10] == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert choice.reason == "length"


def test_a_character_that_stays_incomplete_is_given_out_at_the_end():
    parts, _ = collect(IDS[:2], [1])
    assert parts == ["a", "\ufffd"]


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        ((" stop",), "aé€😀", 15),
        (("st", "stop"), "aé€😀 ", 13),
        (("op h", "stop x"), "aé€😀 st", 17),
        (("😀",), "aé€", 10),
        (("here!",), TEXT, len(IDS)),
        (("e", "here"), "aé€😀 stop h", 18),
    ],
)
def test_stop_sequences_end_the_text_at_the_same_place_whatever_the_pieces(stops, text, tokens):
    for sizes in ([1] * (len(IDS) - 1), [3, 3, 3, 3], [len(IDS) - 1], [5, 9]):
        parts, choice = collect(IDS, sizes, stops)
        assert "".join(parts) == choice.text == text
        assert len(choice.tokens) == tokens
        assert choice.reason == ("length" if text == TEXT else "stop")


def test_an_end_token_is_a_reason_to_stop():
    end = TOKENIZER.eos
    assert collect([*IDS, end], [4], ends=(end,))[1].reason == "stop"
    assert collect(IDS, [4], ends=(end,))[1].reason == "length"


def test_the_stop_that_is_complete_first_counts():
    assert first_stop("abcd", ["bcd", "c"]) == (2, 3)
    assert first_stop("abcd", ["bc", "c"]) == (1, 3)
    assert first_stop("abcd", ["x"]) is None
    assert [held_back(text, ["stop", "to"]) for text in ("a s", "a st", "a sto", "a t", "stop ", "")] == [
        1,
        2,
        3,
        1,
        0,
        0,
    ]
