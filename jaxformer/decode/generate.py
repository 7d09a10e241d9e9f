"""Decoding from end to end: encoded prompts in, hypotheses out, in the order of the prompts.

How `generate` works:

1. Prompts are sorted by length and padded into batches of few static shapes (`batching.py`).
2. A batch is prefilled: the model reads the prompts into its decoding state, for transformers a key-value cache. The
   cache starts small and grows with the outputs (`cache_schedule.py`).
3. A compiled loop adds a token per row and step (`compiled.py`). A search strategy chooses the tokens: greedy search,
   sampling or beam search (`search/`), after logits processors have changed their scores (`logits_processors.py`).
4. Texts that may pass the model's last position are decoded apart from the others (`cropped_context.py`).
5. Continuous batching: when enough rows of a batch are finished, the loop stops, their hypotheses are collected, and
   queued prompts take over the rows (`scheduler.py`).

`streaming.py` decodes a single prompt with the same programs, and stops their loop every few tokens.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence

import jax
import numpy as np
from flax import linen as nn

from jaxformer.config import DecodeConfig, ModelConfig
from jaxformer.decode.batching import Prompt, PromptQueue, bucket_length, buckets_within
from jaxformer.decode.compiled import CompiledDecoder, Vocabulary
from jaxformer.decode.scheduler import DecodeRun, decode_queue, is_on_one_device, open_dispatchers
from jaxformer.decode.search.base import Hypotheses, RowSettings
from jaxformer.errors import ConfigError
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

EXTRA_TOKENS = 10
"""New tokens allowed beside `max_ratio` times the source length."""


class Hypothesis(NamedTuple):
    """One output: `tokens` int32 `[n]`, with the end token if one was reached, and its `score` (see `Hypotheses`)."""

    tokens: np.ndarray
    score: float


@dataclass(frozen=True, eq=False)
class ModelBundle:
    """A module with what is needed to run it over prompts.

    Attributes:
      module: a Linen module; decoding needs its methods `start` and `step`.
      variables: the module's variables, with "params" among them.
      vocabulary: the special tokens and the size of the target vocabulary.
      source_pad: token that pads sources.
      buckets: preferred padded lengths (see `batching.bucket_length`).
      max_source_length: number of source positions that the module has; None: no limit.
      max_target_length: number of target positions that the module has, prompt included; None: no limit. What happens
        to longer texts, `DecodeConfig.past_positions` says.
      draft: a smaller model of the same tokens, which proposes `DecodeConfig.speculate` tokens a step; None: they are
        looked up in the text.
    """

    module: nn.Module
    variables: PyTree
    vocabulary: Vocabulary
    source_pad: int = 0
    buckets: tuple[int, ...] = ()
    max_source_length: int | None = None
    max_target_length: int | None = None
    draft: ModelBundle | None = None

    def decoder(self, options: DecodeConfig, per_row: bool = False) -> tuple[CompiledDecoder, PyTree]:
        """The programs for these `compiled_options`, and the variables that they take.

        Args:
          per_row: True if every row has sampling settings of its own.
        """
        draft, variables = self.draft if options.speculate else None, self.variables
        if draft is not None:
            variables = {"model": variables, "draft": draft.variables}
        decoder = CompiledDecoder(
            self.module, options, self.vocabulary, per_row=per_row, draft=None if draft is None else draft.module
        )
        return decoder, decoder.prepare_variables(variables)


def generate(
    model: ModelBundle,
    prompts: Sequence[Prompt],
    options: DecodeConfig,
    row_indices: Sequence[int] | np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Hypothesis]]:
    """Decodes prompts; result i holds up to `options.hypotheses` outputs for prompt i, best first.

    A result does not depend on the other prompts: random draws depend on the seed and the prompt's row index.

    Args:
      prompts: encoded prompts; one without "target" starts from `vocabulary.start`.
      row_indices: numbers that random draws depend on beside the seed, one per prompt; None: 0, 1, 2, ...
      progress: called with the numbers of finished and of all prompts, whenever some finish.

    Raises:
      ConfigError: a prompt is empty or too long, an output may get too long and the options refuse that, or an option
        names a token outside the vocabulary.
    """
    results: list[list[Hypothesis]] = [[] for _ in prompts]
    finished = tokens = passes = 0
    for group in prepare(model, prompts, options, row_indices):
        with open_dispatchers(model.variables) as dispatchers:
            for outputs in decode_queue(group.run, group.queue, options.batch, dispatchers):
                for index, hypotheses in outputs:
                    results[group.indices[index]] = _unpad(hypotheses)
                finished += len(outputs)
                if outputs and progress is not None:
                    progress(finished, len(prompts))
        tokens, passes = tokens + group.run.tally.tokens, passes + group.run.tally.passes
    if options.speculate and passes:
        log.info("decode: %.2f tokens a pass of the model, of at most %d", tokens / passes, options.speculate + 1)
    return results


class PreparedGroup(NamedTuple):
    """Prompts that wait to be decoded together: their indices in the input, what they share, and their queue."""

    indices: list[int]
    run: DecodeRun
    queue: PromptQueue


def prepare(
    model: ModelBundle,
    prompts: Sequence[Prompt],
    options: DecodeConfig,
    row_indices: Sequence[int] | np.ndarray | None = None,
) -> list[PreparedGroup]:
    """Checks prompts and options, and groups the prompts by `group_by_context`. Arguments and errors as in `generate`.

    Nothing is decoded yet. There is no group if there is no prompt.
    """
    vocabulary = model.vocabulary
    check_token_ids(options, vocabulary)
    prompts = [with_target(prompt, vocabulary) for prompt in prompts]
    _check_sources(prompts, model.max_source_length)
    max_lengths = [max_new_tokens(prompt, options, model.max_target_length) for prompt in prompts]
    check_rotations(model, prompts, max_lengths)
    if not prompts:
        return []
    check_proposals(model, options)
    if options.speculate:
        # The last token is never read by the model, so it needs no position.
        lengths = (len(prompt["target"]) + more - 1 for prompt, more in zip(prompts, max_lengths, strict=True))
        check_speculation(model, options.speculate, max(lengths))
    decoder, variables = model.decoder(compiled_options(options, max(max_lengths)))
    rows = RowSettings(
        max_lengths=np.asarray(max_lengths, np.int32),
        row_indices=np.asarray(np.arange(len(prompts)) if row_indices is None else row_indices, np.int32),
        key=jax.random.key(options.seed),
    )
    buckets = buckets_within(model.buckets, model.max_target_length, model.max_source_length)
    groups = []
    for group in group_by_context(prompts, max_lengths, model.max_target_length):
        indices = np.asarray(group.indices)
        run = DecodeRun(
            decoder=dataclasses.replace(decoder, context_length=group.context_length),
            variables=variables,
            prompts=RowSettings(rows.max_lengths[indices], rows.row_indices[indices], rows.key),
            can_refill=is_on_one_device(model.variables),
        )
        queue = PromptQueue([prompts[i] for i in group.indices], (model.source_pad, vocabulary.pad), buckets)
        groups.append(PreparedGroup(group.indices, run, queue))
    return groups


class ContextGroup(NamedTuple):
    """Prompts that are decoded together: their indices, and `CompiledDecoder.context_length` for them."""

    indices: list[int]
    context_length: int | None


def group_by_context(
    prompts: Sequence[Prompt], max_lengths: Sequence[int], max_target_length: int | None
) -> list[ContextGroup]:
    """The prompts in up to three groups: their texts fit into the model's positions, may outgrow them, or are longer.

    Args:
      max_lengths: new tokens that each prompt may get.
    """
    if max_target_length is None:
        return [ContextGroup(list(range(len(prompts))), None)]
    fitting, growing, longer = [], [], []
    for index, (prompt, max_length) in enumerate(zip(prompts, max_lengths, strict=True)):
        size = len(prompt["target"])
        if size > max_target_length:
            longer.append(index)
        else:
            # The last token is never read by the model, so it needs no position.
            (fitting if size + max_length - 1 <= max_target_length else growing).append(index)
    if longer:
        log.warning(
            "decode: %d prompts have more tokens than the model has positions; only their last %d are read",
            len(longer),
            max_target_length,
        )
    groups = [(fitting, None), (growing, max_target_length), (longer, max_target_length)]
    return [ContextGroup(indices, context_length) for indices, context_length in groups if indices]


def compiled_options(options: DecodeConfig, max_length: int) -> DecodeConfig:
    """Options that are part of compiled programs; those that differ between batches and calls have fixed values.

    Args:
      max_length: most new tokens that any prompt may get, rounded up so that few lengths are compiled.
    """
    rounded = max_length if max_length == options.max_length else min(options.max_length, bucket_length(max_length))
    return dataclasses.replace(options, max_length=rounded, seed=0, batch=1, max_ratio=None, past_positions="crop")


def check_token_ids(options: DecodeConfig, vocabulary: Vocabulary) -> None:
    """Checks that the options name tokens of the vocabulary only.

    Raises:
      ConfigError: a token id is negative or too large, or a sequence in `bad_words` is empty.
    """
    forced = [*options.forced_last, *([] if options.forced_first is None else [options.forced_first])]
    named = [*forced, *options.suppress, *(token for word in options.bad_words for token in word)]
    if vocabulary.size is not None and named and max(named) >= vocabulary.size:
        raise ConfigError(
            f"decode: got token {max(named)} to force or ban, expected ids below the vocabulary's {vocabulary.size}"
        )
    if named and min(named) < 0:  # a negative index would count from the end of the vocabulary
        raise ConfigError(f"decode: got token {min(named)} to force or ban, expected ids from 0")
    if not all(options.bad_words):
        raise ConfigError("decode: got an empty sequence in bad_words, expected at least one token in each")


def check_speculation(model: ModelBundle, proposals: int, longest: int) -> None:
    """Checks that texts of `longest` tokens fit into the positions of the model and of its draft.

    Raises:
      ConfigError: they do not.
    """
    for name, bundle in {"model": model, "draft": model.draft}.items():
        positions = None if bundle is None else bundle.max_target_length
        if positions is not None and longest > positions:
            raise ConfigError(
                f"decode.speculate: got {proposals} and a text of up to {longest} tokens, expected at most the "
                f"{name}'s {positions} positions; lower decode.max_length, or set decode.speculate to 0"
            )


def check_proposals(model: ModelBundle, options: DecodeConfig) -> None:
    """Checks that a module of `multi_token` can propose, where the options say so.

    Raises:
      ConfigError: the model has none, has a draft beside it, or more than one token is asked for.
    """
    if options.proposals != "multi_token":
        return
    if getattr(getattr(model.module, "config", None), "multi_token", None) is None:
        raise ConfigError(
            "decode.proposals: got multi_token and a model without such a module, expected one that was trained with "
            "model.multi_token; use look_up"
        )
    if model.draft is not None:
        raise ConfigError("decode.proposals: got multi_token and a draft, expected one of them; leave the draft out")
    if options.speculate != 1:
        raise ConfigError(
            f"decode.speculate: got {options.speculate}, expected 1 for proposals of multi_token: its first module "
            "predicts one token"
        )


def check_rotations(model: ModelBundle, prompts: Sequence[Prompt], max_lengths: Sequence[int]) -> None:
    """Checks that no text changes its rotations while it is decoded.

    LongRoPE turns all tokens of a text otherwise once it is longer than `scaling.original`; the cache, and through the
    layers all it holds, would have to be computed anew.

    Raises:
      ConfigError: a prompt is within that length and its output may pass it.
    """
    config = getattr(model.module, "config", None)
    stack = config.decoder if isinstance(config, ModelConfig) else None
    scaling = None if stack is None else stack.encoding.scaling
    if scaling is None or scaling.kind != "longrope":
        return
    for prompt, more in zip(prompts, max_lengths, strict=True):
        size = len(prompt["target"])
        # The last token is never read by the model.
        if size <= scaling.original < size + more - 1:
            raise ConfigError(
                f"decode: got a prompt of {size} tokens with up to {more} new ones, expected a text that stays within "
                f"LongRoPE's {scaling.original} or begins beyond them; ask for at most {scaling.original + 1 - size} "
                "new tokens, and go on with the longer text as the prompt"
            )


def max_new_tokens(prompt: Prompt, options: DecodeConfig, max_target_length: int | None) -> int:
    """Number of new tokens that a prompt may get.

    Raises:
      ConfigError: the prompt has more tokens than the model has target positions, or the output may pass the last
        position, and the options do not let the text be cropped.
    """
    limit = options.max_length
    if options.max_ratio is not None and "source" in prompt:
        limit = min(limit, int(options.max_ratio * len(prompt["source"])) + EXTRA_TOKENS)
    size = len(prompt["target"])
    # The last token is never read by the model, so it needs no position.
    if max_target_length is None or size + limit - 1 <= max_target_length:
        return limit
    past_positions = "stop" if "source" in prompt else options.past_positions
    if past_positions == "crop":
        return limit
    if past_positions == "refuse":
        raise ConfigError(
            f"decode.past_positions: got refuse and a prompt of {size} tokens with up to {limit} new ones, expected a "
            f"text within the model's {max_target_length} positions; lower decode.max_length, shorten the prompt, or "
            "set decode.past_positions to crop"
        )
    if size > max_target_length:
        raise ConfigError(
            f"prompt: got {size} tokens, expected at most the model's {max_target_length} positions; shorten it"
        )
    return max_target_length - size + 1


def with_target(prompt: Prompt, vocabulary: Vocabulary) -> Prompt:
    """The prompt with the start token as its target if it has none."""
    if len(prompt.get("target", ())) > 0:
        return prompt
    if vocabulary.start is None:
        raise ConfigError("prompt: got no tokens, expected at least one; begin it with a token that starts a text")
    return {**prompt, "target": np.asarray([vocabulary.start], np.int32)}


def _check_sources(prompts: Sequence[Prompt], max_source_length: int | None) -> None:
    """Raises a ConfigError if a source needs more positions than the encoder has."""
    if max_source_length is None:
        return
    for prompt in prompts:
        size = 1 + max(prompt["position"], default=-1) if "position" in prompt else len(prompt.get("source", ()))
        if size > max_source_length:
            raise ConfigError(
                f"source: got {size} slots, expected at most the model's {max_source_length} positions; shorten it"
            )


def _unpad(hypotheses: Hypotheses) -> list[Hypothesis]:
    """The hypotheses of one prompt, `[n, T]`, without padding and without missing ones."""
    return [
        Hypothesis(tokens[:length].copy(), float(score))
        for tokens, length, score in zip(*hypotheses, strict=True)
        if length > 0
    ]
