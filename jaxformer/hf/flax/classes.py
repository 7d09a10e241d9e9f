"""The classes themselves, made from the table in `names.py`."""

from __future__ import annotations

import inspect
import os
from typing import Any

import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.hf.flax import configs, files, names, signatures
from jaxformer.hf.flax.calls import call_with, outputs_of
from jaxformer.hf.flax.generation import FlaxGenerationMixin
from jaxformer.hf.flax.model import FlaxPreTrainedModel
from jaxformer.hf.flax.names import GROUPS, Group
from jaxformer.hf.flax.pairs import FlaxPair
from jaxformer.hf.flax.seq2seq import FlaxSeq2SeqModel
from jaxformer.hf.flax.spec import family


def _members(model_type: str, head: str, group: Group) -> dict[str, Any]:
    """The members of a class: its family, and methods under the signatures of the old class."""
    kind = signatures.kind_of(group.call, model_type, head)
    call = signatures.signature(signatures.CALLS[kind], "input_ids")

    @call_with(call)
    def __call__(self: FlaxPreTrainedModel, **given: Any) -> Any:
        """The outputs of a forward pass; see `FlaxPreTrainedModel.__call__`."""
        if given.get("head_mask") is not None:  # the classes, but not their modules, took whole numbers
            given["head_mask"] = jnp.asarray(given["head_mask"]).astype(jnp.int32)
        return self._call(**given)

    members: dict[str, Any] = {
        "model_type": model_type,
        "head": head,
        "config_class": configs.CLASSES[f"{group.prefix}Config"],
        "call_signature": call,
        "__call__": __call__,
        "output_class": outputs_of(model_type, head),
        "base_model_prefix": family(model_type, head).prefix.rstrip(".") or "transformer",
        "__doc__": f"{names.class_name(model_type, head)} of the old library.",
        "__module__": "jaxformer.hf.flax",
    }
    if kind in signatures.ENCODE:

        @call_with(signatures.signature(signatures.ENCODE[kind], "input_ids"))
        def encode(self: FlaxSeq2SeqModel, **given: Any) -> Any:
            """The encoder's output."""
            return self._encode(**given)

        @call_with(signatures.signature(signatures.DECODE[kind], "decoder_input_ids encoder_outputs"))
        def decode(self: FlaxSeq2SeqModel, **given: Any) -> Any:
            """The decoder's output, for the encoder's."""
            return self._decode(**given)

        members |= {"encode": encode, "decode": decode}
    return members


def make_classes() -> dict[str, type[FlaxPreTrainedModel]]:
    """All classes by name, those of families without a head included."""
    made: dict[str, type[FlaxPreTrainedModel]] = {"FlaxPreTrainedModel": FlaxPreTrainedModel}
    for model_type, group in GROUPS.items():
        pair = group.call in signatures.ENCODE
        kind = FlaxPair if model_type == "encoder-decoder" else FlaxSeq2SeqModel if pair else FlaxPreTrainedModel
        bases = (FlaxGenerationMixin, kind)
        parent = type(f"Flax{group.prefix}PreTrainedModel", bases, {"__module__": "jaxformer.hf.flax"})
        made[parent.__name__] = parent
        for head in group.heads:
            name, parents = names.class_name(model_type, head), (parent,)
            if pair and head in ("causal_lm", "encoder"):  # one side alone
                parents = (FlaxGenerationMixin, FlaxPreTrainedModel)
            if pair and head == "causal_lm":
                decoder = f"Flax{group.prefix}DecoderPreTrainedModel"
                made[decoder] = type(decoder, parents, {"__module__": "jaxformer.hf.flax"})
                parents = (made[decoder],)
            made[name] = type(name, parents, _members(model_type, head, group))
    return made


CLASSES = make_classes()


def auto_types(name: str) -> tuple[str, ...]:
    """The `model_type`s for which an automatic class has a class."""
    heads = set(names.AUTO_HEADS[name])
    return names.AUTO_TYPES.get(name, tuple(t for t, group in GROUPS.items() if heads & set(group.heads)))


def auto_class(name: str, config: Any) -> type[FlaxPreTrainedModel]:
    """The class that an automatic one takes for a config.

    Raises:
      ConfigError: the family has none, or is not here.
    """
    model_type = str(configs.values_of(config).get("model_type", ""))
    heads, types = names.AUTO_HEADS[name], auto_types(name)
    if model_type not in types:
        raise ConfigError(f"{name}: got model_type {model_type!r}, expected one of {', '.join(types)}")
    head = next(head for head in heads if head in GROUPS[model_type].heads)
    return CLASSES[names.class_name(model_type, head)]


class _Auto:
    """An automatic class, which makes none of its own instances."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"{type(self).__name__}: got a call, expected from_pretrained(path) or from_config(config)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of the class for the config's `model_type`."""
        config, changes = kwargs.pop("config", None), {}
        of_downloads = (*configs.OF_DOWNLOADS, *configs.UNUSED)
        given = {name: kwargs.pop(name) for name in of_downloads if name in kwargs}
        subfolder, from_pt = kwargs.pop("subfolder", ""), kwargs.get("from_pt", False)
        directory, download, _ = files.locate(pretrained_model_name_or_path, given, subfolder, from_pt)
        if config is None or isinstance(config, (str, os.PathLike)):
            own = set(inspect.signature(FlaxPreTrainedModel.from_pretrained).parameters)
            changes = {key: kwargs.pop(key) for key in list(kwargs) if key not in own and not key.startswith("_")}
            source, found = (directory, {}) if config is None else (config, files.of_config(download))
            config = configs.PretrainedConfig.from_pretrained(source, **found, **changes)
        model = auto_class(cls.__name__, config).from_pretrained(directory, *args, config=config, **kwargs)
        (model[0] if isinstance(model, tuple) else model).name_or_path = str(pretrained_model_name_or_path)
        return model

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """A model with random parameters, of the class for the config's `model_type`."""
        return auto_class(cls.__name__, config)(config, **kwargs)


AUTO_CLASSES = {name: type(name, (_Auto,), {"__module__": "jaxformer.hf.flax"}) for name in names.AUTO_HEADS}
