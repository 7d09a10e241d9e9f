"""`pytorch_model.bin` is read as data: tensors come out as they went in, and a pickle that names more is refused."""

import collections
import io
import json
import pickle
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxformer.errors import ConfigError
from jaxformer.hf import weights
from jaxformer.hf.flax import torch_files

KINDS = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


class Stored:
    """A storage that a pickle refers to by a persistent id."""

    def __init__(self, key, array):
        self.key, self.array = key, array


@pytest.fixture
def torch(monkeypatch):
    """Modules with the names that torch's files refer to; the functions fail if anything calls them."""

    def fail(*arguments):
        raise AssertionError("a function of the file was called")

    fake, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in KINDS.values():
        setattr(fake, name, type(name, (), {"__module__": "torch"}))
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        function = types.FunctionType(fail.__code__, fail.__globals__, name)
        function.__module__, function.__qualname__ = "torch._utils", name
        setattr(utils, name, function)
    fake._utils = utils
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return fake


def pickler(torch, stored, legacy=False, protocol=2):
    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            if not isinstance(item, Stored):
                return None
            kind = getattr(torch, KINDS[item.array.dtype.name])
            return ("storage", kind, item.key, "cpu", item.array.size, *([None] if legacy else []))

        def reducer_override(self, item):
            if not isinstance(item, np.ndarray):
                return NotImplemented
            base = item if item.base is None else item.base  # transposed views share a storage
            key = next((k for k, s in stored.items() if s.array is base), str(len(stored)))
            whole = stored.setdefault(key, Stored(key, base))
            offset = (item.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // item.itemsize
            strides = tuple(step // item.itemsize for step in item.strides)
            hooks = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (whole, offset, item.shape, strides, False, hooks)

    return lambda stream: Pickler(stream, protocol)


def write_zip(path, torch, state, protocol=2, compression=zipfile.ZIP_STORED):
    stored, stream = {}, io.BytesIO()
    pickler(torch, stored, protocol=protocol)(stream).dump(state)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, item in stored.items():
            archive.writestr(f"archive/data/{key}", item.array.tobytes())


def write_legacy(path, torch, state):
    stored, stream = {}, io.BytesIO()
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    for value in (torch_files.LEGACY_MAGIC, 1001, system):
        pickle.dump(value, stream, 2)
    pickler(torch, stored, legacy=True)(stream).dump(state)
    pickle.dump(list(stored), stream, 2)
    for item in stored.values():
        stream.write(np.int64(item.array.size).tobytes() + item.array.tobytes())
    path.write_bytes(stream.getvalue())


def a_state():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(4, 6)).astype(np.float32)
    state = collections.OrderedDict(
        weight=whole,
        turned=whole.T,
        part=whole[1:3, 2:],
        half=rng.normal(size=(3,)).astype(np.float16),
        brain=rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16),
        ids=np.arange(5, dtype=np.int64)[None],
    )
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    return state


def test_a_model_of_this_project_is_read_from_it(torch, tmp_path):
    state = a_state()
    write_zip(tmp_path / "pytorch_model.bin", torch, state)
    (tmp_path / "flax_model.msgpack").write_bytes(b"later in the order")
    found = weights.open_weights(tmp_path)
    assert list(found) == list(state)
    np.testing.assert_array_equal(found["turned"].array(), state["turned"])
    save_file({"weight": np.zeros(1)}, tmp_path / "model.safetensors")
    assert list(weights.open_weights(tmp_path)) == ["weight"]
    save_file({"a.kernel": np.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors", {"format": "flax"})
    np.testing.assert_array_equal(weights.open_weights(tmp_path)["a.weight"].array(), np.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize("write", [write_zip, write_legacy], ids=["zip", "legacy"])
def test_tensors_come_out_as_they_went_in(write, torch, tmp_path):
    state = a_state()
    write(tmp_path / "pytorch_model.bin", torch, state)
    found = torch_files.open_bins(tmp_path)
    assert list(found) == list(state)
    for name, value in state.items():
        got = found[name].array()
        assert got.dtype == value.dtype and got.shape == value.shape
        np.testing.assert_array_equal(got, value)


def test_a_pickle_of_a_newer_protocol_is_read(torch, tmp_path):
    write_zip(tmp_path / "pytorch_model.bin", torch, a_state(), protocol=4)
    np.testing.assert_array_equal(torch_files.open_bins(tmp_path)["part"].array(), a_state()["part"])


def test_shards_are_read_and_names_outside_the_directory_refused(torch, tmp_path):
    state = a_state()
    first = {"weight": state["weight"]}
    write_zip(tmp_path / "pytorch_model-00001-of-00002.bin", torch, first)
    write_zip(tmp_path / "pytorch_model-00002-of-00002.bin", torch, {"half": state["half"]})
    files = {"weight": "pytorch_model-00001-of-00002.bin", "half": "pytorch_model-00002-of-00002.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert set(torch_files.open_bins(tmp_path)) == {"weight", "half"}
    index.write_text(json.dumps({"weight_map": {"weight": "../pytorch_model.bin"}}))
    with pytest.raises(ConfigError, match="expected a .bin file beside it"):
        torch_files.open_bins(tmp_path)


class Reduces:
    """Pickles to a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(path):
    """Pickles that would write a file, by the opcodes that can call something."""
    write = f"open({str(path)!r}, 'w').close()"
    text = write.encode()
    return {
        "reduce": pickle.dumps({"weight": Reduces(exec, write)}, 2),
        "stack_global": pickle.dumps({"weight": Reduces(exec, write)}, 4),
        "getattr": pickle.dumps({"weight": Reduces(getattr, "text", "upper")}, 4),
        "inst": b"(S'" + write.replace("'", '"').encode() + b"'\nibuiltins\nexec\n.",
        "obj": b"(cbuiltins\nexec\nV" + text + b"\no.",
        "newobj": b"\x80\x02cbuiltins\nexec\nV" + text + b"\n\x85\x81.",
        "build": b"\x80\x02ccollections\nOrderedDict\n)R\x8c\x01xbb.",
        "ext": b"\x80\x02\x82\x01.",
        "no_end": b"\x80\x02}",
        "no_dict": pickle.dumps([1, 2], 2),
        "no_tensor": pickle.dumps({"weight": 3}, 2),
    }


@pytest.mark.parametrize("name", hostile("x"))
@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_a_pickle_that_names_more_is_refused_and_nothing_is_run(name, layout, tmp_path):
    made = tmp_path / "made"
    content, path = hostile(made)[name], tmp_path / "pytorch_model.bin"
    if layout == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", content)
    else:
        system = {"little_endian": True}
        path.write_bytes(b"".join(pickle.dumps(v, 2) for v in (torch_files.LEGACY_MAGIC, 1001, system)) + content)
    with pytest.raises(ConfigError) as error:
        torch_files.open_bins(tmp_path)
    assert not made.exists()
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_tensors_beyond_their_storage_and_damaged_files_are_refused(torch, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_zip(path, torch, {"weight": np.ones((4, 4), np.float32)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match="an archive that torch does not write"):
        torch_files.open_bins(tmp_path)
    write_zip(path, torch, {"weight": np.ones((4, 4), np.float32)})
    content = path.read_bytes()
    for damaged in (content.replace(b"K\x04K\x04\x86", b"K\x04K\x09\x86"), content[:-60], b"", b"\x80"):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(ConfigError):
            torch_files.open_bins(tmp_path)
