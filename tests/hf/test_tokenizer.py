"""Tokenizer files of the other library's directories, and the special tokens around a text."""

import io
import json

import pytest
import sentencepiece
import tokenizers

from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf.table import Settings, families
from jaxformer.hf.tokenizer import frame, open_tokenizers, pairing

TEXT = ["the cat sat on the mat", "a dog sat", "the dog and the cat", "mats and cats"] * 8


def convention(model_type):
    return dict(families())[model_type].convention


def sentences(path, *symbols):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=40, hard_vocab_limit=False,
        user_defined_symbols=list(symbols), pad_id=3, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def opened(directory, model_type="bert"):
    return open_tokenizers(directory, Settings({"model_type": model_type}))


def test_a_directory_without_one_has_none(tmp_path):
    assert opened(tmp_path) is None


def test_wordpiece_from_vocab_txt(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    tokenizer = opened(tmp_path).source
    assert frame(tokenizer, convention("bert"), "The cats sat").ids == [2, 5, 6, 7, 8, 3]
    assert frame(tokenizer, convention("bert"), "sat [MASK]").ids == [2, 8, 4, 3]
    assert pairing(tokenizer, convention("bert")) == ([2], [3], [3], ([0], 0, [0], 1, [1]))
    assert tokenizer.has_pair_template
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert opened(tmp_path).source.encode("The") == [1]


def test_byte_level_bpe_from_vocab_and_merges(tmp_path):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXT, vocab_size=280, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.save_model(str(tmp_path))
    tokenizer = opened(tmp_path, "gpt2").source
    assert tokenizer.decode(frame(tokenizer, convention("gpt2"), "the cat sat").ids) == "the cat sat"
    assert frame(tokenizer, convention("gpt2"), "the cat").ids == made.encode("the cat").ids
    start, end = (made.token_to_id(name) for name in ("<s>", "</s>"))
    assert frame(tokenizer, convention("roberta"), "the cat").ids == [start, *made.encode("the cat").ids, end]


@pytest.mark.parametrize(
    ("model_type", "tail", "kinds"), [("t5", ["</s>"], [0]), ("xlnet", ["<sep>", "<cls>"], [0, 2])]
)
def test_sentencepiece_is_framed_as_its_architecture_wants(tmp_path, model_type, tail, kinds):
    sentences(tmp_path / "spiece.model", "<sep>", "<cls>")
    tokenizer = opened(tmp_path, model_type).source
    framed = frame(tokenizer, convention(model_type), "the cat")
    pieces = [tokenizer.vocabulary.pieces[i] for i in framed.ids]
    assert pieces[-len(tail) :] == tail
    assert framed.token_types[-len(kinds) :] == kinds
    assert tokenizer.decode(framed.ids).strip().startswith("the cat")
    if model_type == "xlnet":
        names = {piece: i for i, piece in enumerate(tokenizer.vocabulary.pieces)}
        sep, cls = names["<sep>"], names["<cls>"]
        assert pairing(tokenizer, convention(model_type)) == ([], [sep], [sep, cls], ([], 0, [0], 1, [1, 2]))


def test_marian_has_two_models_and_one_table_of_ids(tmp_path):
    for side in ("source", "target"):
        sentences(tmp_path / f"{side}.spm")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    ids = {piece: 2 + i for i, piece in enumerate(reversed(pieces)) if piece not in ("</s>", "<unk>")}
    ids |= {"</s>": 0, "<unk>": 1, "<pad>": 2 + len(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    tokenizer = opened(tmp_path, "marian").source
    expected = [ids[piece] for piece in processor.encode("the cat sat", out_type=str)]
    assert frame(tokenizer, convention("marian"), "the cat sat").ids == [*expected, 0]
    assert tokenizer.decode([*expected, 0, 2 + len(pieces)]) == "the cat sat"
    found, places = tokenizer.encode_with_spans("the cat")
    assert found == tokenizer.encode("the cat")
    assert "".join("the cat"[begin:end] for begin, end in places) == "thecat"


def test_the_config_decides_which_tokens_start_end_and_pad(tmp_path):
    """T5 starts its decoder with padding; what was chosen is saved with the run."""
    sentences(tmp_path / "spiece.model")
    settings = Settings(
        {
            "model_type": "t5",
            "is_encoder_decoder": True,
            "decoder_start_token_id": 3,
            "pad_token_id": 3,
            "eos_token_id": [2],
        }
    )
    both = open_tokenizers(tmp_path, settings)
    assert (both.target.bos, both.target.pad, both.target.eos) == (3, 3, 2)
    both.save(tmp_path)
    again = Tokenizers.load(tmp_path)
    assert (again.target.bos, again.cached(1000).target.bos) == (3, 3)
    assert again.target.decode([3, *again.target.encode("the cat"), 2]) == "the cat"
