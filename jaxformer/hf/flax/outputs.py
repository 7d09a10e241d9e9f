"""The output types of the old Flax classes: attributes, keys and tuple indices name the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import jax


class ModelOutput(dict[str, Any]):
    """Named outputs: `out.logits`, `out["logits"]` and `out[0]`. Fields that are None are neither keys nor indices.

    A pytree, so it passes through `jit`, `grad` and `pmap`.

    Attributes:
      FIELDS: names of the fields in their order.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda self: ([(jax.tree_util.DictKey(name), value) for name, value in self.items()], tuple(self)),
            lambda names, values: cls(**dict(zip(names, values, strict=True))),
        )

    def __init__(self, **values: Any) -> None:
        order = {name: i for i, name in enumerate(self.FIELDS)}
        unknown = [name for name in values if name not in order]
        if unknown:
            raise TypeError(f"{type(self).__name__}: got {', '.join(unknown)}, expected some of {', '.join(order)}")
        given = sorted((name for name, value in values.items() if value is not None), key=order.__getitem__)
        super().__init__({name: values[name] for name in given})

    def __getattr__(self, name: str) -> Any:
        if name in self.FIELDS:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__}: got {name!r}, expected one of {', '.join(self.FIELDS)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.FIELDS:
            raise KeyError(f"{type(self).__name__}: got {name!r}, expected one of {', '.join(self.FIELDS)}")
        values = {**self, name: value}
        self.clear()
        self.update({field: values[field] for field in self.FIELDS if values.get(field) is not None})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None, in the order of the fields."""
        return tuple(self.values())

    def replace(self, **values: Any) -> ModelOutput:
        """The output with other values of some fields."""
        return type(self)(**{**self, **values})


_STATES = ("hidden_states", "attentions")
_CROSS = ("hidden_states", "attentions", "cross_attentions")
_SEQ2SEQ = (
    "past_key_values", "decoder_hidden_states", "decoder_attentions", "cross_attentions", "encoder_last_hidden_state",
    "encoder_hidden_states", "encoder_attentions",
)  # fmt: skip

FIELDS: dict[str, tuple[str, ...]] = {
    "FlaxBaseModelOutput": ("last_hidden_state", "past_key_values", *_STATES),
    "FlaxBaseModelOutputWithPooling": ("last_hidden_state", "pooler_output", *_STATES),
    "FlaxBaseModelOutputWithPoolingAndCrossAttentions": (
        "last_hidden_state", "pooler_output", "hidden_states", "past_key_values", "attentions", "cross_attentions",
    ),
    "FlaxBaseModelOutputWithPastAndCrossAttentions": ("last_hidden_state", "past_key_values", *_CROSS),
    "FlaxCausalLMOutputWithCrossAttentions": ("logits", "past_key_values", *_CROSS),
    "FlaxMaskedLMOutput": ("logits", "past_key_values", *_STATES),
    "FlaxBertForPreTrainingOutput": ("prediction_logits", "seq_relationship_logits", *_STATES),
    "FlaxBigBirdForPreTrainingOutput": ("prediction_logits", "seq_relationship_logits", *_STATES),
    "FlaxAlbertForPreTrainingOutput": ("prediction_logits", "sop_logits", *_STATES),
    "FlaxElectraForPreTrainingOutput": ("logits", *_STATES),
    "FlaxNextSentencePredictorOutput": ("logits", *_STATES),
    "FlaxSequenceClassifierOutput": ("logits", *_STATES),
    "FlaxTokenClassifierOutput": ("logits", *_STATES),
    "FlaxMultipleChoiceModelOutput": ("logits", *_STATES),
    "FlaxQuestionAnsweringModelOutput": ("start_logits", "end_logits", *_STATES),
    "FlaxBigBirdForQuestionAnsweringModelOutput": ("start_logits", "end_logits", "pooled_output", *_STATES),
    "FlaxSeq2SeqModelOutput": ("last_hidden_state", *_SEQ2SEQ),
    "FlaxSeq2SeqLMOutput": ("logits", *_SEQ2SEQ),
    "FlaxSeq2SeqSequenceClassifierOutput": ("logits", *_SEQ2SEQ),
    "FlaxSeq2SeqQuestionAnsweringModelOutput": ("start_logits", "end_logits", *_SEQ2SEQ),
    "FlaxGreedySearchOutput": ("sequences",),
    "FlaxSampleOutput": ("sequences",),
    "FlaxBeamSearchOutput": ("sequences", "scores"),
}  # fmt: skip
"""Output class -> names of its fields in their order."""

CLASSES: dict[str, type[ModelOutput]] = {
    name: type(name, (ModelOutput,), {"FIELDS": fields, "__module__": __name__}) for name, fields in FIELDS.items()
}
CLASSES["FlaxCausalLMOutput"] = CLASSES["FlaxMaskedLMOutput"]  # two names of one class, as there


def __getattr__(name: str) -> type[ModelOutput]:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__} has no {name}")
    return CLASSES[name]


def names() -> Iterator[str]:
    """The names of all output classes."""
    return iter(CLASSES)
