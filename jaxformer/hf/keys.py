"""Checks that every key of a config.json is read, or has a value that changes nothing.

`keys.json` (written by `benchmarks/hugging_face_keys.py`) lists the keys of every family's config class in the
transformers library, with their defaults. A key of a file is one of:

- read: by the family, or later by a call, by generation or by the tokenizer (`KEYS_READ_LATER`);
- ignored: it changes nothing that is computed here; `IGNORED_KEYS` and `Family.ignored_keys` give the reason;
- known to the library, and neither read nor ignored: refused unless it has its default value;
- unknown to the library, too: one warning names all of these.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import quantized
from jaxformer.hf.generation_options import DEFAULTS, MAX_TOKEN_ID
from jaxformer.hf.table import Family, Settings

log = logging.getLogger("jaxformer")

KEYS_READ_LATER = {
    "model_type": "chooses the family",
    "architectures": "chooses the head",
    "id2label": "names of the classes and their number",
    "num_labels": "number of classes where id2label is absent",
    "problem_type": "loss of a classifier's call",
    "output_hidden_states": "outputs of a call",
    "output_attentions": "outputs of a call",
    "output_router_logits": "outputs and loss of a call",
    "use_mems_eval": "memories of XLNet's call",
    "use_mems_train": "memories of XLNet's call",
    "decoder_start_token_id": "first token of a decoder's input",
    "add_prefix_space": "tokenizer of vocab.json and merges.txt",
    **{name: "default of generate" for name in DEFAULTS},
}
"""Key -> what reads it, after the family."""

IGNORED_KEYS = {
    "label2id": "the inverse of id2label",
    "transformers_version": "provenance of the file",
    "_name_or_path": "provenance of the file",
    "name_or_path": "provenance of the file",
    "_commit_hash": "provenance of the file",
    "auto_map": "code, which is not run",
    "dtype": "precision of the file; parameters are float32 here, the computation as `from_pretrained(dtype=)` says",
    "torch_dtype": "as dtype",
    "use_cache": "key-value caches of calls, which are not returned here",
    "initializer_range": "values before training",
    "initializer_factor": "values before training",
    "init_std": "values before training",
    "chunk_size_feed_forward": "memory, not values",
    "gradient_checkpointing": "memory, not values",
    "_attn_implementation": "how attention is computed, not what",
    "attn_implementation": "how attention is computed, not what",
    "_attn_implementation_autoset": "how attention is computed, not what",
    "experts_implementation": "how experts are computed, not what",
    "task_specific_params": "options of generation by task, which the library does not apply, either",
    "finetuning_task": "provenance of the model",
    "tokenizer_class": "of the tokenizer, whose files say it",
    "prefix": "of the tokenizer",
    "sep_token_id": "of the tokenizer",
    "cls_token_id": "of the tokenizer",
    "mask_token_id": "of the tokenizer",
    "unk_token_id": "of the tokenizer",
    "torchscript": "tracing of the library's model",
    "use_bfloat16": "of another backend",
    "output_past": "older name of use_cache",
    "_num_labels": "older name of num_labels",
    "n_ctx": "older name of n_positions",
    "classif_dropout": "older name that the library no longer reads",
}
"""Key -> the reason why no value of it changes what is computed here."""

REFUSED_KEYS = {
    "per_layer_config": "layers that differ",
    "pruned_heads": "layers with fewer heads",
    "tie_encoder_decoder": "one set of layers for both sides",
}
"""Key that changes the computation and is in no list of `keys.json` -> its meaning. Only an empty value is accepted."""


@functools.cache
def key_lists() -> dict[str, Any]:
    """The content of `keys.json`."""
    return json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))


def _family_keys(family: Family) -> dict[str, Any]:
    """The lists of a family in `keys.json`; empty for a family outside the package, of which nothing is known."""
    return key_lists()["families"].get(family.model_types[0], {"aliases": {}, "defaults": {}, "beside": []})


def default_values(family: Family) -> dict[str, Any]:
    """The library's default values of a family's keys; None for keys that only its modelling code reads."""
    listed = _family_keys(family)
    return {**key_lists()["common"], **dict.fromkeys(listed["beside"]), **listed["defaults"]}


@functools.cache
def keys_read_by(model_types: tuple[str, ...]) -> frozenset[str]:
    """Keys that a family reads of an empty config.json, over all of its heads."""
    from jaxformer.hf.table import families

    family = next(family for _, family in families() if family.model_types == model_types)
    read: set[str] = set()
    for head in family.heads:
        settings = Settings({})
        family.read_config(settings, head)
        read |= settings.read_keys
    return frozenset(read)


def with_defaults(family: Family, settings: Settings) -> Settings:
    """The settings with the library's defaults, and with aliases (GPT-2's `hidden_size`) renamed to their keys.

    Weights of fewer bits are read as plain ones, so the settings do not say how they lie in the file.

    Raises:
      ConfigError: a key and its alias differ, or the weights are in a format that is not read.
    """
    quantized.method_of(settings.values, settings.path)
    aliases = _family_keys(family)["aliases"]
    values = {name: value for name, value in settings.values.items() if name != quantized.KEY}
    for alias, name in aliases.items():
        if alias not in values:
            continue
        if name in settings.values and settings.values[name] != values[alias]:
            raise ConfigError(
                f"{settings.path}: got {name} {settings.values[name]!r} and {alias} {values[alias]!r}, expected one "
                "number, since both name the same; remove one"
            )
        values[name] = values[alias]
    return Settings(values, settings.path, default_values(family))


def read_model(family: Family, settings: Settings, head: str) -> ModelConfig:
    """The model config of a config.json with a head. `settings` are those of `with_defaults`; every key is checked.

    Raises:
      ConfigError: the family refuses a value, or a key that changes the computation is not read.
    """
    model = family.read_config(settings, head)
    check_keys(family, settings)
    return model


def check_keys(family: Family, settings: Settings) -> None:
    """Refuses or warns of keys that nothing reads. The family must have read the settings before.

    Raises:
      ConfigError: a key that changes the computation is not read, and has not its default value.
    """
    defaults, content = default_values(family), key_lists()
    read = settings.read_keys | keys_read_by(family.model_types) | set(_family_keys(family)["aliases"])
    ignored = {*KEYS_READ_LATER, *IGNORED_KEYS, *family.ignored_keys, *content["generation"]}
    unknown = sorted(settings.unread_keys)
    for name, value in settings.values.items():
        if name in read or name in ignored:
            continue
        if name in defaults and value not in (None, defaults[name]):
            raise ConfigError(
                f"{settings.path}: got {name} {value!r}, expected {defaults[name]!r}; this variant is not supported"
            )
        if name in REFUSED_KEYS and value:
            raise ConfigError(
                f"{settings.path}: got {name} ({REFUSED_KEYS[name]}), expected none; this variant is not supported"
            )
        if name not in defaults and name not in REFUSED_KEYS:
            unknown.append(name)
    if unknown:
        log.warning(
            "%s: got %s, which nothing reads; check that they change nothing", settings.path, ", ".join(unknown)
        )


def check_special_tokens(values: Mapping[str, Any], path: str, vocab: int) -> None:
    """Warns of special tokens beyond the vocabulary.

    Args:
      path: the file, for messages.
      vocab: size of the vocabulary.

    Raises:
      ConfigError: a token is not a whole number of 32 bits.
    """
    outside = []
    for name, value in values.items():
        if not name.endswith("_token_id") or value is None:
            continue
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not -1 <= token <= MAX_TOKEN_ID:
                raise ConfigError(f"{path}: got {name} {token!r}, expected a token of {vocab}; fix the file")
            if not 0 <= token < vocab:
                outside.append(f"{name} {token}")
    if outside:
        log.warning("%s: got %s, which the vocabulary of %d does not have", path, ", ".join(outside), vocab)
