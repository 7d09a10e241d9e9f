"""One training step of several runs at once: lanes of one program.

Runs that differ in seed and rates only have the same arrays and the same operations. Their states are stacked along a
leading axis, the lane, and one `jax.vmap` of the library's own step (`step.update`) trains all of them. What differs
enters as an argument: a rate of the config is then a traced value in place of a number. On a mesh of several devices
the lanes are divided over the axis `data`, and each device trains its lanes by itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import AXES, Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import Task
from jaxformer.train import freezing, optim
from jaxformer.train import step as steps
from jaxformer.types import Array, Batch, Sums, TrainState

SEED = "train.seed"
RATES = (
    r"schedule\.(peak|warmup|floor|decay)",
    r"optimizer\.weight_decay",
    r"task\.label_smoothing",
    r"model\.(?!adapter\.)([a-z_]+\.)*(dropout|input_dropout|recurrent_dropout)",
)
"""Fields that may differ between lanes, beside the seed: patterns of their whole path."""
ALLOWED = "train.seed, schedule.peak, warmup, floor and decay, optimizer.weight_decay, task.label_smoothing and dropout"
BY_LANE = PartitionSpec("data")


def differing_rates(configs: Sequence[Config]) -> tuple[str, ...]:
    """Paths of the rates in which the configs of lanes differ, in schema order; the seed is not among them.

    Raises:
      ConfigError: they differ in anything else, or have a setting that lanes cannot honour.
    """
    first, paths = configs[0], dict[str, tuple[Any, Any]]()
    for config in configs[1:]:
        paths |= overrides.diff(first, config)
    for path, (value, other) in paths.items():
        if path != SEED and not any(re.fullmatch(pattern, path) for pattern in RATES):
            raise ConfigError(
                f"config.{path}: got {_short(value)} and {_short(other)} in runs of one program, which may differ in "
                f"{ALLOWED} only, expected one value; use --executor=local"
            )
    rates = tuple(path for path in paths if path != SEED)
    _check_model(first, rates)
    _check_mesh(first)
    return rates


def _short(value: Any) -> str:
    """A value for a message; of a section its name."""
    return f"a {type(value).__name__}" if dataclasses.is_dataclass(value) else repr(value)


def _check_model(config: Config, rates: Sequence[str]) -> None:
    for side, stack in config.model.stacks.items():
        if stack.moe is not None:
            raise ConfigError(
                f"config.model.{side}.moe: got experts, expected a model without in runs of one program; use "
                "--executor=local"
            )
    if config.distillation is not None:
        raise ConfigError(
            "config.distillation: got a teacher, expected None in runs of one program; use --executor=local"
        )
    if config.task.recurrence:
        raise ConfigError(
            "config.task.recurrence: got True, expected False in runs of one program; use --executor=local"
        )
    if "task.label_smoothing" in rates and config.data.mixture is not None:
        # Components are grouped by equal settings when the step is traced.
        raise ConfigError(
            "config.task.label_smoothing: got several values with config.data.mixture, expected one; use "
            "--executor=local"
        )


def _check_mesh(config: Config) -> None:
    wrong = [axis for axis in AXES if axis != "data" and getattr(config.mesh, axis) != 1]
    wrong += [f"dcn.{axis}" for axis in AXES if getattr(config.mesh.dcn, axis) != 1]
    if wrong:
        raise ConfigError(
            f"config.mesh.{wrong[0]}: got a mesh that divides a run, expected 1: runs of one program are divided over "
            "config.mesh.data only; use --executor=local"
        )
    if config.mesh.zero1:
        raise ConfigError(
            "config.mesh.zero1: got True, expected False: runs of one program are divided over config.mesh.data; use "
            "--executor=local"
        )


def check_kernels(rates: Sequence[str], kernels: Mapping[str, tuple[str, str]]) -> None:
    """Refuses several rates of attention dropout where the kernel of a stack needs one that is static.

    Args:
      kernels: name of each stack's kernel and the reason for it, as `build.chosen_kernels` has them.
    """
    for side, (kernel, _) in kernels.items():
        path = f"model.{side}.attention.dropout"
        if path in rates and kernel != "dense":
            raise ConfigError(
                f"config.{path}: got several values with the kernel {kernel}, expected one; set "
                f"config.model.{side}.attention.kernel to dense, or use --executor=local"
            )


def value_at(config: Config, path: str) -> Any:
    """The value of the field at `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """`config` with other values at some paths. They are not checked, and may be traced."""
    parts: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        parts.setdefault(name, {})[rest] = value
    changes = {
        name: inner[""] if "" in inner else with_values(getattr(config, name), inner) for name, inner in parts.items()
    }
    return dataclasses.replace(config, **changes)


class LaneStep:
    """The compiled step of all lanes.

    Args:
      config: the config of one of them.
      rates: paths of the rates that differ.
      configs: those of all lanes, which give the rates' values.
      task: what they train on.

    Attributes:
      optimizer: makes the optimizer state of a lane, with all parts that that of any lane has.
      several_seeds: lanes read batches of their own.
      lanes: number of lanes in the arrays: that of the configs, rounded up to a multiple of the devices. The last ones
        repeat the first and never train.
    """

    def __init__(self, configs: Sequence[Config], rates: Sequence[str], task: Task, mesh: Mesh) -> None:
        self.configs, self.config, self.paths, self.task, self.mesh = configs, configs[0], tuple(rates), task, mesh
        self.several_seeds = len({config.train.seed for config in configs}) > 1
        self.lanes = -(-len(configs) // mesh.size) * mesh.size
        padded = [*configs, *[configs[0]] * (self.lanes - len(configs))]
        self.sharding = NamedSharding(mesh, BY_LANE)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        values = [np.array([value_at(config, path) for config in padded], np.float32) for path in rates]
        self.values = jax.device_put(values, self.sharding)
        self.width = build.model_width(self.config.model)
        module = build.build(self.config.model)
        trees = nn.meta.unbox(build.shapes(module))["params"], build.logical_names(module)
        self.trained = [freezing.trained(self.config, tree) for tree in trees]
        decay = max(config.optimizer.weight_decay for config in configs)
        self.optimizer = self._optimizer(with_values(self.config, {"optimizer.weight_decay": decay}))
        self._step = self._compiled()

    def _compiled(self) -> jax.stages.Wrapped:
        """The program `(states, batch, rates, active) -> (states, sums)`."""
        own_batches = self.several_seeds
        step = jax.vmap(self._lane, in_axes=(0, 0 if own_batches else None, 0, 0))
        if self.mesh.size > 1:
            specs = (BY_LANE, BY_LANE if own_batches else PartitionSpec(), BY_LANE, BY_LANE)
            step = jax.shard_map(
                step, in_specs=specs, out_specs=BY_LANE, axis_names=set(self.mesh.axis_names), check_vma=False
            )
        return jax.jit(step, donate_argnums=0, out_shardings=self.sharding)

    def _schedule(self, config: Config) -> optim.Schedule:
        return optim.schedule(config.schedule, config.train.steps, self.width)

    def _optimizer(self, config: Config) -> optim.Transform:
        return optim.optimizer(config.optimizer, self._schedule(config), *self.trained)

    def _lane(self, state: TrainState, batch: Batch, values: Sequence[Array], active: Array) -> tuple[TrainState, Sums]:
        """The step of one lane. A lane that is not active keeps its state."""
        config = with_values(self.config, dict(zip(self.paths, values, strict=True)))
        module = build.build(config.model)
        optimizer, schedule = self._optimizer(config), self._schedule(config)
        after, sums = steps.update(config, module, self.task, optimizer, schedule, None, state, batch)
        return jax.tree.map(lambda new, old: jnp.where(active, new, old), after, state), sums

    def __call__(self, states: TrainState, batches: Sequence[Batch], active: Sequence[bool]) -> tuple[TrainState, Sums]:
        """One step of the active lanes; the states passed in are donated.

        Args:
          batches: of several seeds one for each lane of the configs, those of lanes that are not active being any;
            else one for all lanes.
          active: by lane of the configs.

        Returns:
          The states, and sums with a leading axis of lanes.
        """
        missing = self.lanes - len(active)
        flags = jax.device_put(np.array([*active, *[False] * missing]), self.sharding)
        if not self.several_seeds:
            return self._step(states, jax.device_put(batches[0], self.replicated), self.values, flags)
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *batches, *[batches[0]] * missing)
        return self._step(states, jax.device_put(stacked, self.sharding), self.values, flags)

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """The states of the lanes of the configs as one, divided over the devices.

        They are stacked on the host. A program that gathers and slices every array takes longer to compile than the
        training step.
        """
        padded = [*states, *[states[0]] * (self.lanes - len(states))]

        host = jax.tree.map(lambda *arrays: np.stack([np.asarray(_data(x)) for x in arrays]), *padded)
        return _on_devices(host, self.sharding, like=states[0])

    def take(self, states: TrainState, lane: int) -> TrainState:
        """The state of one lane, on all devices."""
        return _on_devices(jax.tree.map(lambda x: _one_lane(x, lane), states), self.replicated, like=states)


def _one_lane(array: Array, lane: int) -> np.ndarray:
    """One lane of an array of all lanes, from the device that has it; of keys their data."""
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(array.shape[0])
        if start <= lane < stop:
            return np.asarray(_data(shard.data))[lane - start]
    raise IndexError(f"lane {lane} is on no device of this process")


def _is_key(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _data(array: Array) -> Array:
    """The array, or the data of random keys."""
    return jax.random.key_data(array) if _is_key(array) else array


def _on_devices(data: TrainState, sharding: NamedSharding, like: TrainState) -> TrainState:
    """A state of host arrays on devices, with random keys where `like` has them."""
    wrap = lambda x, old: jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if _is_key(old) else x  # noqa: E731
    return jax.tree.map(wrap, jax.device_put(data, sharding), like)


class LaneValue:
    """One lane of an array of all lanes: it is fetched from the device when it is read.

    Slicing on the device would start a program for every measure of every lane of every step.
    """

    def __init__(self, array: Any, lane: int) -> None:
        self.array, self.lane = array, lane

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.asarray(self.array)[self.lane], dtype)

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def block_until_ready(self) -> LaneValue:
        """Waits for the step."""
        self.array.block_until_ready()
        return self


def lane_sums(sums: Sums, lane: int) -> Sums:
    """The sums of one lane, of which nothing is fetched yet."""
    values: Any = {name: tuple(LaneValue(array, lane) for array in pair) for name, pair in sums.items()}
    return values
