"""Encoder-decoders put together of two models (`FlaxEncoderDecoderModel`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import traverse_util

from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.families import encoder_decoder
from jaxformer.hf.flax import configs, names, old
from jaxformer.hf.flax.seq2seq import FlaxSeq2SeqModel
from jaxformer.hf.table import Settings, family_of
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

LOADING = ("from_pt", "subfolder", "ignore_mismatched_sizes")
"""Arguments of one side's loading, beside those of a download."""


class FlaxPair(FlaxSeq2SeqModel):
    """A pair: its old tree has a body of the encoder below "encoder" and a whole model below "decoder".

    Positions of a call that gives none begin at 0 on both sides, as in the old class, also where the family's own class
    begins after the padding's id (RoBERTa).
    """

    def _sides(self) -> tuple[str, ...]:
        values = {side: encoder_decoder.side_values(self.settings, side) for side in encoder_decoder.SIDES}
        for side, config in values.items():
            _check_class("config", side, str(config["model_type"]))
        return tuple(str(config["model_type"]) for config in values.values())

    def _old_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return old.old_pair(values, tuple(encoder_decoder.SIDES))

    def _sided(self, given: Mapping[str, Any]) -> dict[str, Any]:
        inputs = dict(given)
        for prefix in ("", "decoder_"):
            ids = inputs.get(f"{prefix}input_ids")
            if ids is not None and inputs.get(f"{prefix}position_ids") is None:
                shape = jnp.shape(ids)
                inputs[f"{prefix}position_ids"] = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return inputs

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("decoder_input_ids") is None:
            raise ConfigError("call: got no decoder_input_ids, expected them; a pair makes none of its own")
        return super()._inputs(self._sided(given))

    @classmethod
    def from_encoder_decoder_pretrained(
        cls,
        encoder_pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
        decoder_pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
        dtype: Any = jnp.float32,
        seed: int = 0,
        **changes: Any,
    ) -> FlaxPair:
        """A pair of two checkpoints; what neither has, as cross-attention, is random.

        Args:
          dtype: precision of the computation.
          seed: of the random parameters.
          changes: keys of the pair's config; with "encoder_" or "decoder_" before them, of one side's. Of a side there
            are also `model` (in place of its checkpoint), `config` (in place of the checkpoint's), `from_pt`,
            `subfolder`, and the arguments of a download.

        Raises:
          ConfigError: a checkpoint cannot be read, or its family is none of a pair.
        """
        places = {"encoder": encoder_pretrained_model_name_or_path, "decoder": decoder_pretrained_model_name_or_path}
        values: dict[str, Any] = {"model_type": "encoder-decoder", "is_encoder_decoder": True}
        own = {name: value for name, value in changes.items() if _side_of(name) == ""}
        leaves: dict[tuple[str, ...], Any] = {}
        for side, place in places.items():
            edits = {name.removeprefix(f"{side}_"): x for name, x in changes.items() if _side_of(name) == side}
            side_config, params = _side(side, place, edits)
            joined = encoder_decoder.JOINED if side == "decoder" else dict.fromkeys(encoder_decoder.JOINED, False)
            values[side] = side_config | joined
            leaves |= {(side, *path): x for path, x in traverse_util.flatten_dict(params).items()}
        make: Any = cls
        pair = make(values | own, dtype=dtype, seed=seed, _do_init=False)
        fresh = sorted("/".join(path) for path in set(pair.spec.leaves) - set(leaves))
        log.warning("%s and %s: %d random leaves (%s, ...): train the pair", *places.values(), len(fresh), fresh[:1])
        kept = {path: x for path, x in leaves.items() if path in pair.spec.leaves}
        params = traverse_util.unflatten_dict(kept)
        pair._is_initialized, pair._params = True, pair.init_weights(pair.key, pair.input_shape, params)
        return pair


def _side(side: str, place: Any, edits: dict[str, Any]) -> tuple[dict[str, Any], PyTree]:
    """The config and the parameters of the encoder or the decoder, from a model or a checkpoint."""
    from jaxformer.hf.flax.classes import CLASSES

    model, config = edits.pop("model", None), edits.pop("config", None)
    if (model is None) == (place is None):
        raise ConfigError(f"from_encoder_decoder_pretrained: got both or none of a path and {side}_model, expected one")
    loading = {name: edits.pop(name) for name in (*configs.OF_DOWNLOADS, *configs.UNUSED, *LOADING) if name in edits}
    if model is not None or config is not None:
        source = configs.values_of(config if model is None else model.config)
        values = configs.PretrainedConfig.from_dict(source, **edits).to_dict()
    else:
        found = {name: value for name, value in loading.items() if name in configs.OF_DOWNLOADS or name == "subfolder"}
        values = configs.PretrainedConfig.from_pretrained(place, **edits, **found).to_dict()
    model_type = values.get("model_type")
    encoder_decoder.check_type(str(place or side), side, model_type)
    _check_class(str(place or side), side, str(model_type))
    if model is not None:
        return values, model.params
    flags = {"add_cross_attention": False, "is_decoder": side == "decoder"}
    known = keys.default_values(family_of(Settings(values)))
    alone = {name: x for name, x in values.items() if name not in flags}
    alone |= {name: x for name, x in flags.items() if name in known}
    head = "model" if side == "encoder" else "causal_lm"
    made = CLASSES[names.class_name(str(model_type), head)].from_pretrained(place, config=alone, **loading)
    return values, made.params


def _check_class(path: str, side: str, model_type: str) -> None:
    """Refuses a family that had no Flax class.

    Raises:
      ConfigError: it had none.
    """
    if model_type not in names.GROUPS:
        known = ", ".join(name for name in encoder_decoder.SIDES[side] if name in names.GROUPS)
        raise ConfigError(f"{path}: got {model_type} as the {side}, which had no Flax class, expected one of {known}")


def _side_of(key: str) -> str:
    """The side that a keyword argument is for, by its start; "" for the pair's own keys."""
    if key == "decoder_start_token_id":
        return ""
    return next((side for side in encoder_decoder.SIDES if key.startswith(f"{side}_")), "")
