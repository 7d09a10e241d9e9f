"""Meshes: sizes, slices, and what is refused before anything is allocated."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DcnConfig,
    EmbedConfig,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    NormConfig,
    RecurrentConfig,
    StackConfig,
    TaskConfig,
    checks,
)
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules


@dataclasses.dataclass(frozen=True)
class Device:
    """What `create_hybrid_device_mesh` reads of a device."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@dataclasses.dataclass(frozen=True, eq=False)
class Chip(Device):
    """What JAX reads of a TPU's chip when it orders a slice, and when it describes a mesh of them."""

    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    client: None = None


def devices(slices: int, processes: int, each: int) -> list[Device]:
    count = slices * processes * each
    return [Device(i, i // (processes * each), i // each) for i in range(count)]


def test_an_axis_across_slices_is_the_only_one_that_leaves_a_slice():
    config = MeshConfig(data=2, fsdp=-1, dcn=DcnConfig(data=-1))
    found = meshes.multi_slice_devices(config, devices(slices=4, processes=2, each=2))
    assert found.shape == (1, 8, 2, 1, 1, 1)
    slice_of = np.vectorize(lambda device: device.slice_index)(found)[0, :, :, 0, 0, 0]
    assert (slice_of == slice_of[:, :1]).all(), "fsdp stays within a slice"
    assert slice_of[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3], "data runs through a slice before it leaves it"


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(data=2, fsdp=2, dcn=DcnConfig(data=4)),
        MeshConfig(data=2, fsdp=2, dcn=DcnConfig(fsdp=4)),
        MeshConfig(data=1, fsdp=2, tensor=2, dcn=DcnConfig(stage=2, fsdp=2)),
    ],
)
def test_the_slice_of_every_device_follows_from_the_sizes(config):
    found = meshes.multi_slice_devices(config, devices(slices=4, processes=1, each=4))
    slice_of = np.vectorize(lambda device: device.slice_index)(found).reshape(-1)
    assert meshes.slice_numbers(config, found.shape).tolist() == slice_of.tolist()
    assert config.slices == 4 and meshes.merge_slices(config).slices == 1
    assert tuple(meshes.axis_sizes(meshes.merge_slices(config), 16).values()) == found.shape


def test_a_mesh_that_does_not_follow_the_torus_is_laid_out_all_the_same():
    places = [(x, y, 0) for y in range(16) for x in range(16)]
    chips = [Chip(i, 0, i // 8, "tpu", "TPU v6 lite", place) for i, place in enumerate(places)]
    mesh = meshes.make(MeshConfig(data=1, fsdp=32, expert=8), chips)
    assert {name: size for name, size in mesh.shape.items() if size > 1} == {"fsdp": 32, "expert": 8}
    assert sorted(chip.id for chip in mesh.devices.flat) == list(range(256))


def test_without_slices_a_process_is_taken_for_one():
    config = MeshConfig(data=1, tensor=4, dcn=DcnConfig(data=2))
    found = meshes.multi_slice_devices(config, devices(slices=1, processes=2, each=4))
    process = np.vectorize(lambda device: device.process_index)(found)[0, :, 0, 0, 0, :]
    assert process.tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3), "mesh: got data 3, expected a product of 8 devices"),
        (MeshConfig(fsdp=16), "mesh: got data -1 x fsdp 16, expected a product of 8 devices"),
        (
            MeshConfig(dcn=DcnConfig(data=2)),
            "mesh.dcn: got data 2, expected a product of 1 slices",
        ),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(config, message):
    with pytest.raises(ConfigError, match=f"^config.{message}; change the mesh$"):
        meshes.make(config)


def test_several_slices_need_their_own_sizes():
    with pytest.raises(ConfigError, match="config.mesh.dcn: got 1, expected a product of 2 slices"):
        meshes.make(MeshConfig(), devices(slices=2, processes=1, each=4))


def config_of(mesh: MeshConfig, model: ModelConfig | None = None, **edits) -> Config:
    stack = StackConfig(width=48, embed=EmbedConfig(vocab=32), attention=AttentionConfig(heads=8), **edits)
    task = TaskConfig(name="language_modelling" if model is None else "none")
    return Config(model=model or ModelConfig(decoder=stack), mesh=mesh, task=task)


REFUSED = [
    (
        config_of(MeshConfig(stage=3)),
        "decoder.layers: got 4, expected a multiple of mesh.stage (3); change",
    ),
    (config_of(MeshConfig(tensor=16)), "decoder.attention.heads: got 8, expected a multiple of mesh.tensor (16)"),
    (
        config_of(MeshConfig(tensor=8), ffn=FeedForwardConfig(width=20)),
        "decoder.ffn.width: got 20, expected",
    ),
    (config_of(MeshConfig(fsdp=5)), "decoder.width: got 48, expected a multiple of mesh.fsdp (5)"),
    (config_of(MeshConfig(tensor=64)), "decoder.embed.vocab: got 32, expected a multiple of mesh.tensor (64)"),
    (config_of(MeshConfig(fsdp=4, dcn=DcnConfig(fsdp=3))), "config.data.batch: got 32, expected a multiple of 12"),
    (config_of(MeshConfig(data=64)), "config.data.batch: got 32, expected a multiple of 64"),
    (
        config_of(MeshConfig(stage=2), microbatches=3),
        "decoder.microbatches: got 3, expected a multiple",
    ),
    (config_of(MeshConfig(stage=2), norm=NormConfig(kind="batch")), "decoder.norm.kind: got 'batch'"),
    (
        config_of(MeshConfig(stage=2), ModelConfig(recurrent_decoder=RecurrentConfig())),
        "config.mesh.stage: got 2, expected 1 for a recurrent model, which has no pipeline",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_a_mesh_does_not_divide_is_refused_in_one_line(config, message):
    with pytest.raises(ConfigError) as error:
        checks.check(config)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_key_heads_fewer_than_the_axis_may_stay_whole():
    stack = StackConfig(width=48, embed=EmbedConfig(vocab=32), attention=AttentionConfig(heads=8, kv_heads=2))
    config = dataclasses.replace(config_of(MeshConfig(tensor=8)), model=ModelConfig(decoder=stack))
    checks.check(config)


def test_an_array_is_spread_over_one_more_axis_where_it_divides():
    mesh = meshes.make(MeshConfig(data=2, fsdp=2, tensor=2))
    place = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    spread = lambda *shape: rules.shard_over_axis(place, shape, "data").spec  # noqa: E731
    assert spread(4, 8, 8) == PartitionSpec("data", "fsdp", "tensor")
    assert spread(3, 8, 8) == PartitionSpec(None, ("fsdp", "data"), "tensor")
    assert spread(3, 2, 2) == PartitionSpec(None, "fsdp", "tensor")
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), {}),
        (MeshConfig(fsdp=2, tensor=2), {"fsdp": 2, "tensor": 2}),
        (MeshConfig(data=2, fsdp=-1, context=4), {"data": 2, "context": 4}),
        (MeshConfig(data=4, fsdp=4), {}),  # more than the eight there are
        (MeshConfig(fsdp=2, dcn=DcnConfig(data=2)), {"data": 2, "fsdp": 2}),  # those of two slices, on one
        (MeshConfig(fsdp=8, dcn=DcnConfig(data=2)), {}),
    ],
)
def test_other_work_than_training_takes_the_smallest_mesh(config, shape):
    assert {axis: size for axis, size in meshes.smallest_mesh(config).shape.items() if size > 1} == shape


def test_vocabularies_are_divided_over_the_tensor_axis():
    assert rules.spec(("vocab", "table"))[0] == "tensor"
    assert rules.spec(("embed", "vocab"))[1] == "tensor"
