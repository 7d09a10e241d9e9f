"""Reading checkpoint directories: lazily, and damaged or hostile ones are refused in a line."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError
from jaxformer.hf import reading, writing

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT.parent / "shared" / "hf_goldens"
CONFIG = {"model_type": "toy", "layers": 2, "names": {"é": [1, None, 0.5]}}


def fuzzer():
    spec = importlib.util.spec_from_file_location("fuzz_safetensors", ROOT / "benchmarks" / "fuzz_safetensors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = fuzzer()


def tensor_file(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file put together by hand; returns its directory."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)
    return path.parent


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def refused(directory: Path, *words: str) -> str:
    """The message with which a checkpoint is refused: one line of the form what: got, expected; do."""
    with pytest.raises(ConfigError) as caught:
        reading.open_tensors(directory)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    for word in (": got ", ", expected ", "; ", *words):
        assert word in message, message
    return message


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every bit pattern of a type is possible, NaNs with payloads included; a truth value is 0 or 1."""
    raw = np.random.default_rng(seed).integers(0, 256, dtype.itemsize * int(np.prod(shape)), np.uint8)
    return (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


# Laziness


def test_opening_reads_headers_only(tmp_path):
    """A file of 1 TB that has only holes on the disk opens at once, and slices of it are read alone."""
    size = 2**40
    directory = tensor_file(tmp_path / "model.safetensors", {"x": entry("U8", (2**20, 2**20), (0, size))})
    with open(directory / "model.safetensors", "r+b") as file:
        begin = file.seek(0, os.SEEK_END)
        try:
            file.truncate(begin + size)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
        file.seek(begin + 3)
        file.write(b"\x07")
    array = reading.open_tensors(directory)["x"].array()
    assert array.shape == (2**20, 2**20) and array[0, :5].tolist() == [0, 0, 0, 7, 0]


def test_arrays_are_read_only_views_of_the_file_and_may_be_misaligned(tmp_path):
    values = np.array([1.5, -2.0], np.float32)
    header = {"odd": entry("U8", (1,), (0, 1)), "x": entry(offsets=(1, 9))}
    directory = tensor_file(tmp_path / "model.safetensors", header, b"\x01" + values.tobytes())
    tensor = reading.open_tensors(directory)["x"]
    one, other = tensor.array(), tensor.array()
    np.testing.assert_array_equal(one, values)
    assert np.shares_memory(one, other) and not one.flags.writeable and not one.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 0
    with pytest.raises(ValueError):
        one.flags.writeable = True


# Refusals of a file

HUGE = "9" * 4000
HEADERS = {
    "array": (b"[1]", "expected struct HashMetadata"),
    "space first": (b' {"a": 1}', "expected struct TensorInfo"),
    "empty": (b"", "EOF while parsing"),
    "not JSON": (b"{nonsense", "key must be a string"),
    "two objects": (b"{}{}", "trailing characters"),
    "not UTF-8": (b'{"\xff": 1}', "invalid UTF-8 in header"),
    "deep": (b'{"a":' + b"[" * 200_000, "recursion limit exceeded"),
    "a number of too many digits": (b'{"a": ' + b"9" * 5000 + b"}", "number out of range"),
    "NaN": (b'{"a": NaN}', "invalid JSON in header"),
    "tensor twice": (f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry())}}}'.encode(), "'w' twice"),
    "key twice": (b'{"w": {"dtype": "F32", "dtype": "F32"}}', "duplicate field `dtype`"),
    "metadata": ({"__metadata__": {"format": 1}}, "expected a string"),
    "metadata list": ({"__metadata__": ["pt"]}, "expected a map"),
    "half a surrogate pair": ({"\ud800": entry()}, "unexpected end of hex escape"),
    "not an entry": ({"w": 3}, "expected struct TensorInfo"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, "missing field `dtype`"),
    "more": ({"w": entry(stride=1)}, "tensor 'w': entry"),
    "dtype": ({"w": entry("F33")}, "unknown variant `F33`"),
    "dtype of half bytes": ({"w": entry("F4", (16,))}, "dtype: got 'F4'"),
    "dtype a list": ({"w": entry(["F32"])}, "invalid type: sequence"),
    "shape a number": ({"w": entry() | {"shape": 2}}, "expected a sequence"),
    "negative": ({"w": entry(shape=(-2,))}, "integer `-2`"),
    "two negatives": ({"w": entry(shape=(-2, -1))}, "integer `-2`"),
    "float": ({"w": entry(shape=(2.0,))}, "floating point `2.0`"),
    "truth": ({"w": entry(shape=(True, 2))}, "boolean `true`"),
    "huge axis": ({"w": entry(shape=(int(HUGE),))}, "number out of range"),
    "product": ({"w": entry(shape=(2**32, 2**32))}, "overflow computing buffer size"),
    "product that wraps to 8 bytes": ({"w": entry(shape=(2**62 + 2,))}, "overflow computing buffer size"),
    "product with a zero": (
        {"v": entry(), "w": entry(shape=(0, 2**62, 2**62), offsets=(8, 8))},
        "expected at most 32 axes",
    ),
    "rank": ({"w": entry(shape=(1,) * 31 + (2, 1))}, "expected at most 32 axes"),
    "long rank": ({"w": entry(shape=(2,) * 100_000)}, "overflow computing buffer size"),
    "offsets": ({"w": entry(offsets=(0,))}, "expected a tuple of size 2"),
    "float offsets": ({"w": entry(offsets=(0.0, 8))}, "floating point `0.0`"),
    "reversed": ({"w": entry(offsets=(8, 0))}, "invalid offset for tensor `w`"),
    "negative offset": ({"w": entry(offsets=(-8, 0))}, "integer `-8`"),
    "out of range": ({"w": entry(shape=(4,), offsets=(0, 16))}, "not fully covered"),
    "huge offset": ({"w": entry(offsets=(0, 2**80))}, "expected usize"),
    "other size": ({"w": entry(shape=(3,))}, "invalid shape, data type, or offset"),
    "overlap": ({"v": entry(shape=(1,), offsets=(0, 4)), "w": entry()}, "invalid offset for tensor `w`"),
    "the same": ({"v": entry(), "w": entry()}, "invalid offset for tensor"),
    "nothing inside": ({"v": entry(), "w": entry(shape=(0,), offsets=(4, 4))}, "invalid offset for tensor `w`"),
    "hole first": ({"w": entry(shape=(1,), offsets=(4, 8))}, "invalid offset for tensor `w`"),
    "hole last": ({"w": entry(shape=(1,), offsets=(0, 4))}, "not fully covered"),
    "nothing there": ({}, "not fully covered"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_refused(tmp_path, name):
    header, words = HEADERS[name]
    refused(tensor_file(tmp_path / "model.safetensors", header, bytes(8)), "model.safetensors", words)


def test_the_file_of_those_refusals_is_fine_by_itself(tmp_path):
    directory = tensor_file(tmp_path / "model.safetensors", {"w": entry()}, bytes(8))
    assert reading.open_tensors(directory)["w"].array().tolist() == [0, 0]
    directory = tensor_file(tmp_path / "empty" / "model.safetensors", {})
    assert len(reading.open_tensors(directory)) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got header too small"),
        (b"\x02\0\0\0\0\0\0", "got header too small"),
        (b"\x03\0\0\0\0\0\0\0{}", "a header of 3 bytes, expected at most 2"),
        (b"\xff" * 8 + b"{}", "a header of 18446744073709551615 bytes"),
    ],
)
def test_a_length_is_refused(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors", words)


def test_a_header_over_the_bound_is_refused_unread(tmp_path):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write((reading.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
        file.truncate(2 * reading.MAX_HEADER_BYTES)
    refused(tmp_path, f"a header of {reading.MAX_HEADER_BYTES + 1} bytes, expected at most {reading.MAX_HEADER_BYTES}")


def test_every_truncation_is_refused(tmp_path):
    writing.write_checkpoint(tmp_path / "out", {}, {"a": np.ones(2, np.float32), "b": np.ones(1, ml_dtypes.bfloat16)})
    path = tmp_path / "out" / "model.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.unlink()
        path.write_bytes(content[:size])
        refused(path.parent, "model.safetensors")


# Refusals of a directory


def test_pickles_are_refused(tmp_path):
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path, name, "runs the code in it when it is loaded", "safe_serialization=True")
    tensor_file(tmp_path / "model.safetensors", {})
    assert not reading.open_tensors(tmp_path)


def test_a_directory_without_a_checkpoint(tmp_path):
    refused(tmp_path, "got neither model.safetensors nor model.safetensors.index.json")
    refused(tmp_path / "absent", "expected a local directory; download the checkpoint first")
    with pytest.raises(ConfigError, match="got 'org/model', expected a local directory"):
        reading.read_config("org/model")


def test_what_is_no_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to("blobs/absent")
    refused(tmp_path, "got no such file")
    path.unlink()
    path.symlink_to(path.name)
    refused(tmp_path, "model.safetensors: got ")
    path.unlink()
    path.mkdir()
    refused(tmp_path, "expected a regular file")
    path.rmdir()
    os.mkfifo(path)  # opening one would wait for ever
    refused(tmp_path, "expected a regular file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "config.json: got [], expected a JSON object"),
        (b"", "config.json: got Expecting value"),
        (b"\xef\xbb\xbf{}", "config.json: got Unexpected UTF-8 BOM"),
        (b"\xff\xfe{\0}\0", "config.json: got 'utf-8' codec can't decode"),
        (b'{"a": 1, "a": 2}', "config.json: got 'a' twice"),
        (b'{"b": {"a": 1, "a": 1}}', "config.json: got 'a' twice"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b"[" * 100_000, "config.json: got "),
        (None, "config.json: got no such file"),
    ],
)
def test_a_config_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        reading.read_config(tmp_path)
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_a_config_has_a_bound(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="got 1,099,511,627,776 bytes, expected at most 16,777,216"):
        reading.read_config(tmp_path)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index(directory: Path, content) -> Path:
    (directory / reading.INDEX_FILE).write_text(
        content if isinstance(content, str) else json.dumps({"weight_map": content})
    )
    return directory


@pytest.fixture
def sharded(tmp_path):
    """Two shards that hold a and b."""
    tensor_file(tmp_path / ONE, {"a": entry()}, bytes(8))
    tensor_file(tmp_path / TWO, {"b": entry()}, bytes(8))
    return index(tmp_path, {"a": ONE, "b": TWO})


def test_the_shards_of_those_refusals_are_fine(sharded):
    assert {name: tensor.file for name, tensor in reading.open_tensors(sharded).items()} == {"a": ONE, "b": TWO}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "got [], expected a JSON object"),
        ("{}", "got weight_map None"),
        ('{"weight_map": ["a"]}', "got weight_map ['a']"),
        ({}, "got weight_map {}"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "got 'a' twice"),
        ({"a": 1}, "got file 1 for tensor 'a'"),
        ({"a": None}, "got file None for tensor 'a'"),
        ({"a": "pytorch_model.bin"}, "got file 'pytorch_model.bin' for tensor 'a'"),
        ({"a": "x" * 300 + ".safetensors"}, "got file 'xxx"),
        *(
            ({"a": ONE, "b": name}, "expected the name of a .safetensors file beside it")
            for name in (
                f"../{ONE}", f"/tmp/{ONE}", f"sub/{ONE}", f"./{ONE}", f"..\\{ONE}", f"C:{ONE}", f"\0{ONE}", f"\n{ONE}",
                f"\ud800{ONE}", "..", ".", "", ".safetensors", "...safetensors",
            )
        ),
        ({"a": ONE, "b": "other.safetensors"}, "other.safetensors: got no such file"),
        ({"a": ONE, "b": TWO, "c": TWO}, f"{TWO}: got no tensor 'c'"),
        ({"a": ONE, "b": ONE}, f"{ONE}: got no tensor 'b'"),
        ({"a": TWO, "b": TWO}, f"{TWO}: got no tensor 'a'"),
        ({"a": ONE, "c": TWO}, f"got no file for tensor 'b' of {TWO}"),
    ],
    ids=lambda x: repr(x)[:60],
)  # fmt: skip
def test_an_index_is_refused(sharded, content, words):
    refused(index(sharded, content), words)


def test_a_tensor_in_two_shards_is_refused(sharded):
    tensor_file(sharded / TWO, {"a": entry(offsets=(8, 16)), "b": entry()}, bytes(16))
    refused(sharded, f"{TWO}: got tensor 'a', expected it in {ONE} alone")
    (sharded / ONE).unlink()
    (sharded / ONE).symlink_to(TWO)  # the same file under both names
    refused(sharded, "alone, as")


def test_a_damaged_shard_is_refused(sharded):
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    refused(sharded, f"{TWO}: got incomplete metadata, file not fully covered")


# Anything else


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return fuzz.checkpoints(tmp_path_factory.mktemp("fuzz"))


@given(st.integers(0, 1), st.data())
@settings(max_examples=60, deadline=None)
def test_no_damage_is_unexpected(small, which, data):
    """Whatever one file holds: a ConfigError of one line, or exactly what a reader without checks finds in it."""
    directory = small[which]
    name = data.draw(st.sampled_from(sorted(path.name for path in directory.iterdir())))
    content = (directory / name).read_bytes()
    if data.draw(st.booleans(), label="drawn bytes"):
        changed = bytearray(content)
        for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))):
            changed[at] = value
        content = bytes(changed[: data.draw(st.integers(0, len(changed)) | st.just(len(changed)))])
    else:
        content = fuzz.mutate(content, random.Random(data.draw(st.integers(0, 2**32))))
    outcome, words = fuzz.attempt(directory, name, content)
    assert outcome in ("opened", "refused"), words


def test_the_fuzzer_runs_and_can_fail(small, capsys, monkeypatch):
    assert fuzz.main(["--seconds=0.3", "--seed=1"]) == 0
    assert " 0 unexpected" in capsys.readouterr().out
    good = (small[0] / reading.WEIGHTS_FILE).read_bytes()
    assert fuzz.attempt(small[0], reading.WEIGHTS_FILE, good) == ("opened", "")
    wrong = lambda path, name, entry, data: reading.Tensor(name, (1,), np.dtype("u1"), path.name, data[:1])  # noqa: E731
    monkeypatch.setattr(reading, "_tensor", wrong)
    assert fuzz.attempt(small[0], reading.WEIGHTS_FILE, good)[0] == "UNEXPECTED"
    monkeypatch.setattr(fuzz, "problem", lambda directory: "the bytes differ")
    assert fuzz.main(["--seconds=0.1"]) == 1
    assert "the bytes differ" in capsys.readouterr().err


CHECKPOINTS = sorted(path.parent for path in GOLDENS.glob("*/model.safetensors"))


@pytest.mark.skipif(not CHECKPOINTS, reason="no checkpoints in ../shared/hf_goldens")
@pytest.mark.parametrize("again", [False, True], ids=["opened", "written again"])
def test_real_checkpoints_come_back_to_the_byte(tmp_path, again):
    for directory in CHECKPOINTS[:: 8 if again else 1]:
        config, tensors = reading.read_config(directory), reading.open_tensors(directory)
        assert config["model_type"] and tensors, directory.name
        expected = fuzz.trusting(directory / reading.WEIGHTS_FILE)
        if again:
            size = sum(len(content) for _, _, content in expected.values()) // 2
            lazy = {name: tensor.array for name, tensor in tensors.items()}
            writing.write_checkpoint(tmp_path / directory.name, config, lazy, shard_bytes=size)
            tensors = reading.open_tensors(tmp_path / directory.name)
            assert reading.read_config(tmp_path / directory.name) == config
            assert len({tensor.file for tensor in tensors.values()}) > 1
        assert set(tensors) == set(expected)
        for name, (dtype, shape, content) in expected.items():
            tensor = tensors[name]
            assert (tensor.dtype, list(tensor.shape)) == (reading.DTYPES[dtype], shape)
            assert tensor.array().tobytes() == content


def test_released_pages_come_back(tmp_path):
    """Giving pages back changes no value, not even a neighbour's on the same page."""
    arrays = {
        name: np.random.default_rng(i).normal(size=size) for i, (name, size) in enumerate([("a", 5), ("b", 5000)])
    }
    writing.write_checkpoint(tmp_path / "out", {}, arrays)
    tensors = reading.open_tensors(tmp_path / "out")
    for name in ("b", "a", "b"):
        np.testing.assert_array_equal(tensors[name].array(), arrays[name])
        tensors[name].release()
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].array(), array)
