"""The other library's names on a `Model`: which functions compute them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer import framing
from jaxformer.config import Config
from jaxformer.decode.compiled import Vocabulary
from jaxformer.errors import ConfigError
from jaxformer.hf import export, forward, generation, generation_options, push
from jaxformer.hf.framing import ImportedFraming
from jaxformer.hf.origin import TASKS, HuggingFaceOrigin
from jaxformer.hf.peft import writing
from jaxformer.model import Model
from jaxformer.tasks import Predictor
from jaxformer.types import Array, PyTree

Pretrained = Model
"""The name of earlier versions."""


@dataclass(frozen=True, eq=False)
class HuggingFace(HuggingFaceOrigin):
    """An origin with the calls of the other library; the value of `Model.hf`."""

    def predictor(self, model: Model, config: Config) -> Predictor:
        """The model, ready for text; an imported one frames text as its directory does."""
        tokenizers, variables = model.tokenizers, model.inference_variables()
        if self.family is None and (tokenizers is not None or not config.model.reads_tokens):
            return framing.run_predictor(config, model.module, variables, tokenizers)
        if tokenizers is None:
            raise ConfigError("model: got no tokenizers, expected some to read text; give token ids")
        if config.task.name == "none":  # such a model is not trained here, and answers or classifies all the same
            config = dataclasses.replace(
                config, task=dataclasses.replace(config.task, name=TASKS.get(self.head, "none"))
            )
        pad, ends = generation_options.padding_and_ends(self.defaults)
        target = config.model.decoder or config.model.encoder
        vocab = 0 if target is None else target.embed.vocab or 0
        pad = pad if 0 <= pad < vocab else 0  # one outside of the table only fills outputs
        start = generation_options.start_of_text(self.defaults)
        runner = framing.make_runner(
            config, model.module, variables, Vocabulary(eos=ends, pad=pad, start=start), tokenizers.source.pad or 0
        )
        return Predictor(config, runner, ImportedFraming(config.model, tokenizers, self))

    def call(self, model: Model, params: PyTree, dropout_key: Array | None, inputs: Mapping[str, Any]) -> Any:
        """The named outputs of a forward pass."""
        if model.config.model.series is not None:
            raise ConfigError("call: got names of token inputs, expected a batch: this model reads a series")
        return forward.call(model, self, params, dropout_key, inputs)

    def generate(self, model: Model, options: Mapping[str, Any]) -> Any:
        """Token ids."""
        return generation.generate(model, self, options)

    def save_pretrained(self, model: Model, directory: str | os.PathLike[str], family: str | None, dtype: Any) -> None:
        """Writes a directory that the other library loads."""
        export.save_pretrained(model, self, directory, family, dtype)

    def save_adapter(
        self, model: Model, directory: str | os.PathLike[str], base: str | os.PathLike[str] | None
    ) -> None:
        """Writes the adapters as a directory of the peft package."""
        writing.save_adapter(model, self, directory, base)

    def push_to_hub(
        self, model: Model, name: str, family: str | None, dtype: Any, adapter: bool, **options: Any
    ) -> str:
        """Uploads the model with a card; see `push.push`."""
        base = model.config.init.directory or None
        if adapter:
            return push.push(model, self, name, lambda directory: model.save_adapter(directory, base), **options)
        return push.push(
            model, self, name, lambda directory: model.save_pretrained(directory, family, dtype), **options
        )
