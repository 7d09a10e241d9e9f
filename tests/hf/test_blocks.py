"""Copies by blocks equal plain copies, a part that devices share is read once, and damage in a block is noticed."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxformer.config import ConfigError, MeshConfig
from jaxformer.hf import blocks, convert, reading, writing
from jaxformer.hf.table import Row
from jaxformer.parallel import mesh as meshes


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few numbers, and threads for any copy."""
    for name, value in (("BLOCK_BYTES", 64), ("MIN_ROWS", 2), ("MAX_ROWS", 5), ("MIN_THREADED_BYTES", 1)):
        monkeypatch.setattr(blocks, name, value)
    monkeypatch.setattr(blocks.os, "sched_getaffinity", lambda pid: range(3))


SHAPES = ((), (0, 3), (1, 40), (40, 1), (7, 11), (5, 6, 7), (3, 1, 9, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_the_whole_in_every_order_of_axes(small, shape):
    base = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for axes in itertools.permutations(range(len(shape))):
        view = base.transpose(axes)
        if view.size:
            assert sum(old.size for old, _ in blocks.pairs(view, np.empty(view.shape, np.float32))) == view.size
        for dtype in (np.float32, ml_dtypes.bfloat16):
            got = blocks.contiguous(view, np.dtype(dtype))
            assert got.flags.c_contiguous and got.dtype == dtype
            np.testing.assert_array_equal(got, view.astype(dtype))
    strided = np.arange(2 * base.size + 5, dtype=np.float32)[5::2].reshape(shape)[..., None]
    np.testing.assert_array_equal(blocks.contiguous(strided.swapaxes(0, -1)), strided.swapaxes(0, -1))


def test_a_large_matrix_has_several_blocks():
    matrix = np.broadcast_to(np.float32(0), (1000, 3000))
    for view in (matrix, np.empty((3000, 1000), np.float32).T):
        sizes = [old.nbytes for old, _ in blocks.pairs(view, np.empty(view.shape, np.float32))]
        assert len(sizes) > 10 and max(sizes) <= 2 * blocks.BLOCK_BYTES


def test_the_first_error_is_raised(small):
    seen = []

    def function(n):
        seen.append(n)
        if n in (2, 4):
            raise ValueError(n)

    with pytest.raises(ValueError, match="2"):
        blocks.in_threads(function, range(6), 100)
    assert set(seen) >= {0, 1, 2}


TENSORS = {f"h.{i}.weight": np.arange(48, dtype=np.float32).reshape(6, 8) + 100 * i for i in range(4)}
ROW = Row("h.{layer}.weight", "blocks/kernel", "(H K) D -> D H K", {"H": 2, "K": 3})
SHAPES_OF = {"blocks": {"kernel": jax.ShapeDtypeStruct((4, 8, 2, 3), np.float32)}}
EXPECTED = np.stack([x.reshape(2, 3, 8).transpose(2, 0, 1) for x in TENSORS.values()])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_tensors_are_read_in_blocks_and_written_back(small, tmp_path, dtype):
    writing.write_checkpoint(tmp_path / "out", {}, {name: x.astype(dtype) for name, x in TENSORS.items()})
    params = convert.import_params([ROW], reading.open_tensors(tmp_path / "out"), SHAPES_OF)
    kernel = params["blocks"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel, EXPECTED.astype(dtype))
    writing.write_checkpoint(tmp_path / "again", {}, convert.export_tensors([ROW], params, dtype))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files[0] == files[1]


def test_a_part_that_devices_share_is_read_once(small, tmp_path, monkeypatch):
    writing.write_checkpoint(tmp_path / "out", {}, TENSORS)
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    spec = jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    sharding = {"blocks": {"kernel": jax.NamedSharding(mesh, spec)}}
    copied, released = [], []
    copy = convert._copy
    monkeypatch.setattr(convert, "_copy", lambda source, *rest: copied.append(source.size) or copy(source, *rest))
    release = reading.Tensor._release
    monkeypatch.setattr(
        reading.Tensor, "_release", lambda self, begin, end: released.append(self.name) or release(self, begin, end)
    )
    params = convert.import_params([ROW], reading.open_tensors(tmp_path / "out"), SHAPES_OF, sharding)
    kernel = params["blocks"]["kernel"]
    np.testing.assert_array_equal(kernel, EXPECTED)
    assert copied == [12] * 16 and set(released) == set(TENSORS)  # 4 layers x 4 parts, each half of two axes
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 4, 1, 3)}
    np.testing.assert_array_equal(convert.export_tensors([ROW], params)["h.2.weight"](), TENSORS["h.2.weight"])


def test_parameters_and_their_file_are_apart(small, tmp_path):
    plain = Row("h.{layer}.weight", "blocks/kernel")  # no change of axes, so that a view of the file would do
    shapes = {"blocks": {"kernel": jax.ShapeDtypeStruct((4, 6, 8), np.float32)}}
    expected = np.stack(list(TENSORS.values()))
    for pad in range(8):  # the data begin where a CPU device would take them over without a copy
        metadata = {"pad": "-" * 8 * pad}
        writing.write_checkpoint(tmp_path / f"{pad}", {}, TENSORS, metadata)
        tensors = reading.open_tensors(tmp_path / f"{pad}")
        if tensors["h.0.weight"].content.ctypes.data % 64 == 0:
            break
    else:
        pytest.fail("no header of a multiple of 64 bytes")
    file = tmp_path / f"{pad}" / "model.safetensors"
    content = file.read_bytes()
    kernel = convert.import_params([plain], tensors, shapes)["blocks"]["kernel"]
    updated = jax.jit(lambda x: x + 1, donate_argnums=0)(kernel)  # an update in place
    np.testing.assert_array_equal(updated, expected + 1)
    assert file.read_bytes() == content
    kernel = convert.import_params([plain], tensors, shapes)["blocks"]["kernel"]
    with file.open("r+b") as opened:
        opened.write(b"\xff" * len(content))
        opened.flush()
        np.testing.assert_array_equal(kernel, expected)
        opened.truncate(0)
    file.unlink()
    np.testing.assert_array_equal(kernel, expected)


def test_a_bad_number_in_any_block_is_noticed(small, tmp_path, caplog):
    for place in ((0, 0), (3, 4), (5, 7)):
        broken = TENSORS["h.1.weight"].copy()
        broken[place] = np.nan
        out = tmp_path / f"nan-{place}"
        writing.write_checkpoint(out, {}, TENSORS | {"h.1.weight": broken})
        with pytest.raises(ConfigError, match="got 1 of 48 values of h.1.weight that are NaN"):
            convert.import_params([ROW], reading.open_tensors(out), SHAPES_OF)
    large = {name: x.copy() for name, x in TENSORS.items()}
    large["h.0.weight"][:] = 3e38  # whose sum is infinite
    large["h.3.weight"][5, 7] = -np.inf
    writing.write_checkpoint(tmp_path / "large", {}, large)
    params = convert.import_params([ROW], reading.open_tensors(tmp_path / "large"), SHAPES_OF)
    assert float(params["blocks"]["kernel"][0].max()) == np.float32(3e38)
    assert [record.args[1] for record in caplog.records] == ["h.3.weight"]
