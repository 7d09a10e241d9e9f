"""Configs of the Flax classes: objects of the other library, dicts, or `PretrainedConfig`, which is a config.json."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxformer.errors import ConfigError
from jaxformer.hf import keys, reading
from jaxformer.hf.flax import names
from jaxformer.hf.hub import locate
from jaxformer.hf.table import Settings, family_of
from jaxformer.runtime import hub
from jaxformer.runtime.hub import Download

log = logging.getLogger("jaxformer")

OF_DOWNLOADS = ("revision", "token", "use_auth_token", "cache_dir", "local_files_only", "force_download")
"""Arguments of downloads, which count for models of the hub."""

UNUSED = (
    "resume_download", "proxies", "trust_remote_code", "use_safetensors", "_from_auto", "_commit_hash", "code_revision",
    "adapter_kwargs",
)  # fmt: skip
"""Arguments of downloads that change nothing here."""

NO_WISH = (None, False, "", "main")
"""Values of these arguments that ask for nothing: "main" is the usual revision."""

COMMON: dict[str, Any] = {
    "output_attentions": False, "output_hidden_states": False, "return_dict": True, "is_encoder_decoder": False,
    "is_decoder": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "sep_token_id": None,
    "decoder_start_token_id": None, "problem_type": None, "architectures": None, "name_or_path": "", "use_cache": True,
}  # fmt: skip
"""Keys that every config answers to, with their defaults."""


def split_downloads(
    source: str | os.PathLike[str], arguments: Mapping[str, Any], subfolder: str = ""
) -> tuple[Download, dict[str, Any]]:
    """The download that finds `source` on the hub, and the arguments that are not of a download.

    A warning names those of a download that ask for something and change nothing: all of them if `source` is a local
    directory.
    """
    is_local = not hub.is_name(source)
    names = [*OF_DOWNLOADS, *UNUSED] if is_local else UNUSED
    wished = [name for name in names if arguments.get(name) not in NO_WISH and not name.startswith("_")]
    if wished:
        why = ": a local directory is read" if is_local else ""
        log.warning("from_pretrained: got %s, which change nothing%s", ", ".join(wished), why)
    given = {} if is_local else {name: arguments.get(name) for name in OF_DOWNLOADS}
    token = given.get("token") if given.get("token") is not None else given.get("use_auth_token")
    download = Download(
        given.get("revision"),
        token,
        given.get("cache_dir"),
        bool(given.get("local_files_only")),
        bool(given.get("force_download")),
        subfolder or "",
    )
    return download, {name: value for name, value in arguments.items() if name not in (*OF_DOWNLOADS, *UNUSED)}


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
        """The config.json of a local directory or of a model on the hub, with `changes`.

        Args:
          changes: keys to set, and arguments of a download, as of the models' `from_pretrained`.

        Raises:
          ConfigError: there is no such file, or it is damaged.
        """
        download, changes = split_downloads(directory, changes, subfolder)
        found = locate(directory, download, weights=(), tokenizer=False, what="from_pretrained")
        return cls.from_dict(reading.read_config(found), **changes)

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

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes config.json."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / reading.CONFIG_FILE).write_text(self.to_json_string(), encoding="utf-8")

    def to_json_string(self) -> str:
        """The keys that were set, as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str) + "\n"


class AutoConfig(PretrainedConfig):
    """`PretrainedConfig` under the name that scripts import."""


class FamilyConfig(PretrainedConfig):
    """`PretrainedConfig` of one architecture, under the name that it has in the other library (`BertConfig`)."""

    model_type: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        own = type(self).model_type
        if values.get("model_type", own) != own:
            raise ConfigError(f"{type(self).__name__}: got model_type {values['model_type']!r}, expected {own!r}")
        super().__init__(**{**values, "model_type": own})


class EncoderDecoderConfig(FamilyConfig):
    """The config of a pair."""

    model_type = "encoder-decoder"

    @classmethod
    def from_encoder_decoder_configs(cls, encoder_config: Any, decoder_config: Any, **values: Any) -> PretrainedConfig:
        """The config of a pair of these two, the decoder with cross-attention."""
        decoder = {**values_of(decoder_config), "is_decoder": True, "add_cross_attention": True}
        return cls(encoder=values_of(encoder_config), decoder=decoder, is_encoder_decoder=True, **values)


CLASSES: dict[str, type[FamilyConfig]] = {
    f"{group.prefix}Config": type(f"{group.prefix}Config", (FamilyConfig,), {"model_type": model_type})
    for model_type, group in names.GROUPS.items()
} | {"EncoderDecoderConfig": EncoderDecoderConfig}
"""Config classes by name."""


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
