"""The framing of runs: text to features with the run's tokenizers, as the task frames it in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import Config
from jaxformer.data.tokenizers import PairTemplate, Tokenizers
from jaxformer.decode.compiled import Vocabulary
from jaxformer.decode.runner import Runner, max_positions
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, tagging
from jaxformer.types import PyTree


@dataclass(frozen=True, eq=False)
class RunFraming:
    """Frames text like the run's training; see `tasks.Framing` for the methods.

    Attributes:
      config: the resolved config of the run.
      text_tokenizers: its tokenizers; None: its task reads no text.
    """

    config: Config
    text_tokenizers: Tokenizers | None

    @property
    def tokenizers(self) -> Tokenizers:
        """Tokenizers of source and target.

        Raises:
          ConfigError: the model reads a series.
        """
        if self.text_tokenizers is None:
            raise ConfigError("model: got text, expected a series, which this model reads; see docs/series.md")
        return self.text_tokenizers

    @property
    def chat_length(self) -> int:
        """Most tokens of a conversation and its next reply: those of training."""
        return self.config.data.length

    @property
    def pairing(self) -> PairTemplate:
        """The special tokens that the source tokenizer puts around two texts."""
        return self.tokenizers.source.pair_template

    def prompt(self, line: str) -> Features:
        """The prompt that the run's task makes of a line."""
        return tasks.get(self.config.task.name).prompt(self.config, self.text_tokenizers, line)

    def word_slots(self, line: str) -> list[int | None]:
        """Slot of the first token of each word, encoded word by word."""
        return tagging.encode_words(self.config, self.tokenizers.source, line)[1]

    def add_decoder_input(self, features: Features) -> Features:
        """`features` as they are: models that read and do not generate have one side here."""
        return features


def run_vocabulary(tokenizers: Tokenizers | None) -> Vocabulary:
    """The end token, padding token and size of the target vocabulary; empty without tokenizers."""
    if tokenizers is None:
        return Vocabulary(eos=(), pad=0, size=0)
    target = tokenizers.target
    end = target.sep if target.eos is None else target.eos
    return Vocabulary(eos=() if end is None else (end,), pad=target.pad or 0, size=target.size)


def make_runner(
    config: Config, module: nn.Module, variables: Mapping[str, PyTree], vocabulary: Vocabulary, source_pad: int
) -> Runner:
    """A runner with the limits that the config sets."""
    series, positions = config.model.series, max_positions(config.model.encoder)
    if series is not None and positions is not None:  # one for each patch
        positions *= series.stride or series.patch
    return Runner(
        module,
        variables,
        vocabulary,
        source_pad=source_pad,
        buckets=config.data.buckets,
        max_source_length=positions,
        max_target_length=max_positions(config.model.decoder),
        batch_size=config.evaluate.batch,
    )


def run_predictor(
    config: Config, module: nn.Module, variables: Mapping[str, PyTree], tokenizers: Tokenizers | None
) -> Predictor:
    """A run's module, ready for text that is framed as in its training."""
    pad = 0 if tokenizers is None else tokenizers.source.pad or 0
    runner = make_runner(config, module, variables, run_vocabulary(tokenizers), pad)
    return Predictor(config, runner, RunFraming(config, tokenizers))


def predictors(
    config: Config, module: nn.Module, variables: Mapping[str, PyTree], tokenizers: Tokenizers | None
) -> Callable[[Config], Predictor]:
    """Makes the predictor of a component of a mixture from its view; all share one runner."""
    whole = run_predictor(config, module, variables, tokenizers)
    return lambda view: dataclasses.replace(whole, config=view, framing=RunFraming(view, tokenizers))
