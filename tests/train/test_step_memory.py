"""A training step on one CPU holds fewer temporary arrays than XLA's default order of operations does."""

from __future__ import annotations

import builders
import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import Config, MeshConfig, OptimizerConfig, ScheduleConfig, TaskConfig
from jaxformer.models import build
from jaxformer.nn import cpu
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import memory
from jaxformer.train import optim, step

DEFAULT = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_DEFAULT"}


@pytest.fixture(scope="module")
def programs() -> tuple[jax.stages.Compiled, jax.stages.Compiled, step.TrainState, object]:
    """The step as a run compiles it, the same step in XLA's default order, and their arguments."""
    model = builders.decoder(layers=2, dropout=0.1)
    config = Config(
        model=model,
        task=TaskConfig(name="language_modelling"),
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(kind="constant", peak=0.1, warmup=1),
    )
    module, mesh = build.build(model), meshes.make(MeshConfig(), jax.devices()[:1])
    schedule = optim.schedule(config.schedule, 10, 8)
    with jax.set_mesh(mesh):
        optimizer = optim.optimizer(config.optimizer, schedule, nn.meta.unbox(build.shapes(module))["params"])
        update = step.make_train_step(config, module, tasks.get(config.task.name), optimizer, schedule, mesh)
        state = step.init_state(config, module, optimizer, mesh)
        batch = step.shard_batch(builders.batch(model, [40] * 8), mesh)
        lowered = update.lower(state, batch)
        return lowered.compile(), lowered.compile(DEFAULT), state, batch


def test_a_step_on_one_cpu_holds_a_tenth_less_than_in_the_default_order(programs):
    ours, default = (each.memory_analysis().temp_size_in_bytes for each in programs[:2])
    assert ours < 0.9 * default
