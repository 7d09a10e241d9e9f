"""Flax classes by the names of the transformers library, whose version 5 has none.

    from jaxformer.hf.flax import FlaxAutoModelForSequenceClassification

Signatures, outputs and parameter trees are those of the old classes; docs/migration.md says what differs.
"""

from __future__ import annotations

from typing import Any

from jaxformer.hf.flax import classes, configs, logits_process, mappings, names, outputs
from jaxformer.hf.flax.configs import AutoConfig, PretrainedConfig
from jaxformer.hf.flax.generation import FlaxGenerationMixin
from jaxformer.hf.flax.generation_config import GenerationConfig
from jaxformer.hf.flax.seq2seq import shift_tokens_right

OTHERS = (
    AutoConfig, PretrainedConfig, GenerationConfig, FlaxGenerationMixin, shift_tokens_right, *logits_process.CLASSES,
)  # fmt: skip

_names: dict[str, Any] = {
    **classes.CLASSES,
    **classes.AUTO_CLASSES,
    **outputs.CLASSES,
    **configs.CLASSES,
    **mappings.MAPPINGS,
    **{item.__name__: item for item in OTHERS},
}
__all__ = list(_names)
globals().update(_names)


def __getattr__(name: str) -> Any:
    family = names.missing_family(name)
    if family is not None:
        known = ", ".join(group.prefix for group in names.GROUPS.values())
        # not an AttributeError, whose text an import statement replaces by its own
        raise ImportError(f"jaxformer.hf.flax: got {name} ({family}), expected a class of one of {known}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
