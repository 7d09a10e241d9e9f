"""Batches of a data set: an endless training iterator whose state is three numbers, and evaluation passes.

Examples are shuffled, cut into blocks, encoded and planned into global batches (`planning.py`). Each host fills its own
rows of a batch. A checkpoint needs only (epoch, block, batch), and any number of hosts can resume from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import grain

from jaxformer import registry
from jaxformer.config import Config, overrides
from jaxformer.data import cache, concatenation, derived, packing, planning, truncation
from jaxformer.data.batches import TrainingBatches
from jaxformer.data.encoding import CHUNK_EXAMPLES, Encoder, EncodingTask
from jaxformer.data.packing import Features, Shape
from jaxformer.data.planning import BlockPlanner, EncodedExamples, RunningTextPlanner, ShuffledOrder
from jaxformer.data.sources import Dataset, Example, Examples, FirstExamples, examples_at
from jaxformer.data.token_shards import ShardedDocuments
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

TOKEN_CACHE_BYTES = 512 << 20
"""Memory for the token ids of texts that have been tokenized before."""
UNLIMITED_LENGTH = 2**30
"""A `data.length` that no example exceeds."""
MAX_SAMPLED_EXAMPLES = 2**14
"""Training examples in which truncation is counted when a run starts, evenly spaced over the split."""

PACKINGS = ("none", "concat", "first_fit")


class Pipeline(TrainingBatches):
    """The training and evaluation batches of a run.

    Args:
      config: the config of the run.
      dataset: the examples, as text.
      tokenizers: the tokenizers of the two sides; None: the task reads no text.
      task: encodes an example.
      process_index, process_count: number of this host, and of hosts; each fills its own slice of a batch's rows.
      multiple: the rows of a batch are a multiple of this (the number of data shards) and of `process_count`.
      cache_bytes: memory for the token ids of texts that have been tokenized before.

    Raises:
      ConfigError: there are no training examples, or the task does not support the packing.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        tokenizers: Tokenizers | None,
        task: EncodingTask,
        process_index: int = 0,
        process_count: int = 1,
        multiple: int = 1,
        cache_bytes: int = TOKEN_CACHE_BYTES,
    ):
        super().__init__(process_index, process_count, multiple, config.data.workers)
        data = config.data
        if data.packing not in PACKINGS:
            raise ConfigError(f"data.packing: got {data.packing!r}, expected one of {', '.join(PACKINGS)}; change it")
        self.config, self.dataset, self.task = config, dataset, task
        self.tokenizers = tokenizers
        self._check_tokenizer()
        self._caching_tokenizers = None if tokenizers is None else tokenizers.cached(cache_bytes)
        # A trained model may be evaluated on a single split; its first example then decides the arrays of a batch.
        first = "train" if "train" in dataset.splits else next(iter(dataset.splits))
        self._count(first, data.examples)  # at least one, or it raises
        self._check_packing(self._encoder(first, 1, config)([0], 0)[0])
        self._plan = self._planner(
            first, data.examples, packing.shapes(*self._shape_arguments()), train=first == "train"
        )
        self._template = self._plan.encode([0], 0)[0]  # also for hosts whose rows are all empty
        self._sizes: dict[tuple[str, int | None], dict[str, int]] = {}
        self._truncations: dict[tuple[str, int | None], Truncation] = {}

    def train(self) -> grain.DatasetIterator:
        """See `TrainingBatches.train`.

        Raises:
          ConfigError: there is no training split.
        """
        self._split("train")  # the plan may be of another split
        return super().train()

    @property
    def train_examples(self) -> EncodedExamples:
        """The training examples, encoded as the training batches have them."""
        return self._plan.encode

    def evaluate(self, split: str, examples: int | None = None, rows: int | None = None) -> Iterator[Batch]:
        """One pass over a split in the order of the data: every example once, the last batch padded with empty rows.

        If the task has `encode_windows`, a text that is too long for a row takes several rows. Otherwise it is
        truncated, and `truncated` counts by how much.

        Args:
          split: "validation", "test", "train".
          examples: number of examples, from the first on; None: all.
          rows: rows of a global batch, rounded up to a multiple of the data shards; None: `config.evaluate.batch`.

        Raises:
          ConfigError: there is no such split, or it is empty.
        """
        plan = self._evaluation_plan(split, examples, rows)
        return (self.fill(block, batch) for block in map(plan, range(plan.blocks)) for batch in block.batches)

    def evaluate_with_indices(self, split: str, examples: int | None = None) -> Iterator[tuple[list[int], Batch]]:
        """`evaluate` of rows with one example each: with every batch the indices of the examples in its rows.

        Returns:
          Pairs of the indices for the first rows of the global batch, whose other rows are empty, and this host's rows.
        """
        plan = self._evaluation_plan(split, examples)
        return (
            ([block.indices[member] for row in batch.rows for member in row], self.fill(block, batch))
            for block in map(plan, range(plan.blocks))
            for batch in block.batches
        )

    def _evaluation_plan(self, split: str, examples: int | None, rows: int | None = None) -> BlockPlanner:
        rows = self.config.evaluate.batch if rows is None else rows
        rows = -(-rows // self._multiple) * self._multiple
        buckets = packing.shapes(self._shape_arguments()[0], rows, None, self._multiple)
        return self._planner(split, examples, buckets, train=False)

    def size(self, split: str, examples: int | None = None) -> dict[str, int]:
        """Counts "examples", and "bytes", "words" and "lines" (line ends) of the text that is predicted.

        Reads the whole split the first time, unless it is of token shards, whose index has the counts.

        Args:
          examples: number of examples, as in `evaluate`.
        """
        documents = self._split(split)
        if isinstance(documents, ShardedDocuments):
            return documents.size(self._count(split, examples))
        if (split, examples) not in self._sizes:
            roles = self.task.roles
            predicted = next((role for role in ("target", "text", "source") if role in roles), None)
            selected = FirstExamples(self._split(split), self._count(split, examples))
            self._sizes[split, examples] = cache.text_size(
                selected, (predicted,) if predicted else (), self.config.data.document
            )
        return self._sizes[split, examples]

    def truncated(self, split: str, examples: int | None = None) -> Truncation:
        """Counts what `evaluate` truncates of the same examples. Encodes them the first time if any can be too long."""
        if (split, examples) not in self._truncations:
            count = self._count(split, examples)
            complete = self.config.data.packing == "concat" or self.task.encode_windows is not None
            self._truncations[split, examples] = (
                Truncation(count) if complete else self._count_truncation(split, count, range(count))
            )
        return self._truncations[split, examples]

    def truncation_notes(self, validation_examples: int | None) -> list[str]:
        """Lines for the log about text that does not fit: of the training split, and of the evaluated validation split.

        Args:
          validation_examples: number of validation examples that the run evaluates; None: all.
        """
        data, lines = self.config.data, []
        if data.packing != "concat" and "train" in self.dataset.splits:
            count = self._count("train", data.examples)
            sample: Sequence[int] = range(count)
            if count > MAX_SAMPLED_EXAMPLES:
                sample = [number * count // MAX_SAMPLED_EXAMPLES for number in range(MAX_SAMPLED_EXAMPLES)]
            counts = self._count_truncation("train", count, sample, skipped=data.skip_long)
            lines.append(counts.sentence("train", data.length, count, "left out" if data.skip_long else "cut off"))
        tail = self._plan.tail()
        if tail:
            lines.append(f"train: the last {tail:,} of {len(self._plan.encode):,} rows are not read (task.recurrence)")
        if "validation" in self.dataset.splits:
            lines.append(self.truncated("validation", validation_examples).sentence("validation", data.length))
        return [line for line in lines if line]

    def _count_truncation(self, split: str, count: int, sample: Sequence[int], skipped: bool = False) -> Truncation:
        """Counts what does not fit of the examples `sample`, of the first `count`; from the cache if it was counted.

        Code from outside the project may read what no hash covers, and a task that draws texts of other examples reads
        more than the sample: those are counted at every start.

        Args:
          skipped: count examples that are too long for `data.skip_long`, instead of tokens that are cut off.
        """

        def encode() -> Truncation:
            config = self._untruncated() if skipped else self.config
            encoded = self._encoder(split, count, config).iterate(sample)
            if skipped:
                return truncation.count_skipped(encoded, self.config.data.length)
            return truncation.count_truncated(encoded)

        if registry.has_external_members() or self.task.reads_other_text(self.config):
            return encode()
        tokenizers, drawn = self.tokenizers, derived.drawn(self._split(split))
        examples = drawn and [*drawn, *map(int, sample)]
        depends_on = {
            "examples": examples or derived.content_digest(self._chunks(split, sample)),
            "settings": [split, count, skipped, overrides.to_json(self.config)],
            "tokenizers": tokenizers
            and [tokenizers.source.fingerprint, tokenizers.target.fingerprint, tokenizers.chat_template],
            "code": derived.code_digest(derived.PROJECT),
        }
        directory = cache.cache_directory(self.config.data)
        kept = derived.keep(directory, "truncation", depends_on, lambda: truncation.to_json(encode()))
        return truncation.from_json(kept)

    def _chunks(self, split: str, indices: Sequence[int]) -> Iterator[Sequence[Example]]:
        """The examples at `indices`, in chunks to bound the memory."""
        for begin in range(0, len(indices), CHUNK_EXAMPLES):
            yield examples_at(self._split(split), indices[begin : begin + CHUNK_EXAMPLES])

    @property
    def epoch_batches(self) -> int | None:
        """Batches per training epoch, or None if the number differs between epochs (several buckets, packing)."""
        plan = self._plan
        if plan.pack or len(plan.buckets) > 1 or plan.max_length is not None:
            return None
        if isinstance(plan, RunningTextPlanner):
            return plan.part
        count, size = len(plan.encode), planning.block_size(len(plan.encode))
        sizes = [min(size, count - begin) for begin in range(0, count, size)]
        return sum(-(-size // plan.buckets[0].rows) for size in sizes)

    def _shape_arguments(self) -> tuple[set[int], int, int | None, int]:
        """The arguments of `packing.shapes` for training batches."""
        data = self.config.data
        lengths = {data.length}
        if data.packing == "none":
            lengths |= {bucket for bucket in data.buckets if bucket < data.length}
        return lengths, data.batch, data.tokens, self._multiple

    def _split(self, split: str) -> Examples:
        if split not in self.dataset.splits:
            known = ", ".join(self.dataset.splits)
            raise ConfigError(f"split: got {split!r}, expected one of {known}; choose one or add its files")
        return self.dataset.splits[split]

    def _count(self, split: str, limit: int | None) -> int:
        count = len(self._split(split))
        count = count if limit is None else min(limit, count)
        if count < 1:
            raise ConfigError(f"data: got no examples in split {split!r}, expected at least one; check the files")
        return count

    def _token_stream(self, split: str, count: int) -> concatenation.Tokens:
        """The running text of the first `count` examples: token shards themselves, or a file in the cache."""
        side = "target" if self.config.model.has_decoder else "source"
        documents, tokenizer = self._split(split), getattr(self.tokenizers, side)
        if isinstance(documents, ShardedDocuments):
            return documents.stream(count, tokenizer)
        key = f"{self.dataset.key} {split} {count}"
        directory = cache.cache_directory(self.config.data) / "streams"
        return concatenation.token_stream(directory, key, FirstExamples(documents, count), tokenizer)

    def _check_tokenizer(self) -> None:
        """Raises a ConfigError if token shards were made with another tokenizer than the run's."""
        for documents in self.dataset.splits.values():
            if isinstance(documents, ShardedDocuments) and self.tokenizers is not None:
                documents.check_tokenizer(self.tokenizers.target)
                documents.check_tokenizer(self.tokenizers.source)

    def _encoder(self, split: str, count: int, config: Config, windows: bool = False) -> Encoder:
        return Encoder(config, self._caching_tokenizers, self.task, self._split(split), count, windows)

    def _untruncated(self) -> Config:
        """The config without a length limit, so that the true lengths of examples are known."""
        return dataclasses.replace(self.config, data=dataclasses.replace(self.config.data, length=UNLIMITED_LENGTH))

    def _check_packing(self, features: Features) -> None:
        mode, task = self.config.data.packing, self.config.task.name
        is_next_token = "target" in features and "source" not in features
        if mode == "concat" and self.task.encode_row is None and not is_next_token:
            raise ConfigError(
                f"data.packing: got concat for task {task!r}, which reads no running text, expected none or "
                "first_fit; change it"
            )
        has_row_label = "relation" in features or ("labels" in features and packing.has_row_labels(features))
        if mode == "first_fit" and has_row_label:
            raise ConfigError(f"data.packing: got first_fit for task {task!r}, expected none; change it")

    def _planner(self, split: str, limit: int | None, buckets: list[Shape], train: bool) -> BlockPlanner:
        data, config = self.config.data, self.config
        count, windows = self._count(split, limit), False
        if data.packing == "concat" and self.tokenizers is not None:
            tokens = self._token_stream(split, count)
            encode_row, max_length = self.task.encode_row, None
            if encode_row is not None:
                encode_row = functools.partial(encode_row, config, self.tokenizers)
            length = self.task.row_length(config)
            encode = concatenation.ConcatenatedRows(tokens, length, encode_row, config.train.seed)
            if train and config.task.recurrence:
                order = ShuffledOrder(len(encode), planning.block_size(len(encode)), None)
                full_rows = (len(tokens) - 1) // length
                return RunningTextPlanner(encode, order, buckets, False, None, None, full_rows=full_rows)
        else:
            max_length = data.length if train and data.skip_long else None
            if max_length is not None:
                config = self._untruncated()
            windows = not train and self.task.encode_windows is not None
            encode = self._encoder(split, count, config, windows)
        seed = config.train.seed if train and data.shuffle else None
        order = ShuffledOrder(len(encode), planning.block_size(len(encode)), seed)
        # An evaluated pair has rows of its own, so that it can be measured by the length of its source.
        pack = data.packing == "first_fit" and (train or windows or not config.model.is_seq2seq)
        return BlockPlanner(encode, order, buckets, pack, seed, max_length, windows)
