"""Configs of the Flax classes: objects of the other library, dicts, or `PretrainedConfig`, which is a config.json."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.hf import keys, reading
from jaxformer.hf.table import Settings, family_of

log = logging.getLogger("jaxformer")

OF_DOWNLOADS = (
    "cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision", "resume_download",
    "proxies", "trust_remote_code", "use_safetensors", "_from_auto", "_commit_hash", "code_revision", "adapter_kwargs",
)  # fmt: skip
"""Arguments of downloads, of which there are none here: every path is a local directory."""

NO_WISH = (None, False, "", "main")
"""Values of these arguments that ask for nothing: "main" is the usual revision."""

COMMON: dict[str, Any] = {
    "output_attentions": False, "output_hidden_states": False, "return_dict": True, "is_encoder_decoder": False,
    "is_decoder": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "sep_token_id": None,
    "decoder_start_token_id": None, "problem_type": None, "architectures": None, "name_or_path": "", "use_cache": True,
}  # fmt: skip
"""Keys that every config answers to, with their defaults."""


def without_downloads(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not of a download; a warning names those of a download that ask for something."""
    wished = [name for name in OF_DOWNLOADS if arguments.get(name) not in NO_WISH and not name.startswith("_")]
    if wished:
        log.warning("from_pretrained: got %s, which change nothing: a local directory is read", ", ".join(wished))
    return {name: value for name, value in arguments.items() if name not in OF_DOWNLOADS}


class PretrainedConfig:
    """The keys of a config.json as attributes, with the other library's defaults of its `model_type`.

    `num_labels` and `id2label` are one thing, as there: setting the number names the classes LABEL_0 and so on.

    Args:
      values: keys of config.json; `model_type` among them.
    """

    def __init__(self, **values: Any) -> None:
        family = family_of(Settings(values))
        aliases = keys.key_lists()["families"].get(family.model_types[0], {}).get("aliases", {})
        object.__setattr__(self, "_aliases", dict(aliases))
        object.__setattr__(self, "_defaults", {**COMMON, **keys.default_values(family)})
        object.__setattr__(self, "_values", {})
        self.update(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **changes: Any) -> PretrainedConfig:
        """The config of a config.json's content, with `changes`."""
        return cls(**{**values, **changes})

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, subfolder: str = "", **changes: Any
    ) -> PretrainedConfig:
        """The config.json of a local directory, with `changes`.

        Raises:
          ConfigError: there is no such file, or it is damaged.
        """
        changes = without_downloads(changes)
        return cls.from_dict(reading.read_config(Path(directory) / subfolder), **changes)

    @classmethod
    def for_model(cls, model_type: str, **values: Any) -> PretrainedConfig:
        """The default config of an architecture, with `values`."""
        return cls(model_type=model_type, **values)

    def update(self, values: Mapping[str, Any]) -> None:
        """Sets keys."""
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_labels":
            if len(self._values.get("id2label") or ()) != value:
                self._values["id2label"] = {str(i): f"LABEL_{i}" for i in range(value)}
                self._values["label2id"] = {f"LABEL_{i}": i for i in range(value)}
            return
        self._values[self._aliases.get(name, name)] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_values", "_defaults", "_aliases"):
            raise AttributeError(name)
        if name == "num_labels":
            return len(self.id2label)
        if name == "id2label":
            given = self._values.get("id2label") or {i: f"LABEL_{i}" for i in range(2)}
            return {int(number): label for number, label in given.items()}
        if name == "label2id":
            return self._values.get("label2id") or {label: i for i, label in self.id2label.items()}
        name = self._aliases.get(name, name)
        for values in (self._values, self._defaults):
            if name in values:
                return values[name]
        raise AttributeError(f"config: got {name!r}, expected a key of model_type {self._values.get('model_type')}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PretrainedConfig:
        return type(self)(**copy.deepcopy(self._values, memo))

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"

    def to_dict(self) -> dict[str, Any]:
        """The keys that were set."""
        return copy.deepcopy(self._values)

    def to_json_string(self) -> str:
        """The keys that were set, as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str) + "\n"


class AutoConfig(PretrainedConfig):
    """`PretrainedConfig` under the name that scripts import."""


def values_of(config: Any) -> dict[str, Any]:
    """The keys of a config: of the other library's object, of `PretrainedConfig`, or of a dict.

    Raises:
      ConfigError: it is something else.
    """
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ConfigError(f"config: got {type(config).__name__}, expected a config object or the dict of a config.json")
    values = dict(to_dict())
    if not values.get("model_type"):
        values["model_type"] = getattr(config, "model_type", "")
    return values
