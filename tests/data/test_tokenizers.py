"""Tokenizers: what is encoded can be decoded, files give back the same tokenizer, learning is deterministic."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError, DataConfig, TokenizerConfig
from jaxformer.data import tokenizer_files
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.data.vocabularies import LibraryVocabulary, SentencePieceVocabulary

TEXTS = [
    "A dog is running through the green grass.",
    "Ein Hund läuft durch das grüne Gras.",
    "Two dogs, three men; and a horse!",
    "Zwei Hunde, drei Männer und ein Pferd!",
    "a dog and a dog and a dog",
] * 3
PAIRS = [{"source": a, "target": b} for a, b in zip(TEXTS[0::2], TEXTS[1::2], strict=False)]
KINDS = ("byte", "character", "word", "bpe", "unigram")


def build(kind, texts=TEXTS, **settings):
    config = DataConfig(tokenizer=TokenizerConfig(kind=kind, **{"vocab": 300, **settings}))
    return Tokenizers.build(config, [{"text": text} for text in texts], ("text",)).source


@pytest.fixture(scope="module")
def trained():
    return {kind: build(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_the_first_ids_and_the_table_is_padded(trained, kind):
    tokenizer = trained[kind]
    ids = [getattr(tokenizer, role) for role in ("pad", "bos", "eos", "unk", "mask", "cls", "sep")]
    assert ids == list(range(7))
    assert tokenizer.size <= tokenizer.vocab < tokenizer.size + 8
    assert tokenizer.vocab % 8 == 0
    ids = [0, 1, *tokenizer.encode("a dog and"), 2, tokenizer.vocab - 1]
    assert tokenizer.decode(ids if tokenizer.vocab > tokenizer.size else ids[:-1]) == "a dog and"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [False, True])
def test_every_token_knows_its_characters(trained, kind, lowercase):
    """Composed letters, capitals that become two letters, several bytes a letter, white space of any kind."""
    tokenizer = build(kind, lowercase=True) if lowercase else trained[kind]
    text = "  A dog,  cafe\u0301 \u0130 \u039f\u0394\u039f\u03a3\tna\u00efve \u6771\u4eac 1973-74. "
    for each in (tokenizer, tokenizer.cached(2**20), tokenizer.cached(0)):
        for _ in range(2):
            ids, places = each.encode_with_spans(text)
            assert ids == tokenizer.encode(text)
            assert len(places) == len(ids)
    parts = [text[begin:end] for begin, end in places]
    assert all(part == part.strip() for part in parts)
    assert set("".join(parts)) | set(" \t") == set(text)
    begins = [begin for begin, end in places if begin < end]
    assert begins == sorted(begins)
    if kind in ("bpe", "unigram"):
        assert "e\u0301" in parts, "the accent belongs to its letter"
    if kind == "word":
        assert parts == text.split()


def test_a_sentencepiece_token_knows_its_characters():
    model = io.BytesIO()
    texts = (text for text in [*TEXTS, "fine caf\u00e9"] * 4)
    options = dict(vocab_size=60, hard_vocab_limit=False, minloglevel=2, num_threads=1)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options)
    tokenizer, text = (
        Tokenizer(SentencePieceVocabulary(model.getvalue())),
        "A  dog \ufb01ne \u6771\u4eac",
    )  # with a ligature
    ids, places = tokenizer.encode_with_spans(text)
    assert ids == tokenizer.encode(text)
    words = [text[begin:end] for begin, end in places if begin < end]
    assert "".join(words) in ("Adog\ufb01ne\u6771\u4eac", "Adog\ufb01\ufb01ne\u6771\u4eac")


@pytest.mark.parametrize("kind", KINDS)
def test_known_text_comes_back(trained, kind):
    for text in TEXTS[:5]:
        ids = trained[kind].encode(text)
        assert trained[kind].decode(ids) == text
        assert min(ids) > 6
        assert max(ids) < trained[kind].size


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(trained, kind, text):
    expected = text if kind == "byte" else unicodedata.normalize("NFC", text)
    assert trained[kind].decode(trained[kind].encode(text)) == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "text", [" leading", "  two  spaces ", "\ttab\nline\n\n", "<s> </s> <pad><mask>", "日本 ▁ Ġ", ""]
)
def test_awkward_text_comes_back_without_special_tokens(trained, kind, text):
    ids = trained[kind].encode(text)
    assert trained[kind].decode(ids) == text
    assert not set(ids) & set(range(7))


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_word_by_word_is_as_the_whole_text(kind, lowercase):
    """The same model without the table of words is the other side; spaces, marks and accents meet in all ways."""
    blocks = ["def a:\n  \t  b = a\n  \t  c"] * 9  # runs of white space become pieces
    learnt = build(kind, TEXTS + blocks, lowercase=lowercase).vocabulary
    whole = LibraryVocabulary("file", learnt.model)
    pieces = st.sampled_from(
        [" ", " ", "a", "dog", "It's", "\u0308", "é", "Gras.", "ΟΔΟΣ", "1²", "\u00a0", "\n", "<s>", "日本"]
    )
    texts = st.one_of(st.lists(pieces, max_size=12).map("".join), st.text(max_size=20))

    @settings(max_examples=150, deadline=None)
    @given(text=texts)
    def check(text):
        expected = whole.encode(text)
        assert learnt.encode(text) == expected  # some of its words for the first time
        assert learnt.encode(text) == expected

    check()
    for text in ("a\n \tb", "a \n b", " a", "a ", "a  b"):  # a run of white space is one piece, spaces or not
        assert learnt.encode(text) == whole.encode(text)
    assert learnt.encode("a dog " * 3 + "x" * 99) == whole.encode("a dog " * 3 + "x" * 99)
    assert "dog" in learnt._known
    assert "x" * 99 not in learnt._known


def test_byte_ids_are_the_bytes():
    assert build("byte", []).encode("aä") == [7 + 97, 7 + 0xC3, 7 + 0xA4]


def test_characters_are_those_of_the_training_text():
    tokenizer = build("character", ["cab", "bad"])
    assert tokenizer.vocabulary.pieces[7:] == ("a", "b", "c", "d")
    assert tokenizer.encode("dax") == [10, 7, tokenizer.unk]
    assert tokenizer.decode(tokenizer.encode("dax")) == "da<unk>"


def test_words_are_ranked_by_frequency_and_capped():
    tokenizer = build("word", ["b a b", "c b a <unk> <s>"], vocab=9)
    assert tokenizer.vocabulary.pieces[7:] == ("b", "a")
    assert tokenizer.encode("a c  b <unk> <s>") == [8, 3, 7, 3, 3]  # a word "<s>" is unknown, not the beginning
    assert tokenizer.decode([8, 3, 7]) == "a <unk> b"


def test_vocabulary_size_is_respected(trained):
    assert trained["bpe"].size == 300
    assert 263 < trained["unigram"].size <= 300  # so small a text has no more useful pieces
    assert build("bpe", vocab=280).size == build("unigram", vocab=275).size + 5 == 280


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase(kind):
    tokenizer = build(kind, ["a GREEN Dog"], lowercase=True)
    assert tokenizer.decode(tokenizer.encode("A green dog")) == "a green dog"


def test_first_word_has_the_pieces_it_has_inside_a_sentence(trained):
    for kind in ("bpe", "unigram"):
        inside = trained[kind].encode("a dog")
        assert inside[-len(trained[kind].encode("dog")) :] == trained[kind].encode("dog")


def test_word_starts(trained):
    tokenizer = trained["bpe"]
    ids = tokenizer.encode("running dog, zebra")
    words, current = [], []
    for i, start in zip(ids, tokenizer.word_starts(ids), strict=True):
        if start and current:
            words.append(tokenizer.decode(current))
            current = []
        current.append(i)
    assert [*words, tokenizer.decode(current)] == ["running", "dog", ",", "zebra"]
    assert trained["word"].word_starts([9, 10, 11]) == [True] * 3
    assert trained["character"].word_starts(trained["character"].encode("a dog")) == [True, True, False, False, False]


def test_parse_reads_special_tokens(trained):
    for kind in ("bpe", "unigram", "word"):
        tokenizer = trained[kind]
        ids = tokenizer.parse("a <mask> and")
        assert ids == [*tokenizer.encode("a"), tokenizer.mask, *tokenizer.encode("and")]
    tokenizer = trained["character"]
    assert tokenizer.parse("a <mask>d") == [*tokenizer.encode("a "), tokenizer.mask, *tokenizer.encode("d")]
    assert tokenizer.mask not in tokenizer.encode("a <mask>d")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joint", [True, False])
def test_saved_and_loaded(tmp_path, kind, joint):
    config = DataConfig(tokenizer=TokenizerConfig(kind=kind, vocab=300, joint=joint, lowercase=True, multiple=16))
    both = Tokenizers.build(config, PAIRS, ("source", "target"))
    both.save(tmp_path)
    first = (tmp_path / "jaxformer_tokenizer.json").read_bytes()
    loaded = Tokenizers.load(tmp_path)
    assert loaded.joint == both.joint == joint
    assert loaded.source.vocab % 16 == 0
    for side in ("source", "target"):
        ours, theirs = getattr(both, side), getattr(loaded, side)
        assert ours.fingerprint == theirs.fingerprint
        assert ours.vocab == theirs.vocab
        for pair in PAIRS[:3]:
            assert ours.encode(pair["target"]) == theirs.encode(pair["target"])
    loaded.save(tmp_path)
    assert (tmp_path / "jaxformer_tokenizer.json").read_bytes() == first
    # Two sides are no file of the library, and its small letters are not those of a look-up table here.
    library = ["tokenizer.json"] if joint and kind in ("bpe", "unigram") else []
    assert sorted(os.listdir(tmp_path)) == ["jaxformer_tokenizer.json", *library]


ODD = (
    "Hello, w\u00f6rld! a\tb\nc  d \u3000\u2028y\x1cz\x85w\u00a0q e\u0301 \ufb01 \U0001f600 <unk> "
    "\u039f\u0394\u039f\u03a3 \x00"
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizers_library_reads_what_its_file_name_promises(tmp_path, trained, kind):
    tokenizer = build(kind, [*TEXTS, ODD[:40]]) if kind in ("character", "word") else trained[kind]
    Tokenizers(tokenizer, tokenizer).save(tmp_path)
    library = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.get_vocab_size() == tokenizer.size
    library.encode_special_tokens = True  # as here, "</s>" in a text is no end token
    # A look-up of words alone takes a word that is spelled like a special token for it.
    named = "" if kind == "word" else "a </s> b <mask>"
    for text in (*TEXTS, ODD, named, "", *(f"x{chr(code)}y" for code in range(0x3100))):
        ids = tokenizer.encode(text)
        assert library.encode(text, add_special_tokens=False).ids == ids, ascii(text)
    assert library.decode(tokenizer.encode(TEXTS[1])) == tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]
    assert library.decode([1, *tokenizer.encode("a dog and"), 2]) == "a dog and"


def test_workdirs_of_earlier_versions_are_read(tmp_path, trained):
    """Their `tokenizer.json` is what is now in `jaxformer_tokenizer.json`, and that counts where both are."""
    for kind in KINDS:
        trained[kind].save(tmp_path / "tokenizer.json")
        assert Tokenizers.load(tmp_path).source.fingerprint == trained[kind].fingerprint
    Tokenizers(trained["word"], trained["word"]).save(tmp_path)
    trained["bpe"].export(tmp_path / "tokenizer.json")
    assert Tokenizers.load(tmp_path).source.fingerprint == trained["word"].fingerprint


def test_sides_learn_from_their_own_text():
    config = DataConfig(tokenizer=TokenizerConfig(kind="character", joint=False))
    both = Tokenizers.build(config, [{"source": "ab", "target": "xyz"}], ("source", "target"))
    assert both.source.vocabulary.pieces[7:] == ("a", "b")
    assert both.target.vocabulary.pieces[7:] == ("x", "y", "z")
    joint = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="character")), [{"text": "ab"}], ("text",))
    assert joint.joint
    alone = Tokenizers.build(config, [{"text": "ab"}], ("text",))
    assert alone.joint  # one side only


def test_only_the_chosen_training_examples_are_read():
    config = DataConfig(tokenizer=TokenizerConfig(kind="character"), examples=1)
    built = Tokenizers.build(config, [{"text": "ab"}, {"text": "xyz"}], ("text",))
    assert built.source.vocabulary.pieces[7:] == ("a", "b")


LEARN = """
import json, sys
from jaxformer.config import DataConfig, TokenizerConfig
from jaxformer.data.tokenizers import Tokenizers
texts = json.loads(sys.stdin.read())
for kind in ("bpe", "unigram", "word"):
    config = DataConfig(tokenizer=TokenizerConfig(kind=kind, vocab=300))
    print(Tokenizers.build(config, [{"text": text} for text in texts], ("text",)).source.fingerprint)
"""


def test_another_process_learns_the_same(trained):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", LEARN],
        input=json.dumps(TEXTS),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [trained[kind].fingerprint for kind in ("bpe", "unigram", "word")]


def test_loads_a_tokenizer_json(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "run", "##ning", "<s>"]
    model = hf.Tokenizer(hf.models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    model.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    model.decoder = hf.decoders.WordPiece()
    model.add_special_tokens(pieces[:5])
    model.enable_truncation(2)  # what the file says about lengths is not ours to follow
    model.enable_padding(length=7)
    model.save(str(tmp_path / "tokenizer.json"))
    config = DataConfig(tokenizer=TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json")))
    tokenizer = Tokenizers.build(config, [], ("text",)).source
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.eos is None
    assert tokenizer.bos == 8
    assert tokenizer.vocab == 16
    ids = tokenizer.encode("dog running cat")
    assert ids == [5, 6, 7, 1]
    assert tokenizer.word_starts(ids) == [True, True, False, True]
    assert tokenizer.parse("dog [MASK]") == [5, 4]
    tokenizer.save(tmp_path / "copy.json")
    assert Tokenizer.load(tmp_path / "copy.json").encode("dog running cat") == ids


def test_loads_a_sentencepiece_model(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    tokenizer = Tokenizer.load(tmp_path / "m.model", multiple=8)
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.mask) == (0, 1, 2, None, None)
    ids = tokenizer.encode("a dog and")
    assert tokenizer.decode([1, *ids, 2]) == "a dog and"
    assert sum(tokenizer.word_starts(ids)) == 3
    both = Tokenizers(tokenizer, tokenizer)
    both.save(tmp_path / "run")
    assert Tokenizers.load(tmp_path / "run").source.encode("a dog and") == ids
    with pytest.raises(ValueError, match="sentencepiece"):
        tokenizer.export(tmp_path / "x.json")


def test_exported_file_is_a_plain_tokenizer_json(tmp_path, trained):
    trained["bpe"].export(tmp_path / "tokenizer.json")
    model = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert model.encode("a dog").ids == trained["bpe"].encode("a dog")
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode("a dog") == trained["bpe"].encode("a dog")


def test_memory_returns_the_same_ids(trained):
    memory = trained["bpe"].cached(10_000)
    for _ in range(3):
        ids = memory.encode(TEXTS[0])
        assert ids == trained["bpe"].encode(TEXTS[0])
        ids.clear()  # the caller's own list
    assert memory.vocab == trained["bpe"].vocab
    assert memory.decode(memory.encode("a dog")) == "a dog"
    small = trained["bpe"].cached(0)
    assert small.encode("a dog") == trained["bpe"].encode("a dog")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bpe", "vocab": 100}, "data.tokenizer.vocab: got 100, expected at least 263"),
        ({"kind": "wordpiece"}, "data.tokenizer.kind: got 'wordpiece', expected one of"),
        ({"kind": "file", "path": ""}, "data.tokenizer.path: got ''"),
        ({"kind": "file", "path": "absent.json"}, "got absent.json, expected a readable file"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError) as error:
        Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(**settings)), [{"text": "a"}], ("text",))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"kind": "bpe", "multiple": 8, "vocabulary": {}}'])
def test_damaged_files(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    for load in (lambda: Tokenizers.load(tmp_path), lambda: Tokenizer.load(tmp_path / "tokenizer.json")):
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            load()
    with pytest.raises(ConfigError, match="got no jaxformer_tokenizer.json"):
        Tokenizers.load(tmp_path / "absent")


# --- hostile files ----------------------------------------------------------------------------------------------------


def tokenizer_json(**edits) -> str:
    """A small BPE `tokenizer.json` with these parts; `model__X` is part X of its model."""
    vocab = {letter: index for index, letter in enumerate("abcdefgh !")}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
               "decoder": None, "truncation": None, "padding": None, "model": model}  # fmt: skip
    for name, value in edits.items():
        (model if name.startswith("model__") else content)[name.removeprefix("model__")] = value
    return json.dumps(content)


def split_by(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HOSTILE = {
    "a huge id": (tokenizer_json(model__vocab={"a": 0, "b": 2**31}), "token id 2147483648"),
    "an id beyond 32 bits": (tokenizer_json(model__vocab={"a": 0, "b": 2**32}), "u32"),
    "a negative id": (tokenizer_json(model__vocab={"a": 0, "b": -1}), "u32"),
    "no tokens": (tokenizer_json(model__vocab={}), "no token"),
    "a merge of nothing": (tokenizer_json(model__merges=["a zz"]), "zz"),
    "half a merge": (tokenizer_json(model__merges=["a"]), "Merges"),
    "no pattern": (tokenizer_json(pre_tokenizer=split_by("(")), "parenthesis"),
    "a deep pattern": (tokenizer_json(pre_tokenizer=split_by("(" * 10**5 + "a" + ")" * 10**5)), "depth"),
    "a pattern without end": (tokenizer_json(pre_tokenizer=split_by("(a+)+$")), "retry-limit"),
    "a replacement without end": (
        tokenizer_json(normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}), "retry-limit",
    ),
    "a cut table": (
        tokenizer_json(normalizer={"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": "//////////8="},
        ]}), "precompiled_charsmap",
    ),
    "a wrong table": (
        tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "precompiled_charsmap",
    ),
    "deep lists": ("[" * 10**5, ""),
    "long numbers": ('{"kind": "word", "multiple": ' + "9" * 5000 + "}", ""),
    "no multiple": ('{"kind": "byte", "multiple": 0, "vocabulary": {"lowercase": false}}', "multiple 0"),
    "a role without a token": (
        '{"kind": "byte", "multiple": 1, "chosen": {"pad": -1}, "vocabulary": {"lowercase": false}}', "'pad': -1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, tmp_path, capfd):
    content, words = HOSTILE[name]
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(path)
    assert str(error.value).startswith(f"tokenizer: got {path}, expected a tokenizer.json or a .model file (")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # nor a report by the library


@pytest.mark.parametrize("content", [b"", b"junk", bytes(1000), b"\xff" * 1000])
def test_files_that_are_no_sentencepiece_are_refused(content, tmp_path):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.model, expected a tokenizer\.json or a \.model file"):
        Tokenizer.load(tmp_path / "x.model")


@pytest.mark.parametrize("name", ["tokenizer.json", "x.model"])
def test_devices_pipes_and_folders_are_no_tokenizers(name, tmp_path, monkeypatch):
    path = tmp_path / name
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path), path.mkdir):
        make()
        with pytest.raises(ConfigError, match="which is no file, expected a tokenizer.json or a .model file"):
            Tokenizer.load(path)
        path.rmdir() if path.is_dir() else path.unlink()
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 2**20)
    path.write_bytes(bytes(2**20 + 1))
    with pytest.raises(ConfigError, match="of 1 MiB, expected at most 1"):
        Tokenizer.load(path)


def test_a_text_that_a_loaded_tokenizer_cannot_split_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        tokenizer_json(model={"type": "WordLevel", "vocab": {"a": 0, "!": 1}, "unk_token": "<unk>"})
    )
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a") == [0]
    for split in (tokenizer.encode, tokenizer.encode_with_spans):
        with pytest.raises(
            ConfigError, match=r"^tokenizer: got a text that it cannot split \('xyz': .*UNK.*\), expected"
        ):
            split("xyz")


def test_ids_may_have_gaps_and_roles_may_say_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(model__vocab={"a": 0, "b": 999}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.size == len(tokenizer.vocabulary.pieces) == 1000
    assert tokenizer.vocabulary.pieces[1:999] == ("",) * 998
    assert tokenizer.encode("ab") == [0, 999]
    assert tokenizer.with_special_tokens(bos=-1).bos == tokenizer.bos  # published configs say -1 for no token
    assert tokenizer.with_special_tokens(bos=999).bos == 999


def test_a_whole_number_that_is_none_is_refused_when_the_file_is_read(tmp_path):
    (tmp_path / "t.json").write_text('{"kind": "byte", "vocabulary": {}, "multiple": ' + "9" * 400 + "}")
    with pytest.raises(ConfigError, match="tokenizer: got .*t.json.*a whole number of 400 digits"):
        Tokenizer.load(tmp_path / "t.json")
    (tmp_path / "t.json").rename(tmp_path / Tokenizers.FILE)
    with pytest.raises(ConfigError, match="a whole number of 400 digits"):
        Tokenizers.load(tmp_path)


SENTENCES = 'A cat sat. "Did it?" it asked (yes!) and 3.5 dogs... ran.\nOn a new line\n\nthe end'


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe", "unigram"])
def test_sentinels_are_the_last_tokens_and_never_text(kind, tmp_path):
    """Ids descend from the end, as T5's. The other ids, and texts without sentinels, are as in a vocabulary without."""
    text = f"{SENTENCES} <extra_id_0> <extra_id_7>"
    with_none, both = (
        Tokenizers.build(
            DataConfig(tokenizer=TokenizerConfig(kind=kind, vocab=320, sentinels=n)), [{"text": text}], ("text",)
        )
        for n in (0, 3)
    )
    tokenizer = both.source
    assert with_none.source.sentinels == ()
    assert tokenizer.sentinels == tuple(with_none.source.size + n for n in (2, 1, 0))
    assert tokenizer.encode(text) == with_none.source.encode(text)
    assert tokenizer.decode([*tokenizer.encode("a cat"), *tokenizer.sentinels]).strip() == tokenizer.decode(
        tokenizer.encode("a cat")
    )
    ids = tokenizer.parse("cat <extra_id_2> sat. <extra_id_0><extra_id_1>")
    assert [i for i in ids if i in tokenizer.sentinels] == [tokenizer.sentinels[n] for n in (2, 0, 1)]
    if kind != "word":  # whose decoding keeps single words
        assert tokenizer.decode_with_sentinels(ids) == "cat <extra_id_2> sat. <extra_id_0> <extra_id_1>"
    both.save(tmp_path)
    again = Tokenizers.load(tmp_path).source
    assert (again.sentinels, again.fingerprint, again.size) == (
        tokenizer.sentinels,
        tokenizer.fingerprint,
        tokenizer.size,
    )
    library = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [library.token_to_id(f"<extra_id_{n}>") for n in range(3)] == list(tokenizer.sentinels)


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe"])
def test_sentences_begin_at_words_after_their_ends_and_at_lines(kind):
    settings = TokenizerConfig(kind=kind, vocab=300)
    tokenizer = Tokenizers.build(DataConfig(tokenizer=settings), [{"text": SENTENCES}], ("text",)).source
    ids = tokenizer.encode(SENTENCES)
    starts = tokenizer.sentence_starts(ids)
    parts = [tokenizer.decode(part.tolist()).strip() for part in np.split(np.array(ids), np.flatnonzero(starts)[1:])]
    lines = ["A cat sat.", '"Did it?"', "it asked (yes!)", "and 3.5 dogs...", "ran."]
    expected = [*lines, "On a new line", "the end"] if kind != "word" else [*lines, "On a new line the end"]
    assert parts == expected
    assert starts[0] and not len(tokenizer.sentence_starts([]))
