"""Arguments and outputs of calls: signatures, the options of a call, and the class of its output."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.hf.flax import outputs
from jaxformer.hf.flax.names import GROUPS
from jaxformer.hf.flax.outputs import ModelOutput
from jaxformer.types import Array, PyTree


def typed_key(key: Any) -> Array | None:
    """A PRNG key as an array of keys, from one or from the two numbers of `jax.random.PRNGKey`."""
    if key is None or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a call, beside its inputs.

    Attributes:
      heads: factors of the heads `[L, H]`, already in `params`; None: all are 1.
    """

    params: PyTree
    key: Array | None
    heads: Array | None = None
    attentions: bool = False
    hidden_states: bool = False
    return_dict: bool = True

    @property
    def flags(self) -> tuple[bool, bool]:
        """Whether attentions and hidden states are asked for."""
        return self.attentions, self.hidden_states

    def finish(self, output: ModelOutput) -> Any:
        """The output, or without `return_dict` its values as a tuple."""
        return output if self.return_dict else output.to_tuple()


def bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name.

    Raises:
      ConfigError: one is unknown, missing or given twice.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; expected some of {', '.join(signature.parameters)}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def call_with(signature: inspect.Signature) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a method the signature that users see; its arguments arrive by name."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(method, "__name__", "call")

        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, **bind(f"{type(self).__name__}.{name}", signature, args, kwargs))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        called.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # ty: ignore
        return called

    return decorate


def outputs_of(model_type: str, head: str) -> type[ModelOutput]:
    """The output class of a class's call."""
    encoder = GROUPS[model_type].call in ("bert", "big_bird", "albert", "distilbert", "roformer")
    pair = head in ("seq2seq", "sequence", "qa", "model") and GROUPS[model_type].call in ("bart", "t5")
    names = {
        "masked_lm": "FlaxMaskedLMOutput",
        "pretraining": f"Flax{GROUPS[model_type].prefix}ForPreTrainingOutput",
        "next_sentence": "FlaxNextSentencePredictorOutput",
        "sequence": "FlaxSeq2SeqSequenceClassifierOutput" if pair else "FlaxSequenceClassifierOutput",
        "token": "FlaxTokenClassifierOutput",
        "qa": "FlaxSeq2SeqQuestionAnsweringModelOutput" if pair else "FlaxQuestionAnsweringModelOutput",
        "multiple_choice": "FlaxMultipleChoiceModelOutput",
        "seq2seq": "FlaxSeq2SeqLMOutput",
        "encoder": "FlaxBaseModelOutput",
        "causal_lm": "FlaxCausalLMOutputWithCrossAttentions",
        "model": "FlaxSeq2SeqModelOutput" if pair else "FlaxBaseModelOutputWithPastAndCrossAttentions",
    }
    if (model_type, head) == ("big_bird", "qa"):
        names["qa"] = "FlaxBigBirdForQuestionAnsweringModelOutput"
    if head == "causal_lm" and GROUPS[model_type].call in ("gptj", "bloom", "opt"):
        names["causal_lm"] = "FlaxCausalLMOutput"
    elif head == "model" and encoder:
        with_pooler = model_type not in ("distilbert", "electra", "roformer")
        pooled = "WithPooling" if model_type == "albert" else "WithPoolingAndCrossAttentions"
        names["model"] = f"FlaxBaseModelOutput{pooled if with_pooler else ''}"
    elif head == "model" and GROUPS[model_type].call in ("gptj", "bloom", "opt"):
        names["model"] = "FlaxBaseModelOutput"
    return outputs.CLASSES[names[head]]
