"""Models of the other library: loaded, called and saved under its names, computed by ours."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import linen as nn

from jaxformer.config import Config, ConfigError, ModelConfig
from jaxformer.data.tokenizers import Tokenizer, write
from jaxformer.data.vocabularies import Fast
from jaxformer.decode import engine
from jaxformer.decode.batching import Prompt
from jaxformer.hf import calling, convert, generation, keys, rewrite, writing
from jaxformer.hf.table import HIDDEN, Convention, Family, Settings, families, same
from jaxformer.hf.tokenizer import Framed, frame, pairing
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.tasks import answering, tagging
from jaxformer.types import Batch, PyTree

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("jaxformer")

TASKS = {
    "causal_lm": "language_modelling",
    "masked_lm": "masked_lm",
    "seq2seq": "translation",
    "sequence": "classification",
    "token": "tagging",
    "qa": "answering",
}
"""Head -> the task that trains it here. The others are called here, and not trained."""

TRAINED_AS = {"summarisation": "translation"}
"""Task -> the one of `TASKS` whose head it trains; they differ in what is measured."""

BODIES = ("encoder", "bare", "model")
"""Our words for no head at all, the one with the fewest parameters first."""


@dataclass(frozen=True, eq=False)
class Pretrained(Model):
    """A `Model` that also answers to the other library's names.

    Attributes:
      family: the architecture's table.
      head: our word for its head: causal_lm, masked_lm, seq2seq, sequence, token, qa, model, ...
      settings: its config.json.
      defaults: of `generate`'s options: its generation_config.json, or without one what config.json has of them.
    """

    family: Family | None = field(default=None)
    head: str = field(default="")
    settings: Settings = field(default_factory=lambda: Settings({}))
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, batch: Batch | None = None, *, params: PyTree = None, dropout_key: Any = None, **inputs: Any
    ) -> Any:
        """The outputs of a call with their argument names, e.g. `model(input_ids=ids, attention_mask=mask).logits`.

        Usable under jit and grad: parameters are `self.params`, or those given. A `dropout_key` makes it a training
        step's forward. Outputs come in float32 under their names, as a pytree: logits or last_hidden_state, loss where
        labels are given, hidden_states, attentions.

        Raises:
          ConfigError: an argument is not supported by this model.
        """
        params = self.params if params is None else params
        if batch is not None:
            return super().__call__(batch)
        if self.convention.call is not None:
            return self.convention.call(self, params, dropout_key, inputs)
        model, module = self.config.model, self.module
        names = calling.accepted(model, self.head)
        given = calling.with_defaults(calling.check(inputs, names), self.settings, names)
        everywhere = self.family is not None and calling.decides_everywhere(model, self.head)
        batch = calling.batch_of(self.convention, self.settings, model, self.head, given)
        wanted = calling.needs_intermediates(self.head, model, given)
        if everywhere:
            module = build.build(calling.at_every_slot(model))
        logits, sown = apply(module, {**self._variables, "params": params}, batch, wanted, dropout_key)
        if everywhere:
            logits = calling.of_last_token(self.settings, logits, given)
        loss = calling.loss_of(self.head, self.settings, logits, given)
        outputs = calling.outputs_of(self.head, model, logits, loss, sown, given)
        return calling.add_router(outputs, self.settings, model, sown, given)

    def generate(self, prompts: Any = None, decode: Any = None, **options: Any) -> Any:
        """Token ids with their argument names (`input_ids=..., num_beams=4`), or texts as `Model.generate`.

        With ids `max_length` counts the prompt, as there. With texts it counts new tokens (`DecodeConfig.max_length`),
        and generation_config.json is not read.
        """
        if prompts is not None:
            return super().generate(prompts, decode, **options)
        return generation.generate(self, options)

    @property
    def convention(self) -> Convention:
        """How it is called; a model that was trained here in the usual way."""
        return Convention() if self.family is None else self.family.convention

    def _prompt(self, line: str) -> Prompt:
        """An imported model's text is framed as its tokenizer.json says."""
        if self.family is None:
            return super()._prompt(line)
        framed = self._framed(line)
        ids, model = np.asarray(framed.ids, np.int32), self.config.model
        calling.check_range("a token", ids, (model.encoder or model.decoder).embed.vocab)
        if model.encoder is None:
            return {"target": ids}
        prompt = {"source": ids}
        if model.encoder.embed.kinds:
            prompt["kind"] = np.asarray(framed.kinds, np.int32)
        if model.decoder is not None:
            prompt["target"] = generation.decoder_start(self.defaults, 1)[0]
        return prompt

    def _framed(self, line: str) -> Framed:
        return frame(self._tokenizer(), self.convention, line)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizers is None:
            raise ConfigError(
                "model: got text, expected token ids: the directory has no tokenizer.json or spiece.model"
            )
        return self.tokenizers.source

    def _family(self) -> str:
        """A model of both sides answers, too, though no task here trains it."""
        return "answer" if self.head == "qa" else super()._family()

    def _reading(self, question: str, context: str) -> answering.Reading:
        """An imported model's question is framed as its tokenizer.json says."""
        if self.family is None:
            return super()._reading(question, context)
        tokenizer = self._tokenizer()
        return answering.read(self.config, tokenizer, question, context, pairing(tokenizer, self.convention))

    def _part(self, reading: answering.Reading, window: range) -> Prompt:
        """Where a model of both sides answers, its decoder reads the text again."""
        prompt, model = super()._part(reading, window), self.config.model
        if model.encoder is None or model.decoder is None:
            return prompt
        ids = calling.shift_right(self.convention, self.settings, np.asarray(prompt["source"])[None])
        return {**prompt, "target": np.asarray(ids[0])}

    def _words(self, line: str) -> list[tuple[str, int | None]]:
        """Of an imported model by the characters that each token stands for."""
        if self.family is None:
            return super()._words(line)
        offsets, words, found = self._framed(line).offsets, tagging.words(line), []
        if words and not offsets:
            raise ConfigError("tag: got a tokenizer without character offsets, expected a tokenizer.json")
        end = 0
        for word in words:
            begin = line.index(word, end)
            end = begin + len(word)
            slots = (slot for slot, (first, last) in enumerate(offsets) if first < end and last > begin)
            found.append((word, next(slots, None)))
        return found

    def _vocabulary(self) -> engine.Vocabulary:
        if self.family is None:
            return super()._vocabulary()
        pad, ends = generation.special(self.defaults)
        return engine.Vocabulary(eos=ends, pad=pad)

    def save_pretrained(self, directory: str | os.PathLike[str], family: str | None = None, dtype: Any = None) -> None:
        """Writes config.json, model.safetensors and the tokenizer, so that the other library computes the same.

        Args:
          family: file of `jaxformer/hf/families/`; None: the one it came from, or the first that can express it.
          dtype: of the file's tensors; None: float32.

        Raises:
          ConfigError: no family computes what this model does; the message says where they differ.
        """
        model, params = self.config.model, self.params
        if model.head.kind == "pair":
            model = _body(model)
            log.warning(
                "%s: the body alone; a sentence's vector is the %s pooling of its last hidden states here",
                directory,
                self.config.model.head.pooling,
            )
        if self.family is None:
            model, params = rewrite.in_their_terms(model, params)
        chosen, head, settings = self._expressed(model, family)
        tensors = {**convert.write(chosen.rows(model, head), params, dtype), **chosen.constants(model)}
        if not model.head.tied:
            tensors |= {name: tensors[weaker] for name, weaker in chosen.twins if weaker in tensors}
        if head in ("model", "bare", "encoder"):
            tensors = {name.removeprefix(chosen.prefix): make for name, make in tensors.items()}
        writing.write(directory, settings, tensors)
        self._save_tokenizer(Path(directory))

    def _expressed(self, model: ModelConfig, name: str | None) -> tuple[Family, str, dict[str, Any]]:
        """The family to export to, its head, and the config.json."""
        problems: list[tuple[int, str]] = []  # how many settings differ, and which
        for found, family in families():
            if name not in (None, found) or (name is None and self.family is not None and family is not self.family):
                continue
            heads = BODIES if self.config.model.head.kind == "pair" else (self.head,)
            for head in [head for head in heads if head in family.heads]:
                try:
                    settings = {**family.write(model, head), **self._labels(head)}
                    settings = {"model_type": family.types[0], "architectures": [family.heads[head]], **settings}
                    again = family.read(keys.named(family, Settings(settings)), head)
                except (ConfigError, AttributeError, KeyError) as error:
                    problems.append((100, f"{found}: {error}"))
                    continue
                if family.tables is not None and not model.head.tied:
                    again = dataclasses.replace(again, share_embeddings=model.share_embeddings)
                different = same(model, again)
                if not different:
                    return family, head, self._merged(model, family, head, settings)
                problems.append((len(different), f"{found}: {'; '.join(different)}"))
        if not problems:
            known = ", ".join(found for found, family in families() if self.head in family.heads)
            raise ConfigError(f"export: got family {name!r} for head {self.head}, expected one of {known}")
        raise ConfigError(f"export: got a model that no family computes; the nearest is {min(problems)[1]}")

    def _merged(self, model: ModelConfig, family: Family, head: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The config.json to write: an imported model's own, as far as it still describes the model."""
        if self.family is not family:
            return settings | self._special_tokens()
        own = dict(self.settings.values)
        as_it_was = {**settings, **own}
        again = family.read(keys.named(family, Settings(as_it_was)), head)
        return as_it_was if not same(model, again) else {**own, **settings}

    def _labels(self, head: str) -> dict[str, Any]:
        if head not in ("sequence", "token"):
            return {}
        count = self.config.model.head.classes or 0
        names = self.classes or self.config.task.classes or tuple(f"LABEL_{i}" for i in range(count))
        return {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}

    def _special_tokens(self) -> dict[str, Any]:
        """Ids of the special tokens, for a model that was trained here."""
        if self.family is not None or self.tokenizers is None:
            return {}
        target = self.tokenizers.target
        ids = {"pad_token_id": target.pad, "bos_token_id": target.bos, "eos_token_id": target.eos}
        if self.config.model.encoder is not None and self.config.model.decoder is not None:
            ids["decoder_start_token_id"] = target.bos
        return {name: value for name, value in ids.items() if value is not None}

    def _save_tokenizer(self, directory: Path) -> None:
        """One tokenizer of a kind that the other library has is written too; the others stay here."""
        if self.tokenizers is None:
            return
        if not self.tokenizers.joint or not isinstance(self.tokenizers.target.vocabulary, Fast):
            log.warning("%s: no tokenizer.json, the other library has none of this kind; encode texts here", directory)
            return
        target = self.tokenizers.target
        encoder = self.config.model.decoder is None and self.head in ("masked_lm", "sequence", "token", "qa")
        target.export(
            directory / "tokenizer.json",
            closing=self.family is None and self.head == "seq2seq",
            framing=self.family is None and encoder,
        )
        if self.family is None:  # or the other library would take the tokenizer's class from the model's
            says = {f"{role}_token": piece for role, piece in target.names.items()}
            says = {"tokenizer_class": "PreTrainedTokenizerFast", **says}
            write(directory / "tokenizer_config.json", json.dumps(says, indent=2, ensure_ascii=False) + "\n")


@functools.partial(jax.jit, static_argnames=("module", "wanted"))
def apply(module: nn.Module, variables: PyTree, batch: Batch, wanted: bool, key: Any = None) -> tuple[Any, PyTree]:
    """The module's output, and its intermediates if they are wanted."""
    rngs = {} if key is None else {"dropout": key}
    if not wanted:
        return module.apply(variables, batch, rngs=rngs), {}
    output, sown = module.apply(variables, batch, rngs=rngs, mutable=["intermediates"])
    return output, sown["intermediates"]


def room(model: ModelConfig) -> int:
    """The most positions that every table of them has."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return min(stack.encoding.max_length - stack.encoding.offset for stack in stacks)


def _body(model: ModelConfig) -> ModelConfig:
    """A model of sentences without its head, for which the other library has no architecture.

    Raises:
      ConfigError: the head has parameters.
    """
    if model.head.width is not None:
        raise ConfigError(
            f"export: got a head of sentences with a layer of width {model.head.width}, expected none: the other "
            "library has no architecture for it; train with model.head.width=None"
        )
    return dataclasses.replace(model, head=HIDDEN)


def head_of_model(config: Config) -> str:
    """Our word for the head of a model that was trained here."""
    model = config.model
    if model.head.kind == "tokens":
        if model.decoder is None and model.recurrent_decoder is None:
            return "masked_lm"
        return "causal_lm" if model.encoder is None and model.recurrent_encoder is None else "seq2seq"
    slots = "qa" if config.task.name == "answering" else "token"
    return {"classes": "sequence", "slots": slots}.get(model.head.kind, "model")
