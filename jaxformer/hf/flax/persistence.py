"""`from_pretrained` and `save_pretrained` of the Flax classes."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxformer.errors import ConfigError
from jaxformer.hf import reading
from jaxformer.hf.flax import configs, files
from jaxformer.hf.flax.generation_config import COPY_KEY
from jaxformer.hf.flax.generation_config import FILE as GENERATION_FILE
from jaxformer.runtime import hub
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

UPLOAD = ("repo_id", "commit_message", "private", "revision")
"""Arguments of `save_pretrained` that say where and how to upload."""

WITHOUT_UPLOAD = ("use_temp_dir", "repo_url", "organization", "create_pr", "commit_description", "tags")
"""Further ones of the old library, which change nothing where nothing is uploaded."""


class Persistence:
    """Reading and writing of directories."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        dtype: Any = jnp.float32,
        *,
        config: Any = None,
        from_pt: bool = False,
        subfolder: str = "",
        ignore_mismatched_sizes: bool = False,
        _do_init: bool = True,
        seed: int = 0,
        input_shape: tuple[int, ...] = (1, 1),
        gradient_checkpointing: bool = False,
        **changes: Any,
    ) -> Any:
        """The model in a local directory or on the hub, or without `_do_init` the pair (model, params).

        A model of the hub ("org/name") is read from the cache of the hub's client, and downloaded where huggingface_hub
        is installed.

        Weights are read from `flax_model.msgpack`, `model.safetensors` or `pytorch_model.bin`, whole or in shards, and
        nothing in a file is run. Leaves that the directory lacks are random, with a warning.

        Args:
          dtype: precision of the computation; parameters keep that of the file.
          config: a config in place of the directory's config.json, or the path of another.
          from_pt: reads the weights of the newer library even where there is a msgpack.
          ignore_mismatched_sizes: leaves of other shapes are random, with a warning.
          changes: keys of the config to set (`num_labels=3`); and for a model of the hub `revision`, `token` (or
            `use_auth_token`), `cache_dir`, `local_files_only` and `force_download`.

        Raises:
          ConfigError: files are missing or damaged, or shapes differ from the config's.
        """
        directory, download, changes = files.locate(pretrained_model_name_or_path, changes, subfolder, from_pt)
        if config is None:
            config = configs.PretrainedConfig.from_pretrained(directory, **changes)
        elif isinstance(config, (str, os.PathLike)):
            config = configs.PretrainedConfig.from_pretrained(config, **files.of_config(download), **changes)
        elif changes:
            raise ConfigError(
                f"from_pretrained: got a config and {', '.join(changes)}, expected them set in the config"
            )
        options = {"seed": seed, "input_shape": input_shape, "gradient_checkpointing": gradient_checkpointing}
        make: Any = cls
        model = make(config, dtype=dtype, _do_init=False, **options)
        leaves, unused = files.read_leaves(directory, model.spec, from_pt)
        leaves = _checked(leaves, model.spec.leaves, ignore_mismatched_sizes, directory)
        missing = sorted("/".join(path) for path in set(model.spec.leaves) - set(leaves))
        _report(directory, cls.__name__, unused, missing, _do_init)
        params = traverse_util.unflatten_dict({path: jnp.asarray(value) for path, value in leaves.items()})
        model.name_or_path = str(pretrained_model_name_or_path)
        if model.can_generate():
            model.read_options(directory)
        if not _do_init:
            return model, params
        model._is_initialized, model._params = True, model.init_weights(model.key, input_shape, params)
        return model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        params: PyTree = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "10GB",
        token: Any = None,
        safe_serialization: bool = False,
        **upload: Any,
    ) -> None:
        """Writes config.json and `flax_model.msgpack` (or shards of it), which the old library loads as well.

        Args:
          params: parameters to write in place of the model's.
          push_to_hub: uploads them too, see `push_to_hub`.
          max_shard_size: greatest size of a file, in bytes or as "10GB".
          safe_serialization: writes one `model.safetensors` in place of the msgpack, under the same names.
          upload: `repo_id` (without it the name of the directory), `commit_message`, `private`, `revision` and
            `use_auth_token` of an upload.

        Raises:
          ConfigError: an option is not supported.
        """
        token = upload.pop("use_auth_token", None) if token is None else token
        names = upload if push_to_hub else [name for name in upload if name not in WITHOUT_UPLOAD]
        wrong = [name for name in names if name not in UPLOAD]
        if wrong:
            raise ConfigError(f"save_pretrained: got {', '.join(wrong)}, expected some of {', '.join(UPLOAD)}")
        model: Any = self
        directory = Path(save_directory)
        if directory.is_file():
            raise ConfigError(f"save_pretrained: got {str(directory)!r}, a file, expected a directory")
        params = model.params if params is None else params
        params = params.unfreeze() if hasattr(params, "unfreeze") else params
        directory.mkdir(parents=True, exist_ok=True)
        values = configs.values_of(model.config)
        values = {**values, "architectures": [type(self).__name__.removeprefix("Flax")], "model_type": model.model_type}
        _write_json(directory / reading.CONFIG_FILE, values)
        if model.can_generate():
            options = {COPY_KEY: True} if model.is_options_copy() else {}
            _write_json(directory / GENERATION_FILE, options | model.generation_config.to_dict())
        params = jax.device_get(params)
        if safe_serialization:
            files.save_safetensors(directory, params)
        else:
            files.save_leaves(directory, params, _bytes(max_shard_size))
        if push_to_hub:
            repo_id = upload.pop("repo_id", directory.resolve().name)
            self.push_to_hub(repo_id, token=token, max_shard_size=max_shard_size, params=params, **upload)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        max_shard_size: int | str = "10GB",
        params: PyTree = None,
    ) -> str:
        """Uploads what `save_pretrained` writes to the hub; returns the address of the commit.

        Args:
          repo_id: "org/name" of the repository, which is made if there is none.
          params: parameters to write in place of the model's.

        Raises:
          ConfigError: huggingface_hub is not installed, or the hub refuses.
        """
        hub.check_upload(repo_id, revision)
        message = commit_message or "Upload model"
        with tempfile.TemporaryDirectory(prefix="jaxformer-push-") as folder:
            self.save_pretrained(folder, params, max_shard_size=max_shard_size)
            return hub.upload(Path(folder), repo_id, token=token, revision=revision, private=private, message=message)


def _checked(leaves: files.Leaves, shapes: Any, ignore: bool, directory: Path) -> files.Leaves:
    """The leaves that have the shapes of the config.

    Raises:
      ConfigError: one has another, and they are not to be ignored.
    """
    wrong = [path for path, value in leaves.items() if value.shape != shapes[path].shape]
    if wrong and not ignore:
        path = wrong[0]
        raise ConfigError(
            f"{directory}: got {'/'.join(path)} {list(leaves[path].shape)} (and {len(wrong) - 1} more), expected "
            f"{list(shapes[path].shape)} for this config; correct it, or set ignore_mismatched_sizes for random ones"
        )
    if wrong:
        log.warning("%s: random in place of other shapes: %s", directory, ", ".join("/".join(path) for path in wrong))
    return {path: value for path, value in leaves.items() if path not in wrong}


def _report(directory: Path, name: str, unused: list[str], missing: list[str], fills: bool) -> None:
    """Warns of what the directory holds and the class does not, and of the reverse."""
    if unused:
        log.warning("%s: left out %s, which %s has no use for", directory, ", ".join(unused), name)
    if missing:
        done = "random: train them" if fills else "missing from params: fill them with init_weights(rng, shape, params)"
        log.warning("%s: got no %s of %s; they are %s", directory, ", ".join(missing), name, done)


def _bytes(size: int | str) -> int:
    """A number of bytes, from one or from text such as "10GB"."""
    if isinstance(size, int) and size > 0:
        return size
    text = str(size).strip().upper()
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit) and text.removesuffix(unit).strip().isdigit():
            return int(text.removesuffix(unit)) * UNITS[unit]
    raise ConfigError(f"max_shard_size: got {size!r}, expected bytes, or text such as 10GB")


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
