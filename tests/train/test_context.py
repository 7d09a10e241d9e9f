"""Training on sequences that are divided over devices equals training on one device."""

import dataclasses
import types

import builders
import jax
import numpy as np
import pytest
from flax import linen as nn
from test_step import SMALL, begin

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    HeadConfig,
    MeshConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
)
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.train import optim, step
from jaxformer.types import Batch

ROWS, LENGTH, STEPS = 4, 16, 3


def batches() -> list[Batch]:
    """Packed rows, one of them with padding at its end."""

    def one(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        rows = [builders.packed(rng, [7, 5, 4]) for _ in range(ROWS)]
        target = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
        segment = target.slots.segment.copy()
        segment[0, -3:] = 0
        labels = rng.integers(1, builders.VOCAB, size=segment.shape).astype(np.int32)
        target = target._replace(slots=target.slots._replace(segment=segment))
        return Batch(None, target, labels, (segment > 0).astype(np.float32))

    return [one(seed) for seed in range(STEPS)]


def train(kernel: str, mesh: jax.sharding.Mesh, chunk: int | None) -> tuple[np.ndarray, tuple[int, ...]]:
    """The losses of the steps, and the shape of a device's part of the tokens."""
    attention = AttentionConfig(heads=4, kv_heads=2, kernel=kernel, block=4, bias=False)
    model = builders.decoder(**SMALL | {"width": 16, "attention": attention, "embed": EmbedConfig(vocab=16)})
    config = Config(
        model=dataclasses.replace(model, head=HeadConfig(chunk=chunk)),
        data=DataConfig(length=LENGTH),
        task=TaskConfig(name="language_modelling", label_smoothing=0.1, z_loss=1e-3, vocab=13),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
        train=TrainConfig(steps=STEPS),
    )
    module = build.build(config.model)
    schedule = optim.schedule(config.schedule, STEPS, 16)
    losses = []
    with jax.set_mesh(mesh):
        balanced = build.uses_causal_ring(config.model, LENGTH)
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        state = begin(config, module, optimizer, mesh)
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        for batch in batches():
            placed = step.shard_batch(batch, mesh, balanced)
            state, sums = update(state, placed)
            losses.append(float(sums["loss"][0] / sums["loss"][1]))
    return np.array(losses), placed.target.tokens.addressable_shards[0].data.shape


@pytest.fixture(scope="module")
def alone():
    return train("dense", meshes.make(MeshConfig(), jax.devices()[:1]), None)[0]


@pytest.mark.parametrize(
    ("kernel", "mesh"),
    [
        ("ring", MeshConfig(data=1, fsdp=2, context=2, tensor=2)),
        ("ulysses", MeshConfig(data=2, context=4)),
    ],
)
def test_losses_on_divided_sequences_are_those_of_one_device(kernel, mesh, alone):
    losses, part = train(kernel, meshes.make(mesh), chunk=5)
    np.testing.assert_allclose(losses, alone, rtol=2e-5)
    assert part == (ROWS // (mesh.data * mesh.fsdp), LENGTH // mesh.context)


def test_zigzag_gives_every_part_as_much_of_a_causal_mask():
    order = rules.zigzag_order(16, 4)
    assert sorted(order) == list(range(16))
    seen = (order + 1).reshape(4, -1).sum(axis=1)  # slot i sees i + 1 slots
    assert len(set(seen)) == 1
    assert order[0] == 0  # the first slot stays the first: what "first" pooling reads
    assert rules.zigzag_order(12, 4) is None


class Grid:
    """As much of a mesh of several processes as `rules.process_part` looks at."""

    def __init__(self, processes: int, **sizes: int) -> None:
        self.axis_names = ("stage", "data", "fsdp", "expert", "context", "tensor")
        self.shape = {name: sizes.get(name, 1) for name in self.axis_names}
        count = int(np.prod(list(self.shape.values())))
        devices = [types.SimpleNamespace(process_index=i * processes // count) for i in range(count)]
        self.devices = np.array(devices).reshape(tuple(self.shape.values()))


@pytest.mark.parametrize(
    ("processes", "sizes", "readers"),
    [
        (4, {"data": 8}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, {"data": 2, "context": 4}, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # two processes hold the slots of one row
        (2, {"context": 4, "tensor": 2}, [(0, 1), (0, 1)]),
    ],
)
def test_processes_that_hold_the_same_rows_read_the_same(monkeypatch, processes, sizes, readers):
    for process, wanted in enumerate(readers):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert rules.process_part(Grid(processes, **sizes)) == wanted


def test_processes_that_share_some_rows_are_refused():
    with pytest.raises(ConfigError, match="some of which share a part of their rows"):
        rules.process_part(Grid(2, data=3, context=2))
