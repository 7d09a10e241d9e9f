"""The Hugging Face side of a model: its family, head, config.json and generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxformer.config import Config
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf.table import CallConvention, Family, Settings

TASKS = {
    "causal_lm": "language_modelling",
    "masked_lm": "masked_lm",
    "pretraining": "masked_lm",
    "seq2seq": "translation",
    "sequence": "classification",
    "token": "tagging",
    "qa": "answering",
}
"""Head -> the task that trains it here. The others are called here, and not trained."""

PROBLEMS = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
"""`problem_type` of a classifier of texts -> the task that trains it here."""

TRAINED_AS = {
    "summarisation": "translation",
    "span_corruption": "translation",
    "multi_label": "classification",
    "regression": "classification",
    "denoising": "translation",
    "text_to_text": "translation",
    "prefix_lm": "language_modelling",
    "dialogue": "language_modelling",
    "permutation_lm": "language_modelling",
}
"""Task -> the one of `TASKS` whose head it trains; they differ in what is measured."""

BODIES = ("encoder", "bare", "model")
"""Names of heads of a bare body, the one with the fewest parameters first."""


@dataclass(frozen=True, eq=False)
class HuggingFaceOrigin:
    """A model in the other library's terms, as its files say or as they would for a model that was trained here.

    Attributes:
      head: name of the head: causal_lm, masked_lm, pretraining, seq2seq, sequence, token, qa, model, bare, encoder.
      family: the architecture's table; None: the model was trained here.
      settings: its config.json.
      defaults: options of `generate`, from generation_config.json, or from config.json where there is no such file.
      workdir: of the run that the model is of; None: of none.
    """

    head: str = ""
    family: Family | None = None
    settings: Settings = field(default_factory=lambda: Settings({}))
    defaults: Mapping[str, Any] = field(default_factory=dict)
    workdir: Path | None = None

    @property
    def convention(self) -> CallConvention:
        """The family's calling convention; the default one for a model that was trained here."""
        return CallConvention() if self.family is None else self.family.convention

    @property
    def architecture(self) -> str:
        """The class named in config.json; the head of a model that was trained here."""
        return self.head if self.family is None else self.family.heads[self.head]


def special_token_ids(config: Config, tokenizers: Tokenizers | None) -> dict[str, int | None]:
    """Special tokens of a model that was trained here, under their names in a config.json; none without tokenizers."""
    if tokenizers is None:
        return {}
    target = tokenizers.target
    ids = {"pad_token_id": target.pad, "eos_token_id": target.eos, "bos_token_id": target.bos}
    if config.model.is_seq2seq:
        ids["decoder_start_token_id"] = target.bos
    return ids


def head_of_model(config: Config) -> str:
    """The head's name of a model that was trained here."""
    model = config.model
    if model.head.kind == "tokens":
        if not model.has_decoder:
            if model.permutation is not None:
                return "causal_lm"
            return "pretraining" if model.head.relation else "masked_lm"
        return "seq2seq" if model.has_encoder else "causal_lm"
    slots = "qa" if config.task.name == "answering" else "token"
    return {"classes": "sequence", "slots": slots}.get(model.head.kind, "model")
