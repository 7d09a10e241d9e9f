"""Reference log-likelihoods: what the model that a run starts from says about the examples that it trains on.

They are computed once, before training, and kept in the cache of data, named by a hash of the examples, of the
reference's parameters and of all that decides how examples become tokens. A checkpoint holds the hash of the
parameters. So a resumed run, and an evaluation, read the values of the run's start, whatever became of the directory
that it started from.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxformer import registry, tasks
from jaxformer.checkpoint import list_checkpoints, read_about
from jaxformer.config import Config
from jaxformer.data import cache, derived
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset, Example, Examples, examples_at
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import adapters, build
from jaxformer.parallel import distributed, rules
from jaxformer.parallel import mesh as meshes
from jaxformer.train import digest
from jaxformer.train import step as steps
from jaxformer.train.warm_start import InitFormat
from jaxformer.types import PyTree

CHUNK_EXAMPLES = 1024
"""Examples read at a time."""

LOG = logging.getLogger("jaxformer")
_exchanges = itertools.count()


@dataclass(frozen=True)
class ReferencedExamples:
    """The first examples of a split, each with what the reference says about it under "reference".

    Attributes:
      examples: the split.
      values: float32 `[n, ...]`; examples from n on have none, and are not to be trained on.
    """

    examples: Examples
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._with_value(index, self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return list(map(self._with_value, indices, examples_at(self.examples, indices)))

    def _with_value(self, index: int, example: Example) -> Example:
        return {**example, "reference": self.values[index]} if index < len(self.values) else example


def is_needed(config: Config) -> bool:
    """True if the run's task compares with the model that the run starts from."""
    return tasks.get(config.task.name).reference is not None


def recorded(workdir: Path) -> str | None:
    """The hash of the reference's parameters in the newest checkpoint of `workdir`; None if there is none."""
    for part in ("last", "best"):
        for directory in list_checkpoints(workdir / "checkpoints" / part)[:1]:
            found = read_about(directory).get("progress", {}).get("reference")
            if found is not None:
                return found
    return None


def attach(
    config: Config,
    dataset: Dataset,
    counts: Mapping[str, int | None],
    tokenizers: Tokenizers | None,
    mesh: jax.sharding.Mesh,
    init_format: InitFormat,
    known: str | None = None,
) -> tuple[Dataset, str]:
    """`dataset` with the reference's values beside its examples, and the hash of the reference's parameters.

    Uses the current mesh, and every process of the run.

    Args:
      config: the resolved config of the run.
      counts: splits to attach values to, with the number of their examples, the first ones; None: all.
      init_format: reads `config.init.directory`.
      known: hash of the parameters of a run that has begun; None: it begins now.

    Raises:
      ConfigError: values of a run that has begun are not in the cache, and its reference can no longer be made.
    """
    counts = {
        split: len(dataset.splits[split]) if count is None else min(count, len(dataset.splits[split]))
        for split, count in counts.items()
        if split in dataset.splits
    }
    make = _Reference(config, tokenizers, mesh, init_format)
    digested = known or make.digest()
    splits = dict(dataset.splits)
    for split, count in counts.items():
        key = _key(config, tokenizers, splits[split], count, digested)
        values = _find(config, key)
        if values is None:
            if known is not None and make.digest() != known:
                raise ConfigError(
                    f"config.init.directory: got {config.init.directory or 'random parameters'}, whose parameters are "
                    "no longer those that the run started from, expected the same, since their log-likelihoods are not "
                    "in the cache (data.cache); restore either"
                )
            LOG.info("reference: the starting model reads %s examples of %s", f"{count:,}", split)
            values = make.values(dataset.splits[split], count)
            if not registry.has_external_members():
                derived.store(cache.cache_directory(config.data), "reference", key, values.tolist())
        splits[split] = ReferencedExamples(dataset.splits[split], values)
    return dataclasses.replace(dataset, splits=splits), digested


def _key(
    config: Config, tokenizers: Tokenizers | None, examples: Examples, count: int, parameters: str
) -> dict[str, Any]:
    """All that decides the values: no setting of the loss, so that runs that differ in these share them."""
    chunks = (
        examples_at(examples, range(begin, min(begin + CHUNK_EXAMPLES, count)))
        for begin in range(0, count, CHUNK_EXAMPLES)
    )
    return {
        "examples": derived.content_digest(chunks),
        "framing": [config.task.name, config.data.length],
        "model": repr(dataclasses.replace(config.model, adapter=None)),
        "tokenizers": tokenizers
        and [tokenizers.source.fingerprint, tokenizers.target.fingerprint, tokenizers.chat_template],
        "parameters": parameters,
        "code": derived.code_digest(derived.PROJECT),
    }


def _find(config: Config, key: Mapping[str, Any]) -> np.ndarray | None:
    """The values in the cache, if every process has them: they are computed by all processes, or by none."""
    kept = None
    if not registry.has_external_members():
        kept = derived.find(cache.cache_directory(config.data), "reference", key)
    everywhere = distributed.all_gather_host_value(f"reference {next(_exchanges)}", kept is not None)
    return np.asarray(kept[0], np.float32) if kept is not None and all(everywhere) else None


class _Reference:
    """The model that a run starts from, which is made when it is first asked for."""

    def __init__(
        self, config: Config, tokenizers: Tokenizers | None, mesh: jax.sharding.Mesh, init_format: InitFormat
    ) -> None:
        self._config, self._tokenizers, self._mesh, self._format = config, tokenizers, mesh, init_format
        self._variables: dict[str, PyTree] | None = None
        self._digest: str | None = None
        self._module = build.build(config.model)
        self._step: jax.stages.Wrapped | None = None  # one for all splits, so that it is compiled once

    def digest(self) -> str:
        """Hash of its parameters."""
        if self._digest is None:
            self._digest = digest.params_digest(self._made()["params"])
        return self._digest

    def values(self, examples: Examples, count: int) -> np.ndarray:
        """Values of the task's `reference` for the first `count` examples, in order: float32 `[n, ...]`."""
        config, mesh = self._config, self._mesh
        process, processes = rules.process_part(mesh)
        rows = meshes.row_multiple(mesh.shape, config.model)
        task = tasks.get(config.task.name)
        dataset = Dataset({"train": examples}, "")
        pipeline = Pipeline(config, dataset, self._tokenizers, task, process, processes, rows)
        if self._step is None:
            self._step = steps.make_reference_step(config, self._module, mesh)
        balanced, found = build.uses_causal_ring(config.model, config.data.length), np.zeros((count, 0), np.float32)
        for indices, batch in pipeline.evaluate_with_indices("train", count):
            values = jax.device_get(self._step(self._made(), steps.shard_batch(batch, mesh, balanced)))
            if not found.size:
                found = np.zeros((count, *values.shape[1:]), np.float32)
            found[indices] = values[: len(indices)]
        return found

    def _made(self) -> dict[str, PyTree]:
        """Its parameters and other variables. Adapters that begin at zero change nothing and are left out."""
        if self._variables is None:
            variables = steps.initial_variables(self._config, self._module, self._mesh)
            if self._config.init.directory:
                variables["params"] = self._format.read_params(self._config, variables["params"])
            if not any(_is_nonzero(path, x) for path, x in traverse_util.flatten_dict(variables["params"]).items()):
                variables["params"] = adapters.without(variables["params"])
            self._variables = variables
        return self._variables


def _is_nonzero(path: tuple[str, ...], x: jax.Array) -> bool:
    """True for the factor B of an adapter that is no longer as it began."""
    return path[-1] == "lora_b" and bool(jax.numpy.any(x != 0))
