"""Reads adapters of the peft package onto their base model."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from jaxformer.config import AdapterConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import convert, hub, keys, loading, reading
from jaxformer.hf.origin import BODIES, HuggingFaceOrigin
from jaxformer.hf.peft.sites import CONFIG_FILE, PREFIX, TASK_HEADS, WEIGHTS_FILE, Site, find_sites
from jaxformer.hf.reading import Tensor
from jaxformer.hf.table import Family, Row, Settings, family_of
from jaxformer.model import Model
from jaxformer.models import adapters, build
from jaxformer.parallel import rules
from jaxformer.runtime.hub import Download, is_name

READ_KEYS = (
    "task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "r", "target_modules", "exclude_modules",
    "lora_alpha", "lora_dropout", "use_rslora", "modules_to_save", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "revision",
)  # fmt: skip

IGNORED_KEYS = {
    "peft_version": "the version that wrote the file",
    "inference_mode": "what is trained is said in config.model.adapter",
    "fan_in_fan_out": "the layout of the base's weights, which the family knows",
    "megatron_core": "the name of a package; megatron_config is refused",
    "qalora_group_size": "of use_qalora, which is refused",
    "runtime_config": "where the package computes",
    "loftq_config": "how A and B were initialised: init_lora_weights is checked",
    "eva_config": "how A and B were initialised: init_lora_weights is checked",
    "corda_config": "how A and B were initialised: init_lora_weights is checked",
    "lora_ga_config": "how A and B were initialised: init_lora_weights is checked",
    "ensure_weight_tying": "of modules_to_save that are tied, which are refused",
}
"""Keys that change nothing in a trained adapter -> the reason. A key that is not listed has to be null or false."""

PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


def is_adapter_directory(directory: str | os.PathLike[str]) -> bool:
    """True if the directory holds an adapter and no model."""
    path = Path(directory)
    return (path / CONFIG_FILE).exists() and not (path / reading.CONFIG_FILE).exists()


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str = "",
    what: str = "checkpoint",
    **options: Any,
) -> Model:
    """The model of a Hugging Face directory, or of an adapter's directory on its base model.

    Args:
      directory: a local directory; or the name of a model on the hub, "org/name" or "org/name@revision", which is read
        from the cache of the hub's client, and downloaded where huggingface_hub is installed.
      base: directory or name of the base model of an adapter; None: the one that adapter_config.json names.
      revision: branch, tag or commit on the hub; None: the main branch.
      token: a token of the hub; None: `HF_TOKEN`, or that of a login.
      cache_dir: the cache; None: as `HF_HUB_CACHE` and `HF_HOME` say.
      local_files_only: do not ask the hub, as with `HF_HUB_OFFLINE`.
      force_download: download again what is in the cache.
      subfolder: folder of the model's files in the directory.
      what: the argument or flag that holds `directory`, for errors.
      options: of `loading.from_pretrained`.

    Raises:
      ConfigError: files are missing, damaged or contradict each other, or an option of the adapter is not supported.
    """
    download = Download(revision, token, cache_dir, local_files_only, force_download, subfolder)
    named, directory = directory, hub.locate(directory, download, what=what)
    if not is_adapter_directory(directory):
        _check_download(named, download, is_name(named))
        if base is not None:
            raise ConfigError(f"base: got {str(base)!a} for {named}, expected none: there is no {CONFIG_FILE} there")
        return loading.from_pretrained(directory, **options)
    path = Path(directory) / CONFIG_FILE
    values = reading.read_config(directory, CONFIG_FILE)
    check_keys(values, str(path))
    tensors = reading.open_file(Path(directory) / WEIGHTS_FILE)
    stated = base if base is not None else values.get("base_model_name_or_path") or ""
    _check_download(named, download, is_name(named) or (is_name(stated) and revision is None))
    of_base = dataclasses.replace(download, subfolder="", revision=None if base is not None else values.get("revision"))
    what = "base" if base is not None else "base_model_name_or_path"
    source = hub.locate(stated, of_base, what=what)
    if not (source / reading.CONFIG_FILE).exists():
        raise ConfigError(
            f"{path}: got base_model_name_or_path {values.get('base_model_name_or_path')!a}, expected a local "
            "directory; give base=DIRECTORY of the model that the adapter was trained on"
        )
    settings = Settings(reading.read_config(source), str(source / reading.CONFIG_FILE))
    family = family_of(settings)
    if options.get("head") is None:
        options["head"] = _head(values, family, path)
    if options.get("classes") is None and options["head"] in ("sequence", "token"):
        model = keys.read_model(family, keys.with_defaults(family, settings), options["head"])
        names = [
            row.hf_name for row in family.rows(model, options["head"]) if "head/decision/kernel" in row.param_paths
        ]
        saved = [tensors[PREFIX + name] for name in names if PREFIX + name in tensors]
        options["classes"] = saved[0].shape[0] if saved else None
    loaded = loading.from_pretrained(source, **options)
    return attach(loaded, values, tensors, str(path), options.get("mesh"))


def _check_download(source: str | os.PathLike[str], download: Download, is_of_hub: bool) -> None:
    """Refuses options of a download where nothing comes from the hub.

    Raises:
      ConfigError: some are given.
    """
    if download.wishes() and not is_of_hub:
        raise ConfigError(
            f"{', '.join(download.wishes())}: got a value for {str(source)!a}, expected none: it is a local directory, "
            "and these options are for models of the hub"
        )


def check_keys(values: Mapping[str, Any], path: str) -> None:
    """Checks that every key of an adapter_config.json is one that is read, or changes nothing.

    Raises:
      ConfigError: it is of another kind of adapter, or uses what is not supported.
    """

    def refuse(name: str, expected: str) -> None:
        raise ConfigError(f"{path}: got {name} {values[name]!a}, expected {expected}; this variant is not supported")

    if values.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: got peft_type {values.get('peft_type')!a}, expected LORA; other kinds are not read")
    if values.get("bias", "none") != "none":
        refuse("bias", "none")
    if values.get("init_lora_weights", True) not in PLAIN_INITS:
        refuse("init_lora_weights", "one that leaves the base's weights as they are (true, false, gaussian)")
    for name, value in values.items():
        if name not in READ_KEYS and name not in IGNORED_KEYS and value:
            refuse(name, "null, false or nothing")
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        refuse("r", "a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        refuse("lora_alpha", "a number above 0")
    dropout = values.get("lora_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        refuse("lora_dropout", "a number of at least 0 and less than 1")
    task = values.get("task_type")
    if task is not None and task not in TASK_HEADS:
        refuse("task_type", f"null or one of {', '.join(TASK_HEADS)}")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = values.get(name) or {}
        if not isinstance(patterns, dict) or not all(isinstance(value, int | float) for value in patterns.values()):
            refuse(name, "an object of numbers")


def _head(values: Mapping[str, Any], family: Family, path: Path) -> str | None:
    """The head that an adapter was trained with; None: that of the base model."""
    if values.get("task_type") is not None:
        head = TASK_HEADS[values["task_type"]]
        return "bare" if head == "model" and "model" not in family.heads else head
    architecture = (values.get("auto_mapping") or {}).get("base_model_class")
    if architecture is None:
        return None
    head = next((head for head, name in family.heads.items() if name == architecture), None)
    if head is None:
        expected = f"one of {', '.join(family.heads.values())}"
        raise ConfigError(f"{path}: got base_model_class {architecture!a}, expected {expected}")
    return head


def attach(
    base: Model, values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str, mesh: Mesh | None = None
) -> Model:
    """The model `base` with the adapter of a file.

    Args:
      values: the adapter_config.json.
      tensors: of the adapter's file, by name.
      path: of adapter_config.json, for errors.

    Raises:
      ConfigError: the tensors contradict the config or the model.
    """
    origin, model = base.hf, base.config.model
    if not isinstance(origin, HuggingFaceOrigin) or origin.family is None:
        raise ConfigError(f"{path}: got a base model without a family, expected one from a Hugging Face directory")
    rows, layers = origin.family.file_rows(model, origin.head), build.linear_maps(base.module)
    prefix = origin.family.prefix if origin.head in BODIES else ""
    pairs, saved = _sort_tensors(tensors, prefix, path)
    sites = find_sites(rows, layers)
    counts = {path: x.shape[0] for path, x in traverse_util.flatten_dict(base.params).items() if path[-1] == "kernel"}
    placed: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # site -> layer -> A and B
    names: dict[str, tuple[int, int]] = {}
    for number, site in enumerate(sites):
        for layer in range(counts[*site.paths[0], "kernel"] if site.is_stacked else 1):
            names[site.module(layer)] = (number, layer)
    for name, pair in pairs.items():
        if name not in names:
            raise ConfigError(f"{path}: got an adapter of {name}, expected one of a linear map that adapters can have")
        number, layer = names[name]
        placed.setdefault(number, {})[layer] = pair
    _check_targets(values, names, pairs, prefix, path)
    train = _saved_paths(rows, saved, path)
    adapter = _adapter_config(values, sites, placed, counts, train, prefix, path)
    adapted = dataclasses.replace(model, adapter=adapter)
    shapes = {path: x.shape for path, x in traverse_util.flatten_dict(base.params).items()}
    flat = dict(traverse_util.flatten_dict(base.params))
    initial = adapters.leaves(adapter, shapes, layers, jax.random.key(0))
    for number, by_layer in placed.items():
        for key, array in _read_site(sites[number], by_layer, initial).items():
            initial[key] = jnp.asarray(array), initial[key][1]
    for key, (array, axes) in initial.items():
        sharding = None if mesh is None else jax.NamedSharding(
            mesh, rules.drop_uneven_axes(rules.spec(axes), array.shape, mesh)
        )  # fmt: skip
        flat[key] = jax.device_put(array, sharding)
    for key, array in _overlay(rows, saved, flat).items():
        flat[key] = jax.device_put(array, flat[key].sharding)
    return dataclasses.replace(
        base,
        module=build.build(adapted),
        params=traverse_util.unflatten_dict(flat),
        config=dataclasses.replace(base.config, model=adapted),
    )


def _sort_tensors(
    tensors: Mapping[str, Tensor], prefix: str, path: str
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """A and B by the name of their module, and the other tensors by name."""
    halves: dict[str, dict[str, Tensor]] = {}
    saved = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise ConfigError(f"{tensor.file}: got tensor {name!a}, expected names that begin with {PREFIX}")
        own = prefix + name.removeprefix(PREFIX)
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", own)
        if match:
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in own:
            raise ConfigError(f"{tensor.file}: got tensor {name!a}, expected lora_A.weight and lora_B.weight alone")
        else:
            saved[own] = tensor
    for name, half in halves.items():
        if len(half) != 2:
            raise ConfigError(f"{path}: got lora_{''.join(half)} of {name} alone, expected A and B")
    if not halves:
        raise ConfigError(f"{path}: got a file without lora_A and lora_B, expected an adapter")
    return {name: (half["A"], half["B"]) for name, half in halves.items()}, saved


def _check_targets(
    values: Mapping[str, Any], names: Collection[str], found: Collection[str], prefix: str, path: str
) -> None:
    """Raises a ConfigError if target_modules names other linear maps than the file has adapters of."""
    if values.get("target_modules") == "all-linear":
        return
    for name in names:
        expected = _is_target(name.removeprefix(prefix), values, path)
        if expected != (name in found):
            got, what = ("no adapter", "one") if expected else ("an adapter", "none")
            raise ConfigError(f"{path}: got {got} of {name} in the file, expected {what}, as target_modules says")


def _is_target(name: str, values: Mapping[str, Any], path: str) -> bool:
    """True if the module gets an adapter by target_modules and exclude_modules, lists of endings or an expression."""

    def listed(names: Any) -> bool:
        if isinstance(names, str):
            try:
                return re.fullmatch(names, name) is not None
            except re.error as error:
                raise ConfigError(f"{path}: got {names!a}, expected a regular expression ({error})") from None
        return any(name == item or name.endswith(f".{item}") for item in names)

    chosen, excluded = values.get("target_modules") or [], values.get("exclude_modules") or []
    if (excluded and listed(excluded)) or not listed(chosen):
        return False
    layers = values.get("layers_to_transform")
    if layers is None or layers == [] or isinstance(chosen, str) or name in chosen:
        return True
    groups = values.get("layers_pattern") or [r"[^.]*"]
    for group in [groups] if isinstance(groups, str) else groups:
        match = re.match(rf".*\.{group}\.(\d+)\.", name)
        if match:
            return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _by_pattern(entries: Mapping[str, float] | None, name: str, default: float) -> float:
    """The value of the first pattern that the module's name ends with."""
    return next((value for key, value in (entries or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _adapter_config(
    values: Mapping[str, Any],
    sites: Sequence[Site],
    placed: Mapping[int, Mapping[int, tuple[Tensor, Tensor]]],
    counts: Mapping[adapters.Path, int],
    train: tuple[str, ...],
    prefix: str,
    path: str,
) -> AdapterConfig:
    """The section `model.adapter` of a file: a rank and an alpha for each of our linear maps."""
    rank, alpha = values.get("r", 8), float(values.get("lora_alpha", 8))
    ranks, alphas, targets = {}, {}, []
    stacked = [number for number in placed if sites[number].is_stacked]
    layers = {number: {sites[number].first_layer + layer for layer in placed[number]} for number in stacked}
    chosen = set().union(*layers.values())
    for number, by_layer in placed.items():
        site = sites[number]
        modules = {layer: site.module(layer).removeprefix(prefix) for layer in by_layer}
        found = {
            (a.shape[0], _by_pattern(values.get("alpha_pattern"), modules[i], alpha)) for i, (a, _) in by_layer.items()
        }
        if len(found) > 1:
            raise ConfigError(
                f"{path}: got different ranks or alphas in the layers of {site.name}, expected one of all"
            )
        own_rank, own_alpha = found.pop()
        for name in modules.values():
            said = _by_pattern(values.get("rank_pattern"), name, rank)
            if said != own_rank:
                raise ConfigError(
                    f"{path}: got rank {said} of {name}, expected {own_rank}, the file's; they contradict"
                )
        for target in map("/".join, site.paths):
            targets.append(target)
            ranks |= {target: own_rank} if own_rank != rank else {}
            alphas |= {target: own_alpha} if own_alpha != alpha else {}
    existing = {
        number: range(first, first + counts[*sites[number].paths[0], "kernel"])
        for number, first in ((number, sites[number].first_layer) for number in stacked)
    }
    if any(layers[number] != chosen & set(existing[number]) for number in stacked):
        names = sorted({sites[number].name for number in stacked})
        raise ConfigError(f"{path}: got adapters of different layers in {', '.join(names)}, expected the same of each")
    covers_all = all(len(layers[number]) == len(existing[number]) for number in stacked)
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        targets=tuple(sorted(targets)),
        dropout=float(values.get("lora_dropout", 0.0)),
        stabilised=bool(values.get("use_rslora", False)),
        ranks=tuple(f"{name}={value}" for name, value in sorted(ranks.items())),
        alphas=tuple(f"{name}={value:g}" for name, value in sorted(alphas.items())),
        layers=() if covers_all else tuple(sorted(chosen)),
        train=train,
    )


def _read_site(
    site: Site,
    by_layer: Mapping[int, tuple[Tensor, Tensor]],
    initial: Mapping[adapters.Path, tuple[Any, Any]],
) -> dict[adapters.Path, np.ndarray]:
    """A and B of the linear maps of a site; those of layers without adapters as in `initial`."""
    arrays: dict[adapters.Path, np.ndarray] = {
        (*path, name): np.array(initial[*path, name][0]) for path in site.paths for name in ("lora_a", "lora_b")
    }
    for layer, (a, b) in by_layer.items():
        try:
            ours_a = _rearrange(site, site.layout_a, a.array())
            ours_b = _rearrange(site, site.layout_b, b.array())
            for i, path in enumerate(site.paths):
                for name, value in (("lora_a", ours_a), ("lora_b", ours_b if len(site.paths) == 1 else ours_b[i])):
                    target = arrays[*path, name][layer] if site.is_stacked else arrays[*path, name]
                    if target.shape != value.shape:
                        raise ValueError
                    target[...] = value
        except (ValueError, einops.EinopsError):
            raise ConfigError(
                f"{a.file}: got A {list(a.shape)} and B {list(b.shape)} of {site.module(layer)}, expected matrices of "
                "this model; the adapter is of another base"
            ) from None
    return arrays


def _rearrange(site: Site, pattern: str, array: np.ndarray) -> np.ndarray:
    return einops.rearrange(array, pattern, **site.pattern_sizes(pattern.partition("->")[0]))


def _saved_paths(rows: Sequence[Row], saved: Mapping[str, Tensor], path: str) -> tuple[str, ...]:
    """Our parameters that the file has whole.

    Raises:
      ConfigError: a tensor is none of the model's.
    """
    found = []
    for name, tensor in saved.items():
        row = next((row for row in rows if row.hf_name == name), None)
        if row is None:
            raise ConfigError(
                f"{path}: got tensor {name} in {tensor.file}, expected one outside the layers of the model"
            )
        found += row.param_paths
    return tuple(sorted(found))


def _overlay(
    rows: Sequence[Row], saved: Mapping[str, Tensor], params: Mapping[adapters.Path, jax.Array]
) -> dict[adapters.Path, np.ndarray]:
    """The parameters that the file has whole."""
    chosen = [row for row in rows if row.hf_name in saved]
    shapes = {path: params[tuple(path.split("/"))] for row in chosen for path in row.param_paths}
    tree = traverse_util.unflatten_dict(shapes, sep="/")
    return traverse_util.flatten_dict(convert.import_params(chosen, saved, tree)) if chosen else {}
