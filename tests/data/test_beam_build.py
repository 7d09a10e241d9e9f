"""Builds by an Apache Beam pipeline: the bytes of local builds, and what is refused or goes wrong, in one line.

The engine is a stand-in that pickles its elements and works in another folder, and Beam's DirectRunner if installed.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import sys
import types

import pytest

from jaxformer import cli
from jaxformer.config import ComponentConfig, Config, ConfigError, DataConfig, MixtureConfig, TokenizerConfig
from jaxformer.data import build
from jaxformer.data.build import Options, beam, pieces, units
from jaxformer.errors import StorageError

LINES = [f"line {number} " + "ä€x"[number % 3] * (number * 7 % 23) for number in range(60)]
DIRECT = "--runner=DirectRunner"


class Collection:
    """Elements of a stand-in pipeline."""

    def __init__(self, elements=()):
        self.elements = list(elements)

    def __or__(self, transform):
        return transform(self.elements)


class StandInPipeline(contextlib.nullcontext):
    def __init__(self, options):
        super().__init__(Collection())


def stand_in_map(function, *arguments):
    def apply(elements):
        with contextlib.chdir("/"):
            pieces._DATASETS.clear()  # as in another process
            return Collection([function(pickle.loads(pickle.dumps(each)), *arguments) for each in elements])

    return apply


@pytest.fixture(params=["stand-in", "DirectRunner"])
def engine(request, monkeypatch):
    """Shards of a few hundred bytes, by one of the engines. Returns the stand-in module, or None."""
    monkeypatch.setattr(pieces, "MIN_SHARD_BYTES", 300)
    monkeypatch.setattr(pieces, "USUAL_SHARDS", 10**6)
    if request.param == "DirectRunner":
        pytest.importorskip("apache_beam", reason="apache_beam is not installed (extra [beam])")
        return None
    return stand_in(monkeypatch)


def stand_in(monkeypatch):
    module = types.SimpleNamespace(
        Pipeline=StandInPipeline,
        Create=lambda elements, reshuffle: lambda _: Collection(elements),
        Reshuffle=lambda: lambda elements: Collection(elements[::-1]),
        Map=stand_in_map,
    )
    monkeypatch.setitem(sys.modules, "apache_beam", module)
    monkeypatch.setattr(beam, "_options", lambda flags: None)
    return module


def config_of(folder="", **fields):
    tokenizer = TokenizerConfig(kind="character")
    splits = {"train": ("train.txt",)}
    return Config(data=DataConfig(source="text", dir=str(folder), splits=splits, tokenizer=tokenizer, **fields))


def write(folder, lines=LINES):
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in lines))


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.*"))
        if path.is_file() and units.WORK not in path.parts
    }


def test_the_files_are_those_of_a_local_build(tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text", [*LINES, *LINES[20:25]])
    options = Options(deduplicate="exact", held_out=0.2)
    build.build(config_of("text"), "local", options=options)
    index = build.build(config_of("text"), "by-beam", options=options, beam=DIRECT)
    expected = content(tmp_path / "local")
    assert content(tmp_path / "by-beam") == expected and len(expected) > 10
    assert index["dropped"]["train"] == {"duplicate": 5}
    (tmp_path / "by-beam" / "train-00001.array_record").write_bytes(b"damaged")
    build.build(config_of("text"), "by-beam", options=options, beam=DIRECT)
    assert content(tmp_path / "by-beam") == expected, "finished by the pipeline, mended by it"
    (tmp_path / "by-beam" / "train-00001.array_record").unlink()
    build.build(config_of("text"), "by-beam", options=options, workers=1)
    assert content(tmp_path / "by-beam") == expected, "begun by the pipeline, mended by this process"


def test_a_mixture_in_a_relative_folder(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in ("one", "two"):
        write(tmp_path / "text" / name, [f"{name} {line}" for line in LINES])
    parts = {
        name: ComponentConfig(source="text", dir=name, splits={"train": ("train.txt",)}) for name in ("one", "two")
    }
    parts["two"] = dataclasses.replace(parts["two"], splits={"train": ("train.txt[:40]",)})  # read through its source
    data = DataConfig(
        dir="text", cache="cache", mixture=MixtureConfig(components=parts), tokenizer=TokenizerConfig(kind="byte")
    )
    build.build(Config(data=data), "local")
    build.build(Config(data=data), "by-beam", beam=DIRECT)
    assert content(tmp_path / "by-beam") == content(tmp_path / "local")


def test_an_error_of_a_worker_is_its_line_and_is_forgotten_when_mended(tmp_path, engine):
    write(tmp_path / "text", [*LINES, "last"])
    whole = (tmp_path / "text" / "train.txt").read_bytes()
    (tmp_path / "text" / "train.txt").write_bytes(whole.replace(b"last", b"l\xffst"))
    byte = Config(data=DataConfig(source="text", dir=str(tmp_path / "text"), splits={"train": ("train.txt",)},
                                  tokenizer=TokenizerConfig(kind="byte")))  # fmt: skip
    with pytest.raises(ConfigError, match="train.txt:61: got byte 0xff, expected UTF-8") as error:
        build.build(byte, tmp_path / "out", beam=DIRECT)
    assert "\n" not in str(error.value) and not (tmp_path / "out" / "index.json").exists()
    status = (tmp_path / "text" / "train.txt").stat()
    (tmp_path / "text" / "train.txt").write_bytes(whole)
    os.utime(tmp_path / "text" / "train.txt", ns=(status.st_atime_ns, status.st_mtime_ns))  # for the plan: the same
    assert build.build(byte, tmp_path / "out", beam=DIRECT)["splits"]["train"]["documents"] == 61


def test_a_pipeline_that_fails_or_writes_elsewhere_is_one_line(tmp_path, monkeypatch):
    module = stand_in(monkeypatch)
    write(tmp_path / "text")
    build.build(config_of(tmp_path / "text"), tmp_path / "whole")
    (tmp_path / "whole" / "train-00000.array_record").unlink()
    module.Map = lambda function, *arguments: lambda elements: Collection()
    with pytest.raises(
        StorageError, match=r"--beam: got no .*train-00000.json after the pipeline, expected its workers"
    ):
        build.build(config_of(tmp_path / "text"), tmp_path / "whole", beam=DIRECT)
    with pytest.raises(
        StorageError, match=r"--beam: got no .*train-00000.json after the pipeline, expected its workers"
    ):
        build.build(config_of(tmp_path / "text"), tmp_path / "out", beam=DIRECT)
    module.Map = lambda function, *arguments: lambda elements: 1 // 0
    with pytest.raises(
        StorageError, match=r"--beam: got ZeroDivisionError \(.*\) from the pipeline, expected it to fin"
    ):
        build.build(config_of(tmp_path / "text"), tmp_path / "out", beam=DIRECT)
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_cannot_be_honoured_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    write(tmp_path / "text")
    config = config_of(tmp_path / "text")
    refused = {
        r"--workers: got 2 beside --beam, expected one of them": {"workers": 2},
    }
    if importlib.util.find_spec("apache_beam"):
        refused |= {
            r"--beam: got '--runer=DirectRunner', expected --OPTION=VALUE.*did you mean": {
                "beam": "--runer=DirectRunner"
            },
            r"--beam: got '--job_name=x' without --runner": {"beam": "--job_name=x"},
            r"--beam: got the runner 'Quick' \(": {"beam": "--runner=Quick"},
            r"--beam: got 'DirectRunner', expected --OPTION=VALUE": {"beam": "DirectRunner"},
        }
    for message, arguments in refused.items():
        with pytest.raises(ConfigError, match=message):
            build.build(**{"config": config, "target": tmp_path / "out", "beam": DIRECT, **arguments})
    monkeypatch.setitem(sys.modules, "apache_beam.options.pipeline_options", None)
    words = ["--config=configs/wikitext2.py", f"--config.data.dir={tmp_path / 'text'}", f"--target={tmp_path / 'out'}"]
    assert cli.main(["data", "build", *words, f"--beam={DIRECT}"]) == 2
    assert (
        "which needs apache_beam, expected it to be installed; pip install 'jaxformer[beam]'" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
