"""Memory of a training step on one CPU: temporary arrays as the compiler plans them, and when free pages go back."""

from __future__ import annotations

import mmap
import sys

import builders
import jax
import pytest
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
)
from jaxformer.models import build
from jaxformer.nn import cpu
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import memory
from jaxformer.train import optim, step

DEFAULT = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_DEFAULT"}


@pytest.fixture(scope="module")
def planned() -> tuple[int, int]:
    """Bytes of temporary arrays of a decoder's step: as a run compiles it, and in XLA's default order."""
    attention, ffn = AttentionConfig(heads=2, kernel="dense"), FeedForwardConfig(activation="gelu_tanh")
    model = ModelConfig(decoder=builders.stack(layers=1, attention=attention, ffn=ffn), dtype="bfloat16")
    config = Config(
        model=model,
        task=TaskConfig(name="language_modelling"),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
    )
    module, mesh = build.build(model), meshes.make(MeshConfig(), jax.devices()[:1])
    schedule = optim.schedule(config.schedule, 10, 8)
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(cpu, "multiplies_bfloat16", lambda: True)  # the same program on every processor
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        batch = step.shard_batch(builders.batch(model, [128] * 8), mesh)
        lowered = update.lower(step.abstract_state(config, module, optimizer, mesh), batch)
        ours, default = lowered.compile(), lowered.compile(DEFAULT)
    return ours.memory_analysis().temp_size_in_bytes, default.memory_analysis().temp_size_in_bytes


def test_a_step_on_one_cpu_holds_less_than_in_the_default_order(planned):
    ours, default = planned
    assert ours < 0.96 * default


def test_several_devices_keep_the_default_order():
    assert cpu.step_compiler_options(meshes.make(MeshConfig(data=2), jax.devices()[:2])) is None


def test_free_pages_go_back_after_each_of_the_first_steps_and_when_memory_has_grown():
    due, heap = [], None
    resident = dict.fromkeys(range(1, 40), 100) | {
        5: 900,
        12: 124,
        14: 126,
        15: 200,
        16: 249,
        18: 251,
        19: 100,
        20: 126,
    }
    heap = memory.HeapTrimmer("cpu", lambda: due.append(heap.steps), lambda: resident[heap.steps])
    for _ in range(39):
        heap.after_step()
    # Step 15, the first after a return, sets what is usual: 200; so does step 19.
    assert due == [1, 2, 3, 4, 5, 6, 7, 8, 14, 18, 20]


def test_resident_memory_is_read_from_the_system():
    assert not sys.platform.startswith("linux") or memory._resident_pages() * mmap.PAGESIZE > 10_000_000


def test_the_heap_of_an_accelerators_host_is_left_alone():
    due = []
    heap = memory.HeapTrimmer("tpu", lambda: due.append(1))
    heap.after_step()
    assert not due
