"""Runs a module over encoded prompts of any lengths: forward passes and decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from jaxformer.config import DecodeConfig, StackConfig
from jaxformer.decode.batching import Prompt, prompt_batches
from jaxformer.decode.compiled import Finish, forward
from jaxformer.decode.generate import Hypothesis, ModelBundle
from jaxformer.decode.generate import generate as generate_hypotheses
from jaxformer.decode.streaming import stream as stream_tokens
from jaxformer.types import Batch


def max_positions(stack: StackConfig | None) -> int | None:
    """Number of positions of a stack with learned position embeddings; None for other stacks, which have no limit."""
    if stack is None or stack.encoding.kind != "learned":
        return None
    return stack.encoding.max_length - stack.encoding.offset


class ForwardBatch(NamedTuple):
    """The outputs of one forward pass.

    Attributes:
      indices: int `[n]`, the indices of the prompts in the input.
      batch: their padded batch, of n or more rows; rows from n on are empty.
      outputs: `[n, ...]`, the module's outputs; row i belongs to prompt `indices[i]`.
    """

    indices: np.ndarray
    batch: Batch
    outputs: np.ndarray


@dataclass(frozen=True, eq=False)
class Runner(ModelBundle):
    """Runs a module over encoded prompts. It knows no task and no text.

    Attributes:
      batch_size: rows of a batch in `forward`; `generate` has `DecodeConfig.batch`.
    """

    batch_size: int = 64

    def forward(
        self,
        prompts: Sequence[Prompt],
        method: str | None = None,
        finish: Finish | None = None,
        buckets: tuple[int, ...] | None = None,
    ) -> Iterator[ForwardBatch]:
        """Applies the module without decoding, batch by batch; prompts of similar length share a batch.

        Args:
          method: name of the module's method; None: its call. "encode" gets the source stream alone.
          finish: function of `(output, batch)` that runs on the device in the same program. Each new function object
            is compiled, so pass the same one again.
          buckets: padded lengths that replace `self.buckets`.
        """
        pads = (self.source_pad, self.vocabulary.pad)
        buckets = self.buckets if buckets is None else buckets
        for indices, batch in prompt_batches(prompts, self.batch_size, pads, buckets):
            outputs = forward(self.module, self.variables, batch, method, finish)
            yield ForwardBatch(indices, batch, np.asarray(outputs)[: len(indices)])

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: DecodeConfig,
        row_indices: Sequence[int] | np.ndarray | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """Decodes prompts; result i holds up to `options.hypotheses` outputs for prompt i, best first.

        Arguments and errors are those of `generate.generate`.
        """
        return generate_hypotheses(self, prompts, options, row_indices, progress)

    def stream(self, prompt: Prompt, options: DecodeConfig) -> Iterator[np.ndarray]:
        """The new tokens of one prompt, in pieces int32 `[n]`, as they are chosen (see `streaming.stream`)."""
        return stream_tokens(self, prompt, options)
