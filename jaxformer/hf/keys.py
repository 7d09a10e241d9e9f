"""Checks that every key of a config.json is read, or is at a value that changes nothing.

`keys.json` (made by `benchmarks/hugging_face_keys.py`) lists the keys of every family's config class with the other
library's defaults. A key of a file is one of:

- read: by the family, or at a call, by generation or by the tokenizer (`READ_ELSEWHERE`);
- free: it changes nothing that is computed here (`FREE`, and the family's own `free`), with the reason;
- known to the library and neither: refused unless it has its default;
- unknown to the library too, which keeps it as an attribute that nothing reads: one warning names all of these.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.hf.generation import DEFAULTS, MAX_TOKEN_ID
from jaxformer.hf.table import Family, Settings

log = logging.getLogger("jaxformer")

READ_ELSEWHERE = {
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
"""Key -> what reads it after the family has."""

FREE = {
    "label2id": "the inverse of id2label",
    "transformers_version": "who wrote the file",
    "_name_or_path": "who wrote the file",
    "name_or_path": "who wrote the file",
    "_commit_hash": "who wrote the file",
    "auto_map": "code that is never run here",
    "dtype": "precision of the file; parameters are float32 here, the computation as `from_pretrained(dtype=)` says",
    "torch_dtype": "as dtype",
    "use_cache": "whether a call returns keys and values, which none does here",
    "initializer_range": "values before training",
    "initializer_factor": "values before training",
    "init_std": "values before training",
    "chunk_size_feed_forward": "memory, not values",
    "gradient_checkpointing": "memory, not values",
    "_attn_implementation": "how attention is computed, not what",
    "attn_implementation": "how attention is computed, not what",
    "_attn_implementation_autoset": "how attention is computed, not what",
    "experts_implementation": "how experts are computed, not what",
    "task_specific_params": "options of generation by task, which nothing applies",
    "finetuning_task": "what the model was trained for",
    "tokenizer_class": "of the tokenizer, which says itself what it is",
    "prefix": "of the tokenizer",
    "sep_token_id": "of the tokenizer",
    "cls_token_id": "of the tokenizer",
    "mask_token_id": "of the tokenizer",
    "unk_token_id": "of the tokenizer",
    "torchscript": "how the other library traces a model",
    "use_bfloat16": "of another backend",
    "output_past": "older name of use_cache",
    "_num_labels": "older name of num_labels",
    "n_ctx": "older name of n_positions",
    "classif_dropout": "older name that the other library has ceased to read",
}
"""Key -> why no value of it changes what is computed here."""

REFUSED = {
    "quantization_config": "weights in a format of their own",
    "per_layer_config": "layers that differ",
    "pruned_heads": "layers with fewer heads",
    "tie_encoder_decoder": "one set of layers for both sides",
}
"""Keys outside the lists that change the computation -> what they say; only an empty value is accepted."""


@functools.cache
def lists() -> dict[str, Any]:
    """`keys.json`."""
    return json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))


def known(family: Family) -> dict[str, Any]:
    """The library's keys of a family with their defaults; those that only its modelling code reads are None."""
    content = lists()
    own = content["families"][family.types[0]]
    return {**content["common"], **dict.fromkeys(own["beside"]), **own["defaults"]}


@functools.cache
def read_by_default(types: tuple[str, ...]) -> frozenset[str]:
    """Keys that a family asks an empty config.json for, over all of its heads."""
    from jaxformer.hf.table import families

    family = next(family for _, family in families() if family.types == types)
    asked: set[str] = set()
    for head in family.heads:
        settings = Settings({})
        family.read(settings, head)
        asked |= settings.asked
    return frozenset(asked)


def named(family: Family, settings: Settings) -> Settings:
    """The settings with the library's defaults, and every alias of a key (GPT-2's `hidden_size`) under its own name.

    Raises:
      ConfigError: both are given and differ.
    """
    own, values = lists()["families"][family.types[0]]["aliases"], dict(settings.values)
    for alias, name in own.items():
        if alias not in values:
            continue
        if name in settings.values and settings.values[name] != values[alias]:
            raise ConfigError(
                f"{settings.where}: got {name} {settings.values[name]!r} and {alias} {values[alias]!r}, expected one "
                "number, since both name the same; remove one"
            )
        values[name] = values[alias]
    return Settings(values, settings.where, known(family))


def read_model(family: Family, settings: Settings, head: str) -> ModelConfig:
    """The model of a config.json (as `named` returns it) under a head, with every key accounted for.

    Raises:
      ConfigError: the family refuses a value, or a key that changes the computation is not read.
    """
    model = family.read(settings, head)
    check(family, settings)
    return model


def check(family: Family, settings: Settings) -> None:
    """Refuses or names the keys of `settings` that nothing reads; `settings` are those that the family has read."""
    defaults, content = known(family), lists()
    read = settings.asked | read_by_default(family.types) | set(content["families"][family.types[0]]["aliases"])
    free = {*READ_ELSEWHERE, *FREE, *family.free, *content["generation"]}
    unknown = sorted(settings.unread)
    for name, value in settings.values.items():
        if name in read or name in free:
            continue
        if name in defaults and value not in (None, defaults[name]):
            raise ConfigError(
                f"{settings.where}: got {name} {value!r}, expected {defaults[name]!r}; this variant is not supported"
            )
        if name in REFUSED and value:
            raise ConfigError(
                f"{settings.where}: got {name} ({REFUSED[name]}), expected none; this variant is not supported"
            )
        if name not in defaults and name not in REFUSED:
            unknown.append(name)
    if unknown:
        log.warning("%s: nothing reads %s, here or in the other library", settings.where, ", ".join(unknown))


def check_tokens(values: Mapping[str, Any], where: str, rows: int) -> None:
    """Names special tokens that are not among the vocabulary's `rows`.

    Raises:
      ConfigError: one is no whole number of 32 bits.
    """
    outside = []
    for name, value in values.items():
        if not name.endswith("_token_id") or value is None:
            continue
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not -1 <= token <= MAX_TOKEN_ID:
                raise ConfigError(f"{where}: got {name} {token!r}, expected a token of {rows}; fix the file")
            if not 0 <= token < rows:
                outside.append(f"{name} {token}")
    if outside:
        log.warning("%s: got %s, which the vocabulary of %d does not have", where, ", ".join(outside), rows)
