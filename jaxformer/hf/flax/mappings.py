"""`FLAX_MODEL_*_MAPPING` of the old library: which class an automatic one takes for a class of configs.

MODEL_TYPES = tuple(config.model_type for config in FLAX_MODEL_FOR_MASKED_LM_MAPPING)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.hf.flax import classes, configs, names

AUTO_CLASSES = {
    "FLAX_MODEL_MAPPING": "FlaxAutoModel",
    "FLAX_MODEL_FOR_CAUSAL_LM_MAPPING": "FlaxAutoModelForCausalLM",
    "FLAX_MODEL_FOR_MASKED_LM_MAPPING": "FlaxAutoModelForMaskedLM",
    "FLAX_MODEL_FOR_MULTIPLE_CHOICE_MAPPING": "FlaxAutoModelForMultipleChoice",
    "FLAX_MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING": "FlaxAutoModelForNextSentencePrediction",
    "FLAX_MODEL_FOR_PRETRAINING_MAPPING": "FlaxAutoModelForPreTraining",
    "FLAX_MODEL_FOR_QUESTION_ANSWERING_MAPPING": "FlaxAutoModelForQuestionAnswering",
    "FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "FlaxAutoModelForSeq2SeqLM",
    "FLAX_MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "FlaxAutoModelForSequenceClassification",
    "FLAX_MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": "FlaxAutoModelForTokenClassification",
}
"""Name of a mapping -> the automatic class whose choices it holds."""


class ModelMapping(Mapping[Any, Any]):
    """Config class -> model class. A key is a class with a `model_type`: of here, or of the other library."""

    def __init__(self, auto_class: str) -> None:
        self._classes = {
            model_type: classes.auto_class(auto_class, {"model_type": model_type})
            for model_type in classes.auto_types(auto_class)
        }

    def __getitem__(self, key: Any) -> Any:
        model_type = getattr(key, "model_type", None)
        if model_type not in self._classes:
            raise KeyError(key)
        return self._classes[model_type]

    def __iter__(self) -> Iterator[Any]:
        return (configs.CLASSES[f"{names.GROUPS[model_type].prefix}Config"] for model_type in self._classes)

    def __len__(self) -> int:
        return len(self._classes)


MAPPINGS = {name: ModelMapping(auto_class) for name, auto_class in AUTO_CLASSES.items()}
"""The mappings by name."""
