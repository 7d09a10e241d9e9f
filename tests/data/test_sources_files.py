"""Local files: what comes out is what stands in them, and what is wrong is said with file and line."""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.cache import text_size
from jaxformer.data.sources import _files, build, with_classes

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return name

    return write


@pytest.fixture
def config(tmp_path):
    def config(source, columns=(), document="line", **splits):
        return DataConfig(
            source=source,
            dir=str(tmp_path),
            cache=str(tmp_path / "cache"),
            splits=splits,
            columns=dict(columns),
            document=document,
        )

    return config


def rows(data, split="train"):
    return [data.splits[split][i] for i in range(len(data.splits[split]))]


def entries(config):
    return {path for path in Path(config.cache or "/none").glob("sources/*") if path.is_dir()}


def fails(config, message):
    before = entries(config)
    with pytest.raises(ConfigError, match=message) as error:
        build(config)
    assert "\n" not in str(error.value)
    assert entries(config) == before, "a failed build left something behind"


def test_parallel_pairs_line_with_line(write, config):
    write("a.en.gz", "one\u2028dog\ntwo\r\nthree")  # U+2028 and \r end no line; the last newline may be missing
    write("a.de", "\ufeffeins\nzwei\ndrei\n")
    data = build(config("parallel", train=("a.en.gz", "a.de"), test_2017=("a.de", "a.de")))
    assert [(row["source"], row["target"]) for row in rows(data)] == [
        ("one\u2028dog", "eins"),
        ("two", "zwei"),
        ("three", "drei"),
    ]
    assert len(rows(data, "test_2017")) == 3
    assert data.classes is None


def test_training_drops_pairs_with_an_empty_side_and_tests_refuse_them(write, config, caplog):
    write("a", "one\n\nthree\nfour\n")
    write("b", "eins\nzwei\n \nvier\n")
    with caplog.at_level("WARNING"):
        data = build(config("parallel", train=("a", "b")))
    assert [row["source"] for row in rows(data)] == ["one", "four"]
    assert "dropped 2 training examples" in caplog.text
    assert "a:2" in caplog.text
    write("c", "x\n")
    fails(config("parallel", train=("c", "c"), test=("a", "b")), r"a:2: got an empty source, expected text")


def test_parallel_errors(write, config):
    write("three", "1\n2\n3\n")
    write("two", "1\n2\n")
    write("empty", "")
    fails(config("parallel", train=("three", "two")), r"two:2: the file ends here, but .*three has 3 lines")
    fails(config("parallel", train=("two", "three")), r"two:2: the file ends here, but .*three has 3 lines")
    fails(config("parallel", train=("two", "empty")), r"empty: got an empty file")
    fails(config("parallel", train=("two",)), r"data.splits.train: got 1 files, expected two")
    fails(config("parallel", train=("two", "nowhere")), r"nowhere: got no such file.*--config.data.dir")
    fails(config("parallel", test=("two", "two")), r"data.splits: got test, expected files for at least 'train'")
    fails(config("parallel", train=("two", "two"), all=("two", "two")), r"data.splits: got the name 'all'")
    fails(DataConfig(source="parallel"), r"data.dir: got ''.*set --config.data.dir=DIR")
    fails(DataConfig(source="parallel", dir="/no/such"), r"data.dir: got '/no/such', which is no folder")


def test_bytes_that_are_not_utf8_are_named_by_file_and_line(write, config):
    write("latin", b"good\nalso good\nm\xfcde\n")
    write("ascii", b"a\nb\nc\n")
    fails(config("parallel", train=("ascii", "latin")), r"latin:3: got byte 0xfc, expected UTF-8")
    fails(config("text", train=("latin",)), r"latin:3: got byte 0xfc, expected UTF-8")
    fails(config("text", train=("latin",), document="file"), r"latin:3: got byte 0xfc, expected UTF-8")


def test_damaged_gzip(write, config, tmp_path):
    write("a.gz", "some text\n" * 1000)
    (tmp_path / "cut.gz").write_bytes((tmp_path / "a.gz").read_bytes()[:-12])
    (tmp_path / "plain.gz").write_text("plain")
    fails(config("text", train=("cut.gz",)), r"cut.gz: got .*expected a whole gzip file")
    fails(config("text", train=("plain.gz",)), r"plain.gz: got .*expected a whole gzip file")


def test_text_lines_keep_empty_lines_and_order(write, config):
    write("a.txt", " = Title = \n\nword word\n")
    write("b.txt.gz", "last")
    data = build(config("text", train=("a.txt", "b.txt.gz"), validation=("a.txt[1:]",), test=("a.txt[:34%]",)))
    assert [row["text"] for row in rows(data)] == [" = Title = ", "", "word word", "last"]
    assert [row["text"] for row in rows(data, "validation")] == ["", "word word"]
    assert [row["text"] for row in rows(data, "test")] == [" = Title = "]
    assert text_size(data.splits["train"]) == {"examples": 4, "lines": 4, "bytes": 28, "words": 6}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=2, max_size=40).filter(lambda t: "\ufeff" not in t), percent=st.integers(50, 99))
def test_cuts_of_a_file_meet_without_gap_or_overlap(write, config, text, percent):
    write("t.txt", text)
    cut = len(text) * percent // 100
    splits = {"train": (f"t.txt[:{percent}%]",), "validation": (f"t.txt[{percent}%:]",)}
    data = build(config("text", document="file", **splits))
    assert rows(data) == [{"text": text[:cut]}]
    assert rows(data, "validation") == [{"text": text[cut:]}]
    assert text_size(data.splits["train"], document="file")["bytes"] == len(text[:cut].encode())


def test_one_file_one_example(write, config):
    write("b.txt", "second\r\nfile\n")
    write("a.txt", "first\n\n")
    data = build(config("text", document="file", train=("*.txt",)))
    assert [row["text"] for row in rows(data)] == ["first\n\n", "second\r\nfile\n"]


def test_text_errors(write, config):
    write("a", "x\n")
    fails(config("text", train=("*.none",)), r"got '\*.none', which matches no file")
    fails(
        config("text", train=("a[5:]",), document="file"),
        r"a\[5:\]: got a slice that leaves none of 2 characters, expected",
    )
    fails(config("text", train=("a[5:]",)), r"a\[5:\]: got a slice that leaves none of 1 lines, expected some")
    fails(config("text", train=("a[:-5]",)), r"data.splits: got 'a\[:-5\]', expected FILE\[:90%\], FILE")
    fails(config("text", train=("a",), document="page"), r"data.document: got 'page', expected one of line, file")


def test_tsv_by_column_names_with_sorted_classes(write, config):
    write("train.tsv", 'id\tsentence\tlabel\n1\t"a" b\t10\n\n2\tc\t9\r\n')
    write("dev.tsv.gz", "label\tid\tsentence\n9\t3\td\n")
    columns = {"text": "sentence", "label": "label"}
    data = build(config("table", columns, train=("train.tsv",), validation=("dev.tsv.gz",)))
    assert data.classes == ("9", "10")
    assert rows(data) == [{"text": '"a" b', "label": 1}, {"text": "c", "label": 0}]
    assert rows(data, "validation") == [{"text": "d", "label": 0}]


def test_tsv_without_a_header(write, config):
    write("pairs.tsv", "Run!\tCours !\nStop\tHalte\n")
    data = build(config("table", {"source": "#1", "target": "#2"}, train=("pairs.tsv",)))
    assert [(row["source"], row["target"]) for row in rows(data)] == [("Run!", "Cours !"), ("Stop", "Halte")]


def test_jsonl(write, config):
    records = [{"text": "two\nlines", "y": "pos", "more": [1]}, {"text": "ü", "y": "neg"}]
    write("a.jsonl.gz", "\n".join(json.dumps(record) for record in records))
    data = build(config("table", {"text": "text", "label": "y"}, train=("a.jsonl.gz",)))
    assert data.classes == ("neg", "pos")
    assert rows(data) == [{"text": "two\nlines", "label": 1}, {"text": "ü", "label": 0}]


def talk(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_dialogues(write, config, caplog):
    """Turns as they are; a conversation with an empty turn is dropped from training, and refused elsewhere."""
    first = [{"role": "system", "content": "s"}, *talk("a\nb", "\u00e9", "c", "d")]
    lines = [{"messages": first, "id": 7}, {"messages": talk("a", " ")}, {"messages": talk("e", "f")}]
    write("a.jsonl.gz", "\n\n".join(json.dumps(line) for line in lines))
    write("b.jsonl", json.dumps({"turns": talk("a", "b")}))
    data = build(config("dialogues", train=("a.jsonl.gz",)))
    assert rows(data) == [{"messages": tuple(first)}, {"messages": tuple(talk("e", "f"))}]
    assert "dropped 1 training conversations with an empty turn, the first at" in caplog.text
    assert "a.jsonl.gz:3" in caplog.text
    sliced = build(config("dialogues", train=("a.jsonl.gz[:1]",)))
    assert len(rows(sliced)) == 1
    assert rows(build(config("dialogues", {"messages": "turns"}, train=("b.jsonl",)))) == [
        {"messages": tuple(talk("a", "b"))}
    ]
    fails(
        config("dialogues", train=("a.jsonl.gz",), test=("a.jsonl.gz",)), r"a.jsonl.gz:3: got an empty turn of the assi"
    )
    fails(config("dialogues", train=("b.jsonl",)), r"b.jsonl:1: got keys 'turns', expected an object with 'messages'")
    fails(config("dialogues", {"text": "x"}, train=("b.jsonl",)), "data.columns: got text=x, expected messages=KEY")


def test_preferences(write, config, caplog):
    """Three ways to write a pair; one that teaches nothing is dropped from training, and refused elsewhere."""
    lines = [
        {"prompt": "a", "chosen": "b\n", "rejected": "\u00e9", "score": 3},
        {"prompt": talk("a", "b", "c"), "chosen": talk("-", "d")[1:], "rejected": "e"},
        {"chosen": talk("a", "b"), "rejected": talk("a", "c")},
        {"prompt": "a", "chosen": "b", "rejected": " b "},
        {"prompt": "a", "chosen": "", "rejected": "b"},
    ]
    write("a.jsonl", "\n\n".join(map(json.dumps, lines)))
    write("b.jsonl", json.dumps(lines[4]))
    write("c.jsonl", json.dumps({"question": "a", "good": "b", "bad": "c"}))
    data = build(config("preferences", train=("a.jsonl",)))
    assert rows(data) == [
        {"messages": tuple(talk("a")), "chosen": "b\n", "rejected": "\u00e9"},
        {"messages": tuple(talk("a", "b", "c")), "chosen": "d", "rejected": "e"},
        {"messages": tuple(talk("a")), "chosen": "b", "rejected": "c"},
    ]
    assert "dropped 2 training pairs that teach nothing, the first at" in caplog.text
    assert "a.jsonl:7 (equal chosen and rejected replies" in caplog.text
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert rows(build(config("preferences", columns, train=("c.jsonl",)))) == [
        {"messages": tuple(talk("a")), "chosen": "b", "rejected": "c"}
    ]
    fails(config("preferences", train=("a.jsonl",), test=("a.jsonl",)), "a.jsonl:7: got equal chosen and rejected repl")
    fails(config("preferences", train=("c.jsonl",), test=("b.jsonl",)), "c.jsonl:1: got keys 'question', 'good', 'bad'")
    fails(config("preferences", train=("a.jsonl",), test=("b.jsonl",)), "b.jsonl:1: got an empty chosen reply, expect")
    fails(config("preferences", {"text": "x"}, train=("a.jsonl",)), "got text=x, expected keys for prompt, chosen, rej")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "bad.jsonl:2: got list, expected an object with 'chosen'"),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "got keys 'prompt', 'completion', 'label', expected an obj",
        ),
        (
            {"prompt": "a", "chosen": "b"},
            "expected an object with 'rejected', the rejected reply; set data.columns.rej",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            "got keys 'chosen', 'rejected', expected 'prompt' beside replies that are t",
        ),
        (
            {"prompt": talk("a", "b"), "chosen": "b", "rejected": "c"},
            "bad.jsonl:2, prompt: got role assistant in the l",
        ),
        (
            {"prompt": "a", "chosen": 1, "rejected": "c"},
            "bad.jsonl:2, chosen: got int, expected a text, or a list with",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": talk("a", "b")},
            "bad.jsonl:2, rejected: got a list of 2, expected",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": talk("a")},
            "bad.jsonl:2, rejected, turn 2: got role user, expecte",
        ),
        ({"chosen": talk("a", "b"), "rejected": talk("x", "c")}, "got chosen and rejected of different conversations"),
        ({"chosen": talk("a"), "rejected": talk("a", "c")}, "bad.jsonl:2, chosen: got role user in the last turn, exp"),
    ],
)
def test_pairs_that_are_none(write, config, record, message):
    write("bad.jsonl", json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" + json.dumps(record))
    fails(config("preferences", train=("bad.jsonl",)), message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON"),
        ("[]", "got list, expected an object with 'messages'"),
        (json.dumps({"messages": talk("a")}), "got role user in the last turn, expected assistant; add a turn"),
        (json.dumps({"messages": talk("a", "b")[::-1]}), "bad.jsonl:2, turn 1: got role assistant, expected user"),
        (
            json.dumps({"messages": [{"role": "bot", "content": "a"}]}),
            "bad.jsonl:2, turn 1: got role 'bot', expected one",
        ),
    ],
)
def test_conversations_that_are_none(write, config, line, message):
    write("bad.jsonl", json.dumps({"messages": talk("a", "b")}) + "\n" + line)
    fails(config("dialogues", train=("bad.jsonl",)), message)


def test_table_errors(write, config):
    columns = {"text": "sentence", "label": "label"}
    write("good.tsv", "sentence\tlabel\na\t0\n")
    write("ragged.tsv", "sentence\tlabel\na\t0\nb\n")
    write("column.tsv", "sentences\tlabel\na\t0\n")
    write("new.tsv", "sentence\tlabel\na\t0\nb\t2\n")
    write("bad.jsonl", '{"sentence": "a", "label": 0}\n{"sentence": \n')
    write("list.jsonl", "[1]\n")
    write("half.jsonl", '{"sentence": "a\\ud800", "label": 0}\n')
    write("type.jsonl", '{"sentence": "a", "label": 0.5}\n')
    write("missing.jsonl", '{"sentence": "a", "label": 0}\n\n{"sentence": "b"}\n')
    write("void.tsv", "sentence\tlabel\n")
    write("data.xls", "x")
    fails(config("table", columns, train=("ragged.tsv",)), r"ragged.tsv:3: got 1 cells, expected 2")
    fails(config("table", columns, train=("column.tsv",)), r"column.tsv:1: got no column 'sentence'.*'sentences'")
    fails(config("table", columns, train=("good.tsv",), test=("new.tsv",)), r"new.tsv:3: got label '2', expected .*: 0")
    fails(config("table", columns, train=("bad.jsonl",)), r"bad.jsonl:2: got malformed JSON")
    fails(config("table", columns, train=("half.jsonl",)), r"half.jsonl:1: got '.ud800' in column 'sentence'")
    fails(config("table", columns, train=("list.jsonl",)), r"list.jsonl:1: got list, expected one JSON object")
    fails(config("table", columns, train=("type.jsonl",)), r"type.jsonl:1: got float in column 'label'")
    fails(config("table", columns, train=("missing.jsonl",)), r"missing.jsonl:3: got no column 'label'")
    fails(
        config("table", columns, train=("void.tsv",), test=("good.tsv",)), r"void.tsv: got a file without rows, expec"
    )
    fails(
        config("table", columns, train=("data.xls",)), r"data.xls: got an unknown table format, expected .* .tsv, .csv"
    )
    fails(config("table", {}, train=("good.tsv",)), r"data.columns: got nothing")
    fails(config("table", {"txt": "sentence"}, train=("good.tsv",)), r"got 'txt'.*did you mean 'text'")


def test_scores_become_shares_of_their_range(write, config):
    write("a.tsv", "one\ttwo\tscore\na\tb\t5.0\nc\td\t3.8\ne\t\t1\nf\tg\t-1e0\n")
    write("b.jsonl", '{"one": "a", "two": "b", "score": 2}\n{"one": "c", "two": "d", "score": "0.5"}\n')
    columns = {"text": "one", "pair": "two", "score": "score"}
    settings = config("table", columns, train=("a.tsv",), validation=("b.jsonl",))
    data = build(dataclasses.replace(settings, score_range=(-1.0, 5.0)))
    assert rows(data) == [
        {"text": "a", "pair": "b", "score": 1.0},
        {"text": "c", "pair": "d", "score": pytest.approx(0.8, abs=1e-7)},
        {"text": "f", "pair": "g", "score": 0.0},
    ]
    assert [row["score"] for row in rows(data, "validation")] == [0.5, 0.25]
    other = dataclasses.replace(settings, score_range=(0.0, 5.0))
    fails(other, r"a.tsv:5: got score -1, expected a number from 0 to 5; mend the data or set data.score_range")
    for cell, message in (
        ("x", "got score 'x', expected a number"),
        ("nan", "got score nan, expected a number from 0"),
    ):
        write("bad.tsv", f"one\ttwo\tscore\na\tb\t1\na\tb\t{cell}\n")
        fails(config("table", columns, train=("bad.tsv",)), f"bad.tsv:3: {message}")
    write("bad.jsonl", '{"one": "a", "two": "b", "score": true}\n')
    fails(config("table", columns, train=("bad.jsonl",)), "bad.jsonl:1: got bool in column 'score', expected a number")


def test_tagged_words(write, config):
    write("a.conll", "-DOCSTART-\tO\n\nIn\tO\nNew\tB-LOC\nYork\tI-LOC\n\n\n\ufe0f \tO\nre y\tO\r\n\tB-PER")
    write("b.conll.gz", "EU NNP I-NP I-ORG\nrejects VBZ I-VP O\n")
    data = build(config("conll", train=("a.conll",), test=("a.conll", "a.conll")))
    assert data.classes == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert rows(data) == [
        {"text": "In New York", "tags": (0, 1, 2)},
        {"text": "\ufe0f re\u00a0y \u00a0", "tags": (0, 0, 3)},
    ]
    assert len(rows(data, "test")) == 4
    last = build(config("conll", train=("b.conll.gz",)))
    assert (last.classes, rows(last)) == (("O", "B-ORG", "I-ORG"), [{"text": "EU rejects", "tags": (2, 0)}])
    second = build(config("conll", {"tags": "#2"}, train=("b.conll.gz",)))
    assert (second.classes, rows(second)) == (("NNP", "VBZ"), [{"text": "EU rejects", "tags": (0, 1)}])


def test_every_mark_of_the_scheme_is_a_class(write, config):
    write("single.conll", "New\tB-LOC\nYork\tI-LOC\nin\tO\nRome\tS-LOC\nEU\tB-ORG")
    marked = [f"{mark}-{kind}" for kind in ("LOC", "ORG") for mark in "BIES"]
    assert build(config("conll", train=("single.conll",))).classes == ("O", *marked)
    write("other.conll", "New\tB-LOC\nRome\tU-LOC")
    assert build(config("conll", train=("other.conll",))).classes == ("B-LOC", "U-LOC")


def test_tagged_words_errors(write, config):
    write("good", "a\tO\n")
    write("bare", "a\tO\n\nb\n")
    write("open", "a\tO\nb\t\n")
    write("more", "\na\tO\nb\tB-x\n")
    write("void", "\n\n")
    fails(config("conll", train=("bare",)), r"bare:3: got 1 columns, expected 2 at least")
    fails(config("conll", {"tags": "#3"}, train=("good",)), r"good:1: got 2 columns, expected 3 at least")
    fails(config("conll", train=("open",)), r"open:2: got no tag for 'b', expected one")
    fails(config("conll", train=("good",), test=("more",)), r"more:2: got tag 'B-x' in this sentence, expected .*: O")
    fails(config("conll", train=("void",), test=("good",)), r"void: got a file without sentences, expected some")
    fails(config("conll", {"tags": "tag"}, train=("good",)), r"data.columns.tags: got 'tag', expected the number of a")
    fails(config("conll", {"label": "#2"}, train=("good",)), r"data.columns: got 'label', expected the roles text and")


def asked(number, context="a red cat sat", answer="red cat", start=2, **fields):
    return {
        "id": f"q{number}",
        "question": f"what is {number}?",
        "answers": [{"text": answer, "answer_start": start}],
        **fields,
    }


def squad(*articles):
    """SQuAD's JSON of (title, context, questions)."""
    data = [{"title": t, "paragraphs": [{"context": context, "qas": qas}]} for t, context, qas in articles]
    return json.dumps({"version": "v2.0", "data": data})


def test_questions(write, config, caplog):
    guess = {"text": "cat", "answer_start": 6, "start_inferred": True}
    several = asked(1, answers=[guess, {"text": "red", "answer_start": 2}])
    none = asked(2, answers=[], is_impossible=True, plausible_answers=[{"text": "sat", "answer_start": 10}])
    lost = asked(3, answers=[guess])
    cafe = asked(4, answer="caf\u00e9", start=3, is_impossible=False)
    write(
        "a.json.gz", squad(("A", "a red cat sat", [several, none, lost]), ("B", "\U0001f600 \u00fccaf\u00e9", [cafe]))
    )
    with caplog.at_level("WARNING"):
        data = build(config("squad", train=("a.json.gz",), test=("a.json.gz",), last=("a.json.gz[1:]",)))
    assert "dropped 1 training questions, the places of whose answers are all inferred" in caplog.text
    first = {
        "id": "q1",
        "question": "what is 1?",
        "context": "a red cat sat",
        "answers": ("cat", "red"),
        "starts": (-1, 2),
    }
    assert rows(data)[0] == first
    assert [(row["answers"], row["starts"]) for row in rows(data, "test")[1:]] == [
        ((), ()),
        (("cat",), (-1,)),
        (("caf\u00e9",), (3,)),  # characters, not bytes
    ]
    assert [row["id"] for row in rows(data)] == ["q1", "q2", "q4"]
    assert [row["id"] for row in rows(data, "last")] == ["q4"]
    assert data.classes is None


def test_a_table_says_which_articles_a_split_has(write, config):
    write("a.json", squad(*((title, "a red cat sat", [asked(title)]) for title in "ABCD")))
    write("split.tsv", "questions\ttitle\tsplit\r\n1\tC\tone\n1\tB\ttwo\n1\tA\tone\n1\tD\tone\n")
    chosen = {"train": ("a.json[split.tsv=one]",), "test": ("a.json[split.tsv=two]", "a.json[split.tsv=one][:1]")}
    data = build(config("squad", **chosen, cut=("a.json[split.tsv=one][1:]",)))
    ids = {split: [row["id"][1:] for row in rows(data, split)] for split in data.splits}
    assert ids == {"train": ["A", "C", "D"], "test": ["B", "A"], "cut": ["C", "D"]}
    write("other.tsv", "title\tsplit\nA\tone\nX\tone\n")
    write("ragged.tsv", "title\tsplit\nA\n")
    write("names.tsv", "article\tsplit\n")
    of = lambda table: config("squad", train=(f"a.json[{table}]",))  # noqa: E731
    fails(of("split.tsv=three"), r"split.tsv: got no article of split 'three', expected one of one, two")
    fails(of("other.tsv=one"), r"other.tsv:3: got the title 'X', expected one that an article of .*a.json has")
    fails(of("ragged.tsv=one"), r"ragged.tsv:2: got 1 cells, expected 2")
    fails(of("names.tsv=one"), r"names.tsv:1: got columns article, split, expected title and split")
    fails(of("none.tsv=one"), r"none.tsv: got no such file")
    fails(of("train"), r"data.splits: got 'a.json.train.', expected FILE, FILE.:90%. or FILE.TABLE.tsv=SPLIT")


def test_questions_errors(write, config):
    def refused(content, message):
        write("a.json", content if isinstance(content, str) else squad(("A", "a red cat sat", content)))
        fails(config("squad", train=("a.json",)), message)

    place = r"a.json: data\[0\].paragraphs\[0\].qas\[0\]"
    refused(
        [asked(1, start=3)],
        place + r".answers\[0\].answer_start: got 3, where the context has 'ed cat ', expected 'red cat'",
    )
    refused([asked(1, start=-1)], place + r".answers\[0\].answer_start: got -1")
    refused([asked(1, start="2")], place + r".answers\[0\].answer_start: got str, expected int")
    refused([asked(1, answer="", start=0)], place + r".answers\[0\].text: got an empty text")
    refused([asked(1, question=" ")], place + r".question: got an empty text")
    refused([asked(1, question="\ud800")], place + r".question: got '.ud800', expected text that UTF-8 can hold")
    refused(
        [asked(1, answers=[])], place + r".answers: got 0 answers and is_impossible False, expected answers, or none"
    )
    refused([asked(1, is_impossible=True)], place + r".answers: got 1 answers and is_impossible True")
    refused([asked(1), asked(1)], r"qas\[1\]: got id 'q1' a second time \(first at .*qas\[0\]\)")
    refused([{"id": "1"}], place + r": got an object without 'answers', expected an object with 'answers'")
    refused(["question"], place + r": got str, expected an object with 'answers'")
    refused('{"data": [{}]}', r"a.json: data\[0\]: got an object without 'paragraphs'")
    refused('{"data": {}}', r"a.json: data: got dict, expected list")
    refused("[1]", r"a.json: got list, expected an object with 'data'")
    refused('{"data":\n [}', r"a.json:2: got malformed JSON \(.*column 3\), expected SQuAD's form")
    refused("[" * 100_000, r"a.json: got JSON of too many levels")
    refused('{"data": []}', r"a.json: got a file without articles, expected some")


SOURCES = {
    "text": ({}, ["{}"]),
    "table": ({"text": "0", "label": "1"}, ["{}.tsv"]),
    "conll": ({}, ["{}"]),
    "parallel": ({}, ["{}.en", "{}.de"]),
    "squad": ({}, ["{}.json"]),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "dangling link"])
def test_what_is_no_file_is_named_and_not_opened(source, kind, config, tmp_path):
    columns, names = SOURCES[source]
    names = [name.format("odd") for name in names]
    for name in names:
        path = tmp_path / name
        {
            "device": lambda: path.symlink_to("/dev/zero"),  # noqa: B023
            "pipe": lambda: os.mkfifo(path),  # noqa: B023
            "folder": path.mkdir,
            "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),  # noqa: B023
        }[kind]()
    got = {"folder": "a folder", "dangling link": "no such file"}.get(kind, "a device or pipe")
    fails(config(source, columns, train=names), rf"^{tmp_path}/{names[0]}: got {got}, expected a file")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_without_an_end_are_refused_with_their_number(name, write, config, monkeypatch):
    monkeypatch.setattr(_files, "MAX_LINE_BYTES", 2**20)
    write(name, b"fine\n" + b"x" * 2**20 + b"\n")  # as long as a line may be
    build(config("text", train=[name]))
    write(name, b"fine\n" + b"x" * (2**20 + 1) + b"\n")
    fails(config("text", train=[name]), rf"/{name}:2: got a line of more than 1 MiB, expected a text with newlines")


def test_lines_end_at_newlines_only(tmp_path):
    (tmp_path / "a").write_bytes("a\x0bb\x85c\u2028d\r e\nf\r\n\r\ng".encode())
    assert list(_files.read_lines(tmp_path / "a")) == [(1, "a\x0bb\x85c\u2028d\r e"), (2, "f"), (3, ""), (4, "g")]


def test_lines_of_old_mac_files(write, config, tmp_path):
    (tmp_path / "a").write_bytes(b"a b\rc\r\rd\r")
    assert list(_files.read_lines(tmp_path / "a")) == [(1, "a b"), (2, "c"), (3, ""), (4, "d")]
    write("t.tsv.gz", "s\tl\rone\tx\rtwo\ty")
    assert rows(build(config("table", {"text": "s", "label": "l"}, train=("t.tsv.gz",))))[1] == {
        "text": "two",
        "label": 1,
    }


CUT_SOURCES = {
    "parallel": ({}, lambda n: f"s{n}\n", 2),
    "text": ({}, lambda n: f"s{n}\n", 1),
    "table": ({"text": "#1", "label": "#2"}, lambda n: f"s{n}\t{n % 2}\n", 1),
    "conll": ({}, lambda n: f"s{n} O\nw O\n\n", 1),
}
"""Source -> columns, the text of example n, and files a split."""


@pytest.mark.parametrize("source", CUT_SOURCES)
def test_one_file_serves_all_splits(write, config, source):
    columns, text, files = CUT_SOURCES[source]
    write("a.tsv", "".join(map(text, range(10))))
    write("b.tsv", text(0) + text(1))
    cuts = {"train": "[:70%]", "validation": "[70%:9]", "test": "[9:]"}
    splits = {split: (f"a.tsv{cut}",) * files for split, cut in cuts.items()}
    data = build(config(source, columns, **splits))
    role = "source" if source == "parallel" else "text"
    found = {split: [row[role].split()[0] for row in rows(data, split)] for split in splits}
    numbers = [f"s{n}" for n in range(10)]
    assert found == {"train": numbers[:7], "validation": numbers[7:9], "test": numbers[9:]}
    other = build(config(source, columns, **{**splits, "train": ("a.tsv[:60%]",) * files}))
    assert len(rows(other)) == 6, "another cut is another entry of the cache"
    assert other.key != data.key
    none = config(source, columns, **{**splits, "test": ("a.tsv[10:]",) * files})
    fails(none, r"a.tsv\[10:\]: got a slice that leaves none of 10 (lines|rows|sentences), expected some")
    if files == 1:
        both = build(config(source, columns, train=("*.tsv",)))
        assert len(rows(both)) == 12


def test_both_sides_of_pairs_are_cut_alike(write, config):
    write("a", "1\n2\n3\n")
    cut = config("parallel", train=("a[:2]", "a[1:]"))
    fails(cut, r"data.splits.train: got different slices, .*a\[:2\] and .*a\[1:\], expected the same slice of both")


def test_packed_and_unpacked_files_stand_for_each_other(write, config):
    write("a.gz", "packed")
    write("b", "plain")
    write("c.gz", "packed")
    write("c", "plain")
    data = build(config("text", train=("a",), validation=("b.gz",), test=("c", "c.gz")))
    assert [rows(data, split) for split in ("train", "validation")] == [[{"text": "packed"}], [{"text": "plain"}]]
    assert [row["text"] for row in rows(data, "test")] == ["plain", "packed"], "a file that is there is the one meant"
    build(config("text", train=("a",)))
    folder = Path(data.splits["train"].directory).parents[2]
    (folder / "a").write_bytes((folder / "a.gz").read_bytes())
    fails(config("text", train=("a",)), r"a:1: got byte 0x8b, expected UTF-8")  # the cache has these bytes, as .gz


def test_quoted_cells(write, config):
    write("a.csv", 'text,label\r\n"one, ""two""\nthree",x\r\n\r\nfour,"y"\r\n')
    columns = {"text": "text", "label": "label"}
    assert rows(build(config("table", columns, train=("a.csv",)))) == [
        {"text": 'one, "two"\nthree', "label": 0},
        {"text": "four", "label": 1},
    ]
    write("b.tsv", 'text\tlabel\n"one"\tx\n')
    plain, quoted = config("table", columns, train=("b.tsv",)), config("table", columns, train=("b.tsv",))
    quoted = dataclasses.replace(quoted, format="tsv_quoted")
    assert [rows(build(each))[0]["text"] for each in (plain, quoted)] == ['"one"', "one"]
    write("open.csv", 'text,label\n"one,x\n')
    write("more.csv", "text,label\none,two,x\n")
    write("in.csv", 'text,label\n"a"b,x\n')
    fails(config("table", columns, train=("open.csv",)), r"open.csv:2: got unexpected end of data, expected cells in")
    fails(
        config("table", columns, train=("in.csv",)), r"in.csv:2: got .*, expected cells in double quotes to end in one"
    )
    fails(
        config("table", columns, train=("more.csv",)), r"more.csv:2: got 3 cells, expected 2; a comma separates cells"
    )
    wrong = dataclasses.replace(plain, format="tvs")
    fails(wrong, r"data.format: got 'tvs', expected one of tsv, tsv_quoted, .*did you mean 'tsv'")


def test_a_label_before_each_text(write, config):
    write("a.txt", "DESC:manner How did it end ?\n\nNUM\u00a0x  Two  words \n")
    columns = {"label": "#1", "text": "#2"}
    data = build(config("table", columns, train=("a.txt",)))
    assert data.classes == ("DESC:manner", "NUM\u00a0x")
    assert rows(data) == [{"text": "How did it end ?", "label": 0}, {"text": "Two  words", "label": 1}]
    write("tabs.txt", "a text\tlabel\n")
    fails(config("table", columns, train=("tabs.txt",)), r"tabs.txt:1: got a tab in a labelled line, .*data.format=tsv")
    named = {"label": "label", "text": "#2"}
    fails(config("table", named, train=("a.txt",)), r"a.txt: got data.columns label=label for a file of labelled lines")
    tsv = dataclasses.replace(config("table", {"text": "#1", "label": "#2"}, train=("tabs.txt",)), format="tsv")
    assert rows(build(tsv)) == [{"text": "a text", "label": 0}]


def test_one_split_is_read_alone_and_numbered_as_the_model(write, config):
    write("train.tsv", "one\ta\ntwo\tb\nthree\tc\n")
    write("test.tsv", "four\tc\nfive\ta\n")
    columns = {"text": "#1", "label": "#2"}
    settings = config("table", columns, train=("gone.tsv",), test=("test.tsv",))
    alone = build(settings, ("text", "label"), "test")
    assert (list(alone.splits), alone.classes) == (["test"], ("a", "c"))
    data = with_classes(alone, ("a", "b", "c"))
    assert [(row["text"], row["label"]) for row in rows(data, "test")] == [("four", 2), ("five", 0)]
    with pytest.raises(ConfigError, match=r"'c' \('c' in example 1 of test\), expected those of the model: a, b; mend"):
        with_classes(alone, ("a", "b"))
    with pytest.raises(ConfigError, match="split: got 'tset', expected one of train, test; did you mean 'test'"):
        build(settings, (), "tset")
    write("t.conll", "x\tB-q\n")
    tagged = build(config("conll", test=("t.conll",)), ("text", "tags"), "test")
    assert rows(with_classes(tagged, ("O", "B-p", "I-p", "B-q", "I-q")), "test") == [{"text": "x", "tags": (3,)}]


@pytest.mark.skipif(not (SHARED / "multi30k_en_de").is_dir(), reason="no example data")
def test_multi30k(tmp_path):
    splits = {"train": ("val.en", "val.de"), "test": ("test_2016_flickr.en", "test_2016_flickr.de")}
    data = build(DataConfig(source="parallel", dir=str(SHARED / "multi30k_en_de"), cache=str(tmp_path), splits=splits))
    assert {split: len(examples) for split, examples in data.splits.items()} == {"train": 1014, "test": 1000}
    assert data.splits["train"][0] == {
        "source": "A group of men are loading cotton onto a truck",
        "target": "Eine Gruppe von Männern lädt Baumwolle auf einen Lastwagen",
    }


@pytest.mark.skipif(not (SHARED / "tiny_shakespeare").is_dir(), reason="no example data")
def test_tiny_shakespeare_is_cut_where_others_cut_it(tmp_path):
    splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}
    folder = str(SHARED / "tiny_shakespeare")
    data = build(DataConfig(source="text", dir=folder, cache=str(tmp_path), splits=splits, document="file"))
    assert [len(data.splits[split][0]["text"]) for split in splits] == [1_003_854, 111_540]


@pytest.mark.skipif(not (SHARED / "wikitext2").is_dir(), reason="no example data")
def test_wikitext2_has_the_published_number_of_words(tmp_path):
    splits = {"train": ("valid.txt",)}
    data = build(DataConfig(source="text", dir=str(SHARED / "wikitext2"), cache=str(tmp_path), splits=splits))
    counted = text_size(data.splits["train"])
    assert counted["words"] + counted["lines"] == 217_646
    assert counted["bytes"] == 1_121_681


@pytest.mark.skipif(not (SHARED / "squad_v1.1_dev").is_dir(), reason="no example data")
def test_squad_has_the_published_number_of_questions(tmp_path):
    parts = {"train": "dev-v1.1.json.gz", "rest": "dev-v1.1.json.gz[article_split.tsv=test]", "x": "xquad.en.json"}
    splits = {split: (name,) for split, name in parts.items()}
    data = build(DataConfig(source="squad", dir=str(SHARED / "squad_v1.1_dev"), cache=str(tmp_path), splits=splits))
    assert [len(data.splits[split]) for split in splits] == [10_570 - 782, 2336, 1190]


@pytest.mark.skipif(not (SHARED / "wnut17").is_dir(), reason="no example data")
def test_wnut17_has_the_published_number_of_words(tmp_path):
    splits = {"train": ("train.conll",), "test": ("test.conll",)}
    data = build(DataConfig(source="conll", dir=str(SHARED / "wnut17"), cache=str(tmp_path), splits=splits))
    assert [len(data.splits[split]) for split in splits] == [3394, 1287]
    assert [sum(len(row["tags"]) for row in rows(data, split)) for split in splits] == [62_730, 23_394]
    assert len(data.classes) == 13
