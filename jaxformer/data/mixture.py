"""Batches of several data sets: which component each training example comes from, and what has been drawn of each.

The components' pipelines encode and evaluate. Training draws from all of them in the order of `planning.MixedOrder`: a
function of the seed and the number of the example, so that three numbers resume a mixture, too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxformer.config import Config, components
from jaxformer.data import packing, planning
from jaxformer.data.batches import TrainingBatches
from jaxformer.data.packing import Features
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.planning import BlockPlanner, Draw, EncodedExamples, MixedOrder, PlannedBlock, ShuffledOrder
from jaxformer.errors import ConfigError

UNSTACKED = ("cut", "unread", "weights")
"""Features that examples of one batch may have or lack: the first two are only counted, and missing weights are 1."""

MIXED = ("source", "target", "segment", "token_type", "labels", "component", *UNSTACKED)
"""Features that the examples of a mixture may have: others make arrays whose component is not known."""

REMEMBERED_BLOCKS = 8
"""Blocks whose draws are known: the background plans a few ahead of the batch that is trained on."""


@dataclasses.dataclass(frozen=True)
class MixedExamples:
    """Encoded examples of several data sets by `Draw`, each with the feature "component".

    "component" has the shape of the labels: a packed row may hold examples of several components.

    Attributes:
      parts: encoded examples of each part.
      numbers: number of each part among all components of the mixture.
    """

    parts: Sequence[EncodedExamples]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def known_lengths(self, indices: Sequence[Draw]) -> list[int] | None:
        """Slots of the examples of `indices`, if every part that they are of knows them without encoding; else None."""
        found = [0] * len(indices)
        for part in sorted({draw.part for draw in indices}):
            known = getattr(self.parts[part], "known_lengths", None)  # of an `Encoder`
            places = [place for place, draw in enumerate(indices) if draw.part == part]
            lengths = None if known is None else known([indices[place].index for place in places])
            if lengths is None:
                return None
            for place, length in zip(places, lengths, strict=True):
                found[place] = length
        return found

    def __call__(self, indices: Sequence[Draw], epoch: int) -> list[Features]:
        """The examples of `indices`, each in the epoch of its own part; `epoch` is the mixture's, and not read."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, draw in enumerate(indices):
            places.setdefault((draw.part, draw.epoch), []).append(place)
        found: list[Features] = [{}] * len(indices)
        for (part, part_epoch), members in places.items():
            encoded = self.parts[part]([indices[place].index for place in members], part_epoch)
            for place, features in zip(members, encoded, strict=True):
                found[place] = with_component(features, self.numbers[part])
        return found


def with_component(features: Features, number: int) -> Features:
    """`features` of an example of component `number`, with the feature "component" and with weights."""
    shape = np.shape(features["labels"])
    weights = features.get("weights", np.ones(shape, np.float32))
    return {**features, "weights": weights, "component": np.full(shape, number, np.int32)}


class Mixture(TrainingBatches):
    """The training batches of a mixture.

    Args:
      config: the config of the run.
      parts: pipeline of each component, by name.
      process_index, process_count, multiple: see `Pipeline`.

    Raises:
      ConfigError: the components' examples have different arrays.
    """

    def __init__(
        self,
        config: Config,
        parts: Mapping[str, Pipeline],
        process_index: int = 0,
        process_count: int = 1,
        multiple: int = 1,
    ):
        super().__init__(process_index, process_count, multiple, config.data.workers)
        mixture, data = config.data.mixture, config.data
        if mixture is None:
            raise ValueError("mixture: got a config without data.mixture, expected one")
        self.parts, self.trained = parts, components.trained(config)
        pipelines = [parts[name] for name in self.trained]
        examples = [pipeline.train_examples for pipeline in pipelines]
        numbers = [components.names(config).index(name) for name in self.trained]
        encode = MixedExamples(examples, numbers)
        for name, each in zip(self.trained, examples, strict=True):
            _check_arrays(name, each([0], 0)[0])
        self._template = encode([Draw(0, 0, 0)], 0)[0]
        for name, each in zip(self.trained, examples, strict=True):
            _check_same_arrays(self.trained[0], self._template, name, with_component(each([0], 0)[0], 0))
        self.sizes = [len(each) for each in examples]
        self._order = MixedOrder(
            tuple(
                ShuffledOrder(size, size, pipeline.config.train.seed if data.shuffle else None)
                for size, pipeline in zip(self.sizes, pipelines, strict=True)
            ),
            planning.shares(
                [mixture.components[name].weight for name in self.trained],
                self.sizes,
                mixture.temperature,
                mixture.limit,
            ),
            planning.mixture_block_size(self.sizes),
            config.train.seed if data.shuffle else None,
        )
        self._plan = BlockPlanner(
            encode,
            self._order,
            pipelines[0].shapes(),
            data.packing == "first_fit",
            self._order.seed,
            data.length if data.skip_long and data.packing != "concat" else None,
        )
        self._draws: dict[int, list[Counter[int]]] = {}  # block -> draws of each part, by batch

    def shares(self) -> dict[str, float]:
        """Share of each component among the training examples."""
        total = sum(self._order.shares)
        return {name: share / total for name, share in zip(self.trained, self._order.shares, strict=True)}

    def progress(self, batches: grain.DatasetIterator) -> dict[str, float]:
        """Examples drawn from each component since the run began ("examples/NAME"), also in epochs ("epochs/NAME").

        Examples that `data.skip_long` leaves out count when their block is complete.
        """
        state = batches.get_state()
        number = state["epoch"] * self._plan.blocks + state["block"]
        drawn = self._order.drawn(number)
        seen: Counter[int] = sum(self._draws.get(number, [])[: state["batch"]], Counter())
        values = {}
        for part, name in enumerate(self.trained):
            count = drawn[part] + seen[part]
            values[components.measure("examples", name)] = float(count)
            values[components.measure("epochs", name)] = count / self.sizes[part]
        return values

    def truncation_notes(self, validation_examples: int | None) -> list[str]:
        """Lines for the log about text of each component that does not fit; see `Pipeline.truncation_notes`."""
        notes = {name: part.truncation_notes(validation_examples) for name, part in self.parts.items()}
        return [f"{name}, {line}" for name, lines in notes.items() for line in lines]

    def _planned(self, number: int) -> PlannedBlock:
        block = self._plan(number)
        self._remember(number, list(_draws_of_batches(block)))
        return block

    def _remember(self, number: int, draws: list[Counter[int]]) -> None:
        self._draws[number] = draws
        for old in sorted(self._draws)[:-REMEMBERED_BLOCKS]:
            del self._draws[old]

    def note(self, number: int) -> Any:
        return super().note(number) | {"draws": self._draws[number]}

    def learn(self, number: int, note: Any) -> None:
        super().learn(number, note)
        self._remember(number, note["draws"])


def _draws_of_batches(block: PlannedBlock) -> Iterator[Counter[int]]:
    """Examples of each part in each batch of a block, over all hosts."""
    for batch in block.batches:
        yield Counter(block.indices[member].part for row in batch.rows for member in row)


def _check_arrays(name: str, features: Features) -> None:
    """Raises ConfigError if examples have labels of several values, or features that a mixture does not know."""
    others = [key for key in features if key not in MIXED]
    if others or (np.ndim(features["labels"]) and packing.has_row_labels(features)):
        got = ", ".join(others) or "several numbers as labels"
        raise ConfigError(
            f"data.mixture.components.{name}: got examples with {got}, expected {', '.join(MIXED[:4])} and labels of "
            "slots or of whole rows; give it another task"
        )


def _check_same_arrays(first: str, expected: Features, name: str, got: Features) -> None:
    def describe(features: Features) -> Any:
        return {
            key: f"{key} ({np.asarray(value).dtype}{', one an example' if np.ndim(value) == 0 else ''})"
            for key, value in features.items()
            if key not in UNSTACKED
        }

    theirs, ours = describe(expected), describe(got)
    if theirs != ours:
        raise ConfigError(
            f"data.mixture.components.{name}: got examples with {', '.join(ours.values())}, expected the arrays of "
            f"{first}, which share its batches: {', '.join(theirs.values())}; give them tasks of one kind"
        )
