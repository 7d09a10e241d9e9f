"""Training from memory: a config and batches in, a state and measures out. For experiments and quick trials.

The training step and the measures are those of `jaxformer train`. There are no files, no data pipeline and no log.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer import metrics, tasks
from jaxformer.config import (
    AttentionConfig,
    Config,
    EmbedConfig,
    FeedForwardConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TrainConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import freezing, optim
from jaxformer.train import step as steps
from jaxformer.types import Batch, PyTree, Slots, Stream, Sums, TrainState


def stream(tokens: np.ndarray) -> Stream:
    """Stream of token ids `[B, T]` without padding: positions 0 to T - 1, one segment. Its arrays are numpy's."""
    ids: PyTree = tokens.astype(np.int32)
    position: PyTree = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    segment: PyTree = np.ones(tokens.shape, np.int32)
    return Stream(ids, Slots(position, segment))


def continuation(tokens: np.ndarray) -> Batch:
    """Language-modelling batch of token ids `[B, T + 1]`: T input tokens, each labelled with the token after it."""
    labels: PyTree = tokens[:, 1:].astype(np.int32)
    weights: PyTree = np.ones(labels.shape, np.float32)
    return Batch(None, stream(tokens[:, :-1]), labels, weights)


def small_stack(layers: int, width: int, embed: EmbedConfig, heads: int = 4, **fields: Any) -> StackConfig:
    """Stack of a small transformer: `heads` attention heads, a feed-forward layer of twice the width, one scan step.

    Args:
      fields: other fields of `StackConfig`; they replace those above.
    """
    defaults: dict[str, Any] = {
        "attention": AttentionConfig(heads=heads),
        "ffn": FeedForwardConfig(width=2 * width),
        "unroll": 1,
    }
    return StackConfig(layers=layers, width=width, embed=embed, **(defaults | fields))


def small_config(
    model: ModelConfig,
    task: str,
    steps: int,
    schedule: ScheduleConfig,
    optimizer: OptimizerConfig | None = None,
) -> Config:
    """Config of a short training run of `steps` updates, with Adam unless another optimizer is given."""
    return Config(
        model=model,
        task=TaskConfig(name=task),
        optimizer=optimizer or OptimizerConfig(name="adam"),
        schedule=schedule,
        train=TrainConfig(steps=steps),
    )


class Trainer:
    """Trains one config from any number of seeds on one device, compiling once.

    `config.model` must be resolved. `config.data` and `config.train.seed` are not read, since batches and seed are
    arguments. The learning-rate schedule is that of `config.train.steps` updates.

    Attributes:
      config: the config, on one device: small models are faster there, and results do not depend on the machine.
      module: the model.
      parameters: number of parameters.
    """

    def __init__(self, config: Config) -> None:
        if config.distillation is not None:
            raise ConfigError("config.distillation: got a teacher, expected None in memory; train with train.loop")
        self.config = config = dataclasses.replace(config, mesh=MeshConfig(data=1))
        self.mesh = meshes.make(config.mesh, jax.devices()[:1])
        self.module = module = build.build(config.model)
        shapes = nn.meta.unbox(build.shapes(module))["params"]
        self.parameters = build.count_params(shapes)
        schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
        trained = [freezing.trained(config, tree) for tree in (shapes, build.logical_names(module))]
        optimizer = optim.optimizer(config.optimizer, schedule, *trained)
        task = tasks.get(config.task.name)
        self._init_state = steps.make_init(config, module, optimizer, self.mesh)
        self._train_step = steps.make_train_step(config, module, task, optimizer, schedule, self.mesh)
        self._eval_step = steps.make_eval_step(config, module)

    def train(self, seed: int, batches: Iterable[Batch], state: TrainState | None = None) -> TrainState:
        """The state after one update with each of `batches`.

        Args:
          seed: of the initial parameters, the same as those of `jaxformer train` for this seed.
          state: start from this state instead. Its arrays are donated: do not use it afterwards.
        """
        with jax.set_mesh(self.mesh):
            state = self._init_state(jnp.uint32(seed)) if state is None else state
            for batch in batches:
                state, _ = self._train_step(state, steps.shard_batch(batch, self.mesh))
        return state

    def measure(self, state: TrainState, batches: Iterable[Batch]) -> dict[str, float]:
        """The task's measures over all of `batches`."""
        variables = state.evaluation_variables()
        total: Sums = {}
        with jax.set_mesh(self.mesh):
            for batch in batches:
                sums = jax.device_get(self._eval_step(variables, steps.shard_batch(batch, self.mesh)))
                total = metrics.add(total, sums) if total else sums
        return metrics.divide(total)
