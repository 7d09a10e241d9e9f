"""Training without files: a config, batches from memory, parameters. For experiments and for trying an idea out.

The update is `step.make`'s, the measures are the task's; what is left out is the data pipeline, checkpoints and logs.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer import metrics, tasks
from jaxformer.config import Config, MeshConfig
from jaxformer.models import build
from jaxformer.nn import cpu
from jaxformer.parallel import mesh as meshes
from jaxformer.train import optim
from jaxformer.train import step as steps
from jaxformer.types import Array, Batch, PyTree, Slots, Stream, Sums, TrainState


def stream(tokens: np.ndarray) -> Stream:
    """Texts without padding: `tokens` `[B, T]` at the positions 0 to T - 1 of one segment."""
    position = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Stream(tokens.astype(np.int32), Slots(position, np.ones(tokens.shape, np.int32)))


def continuation(text: np.ndarray) -> Batch:
    """A language model's batch of texts `[B, T + 1]`: T tokens, each labelled with the one after it."""
    labels = text[:, 1:].astype(np.int32)
    return Batch(None, stream(text[:, :-1]), labels, np.ones(labels.shape, np.float32))


class Trainer:
    """Trains one config from any number of seeds on one device, compiling once.

    `config.model` must be resolved. `config.data` and `config.train.seed` are not read: the batches and the seed are
    arguments. `config.train.steps` is what the schedule is made for.
    """

    def __init__(self, config: Config) -> None:
        # Small models are faster on one device; so the numbers also do not depend on how many there are.
        self.config = config = dataclasses.replace(config, mesh=MeshConfig(data=1))
        self.mesh = meshes.make(config.mesh, jax.devices()[:1])
        self.module = module = build.build(config.model)
        task = tasks.get(config.task.name)
        shapes = nn.meta.unbox(build.shapes(module))["params"]
        self.parameters = build.count(shapes)
        schedule = optim.schedule(config.schedule, config.train.steps, build.width(config.model))
        optimizer = optim.optimizer(config.optimizer, schedule, shapes, build.logical_names(module))
        layout = steps.layout_of(config, module, optimizer, self.mesh)

        def start(seed: Array) -> TrainState:
            root = jax.random.key(seed)
            variables = nn.meta.unbox(build.initialise(module, jax.random.fold_in(root, 0)))
            params = variables.pop("params")
            if config.train.ema is not None:
                variables["ema"] = params
            opt_state = optimizer.init(params)
            return TrainState(jnp.zeros((), jnp.int32), params, opt_state, jax.random.fold_in(root, 1), variables)

        def measure(variables: PyTree, batch: Batch) -> Sums:
            return task.metrics(config, module.apply(variables, batch, whole=False), batch)

        self._start = jax.jit(start, out_shardings=layout, compiler_options=cpu.once())
        self._update = steps.make(config, module, task, optimizer, schedule, self.mesh)
        self._measure = jax.jit(measure)

    def train(self, seed: int, batches: Iterable[Batch], state: TrainState | None = None) -> TrainState:
        """The state after one update with each of `batches`. The start is `jaxformer train`'s for the same seed.

        Args:
          state: goes on from this one instead, which is used up.
        """
        with jax.set_mesh(self.mesh):
            state = self._start(jnp.uint32(seed)) if state is None else state
            for batch in batches:
                state, _ = self._update(state, steps.place(batch, self.mesh))
        return state

    def measure(self, state: TrainState, batches: Iterable[Batch]) -> dict[str, float]:
        """The task's measures over all of `batches`."""
        average = {} if self.config.train.ema is None else {"params": state.variables["ema"]}
        others = {name: value for name, value in state.variables.items() if name != "ema"}
        variables = {"params": state.params, **others, **average}
        total: Sums = {}
        with jax.set_mesh(self.mesh):
            for batch in batches:
                sums = jax.device_get(self._measure(variables, steps.place(batch, self.mesh)))
                total = metrics.add(total, sums) if total else sums
        return metrics.divide(total)
