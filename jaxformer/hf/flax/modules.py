"""`model.module`: the old modules' `apply` and `init`, on top of a model's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxformer.errors import ConfigError
from jaxformer.hf.flax import signatures
from jaxformer.hf.flax.calls import bind
from jaxformer.hf.flax.names import GROUPS
from jaxformer.types import PyTree

if TYPE_CHECKING:
    from jaxformer.hf.flax.model import FlaxPreTrainedModel


class Module:
    """A model's function of its variables: `apply({"params": params}, input_ids, ..., deterministic=True)`."""

    def __init__(self, model: FlaxPreTrainedModel) -> None:
        self.model = model
        kind = signatures.kind_of(GROUPS[model.model_type].call, model.model_type, model.head)
        names = signatures.MODULES[signatures.module_kind(kind, model.model_type, model.head)]
        self.signature = signatures.signature(names, "input_ids")

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        mutable: Any = False,
        method: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The outputs for `variables` {"params": tree}, and with a mutable "cache" the new variables beside them.

        Args:
          rngs: {"dropout": key} where `deterministic` is False.
          mutable: False or ["cache"], where `variables` hold a "cache".

        Raises:
          ConfigError: a method, a collection or an argument is not supported.
        """
        if method is not None:
            raise ConfigError("module.apply: got a method, expected None; use the model's encode and decode")
        unknown = set(variables) - {"params", "cache"}
        if unknown or (mutable and list(mutable) != ["cache"]):
            raise ConfigError('module.apply: got other collections, expected "params" and "cache"')
        given = bind("module.apply", self.signature, args, kwargs)
        if given.pop("init_cache", False):
            raise ConfigError("module.apply: got init_cache, expected False; use the model's init_cache")
        if given.pop("encoder_outputs", None) is not None:
            raise ConfigError("module.apply: got encoder_outputs, expected None; use the model's decode")
        key = None if rngs is None else rngs["dropout"] if isinstance(rngs, Mapping) else rngs
        given["train"] = not given.pop("deterministic")
        for name in signatures.OUTPUTS.split():
            given[name] = given[name] if given[name] is not None else name == "return_dict"
        output = self.model._call(
            **given, params=variables["params"], dropout_rng=key, past_key_values=variables.get("cache")
        )
        if not mutable:
            return output
        past = output.pop("past_key_values", None) if isinstance(output, dict) else None
        return output, {} if past is None else {"cache": past}

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> PyTree:
        """Random variables, {"params": tree}."""
        key = rngs["params"] if isinstance(rngs, Mapping) else rngs
        return {"params": self.model.init_weights(key, jax.numpy.shape(args[0]) if args else (1, 1))}
