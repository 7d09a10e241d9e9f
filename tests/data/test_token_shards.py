"""Reading token shards: the batches of a run are those of the text itself, on any hosts, from any point."""

import dataclasses
import json
import pickle
import shutil

import builders
import chex
import jax
import numpy as np
import pytest

from jaxformer import cli, tasks
from jaxformer.config import (
    ComponentConfig,
    Config,
    ConfigError,
    DataConfig,
    MixtureConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.config.checks import sections
from jaxformer.data import build, cache, record_ranges, sources, token_shards
from jaxformer.data.build import pieces
from jaxformer.data.mixture import MixedExamples, Mixture
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.planning import Draw, ShuffledOrder
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import _datasets
from jaxformer.train import setup

LINES = [f"line {number} " + "ä€😀x"[number % 4] * (number * 7 % 23) for number in range(60)]
LINES[7] = ""
WORDS = TokenizerConfig(kind="word", vocab=30, lowercase=True)  # <unk> and small letters: its text is not the input's


@pytest.fixture(scope="module")
def small():
    """Shards of a few hundred bytes, records of a few tokens, few open files: a page of text has all borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MIN_SHARD_BYTES", 300)
        patch.setattr(token_shards, "RECORD_TOKENS", 16)
        patch.setattr(token_shards, "TABLE_DOCUMENTS", 3)
        patch.setattr(token_shards, "MAX_OPEN_SHARDS", 2)
        yield


@pytest.fixture(scope="module")
def built(small, tmp_path_factory):
    """The target of each tokenizer, and the folder of the text."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in LINES))
    (folder / "test.txt").write_text("".join(f"{line}\n" for line in LINES[:20]))
    for name, tokenizer in {"byte": TokenizerConfig(kind="byte"), "word": WORDS}.items():
        splits = {"train": ("train.txt",), "test": ("test.txt",)}
        data = DataConfig(source="text", dir=str(folder), splits=splits, tokenizer=tokenizer)
        build.build(Config(data=data), folder / name)
    return folder


def config_of(task="language_modelling", encoder=False, **data):
    stacks = {"encoder": StackConfig()} if encoder else {"decoder": StackConfig()}
    data = {"source": "shards", "batch": 4, "length": 8, "packing": "concat", **data}
    return Config(
        model=ModelConfig(**stacks), data=DataConfig(**data), task=TaskConfig(task), train=TrainConfig(seed=3)
    )


def pipelines_of(config, folder, cache_folder, **hosts):
    """The pipeline of the shards in `folder`, and that of the text that they were built from."""
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, dir=str(folder), cache=str(cache_folder))
    )
    dataset = sources.build(config.data, ("text",))
    tokenizers = setup.build_or_load_tokenizers(config, dataset, cache_folder)
    text = Dataset(
        {name: [{"text": line} for line in LINES[:count]] for name, count in (("train", 60), ("test", 20))}, "x"
    )
    task = tasks.get(config.task.name)
    return Pipeline(config, dataset, tokenizers, task, **hosts), Pipeline(config, text, tokenizers, task, **hosts)


def take(batches, count):
    try:
        return [next(batches) for _ in range(count)]
    finally:
        batches.close()


CASES = [
    ("language_modelling", {}),
    ("language_modelling", {"packing": "none", "buckets": (4,)}),
    ("language_modelling", {"packing": "first_fit", "length": 40}),
    ("language_modelling", {"packing": "first_fit", "length": 3, "skip_long": True}),
    ("language_modelling", {"examples": 31}),
    ("prefix_lm", {}),
    ("prefix_lm", {"packing": "first_fit", "length": 20}),
    ("permutation_lm", {"encoder": True}),
    ("masked_lm", {"packing": "none", "encoder": True}),
]


@pytest.mark.parametrize(("task", "fields"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case))
def test_batches_are_those_of_the_text(built, tmp_path, task, fields):
    shards, text = pipelines_of(config_of(task, **fields), built / "word", tmp_path)
    for one, other in zip(take(shards.train(), 25), take(text.train(), 25), strict=True):
        chex.assert_trees_all_equal(one, other)
    for examples in (None, 7):
        ours, theirs = (list(each.evaluate("test", examples, rows=4)) for each in (shards, text))
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            chex.assert_trees_all_equal(one, other)
    assert shards.epoch_batches == text.epoch_batches and shards.truncation_notes(5) == text.truncation_notes(5)


def test_a_host_reads_the_documents_of_its_rows_alone(built, tmp_path, monkeypatch):
    """Packed rows are planned from the tables of the shards; texts are not decoded."""
    config = config_of(packing="first_fit", length=40)
    whole, _ = pipelines_of(config, built / "byte", tmp_path)
    hosts = [pipelines_of(config, built / "byte", tmp_path, process_index=n, process_count=2)[0] for n in range(2)]
    read, get = [], token_shards.ShardedDocuments.__getitem__

    def record(documents, index):
        read.append(index)
        return get(documents, index)

    (expected,) = take(whole.train(), 1)
    monkeypatch.setattr(token_shards.ShardedDocuments, "__getitem__", record)
    monkeypatch.setattr(type(whole.tokenizers.source), "decode", lambda *_: pytest.fail("it decodes"))
    halves = []
    for host, ours in enumerate(hosts):
        read.clear()
        plan = ours._plan(0)
        assert not read
        halves.append(ours.fill(plan, plan.batches[0]))
        assert len(read) == len(set(read)) == sum(map(len, plan.batches[0].rows[2 * host : 2 * host + 2]))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
    chex.assert_trees_all_equal(joined, expected)


def test_a_task_that_makes_other_slots_than_it_says_is_refused(built, tmp_path):
    config = config_of(packing="first_fit", dir=str(built / "byte"))
    dataset = sources.build(config.data, ("text",))
    tokenizers = setup.build_or_load_tokenizers(config, dataset, tmp_path)
    task = tasks.get("language_modelling")
    derived = dataclasses.replace(task, encode=lambda *_: {"target": np.zeros(3, np.int32)})
    with pytest.raises(
        ConfigError, match="task: got 3 slots of a document of 7 tokens from the task's encode, expected"
    ):
        Pipeline(config, dataset, tokenizers, derived)


def test_sizes_come_from_the_index(built, tmp_path):
    shards, text = pipelines_of(config_of(), built / "word", tmp_path)
    for count in (None, 1, 2, 3, 19, 20, 59, 60):
        assert shards.size("train", count) == text.size("train", count), count
    assert shards.size("train") == cache.text_size([{"text": line} for line in LINES])


@pytest.mark.parametrize(("packing", "hosts"), [("concat", (2, 16, 64)), ("none", (2,))])
def test_any_number_of_hosts_reads_the_same_and_resumes(built, tmp_path, packing, hosts):
    config = config_of(packing=packing, batch=64, length=4)
    whole, _ = pipelines_of(config, built / "byte", tmp_path)
    batches = whole.train()
    expected = [next(batches) for _ in range(3)]
    state = json.loads(json.dumps(whole.data_state(batches)))
    expected += [next(batches) for _ in range(2)]
    batches.close()
    arguments = config, whole.dataset, whole.tokenizers, whole.task
    for count in hosts:
        for host in {0, 1, count - 1}:
            part = Pipeline(*arguments, process_index=host, process_count=count)
            rows = slice(host * 64 // count, (host + 1) * 64 // count)
            for got, all_rows in zip(
                [*take(part.train(), 1), *take(part.resume(state), 2)], expected[:1] + expected[3:]
            ):
                chex.assert_trees_all_equal(got, jax.tree.map(lambda array, rows=rows: array[rows], all_rows))


def test_slices_of_the_stream_cross_records_and_shards(built):
    examples = sources.build(DataConfig(source="shards", dir=str(built / "byte"))).splits["train"]
    examples = pickle.loads(pickle.dumps(examples))
    assert len(examples.files.shards) > 3
    stream = examples.stream(60, examples.tokenizer)
    whole = stream[:]
    assert len(whole) == len(stream) and whole[0] == examples.tokenizer.bos
    for begin in range(0, len(stream) + 2, 7):
        for end in (begin, begin + 1, begin + 16, begin + 700, len(stream) + 5):
            np.testing.assert_array_equal(stream[begin:end], whole[begin:end])
    assert len(examples.files._open) <= 2
    for count in (1, 13, 59):
        part = examples.stream(count, examples.tokenizer)
        np.testing.assert_array_equal(part[:], whole[: len(part)])
        assert part[:].tolist().count(examples.separator) == count
    with pytest.raises(IndexError):
        examples[60]


def test_an_index_of_ten_billion_tokens_is_read_at_once(built, monkeypatch):
    """2,500 shards that do not exist: only what a batch needs would be read."""
    real = token_shards.read_index(built / "byte")
    shard = {**real["splits"]["train"]["shards"][0], "tokens": 4_000_007, "documents": 4_000_001}
    shards = [{**shard, "file": f"train-{number:05d}.array_record"} for number in range(2500)]
    monkeypatch.setattr(token_shards.ShardFiles, "_check", lambda files: None)
    index = {**real, "splits": {"train": {"shards": shards}}}
    documents = token_shards.ShardedDocuments(built / "byte", "train", index, Tokenizers.load(built / "byte").target)
    read = []
    monkeypatch.setattr(
        token_shards.ShardFiles,
        "tokens",
        lambda _, number, begin, end: read.append((number, begin, end)) or np.zeros(end - begin),
    )
    stream = documents.stream(len(documents), documents.tokenizer)
    assert len(stream) == 2500 * 4_000_007 + 1 > 10**10 and len(documents) > 10**10
    place = 1999 * 4_000_007 + 3_999_999
    assert len(stream[1 + place : 1 + place + 20]) == 20
    assert read == [(1999, 3_999_999, 4_000_007), (2000, 0, 12)]
    assert documents._find(1234 * 4_000_001 + 17) == (1234, 17)
    order = ShuffledOrder(len(documents), 4, 0)
    found = {int(index) for number in range(50) for index in order(number)}
    assert len(found) == 200 and max(found) < len(documents) and max(found) > 2**32


@pytest.mark.parametrize("size", [1, 127, 128, 1000, 16384, 32768])
def test_a_record_is_where_the_sizes_of_those_before_it_say(tmp_path, size):
    """Across several blocks of the file, with a shorter record after equal ones, and others after it."""
    generator = np.random.default_rng(0)
    runs = [(280_000 // size % 20_000 + 5, size), (1, size // 3 + 1), (9, 160), (0, 7)]
    records = [generator.bytes(each) for count, each in runs for _ in range(count)]
    writer = token_shards.array_record().ArrayRecordWriter(str(tmp_path / "x"), token_shards.WRITER_OPTIONS)
    for record in records:
        writer.write(record)
    writer.close()
    raw, checks = (tmp_path / "x").read_bytes(), {}
    module, options = token_shards.array_record(), (token_shards.WRITER_OPTIONS, token_shards.READER_OPTIONS)
    for number, record in enumerate(records):
        place = record_ranges.place("x", runs, number)
        chunk = record_ranges.without_block_headers(raw[place.begin : place.end], place.begin)
        assert chunk.endswith(record) and len(chunk) == record_ranges.chunk_bytes(len(record)), number
        if 9 < number < len(records) - 12 and number % 97:
            continue
        check = checks.setdefault(place.size, record_ranges.RecordCheck(module, place.size, *options))
        assert check.record(chunk) == record, number
    for position in (0, 39, 41, len(chunk) - 1):
        damaged = bytearray(chunk)
        damaged[position] ^= 1
        with pytest.raises((RuntimeError, ValueError)):
            check.record(bytes(damaged))
    with pytest.raises(ValueError, match="bytes of a record"):
        check.record(chunk + b"x")
    assert check.record(chunk) == records[number]
    with pytest.raises(IndexError, match="there is no record"):
        record_ranges.place("x", runs, len(records))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(built, tmp_path):
    shutil.copytree(built / "byte", tmp_path / "copied")
    return tmp_path / "copied"


def read_all(folder):
    examples = sources.build(DataConfig(source="shards", dir=str(folder))).splits["train"]
    return [examples[number]["text"] for number in range(len(examples))]


def test_damage_is_one_line_that_names_the_shard(copied):
    path = copied / "train-00001.array_record"
    raw = bytearray(path.read_bytes())
    token = raw.index(bytes([ord("l") + 7, 0, ord("i") + 7, 0]))
    raw[token] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"train-00001.array_record: got a damaged shard \(.*run the same `jaxformer"):
        read_all(copied)
    path.write_bytes(bytes(len(raw)))
    with pytest.raises(ConfigError, match=r"train-00001.array_record: got a damaged shard \("):
        read_all(copied)
    path.write_bytes(raw[:-5])
    with pytest.raises(
        ConfigError, match=r"train-00001.array_record: got [\d,]+ bytes, expected [\d,]+, expected the one"
    ):
        read_all(copied)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda index: index.pop("splits"), "got no index of shards"),
    (lambda index: index.update(format=9), "got format 9, expected 1"),
    (lambda index: index["splits"]["train"]["shards"][0].pop("size"), "got no index of shards"),
    (lambda index: index.update(tokenizer="0"), "jaxformer_tokenizer.json: got another tokenizer"),
])  # fmt: skip
def test_a_wrong_index_is_refused(copied, edit, message):
    index = json.loads((copied / "index.json").read_text())
    edit(index)
    (copied / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        read_all(copied)


def test_settings_must_be_those_of_the_build_or_none(built):
    same = {"splits": {"train": ("train.txt",), "test": ("test.txt",)}, "tokenizer": WORDS}
    assert "test" in sources.build(DataConfig(source="shards", dir=str(built / "word"), **same), split="test").splits
    for fields, message in [
        (
            {"splits": {"train": ("other.txt",)}},
            r"data.splits: got .*other.txt.*, expected .*train.txt.*, as the shards",
        ),
        ({"document": "file"}, "data.document: got file for source shards, expected its default"),
        (
            {"tokenizer": TokenizerConfig(kind="byte")},
            "data.tokenizer.kind: got 'byte' for source shards, expected 'word'",
        ),
        ({"tokenizer": dataclasses.replace(WORDS, multiple=64)}, "data.tokenizer.multiple: got 64"),
    ]:
        with pytest.raises(ConfigError, match=message):
            sources.build(DataConfig(source="shards", dir=str(built / "word"), **fields))
    with pytest.raises(ConfigError, match="split: got 'valid', expected one of train, test"):
        sources.build(DataConfig(source="shards", dir=str(built / "word"), **same), split="valid")
    with pytest.raises(ConfigError, match="data.dir: got '', expected the folder that `jaxformer data build"):
        sources.build(DataConfig(source="shards"))
    with pytest.raises(ConfigError, match="whose examples have text, expected source, target for the task"):
        sources.build(DataConfig(source="shards", dir=str(built / "word")), ("source", "target"))
    with pytest.raises(ConfigError, match="config.data.source: got shards, expected the text to build them from"):
        build.build(Config(data=DataConfig(source="shards", dir=str(built / "word"))), built / "again")


def test_another_tokenizer_is_refused(built):
    config = config_of(dir=str(built / "byte"))
    other = Tokenizers.load(built / "word")
    with pytest.raises(ConfigError, match="data.dir: got shards in '.*byte' of another tokenizer than the model's"):
        Pipeline(config, sources.build(config.data), other, tasks.get("language_modelling"))
    own = Tokenizers.load(built / "byte").target
    padded = type(own)(own.vocabulary, multiple=128)
    Pipeline(config, sources.build(config.data), Tokenizers(padded, padded), tasks.get("language_modelling"))
    ends = own.with_special_tokens(eos=own.bos)
    with pytest.raises(ConfigError, match="of another tokenizer"):
        Pipeline(config, sources.build(config.data), Tokenizers(ends, ends), tasks.get("language_modelling"))


# --- mixtures and runs ------------------------------------------------------------------------------------------------


def test_mixtures_of_shards_and_with_text(built, tmp_path, monkeypatch):
    shards = ComponentConfig(source="shards", dir="byte", weight=3.0)
    text = ComponentConfig(source="text", splits={"train": ("test.txt",)})
    config = config_of(source="numerals", dir=str(built), cache=str(tmp_path))
    data = dataclasses.replace(config.data, mixture=MixtureConfig(components={"a": shards, "b": text}))
    config = dataclasses.replace(config, data=data)
    dataset = _datasets.build(config)
    tokenizers = setup.build_or_load_tokenizers(config, dataset, tmp_path)
    assert tokenizers.target.vocabulary.kind == "byte"
    parts = setup.build_pipelines(config, dataset, tokenizers)
    batches = take(Mixture(config, parts).train(), 30)
    shares = np.bincount(np.concatenate([batch.component.ravel() for batch in batches]))
    assert 0.7 < shares[0] / shares.sum() < 0.8
    assert {part.dataset.splits["train"].__class__.__name__ for part in parts.values()} == {
        "ShardedDocuments",
        "PreparedSplit",
    }
    assert Mixture(config, parts)._plan.encode.known_lengths([Draw(1, 0, 0), Draw(0, 0, 0)]) is None
    both = {"a": shards, "b": dataclasses.replace(shards, weight=1.0)}
    packed = dataclasses.replace(config.data, mixture=MixtureConfig(components=both), packing="first_fit", length=40)
    config = dataclasses.replace(config, data=packed)
    parts = setup.build_pipelines(config, _datasets.build(config), tokenizers)
    plan = Mixture(config, parts)._planned(3)
    assert plan.encoded is None and {draw.part for draw in plan.indices} == {0, 1}
    monkeypatch.setattr(MixedExamples, "known_lengths", lambda *_: None)
    encoded = Mixture(config, parts)._planned(3)
    assert encoded.encoded is not None and plan.batches == encoded.batches, "planned as if they were encoded"
    both = {"a": shards, "b": dataclasses.replace(shards, dir="word")}
    data = dataclasses.replace(config.data, mixture=MixtureConfig(components=both))
    with pytest.raises(
        ConfigError, match="components.b: got shards of another tokenizer than those of a, expected one"
    ):
        setup.build_or_load_tokenizers(config, _datasets.build(dataclasses.replace(config, data=data)), tmp_path)


def test_a_run_from_the_recipe_to_the_refusal_of_other_shards(small, tmp_path, monkeypatch, capsys):
    """The commands of the guide: build with a held-out split, train, and resume after another build."""
    monkeypatch.chdir(tmp_path)
    builders.one_device(monkeypatch)
    (tmp_path / "corpus.txt").write_text("".join(f"{line}\n" for line in LINES * 3))
    (tmp_path / "recipe.py").write_text(
        "from jaxformer.config import StackConfig\nfrom jaxformer.config.overrides import defaults, section\n\n\n"
        "def get_config(variant=''):\n    config = defaults()\n    config.data.source = 'text'\n"
        "    config.data.splits = {'train': ('corpus.txt',)}\n    config.data.dir = '.'\n"
        "    config.data.packing = 'concat'\n    config.data.length = 16\n    config.data.batch = 4\n"
        "    config.data.tokenizer.kind = 'byte'\n    config.task.name = 'language_modelling'\n"
        "    config.model.decoder = section(StackConfig, layers=1, width=16, attention=dict(heads=2, bias=False))\n"
        "    config.train.steps = 3\n    config.evaluate.decode_examples = 0\n    return config\n"
    )
    assert cli.main(["data", "build", "--config=recipe.py", "--target=shards", "--held-out=0.1", "--min-length=8"]) == 0
    assert "train: 1" in (out := capsys.readouterr().out) and "validation: " in out and "built in shards" in out
    train = ["train", "--config=recipe.py", "--workdir=run", "--config.data.source=shards", "--config.data.dir=shards"]
    assert cli.main(train) == 0, capsys.readouterr().err
    index = json.loads((tmp_path / "shards" / "index.json").read_text())
    held, measured = index["splits"]["validation"], json.loads((tmp_path / "run" / "result.json").read_text())
    named = DataConfig(source="shards", dir="shards", splits={"train": ("corpus.txt",)})
    assert len(sources.build(named, ("text",), "validation").splits["validation"]) == held["documents"] > 5
    bits = measured["loss"] * held["tokens"] / np.log(2) / held["bytes"]
    np.testing.assert_allclose(measured["bits_per_byte"], bits, rtol=1e-5)
    before = (tmp_path / "run" / "config.json").read_bytes()
    shutil.rmtree(tmp_path / "shards")
    assert cli.main(["data", "build", "--config=recipe.py", "--target=shards", "--held-out=0.2"]) == 0
    capsys.readouterr()
    assert cli.main([*train, "--config.train.steps=5"]) == 2
    error = capsys.readouterr().err
    assert "data.dir: got token shards with the key shards-" in error and error.count("\n") == 1
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_bound_on_copies_is_refused_where_nothing_is_copied():
    sections.check_shard_copies(Config(data=DataConfig(source="shards", shard_copies_gb=3.0)))
    expected = "config.data.shard_copies_gb: got 3.0, expected None for data.source text: only shards in a bucket"
    with pytest.raises(ConfigError, match=expected):
        sections.check_shard_copies(Config(data=DataConfig(source="text", shard_copies_gb=3.0)))
