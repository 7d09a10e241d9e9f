"""Writing checkpoint directories: what is written comes back to the byte, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_reading import CONFIG, entry, random_array

from jaxformer.config import ConfigError
from jaxformer.hf import reading, weights, writing

# Round trips


def test_every_element_type_comes_back_to_the_byte(tmp_path):
    shapes = [(3, 5), (), (0, 4), (1,)]
    arrays = {
        f"{name} {shape}": random_array(dtype, shape) for name, dtype in reading.DTYPES.items() for shape in shapes
    }
    assert len(arrays) == 19 * 4
    calls = {name: array if len(array.shape) == 1 else lambda array=array: array for name, array in arrays.items()}
    writing.write_checkpoint(tmp_path / "out", CONFIG, calls)
    assert reading.read_config(tmp_path / "out") == CONFIG
    opened = reading.open_tensors(tmp_path / "out")
    assert set(opened) == set(arrays)
    for name, tensor in opened.items():
        array, back = arrays[name], tensor.array()
        assert (tensor.dtype, tensor.shape, tensor.file) == (array.dtype, array.shape, "model.safetensors")
        assert type(back) is np.ndarray and (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()


def test_the_bytes_of_a_file_are_the_formats(tmp_path):
    tensors = {
        "b": np.array([1], np.int8),
        "a": np.array([[1.0], [2.0]], np.float32).T,
        "c": np.array([3], ">f4"),  # the file is little-endian whatever the array is
        "d": np.array(-1.0, ml_dtypes.bfloat16),
    }
    writing.write_checkpoint(tmp_path / "out", {"z": 1, "a": "é"}, tensors)
    assert (tmp_path / "out" / "config.json").read_text() == '{\n  "a": "\\u00e9",\n  "z": 1\n}\n'
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and content[8:9] == b"{"
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": entry(shape=(1, 2), offsets=(0, 8)),
        "c": entry(shape=(1,), offsets=(8, 12)),
        "d": entry("BF16", (), (12, 14)),
        "b": entry("I8", (1,), (14, 15)),
    }
    assert content[8 + length :] == bytes.fromhex("0000803f 00000040 00004040 80bf 01")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask()
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask(), path


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_shards_and_their_index(tmp_path):
    tensors = {f"t{n}": np.full(n + 1, n, np.float32) for n in range(5)}  # 4, 8, 12, 16, 20 bytes
    writing.write_checkpoint(tmp_path, CONFIG, tensors, shard_bytes=24)  # an empty directory may be there
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["config.json", reading.INDEX_FILE, *names])
    index = json.loads((tmp_path / reading.INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 60}
    assert index["weight_map"] == dict(zip(tensors, [names[n] for n in (0, 0, 0, 1, 2)]))
    opened = reading.open_tensors(tmp_path)
    assert {name: tensor.file for name, tensor in opened.items()} == index["weight_map"]
    for name, array in tensors.items():
        np.testing.assert_array_equal(opened[name].array(), array)
    with pytest.raises(KeyError):
        opened["t5"]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    writing.write_checkpoint(
        tmp_path / "out", {}, {"a": np.zeros(9, "u1"), "b": np.zeros(1, "u1"), "c": np.zeros(2, "u1")}, {}, 3
    )
    assert [t.file[:11] for t in reading.open_tensors(tmp_path / "out").values()] == [
        "model-00001", "model-00002", "model-00002",
    ]  # fmt: skip


def test_shards_may_be_links_out_of_the_directory(tmp_path):
    """Download caches keep the content elsewhere, under its hash."""
    writing.write_checkpoint(tmp_path / "out", {}, {"a": np.zeros(9, "u1"), "b": np.ones(1, "u1")}, shard_bytes=1)
    (tmp_path / "blobs").mkdir()
    for path in (tmp_path / "out").iterdir():
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    assert reading.open_tensors(tmp_path / "out")["b"].array().tolist() == [1]


# Writing is all or nothing, one shard at a time


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    arrays: list[weakref.ref] = []

    def make(n: int):
        def call() -> np.ndarray:
            assert len([ref for ref in arrays if ref() is not None]) <= 2, "400 bytes each, of shards of 900"
            array = np.full(100, n, np.float32)
            arrays.append(weakref.ref(array))
            return array

        return call

    writing.write_checkpoint(tmp_path / "out", {}, {f"t{n}": make(n) for n in range(6)}, shard_bytes=900)
    assert len(arrays) == 6  # every function is called once
    opened = reading.open_tensors(tmp_path / "out")
    assert all((opened[f"t{n}"].array() == n).all() for n in range(6))


def test_what_the_system_refuses_is_an_os_error_with_its_number(tmp_path, monkeypatch):
    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(writing, "open", full, raising=False)
    with pytest.raises(OSError) as error:
        writing.write_checkpoint(tmp_path / "out", {}, {"a": np.zeros(3)})
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_files_are_those_of_the_package(tmp_path):
    arrays = {"b": np.ones((2, 3), np.float32), 'é"': np.zeros((0, 4), np.float32), "a": np.array(3.5, np.float32)}
    lazy = {name: writing.Deferred(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}
    save_file(arrays, tmp_path / "theirs", {"format": "pt"})
    for name, tensors in (("arrays", arrays), ("deferred", lazy)):
        writing.write_checkpoint(tmp_path / name, {}, tensors)
        assert (tmp_path / name / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes(), name


def test_one_deferred_tensor_is_in_memory_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def make(n: int) -> np.ndarray:
        assert not [ref for ref in alive if ref() is not None]
        array = np.full(100, n, np.float32)
        alive.append(weakref.ref(array))
        return array

    tensors = {f"t{n}": writing.Deferred((100,), np.dtype("f4"), lambda n=n: make(n)) for n in range(4)}
    writing.write_checkpoint(tmp_path / "out", {}, tensors, shard_bytes=1200)
    assert len(alive) == 4 and len(list((tmp_path / "out").glob("*-of-00002.safetensors"))) == 2
    assert [t.array()[0] for t in reading.open_tensors(tmp_path / "out").values()] == [0, 1, 2, 3]
    wrong = {"a": writing.Deferred((3,), np.dtype("f4"), lambda: np.zeros(2, np.float32))}
    with pytest.raises(RuntimeError, match="expected float32"):
        writing.write_checkpoint(tmp_path / "wrong", {}, wrong)
    assert not (tmp_path / "wrong").exists()


def test_plain_safetensors_need_no_flax_classes(tmp_path, monkeypatch):
    """Their import takes longer than reading a small model."""
    monkeypatch.setattr(weights, "_flax_files", lambda: pytest.fail("imported the Flax classes"))
    arrays = {"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}
    for shard_bytes, files in ((99, 2), (12, 4)):  # one file, and two with an index, beside config.json
        out = tmp_path / f"{files}"
        writing.write_checkpoint(out, {}, arrays, shard_bytes=shard_bytes)
        assert len(list(out.iterdir())) == files
        assert weights.open_weights(out)["a"].array().tolist() == [1, 1, 1]


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        writing.write_checkpoint(tmp_path / "out", {}, {"a": np.zeros(3), "b": fail})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["file", "directory"])
def test_nothing_is_overwritten(tmp_path, content):
    place = tmp_path / "out"
    if content == "directory":
        place.mkdir()
        (place / "mine").write_text("mine")
    else:
        place.write_text("mine")
    with pytest.raises(ConfigError, match="expected no such directory or an empty one; name another one"):
        writing.write_checkpoint(place, {}, {"a": lambda: pytest.fail("evaluated")})
    assert (place / "mine" if content == "directory" else place).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_somebody_faster_is_not_overwritten(tmp_path):
    def meanwhile():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        return np.zeros(1)

    with pytest.raises(ConfigError, match="name another one"):
        writing.write_checkpoint(tmp_path / "out", {}, {"a": meanwhile})
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"a": object()}, {}, "config.json: got Object of type object is not JSON serializable"),
        ({"a": float("nan")}, {}, "config.json: got Out of range float"),
        ({}, {"a": np.array(["text"])}, "tensor 'a': got dtype <U4, expected one of BOOL"),
        ({}, {"a": np.array([object()])}, "tensor 'a': got dtype object"),
        ({}, {"__metadata__": np.zeros(1)}, "tensor name: got '__metadata__'"),
        ({}, {"\ud800": np.zeros(1)}, r"tensor name: got '\ud800'"),
    ],
    ids=["object", "nan", "text", "objects", "metadata", "surrogate"],
)
def test_what_cannot_be_written_is_refused(tmp_path, config, tensors, words):
    with pytest.raises(ConfigError) as caught:
        writing.write_checkpoint(tmp_path / "out", config, tensors)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_shard_has_a_size(tmp_path):
    with pytest.raises(ConfigError, match="shard_bytes: got 0, expected at least 1"):
        writing.write_checkpoint(tmp_path / "out", {}, {}, shard_bytes=0)
