"""Building token shards: what they hold, whatever the workers and interruptions; cleaning; and what is refused."""

import contextlib
import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import ComponentConfig, Config, ConfigError, DataConfig, MixtureConfig, TokenizerConfig
from jaxformer.data import build, sources, token_shards
from jaxformer.data.build import Options, deduplication, pieces, targets, units
from jaxformer.data.sources import _files
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import StorageError

ROOT = Path(__file__).resolve().parents[2]
LINES = [f"line {number} " + "ä€😀x"[number % 4] * (number * 7 % 23) for number in range(60)]
LINES[7] = LINES[33] = ""
LINES[50] = LINES[20]
BYTE = TokenizerConfig(kind="byte")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shards of a few hundred bytes, records of a few tokens, so that a page of text has all borders."""
    monkeypatch.setattr(pieces, "MIN_SHARD_BYTES", 300)
    monkeypatch.setattr(pieces, "USUAL_SHARDS", 10**6)
    monkeypatch.setattr(token_shards, "RECORD_TOKENS", 16)
    monkeypatch.setattr(token_shards, "TABLE_DOCUMENTS", 3)


def config_of(folder, source="text", tokenizer=BYTE, files=("train.txt",), **fields):
    splits = {"train": files, **fields.pop("others", {})}
    data = DataConfig(source=source, dir=str(folder), splits=splits, tokenizer=tokenizer, **fields)
    return Config(data=data)


def write(folder, lines=LINES, name="train.txt", end="\n"):
    (folder / name).write_bytes("".join(line + end for line in lines).encode())
    return folder


def texts_of(target, split="train"):
    examples = sources.build(DataConfig(source="shards", dir=str(target))).splits[split]
    return [str(examples[index]["text"]) for index in range(len(examples))]


def content(folder):
    """The bytes of all files but those that only the build reads."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.*"))
        if path.is_file() and units.WORK not in path.parts
    }


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [
    "\ufeffa\r\nbb\r\n\r\n€€\r\nlast".encode(), b"one\n\n\ntwo\n", b"old\rmac\rfile", b"\n", b"no end",
    "ä\u2028b\x0bc\x85d\n".encode() * 3,
])  # fmt: skip
def test_the_lines_of_all_pieces_are_those_of_the_file(tmp_path, raw):
    path = tmp_path / "x.txt"
    path.write_bytes(raw)
    expected = [line for _, line in _files.read_lines(path)]
    for size in range(1, len(raw) + 1):
        cuts = [*range(0, len(raw), size), len(raw)]
        parts = [pieces.Piece(str(path), begin, end, 0) for begin, end in itertools.pairwise(cuts)]
        found = [(where(), line) for part in parts for where, line in pieces.read_lines(part)]
        assert [line for _, line in found] == expected, size
        assert [where for where, _ in found] == [f"{path}:{number + 1}" for number in range(len(expected))]


def test_shards_share_the_input_evenly_and_leave_nothing_out(tmp_path):
    for number, size in enumerate((700, 20, 30, 1100)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    config = config_of(tmp_path, files=("*.txt",))
    (source,) = pieces.inputs(config.data).values()
    planned = pieces.shards(source, None)
    covered = [(Path(piece.path).name, piece.begin, piece.end) for shard in planned for piece in shard]
    assert covered == sorted(covered)
    for number, size in enumerate((700, 20, 30, 1100)):
        ends = [(begin, end) for name, begin, end in covered if name == f"{number}.txt"]
        assert ends[0][0] == 0 and ends[-1][1] == size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert [sum(piece.size for piece in shard) for shard in planned] == [300] * 6 + [50]
    assert pieces.shard_bytes(10**16) == pieces.MAX_SHARD_BYTES


# --- sources ----------------------------------------------------------------------------------------------------------


def test_every_source_gives_its_documents(tmp_path):
    write(tmp_path)
    (tmp_path / "crlf.txt").write_bytes("".join(line + "\r\n" for line in LINES).encode())
    with gzip.open(tmp_path / "zipped.txt.gz", "wb") as file:
        file.write((tmp_path / "train.txt").read_bytes())
    kept = [line for line in LINES if line.strip()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": 1, "body": line}) + "\n\n" for line in LINES))
    (tmp_path / "rows.tsv").write_text("".join(f"{line}\n" for line in ["body", *kept]))
    found = {
        "crlf": config_of(tmp_path, files=("crlf.txt",)),
        "zipped": config_of(tmp_path, files=("zipped.txt.gz",)),
        "jsonl": config_of(tmp_path, "table", files=("rows.jsonl",), columns={"text": "body"}),
        "slice": config_of(tmp_path, files=("train.txt[10:40]",), cache=str(tmp_path / "cache")),
        "file": config_of(tmp_path, files=("train.txt", "crlf.txt"), document="file"),
        "tsv": config_of(
            tmp_path, "table", files=("rows.tsv",), columns={"text": "body"}, cache=str(tmp_path / "cache")
        ),
    }
    expected = {
        "crlf": LINES, "zipped": LINES, "jsonl": kept, "slice": LINES[10:40], "tsv": kept,
        "file": [(tmp_path / name).read_bytes().decode() for name in ("train.txt", "crlf.txt")],
    }  # fmt: skip
    for name, config in found.items():
        index = build.build(config, tmp_path / "out" / name)
        assert texts_of(tmp_path / "out" / name) == expected[name], name
        assert index["splits"]["train"]["documents"] == len(expected[name])
        assert index["dropped"]["train"] == ({"empty": 2} if name == "jsonl" else {})
        assert len(index["splits"]["train"]["shards"]) > 1 or name == "zipped"


def test_parquet_files_are_read_by_row_group_and_by_row(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    kept = [line for line in LINES if line]
    parquet.write_table(
        pyarrow.table({"body": [*LINES[:30], None], "n": range(31)}), tmp_path / "a.parquet", row_group_size=7
    )
    parquet.write_table(pyarrow.table({"body": LINES[30:], "n": range(30)}), tmp_path / "b.parquet", row_group_size=50)
    config = config_of(tmp_path, "parquet", files=("*.parquet",), columns={"text": "body"})
    index = build.build(config, tmp_path / "out")
    assert texts_of(tmp_path / "out") == kept and index["dropped"]["train"] == {"empty": 3}
    assert len(index["splits"]["train"]["shards"]) > 1
    sliced = config_of(tmp_path, "parquet", files=("b.parquet[5:20]",), columns={"text": "body"})
    examples = sources.build(sliced.data, ("text",)).splits["train"]
    assert [example["text"] for example in map(examples.__getitem__, range(len(examples)))] == LINES[35:50]
    build.build(sliced, tmp_path / "sliced")
    assert texts_of(tmp_path / "sliced") == LINES[35:50]
    with pytest.raises(
        ConfigError, match="b.parquet: got no column 'bodi', expected one of body, n; did you mean 'body'"
    ):
        sources.build(config_of(tmp_path, "parquet", files=("b.parquet",), columns={"text": "bodi"}).data)
    with pytest.raises(ConfigError, match="a.parquet: row 2 of row group 4: got null in column 'body', expected text"):
        sources.build(config.data).splits["train"][30]


def test_damaged_parquet_files_are_one_line(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def file(name, **columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / name, row_group_size=20, compression="none")
        return tmp_path / name

    whole = file("whole.parquet", body=LINES)
    raw = whole.read_bytes()
    found = {
        "empty.parquet": (b"", "got no readable parquet file"),
        "text.parquet": (b"some text, and no parquet at all\n", "got no readable parquet file"),
        "short.parquet": (raw[: len(raw) // 2], "got no readable parquet file"),
        "end.parquet": (raw[:-4] + b"PARE", "got no readable parquet file"),
        "body.parquet": (raw[:4] + b"\xff" * 60 + raw[64:], r"got a damaged row group 0 \("),
    }
    for name, (content, _) in found.items():
        (tmp_path / name).write_bytes(content)
    file("numbers.parquet", body=range(60))
    file("lists.parquet", body=[["a"], ["b"]])
    file("none.parquet", body=pyarrow.array([], pyarrow.string()))
    file("nulls.parquet", body=[*LINES[:6], None, "x"])
    expected = {name: line for name, (_, line) in found.items()} | {
        "numbers.parquet": "got column 'body' of type int64, expected strings",
        "lists.parquet": "got column 'body' of type list<.*>, expected strings",
        "none.parquet": "got a file without rows, expected some",
    }
    for number, (name, line) in enumerate(expected.items()):
        config = config_of(tmp_path, "parquet", files=(name,), columns={"text": "body"})
        with pytest.raises(ConfigError, match=f"{name}: {line}") as caught:
            build.build(config, tmp_path / f"target-{number}")
        assert "\n" not in str(caught.value) and not (tmp_path / f"target-{number}" / "index.json").exists()
        with pytest.raises(ConfigError, match=f"{name}: {line}"):
            sources.build(config.data).splits["train"][0]
    config = config_of(
        tmp_path, "parquet", files=("whole.parquet",), columns={"text": "body"}, others={"test": ("nulls.parquet",)}
    )
    with pytest.raises(ConfigError, match="nulls.parquet: row 6 of row group 0: got an empty text, expected some"):
        build.build(config, tmp_path / "nulls")


# --- workers and interruptions ----------------------------------------------------------------------------------------

DEADLY = """
import os, signal, pathlib

def keep(text):
    if pathlib.Path("armed").exists() and text.startswith("line 12345 "):
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return "drop me" not in text
"""


def test_killed_and_resumed_by_other_workers_the_files_are_the_same(tmp_path, monkeypatch, caplog):
    """Two workers whose parent is killed in mid-build, then one process, against one process without a break.

    One document is longer than two shards: a shard lies within it, and has no document.
    """
    monkeypatch.undo()  # other processes have the usual sizes
    monkeypatch.chdir(tmp_path)
    lines = [f"line {number} " + "abcdefgh" * 20 for number in range(20000)]
    lines[3], lines[100] = "drop me", "giant " * 450_000
    write(tmp_path, lines)
    (tmp_path / "deadly.py").write_text(DEADLY)
    (tmp_path / "recipe.py").write_text(
        "from jaxformer.config import StackConfig\nfrom jaxformer.config.overrides import defaults, section\n\n\n"
        "def get_config(variant=''):\n    config = defaults()\n    config.model.decoder = section(StackConfig)\n"
        "    config.data.source = 'text'\n    config.data.splits = {'train': ('train.txt',)}\n"
        "    config.data.dir = '.'\n"
        "    config.data.tokenizer.kind = 'byte'\n    config.task.name = 'language_modelling'\n    return config\n"
    )
    (tmp_path / "armed").touch()
    flags = ["--config=recipe.py", "--target=out", "--workers=2", "--filter=deadly:keep", "--shard-mb=1"]
    command = [sys.executable, "-m", "jaxformer", "data", "build", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -9
    (tmp_path / "armed").unlink()
    finished = sorted(path.name for path in (tmp_path / "out").glob("train-*.json"))
    assert "train-00004.json" not in finished and finished and not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(
        ConfigError, match="without index.json, expected the target of a finished `jaxformer data build`"
    ):
        sources.build(DataConfig(source="shards", dir="out"))
    config = Config(data=DataConfig(source="text", dir=".", splits={"train": ("train.txt",)}, tokenizer=BYTE))
    options = Options(filters=("deadly:keep",), shard_mb=1)
    caplog.set_level("INFO")
    index = build.build(config, "out", options=options)
    assert f"{len(finished)} of 6 shards are finished" in caplog.text
    build.build(config, "whole", options=options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list((tmp_path / "out" / units.WORK).glob("*.partial"))
    assert index["dropped"]["train"] == {"filter": 1}
    assert index["splits"]["train"]["bytes"] == sum(map(len, lines)) + len(lines) - len("drop me\n")


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("kind", ["exact", "minhash"])
def test_killed_at_a_write_a_build_without_duplicates_goes_on(tmp_path, monkeypatch, kind):
    words = [f"{'many words of one line ' * 3}{number % 9} end" for number in range(20)]
    lines = [*LINES[:8], *words, "a line alone " + "x" * 300]
    config = config_of(write(tmp_path, lines), tokenizer=TokenizerConfig(kind="character"))
    options = Options(deduplicate=kind, held_out=0.2)
    left = [10**9]

    def limited(act):
        def limit(*arguments, **flags):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return act(*arguments, **flags)

        return limit

    monkeypatch.setattr(os, "replace", limited(os.replace))
    monkeypatch.setattr(Path, "unlink", limited(Path.unlink))
    index = build.build(config, tmp_path / "whole", options=options)
    assert index["dropped"]["train"]["duplicate"] > 8 and len(content(tmp_path / "whole")) > 8
    writes = 10**9 - left[0]
    assert writes > 25
    for count in range(2, writes, writes // 6):
        target = tmp_path / f"killed-{count}"
        left[0] = count
        with pytest.raises(Killed):
            build.build(config, target, options=options)
        assert not (target / "index.json").exists()
        left[0] = (writes - count) // 2 + 3  # and once more
        with contextlib.suppress(Killed):
            build.build(config, target, options=options)
        left[0] = 10**9
        assert build.build(config, target, options=options) == index
        assert content(target) == content(tmp_path / "whole"), count


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"[]", "half", "stale"])
def test_what_only_the_build_reads_is_made_again_if_it_is_torn(tmp_path, damage, caplog):
    """Manifests, the plan, the sample, the tokenizer, and which documents survive."""
    tokenizer, options = TokenizerConfig(kind="character"), Options(deduplicate="exact")
    config = config_of(write(tmp_path), tokenizer=tokenizer)
    build.build(config, tmp_path / "out", options=options)
    before, work = content(tmp_path / "out"), tmp_path / "out" / units.WORK
    torn = [tmp_path / "out" / name for name in ("train-00001.json", Tokenizers.FILE)]
    torn += [work / name for name in ("plan.json", "sample.json", "train-00001.survivors.npy")]
    if damage == "stale":  # of another shard, and of a build with other options, which was killed in this folder
        torn = [torn[0], work / "plan.json", work / "train-00001.survivors.npy"]
        (tmp_path / "out" / "train-00000.json").rename(torn[0])
        torn[1].write_text("{")
        (work / "sample.json").write_text("{}")
        np.save(torn[2], ~np.load(torn[2]))
    else:
        for path in torn:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damage == "half" else damage)
    build.build(config, tmp_path / "out", options=options)
    assert content(tmp_path / "out") == before and "plan.json is damaged" in caplog.text
    torn[-1].write_bytes(torn[-1].read_bytes()[:9])
    torn[0].unlink()
    build.build(config, tmp_path / "out", options=options)
    assert content(tmp_path / "out") == before, "survivors alone"
    (tmp_path / "out" / "index.json").write_bytes(damage if isinstance(damage, bytes) else b'{"format"')
    with pytest.raises(ConfigError, match="index.json: got"):
        texts_of(tmp_path / "out")


def test_a_second_build_mends_what_is_damaged(tmp_path):
    config = config_of(write(tmp_path))
    build.build(config, tmp_path / "out")
    before = content(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train-*")}
    damaged, missing = (tmp_path / "out" / f"train-0000{number}.array_record" for number in (1, 2))
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    missing.unlink()
    with pytest.raises(
        ConfigError, match=r"train-00002.array_record: got no shard \(No such file.*run the same `jaxfo"
    ):
        texts_of(tmp_path / "out")
    build.build(config, tmp_path / "out")
    assert content(tmp_path / "out") == before
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train-*")}
    changed = {path.stem for path in times if times[path] != again[path]}
    assert changed == {"train-00001", "train-00002"}


def test_a_target_is_of_one_build_at_a_time(tmp_path):
    config = config_of(write(tmp_path))
    build.build(config, tmp_path / "out")
    with targets.Folder(tmp_path / "out").locked(), pytest.raises(ConfigError, match="where another process builds"):
        build.build(config, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds shards of other input, settings or options"):
        build.build(config, tmp_path / "out", options=Options(min_length=3))
    write(tmp_path, LINES[:-1])
    with pytest.raises(ConfigError, match="holds shards of other input, settings or options"):
        build.build(config, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="full', which holds other files, expected a new or empty folder"):
        build.build(config, tmp_path / "full")


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.undo()
    config = config_of(write(tmp_path, ["a" * 1000] * 3000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(
            StorageError, match=r"train-00000.array_record: got .*, expected to write a shard there; make"
        ):
            build.build(config, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in (tmp_path / "out").rglob("*") if "train-" in path.name]
    assert build.build(config, tmp_path / "out")["splits"]["train"]["documents"] == 3000


# --- cleaning ---------------------------------------------------------------------------------------------------------


def test_filters_and_lengths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def even(text):\n    return int(text.split()[1]) % 2 == 0\n\n\n"
        "def odd_value(text):\n    return 'yes'\n\n\nNUMBER = 3\n"
    )
    config = config_of(write(tmp_path))
    index = build.build(config, tmp_path / "out", options=Options(("mine:even",), min_length=1, max_length=15))
    expected = [x for x in LINES if 1 <= len(x) <= 15 and int(x.split()[1]) % 2 == 0]
    assert texts_of(tmp_path / "out") == expected and 5 < len(expected) < 40
    long = sum(not 1 <= len(x) <= 15 for x in LINES)
    assert index["dropped"]["train"] == {"filter": 60 - long - len(expected), "length": long}
    for name, message in {
        "mine:odd_value": "got 'yes' from mine:odd_value of the text 'line 0 ', expected True",
        "mine:NUMBER": "a int, expected a function", "mine:lost": "expected a function of that name in mine",
        "lost:x": "whose module cannot be imported", "mine": "expected MODULE:FUNCTION",
        "mine:even": r"got IndexError \(list index out of range\) from mine:even of the text ''",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"--filter: got .*{message}|--filter: {message}"):
            build.build(config, tmp_path / name.replace(":", "-"), options=Options((name,)))
    with pytest.raises(ConfigError, match="got no training document after cleaning"):
        build.build(config, tmp_path / "none", options=Options(min_length=1000))


def test_of_equal_documents_the_first_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(deduplication, "PASS_DOCUMENTS", 7)
    config = config_of(write(tmp_path, [*LINES, *LINES[40:45], "new"]), others={"test": ("train.txt",)})
    index = build.build(config, tmp_path / "out", options=Options(deduplicate="exact"))
    assert texts_of(tmp_path / "out") == [*dict.fromkeys(LINES), "new"]
    assert index["dropped"]["train"] == {"duplicate": 7}
    assert texts_of(tmp_path / "out", "test") == [*LINES, *LINES[40:45], "new"], "only training text is cleaned of them"


def words(generator, count):
    return [f"w{number}" for number in generator.integers(0, 5000, count)]


def test_minhash_estimates_the_similarity_and_finds_near_duplicates(tmp_path):
    generator = np.random.default_rng(0)
    base = words(generator, 400)
    errors = []
    for changes in (0, 2, 5, 10, 30):
        other = list(base)
        for place in generator.choice(400, changes, replace=False):
            other[place] = "changed"
        shingles = [{tuple(each[i : i + 5]) for i in range(396)} for each in (base, other)]
        true = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
        estimate = (deduplication.signature(" ".join(base)) == deduplication.signature(" ".join(other))).mean()
        errors.append(abs(true - estimate))
    assert errors[0] == 0 and max(errors) < 4 * 0.044
    assert [deduplication.band_rows(x) for x in (0.99, 0.8, 0.5, 0.01)] == [32, 8, 2, 1]
    other = [" ".join(words(generator, 100)) for _ in range(20)]
    near = [text.replace(text.split()[50], "x").upper() + "!" for text in other[:5]]
    half = " ".join(other[6].split()[:50] + words(generator, 50))
    config = config_of(write(tmp_path, [*other, *near, half, "", "two words", "two words"]))
    index = build.build(config, tmp_path / "out", options=Options(deduplicate="minhash", similarity=0.7))
    assert texts_of(tmp_path / "out") == [*other, half, "", "two words"]
    assert index["dropped"]["train"] == {"duplicate": 6} and len(index["splits"]["train"]["shards"]) > 4


def test_the_held_out_split_is_decided_by_the_text(tmp_path):
    lines = [f"text {number % 700}" for number in range(1000)]
    config = config_of(write(tmp_path, lines))
    index = build.build(config, tmp_path / "out", options=Options(held_out=0.1))
    train, held = texts_of(tmp_path / "out"), texts_of(tmp_path / "out", "validation")
    assert sorted(train + held) == sorted(lines) and not set(train) & set(held)
    assert 0.06 < len(held) / 1000 < 0.14 and index["splits"]["validation"]["documents"] == len(held)
    build.build(config_of(write(tmp_path, lines[::-1])), tmp_path / "other", options=Options(held_out=0.1))
    assert set(texts_of(tmp_path / "other", "validation")) == set(held)
    both = config_of(tmp_path, others={"validation": ("train.txt",)})
    with pytest.raises(ConfigError, match="--held-out: got 0.1 beside a split 'validation'"):
        build.build(both, tmp_path / "both", options=Options(held_out=0.1))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_vocabulary_is_learned_from_a_sample_of_the_stated_size(tmp_path):
    lines = [f"common {'x' * 900} word{number}" for number in range(3000)]
    config = config_of(write(tmp_path, lines), tokenizer=TokenizerConfig(kind="word", vocab=5000))
    index = build.build(config, tmp_path / "out", options=Options(sample_mb=1, shard_mb=1))
    sample = index["vocabulary_sample"]
    assert 0.99 * 2**20 < sample["bytes"] <= 2**20 and sample["documents"] == 1145
    tokenizer = Tokenizers.load(tmp_path / "out").target
    learned = {int(piece[4:]) for piece in tokenizer.vocabulary.pieces if piece.startswith("word")}
    assert len(learned) == 1145 and min(learned) == 0 and max(learned) > 2300, "from every shard"
    huge = config_of(write(tmp_path, ["€" * 10**6]), tokenizer=TokenizerConfig(kind="character"))
    assert build.build(huge, tmp_path / "huge", options=Options(sample_mb=1, shard_mb=1))["vocabulary_sample"] == {
        "documents": 1,
        "bytes": 2**20 // 9 * 3,
    }


@pytest.mark.parametrize("kind", ["byte", "character", "word", "bpe", "unigram", "file"])
def test_shards_hold_what_the_tokenizer_gives(tmp_path, kind):
    lines = [*LINES, "a </s> b <pad> <s>  <unk> İSTANBUL\tx <extra_id_0>", "ﬁn e\u0301"] * 2
    tokenizer = TokenizerConfig(kind=kind, vocab=300, lowercase=kind == "word", sentinels=0 if kind == "file" else 2)
    if kind == "file":
        learned = Tokenizers.build(
            DataConfig(tokenizer=TokenizerConfig(vocab=300)), [{"text": x} for x in lines], ("text",)
        )
        learned.save(tmp_path / "learned")
        tokenizer = TokenizerConfig(kind="file", path=str(tmp_path / "learned" / "tokenizer.json"))
    build.build(config_of(write(tmp_path, lines), tokenizer=tokenizer), tmp_path / "out")
    examples = sources.build(DataConfig(source="shards", dir=str(tmp_path / "out"))).splits["train"]
    found = Tokenizers.load(tmp_path / "out").target
    assert [examples[i]["text"].ids for i in range(len(examples))] == [found.encode(line) for line in lines]
    stream = examples.stream(len(examples), found)
    expected = [found.bos, *(token for line in lines for token in [*found.encode(line), found.eos])]
    assert len(stream) == len(expected) and stream[:].tolist() == expected
    assert stream[:].tolist().count(found.eos) == len(lines)


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    lines = [" ".join(f"w{number + i}" for i in range(100)) for number in range(0, 66000, 100)]
    config = config_of(write(tmp_path, lines), tokenizer=TokenizerConfig(kind="word", vocab=70000))
    index = build.build(config, tmp_path / "out", options=Options(shard_mb=1))
    assert index["dtype"] == "<u4" and token_shards.token_dtype(2**16) == np.dtype("<u2")
    examples = sources.build(DataConfig(source="shards", dir=str(tmp_path / "out"))).splits["train"]
    assert max(max(examples[i]["text"].ids) for i in range(len(examples))) > 2**16
    assert texts_of(tmp_path / "out") == lines


# --- mixtures ---------------------------------------------------------------------------------------------------------


def test_a_mixture_is_a_folder_for_each_component_and_one_tokenizer(tmp_path):
    for name, lines in {"one": LINES, "two": [line.upper() for line in LINES[:20]]}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, lines)
    part = {name: ComponentConfig(source="text", dir=name, splits={"train": ("train.txt",)}) for name in ("one", "two")}
    data = DataConfig(
        dir=str(tmp_path), mixture=MixtureConfig(components=part), tokenizer=TokenizerConfig(kind="character")
    )
    index = build.build(Config(data=data), tmp_path / "out")
    assert index["components"]["two"]["train"]["documents"] == 20 and index["splits"]["train"]["documents"] == 80
    assert texts_of(tmp_path / "out" / "two") == [line.upper() for line in LINES[:20]]
    with pytest.raises(
        ConfigError, match=r"the shards of a mixture, expected those of one of its components \(one, two\)"
    ):
        texts_of(tmp_path / "out")


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(config, match, target, **options):
    with pytest.raises(ConfigError, match=match):
        build.build(config, target, options=Options(**options))
    assert not target.exists() or not (target / "index.json").exists()


def test_what_is_wrong_with_the_input_is_one_line(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 200 + b"\xff\n")
    refused(config_of(tmp_path, files=("bad.txt",)), "bad.txt:201: got byte 0xff, expected UTF-8", tmp_path / "1")
    (tmp_path / "bad.jsonl").write_text('{"text": "' + "x" * 400 + '"}\n{"text": 3}\n{"text": ""}\n')
    rows = {"files": ("bad.jsonl",), "columns": {"text": "text"}}
    refused(config_of(tmp_path, "table", **rows), "bad.jsonl:2: got int in column 'text'", tmp_path / "2")
    (tmp_path / "empty.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    rows = {"files": ("empty.jsonl",), "columns": {"text": "text"}, "others": {"test": ("empty.jsonl",)}}
    refused(config_of(tmp_path, "table", **rows), "empty.jsonl:2: got an empty text, expected some", tmp_path / "3")
    (tmp_path / "nothing.txt").touch()
    refused(config_of(tmp_path, files=("nothing.txt",)), "nothing.txt: got an empty file", tmp_path / "4")
    write(tmp_path)
    refused(config_of(tmp_path, examples=3), "config.data.examples: got 3 for a build, expected None", tmp_path / "5")
    only = Config(data=DataConfig(source="text", dir=str(tmp_path), splits={"test": ("train.txt",)}, tokenizer=BYTE))
    refused(only, "got test, expected files for at least 'train'", tmp_path / "6")
    rows = {"files": ("bad.jsonl",), "columns": {"source": "text", "target": "text"}}
    refused(config_of(tmp_path, "table", **rows), "got source, target, expected the column of the text", tmp_path / "7")
    refused(Config(data=DataConfig(source="numerals", name="de")), "expected text; set", tmp_path / "8")
    for options, match in [
        ({"held_out": 1.0}, "--held-out: got 1"), ({"similarity": 0.5}, "got 0.5 with --deduplicate=none"),
        ({"min_length": 5, "max_length": 4}, "--max-length: got 4"), ({"similarity": 0.0}, "--similarity: got 0"),
    ]:  # fmt: skip
        refused(config_of(tmp_path), match, tmp_path / "9", **options)
