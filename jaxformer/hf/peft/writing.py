"""Writes adapters as a directory of the peft package."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import einops
import numpy as np
from flax import traverse_util

from jaxformer.config import AdapterConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import convert, export, rewrite, writing
from jaxformer.hf.origin import BODIES, HuggingFaceOrigin
from jaxformer.hf.peft.sites import CONFIG_FILE, PREFIX, TASK_HEADS, WEIGHTS_FILE, Site, find_sites
from jaxformer.hf.table import Row
from jaxformer.model import Model
from jaxformer.models import adapters, build
from jaxformer.types import PyTree


def save_adapter(
    model: Model, origin: HuggingFaceOrigin, directory: str | os.PathLike[str], base: str | os.PathLike[str] | None
) -> None:
    """Writes a model's adapters as a directory of the peft package; see `Model.save_adapter`.

    Raises:
      ConfigError: the model has no adapters, no family computes what it does, or the format has no place for something.
    """
    config, params, adapter = model.config.model, model.params, model.config.model.adapter
    if adapter is None:
        raise ConfigError("save_adapter: got a model without adapters, expected some; use save_pretrained")
    if origin.family is None:
        config, params = rewrite.rewrite_for_export(config, params)
    plain = dataclasses.replace(config, adapter=None)
    family, head, _ = export.choose_family(model, origin, plain, None)
    rows, layers = family.file_rows(plain, head), build.linear_maps(build.build(plain))
    prefix = family.prefix if head in BODIES else ""
    flat = {path: np.asarray(x) for path, x in traverse_util.flatten_dict(params).items()}
    written = _write_sites(find_sites(rows, layers), flat, prefix)
    saved = _saved_tensors(rows, config, params, prefix)
    values = _config_values(written, find_sites(rows, layers), adapter, prefix)
    values |= {
        "base_model_name_or_path": None if base is None else str(base),
        "task_type": next((task for task, name in TASK_HEADS.items() if name == head), None),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
    }
    tensors: dict[str, Callable[[], np.ndarray] | np.ndarray] = {PREFIX + name: make for name, make in saved.items()}
    for site in written:
        for name, (a, b) in site.matrices.items():
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    writing.write_checkpoint(directory, values, tensors, config_file=CONFIG_FILE, weights_file=WEIGHTS_FILE)


class WrittenSite(NamedTuple):
    """The adapters of a site in the other library's form.

    Attributes:
      name: of the site.
      rank, alpha: of all its layers.
      matrices: A and B by the name of the module.
      transposed: see `Site`.
    """

    name: str
    rank: int
    alpha: float
    matrices: dict[str, tuple[np.ndarray, np.ndarray]]
    transposed: bool


def _write_sites(sites: Sequence[Site], flat: Mapping[adapters.Path, np.ndarray], prefix: str) -> list[WrittenSite]:
    """All adapters of a model.

    Raises:
      ConfigError: the other library has no such linear map.
    """
    adapted = {path[:-1] for path in flat if path[-1] == "lora_a"}
    missing = sorted("/".join(path) for path in adapted - {path for site in sites for path in site.paths})
    if missing:
        raise ConfigError(f"export: got adapters of {', '.join(missing)}, expected those of linear maps of the family")
    return [_write_site(site, flat, prefix) for site in sites if adapted & set(site.paths)]


def _write_site(site: Site, flat: Mapping[adapters.Path, np.ndarray], prefix: str) -> WrittenSite:
    """The adapters of a site. Those of a fused map share A if theirs are equal, else they are stacked."""
    paths = [path for path in site.paths if (*path, "lora_a") in flat]
    as_layers = lambda x: x if site.is_stacked else x[None]  # noqa: E731
    a, b, scale = ({path: as_layers(flat[*path, f"lora_{name}"]) for path in paths} for name in ("a", "b", "scale"))
    factor = float(max(scale[paths[0]]))
    shares = len(paths) == len(site.paths) and all(
        a[path].shape == a[paths[0]].shape and (a[path] == a[paths[0]]).all() and (scale[path] == scale[paths[0]]).all()
        for path in paths
    )
    rank = a[paths[0]].shape[-1] if shares else sum(a[path].shape[-1] for path in paths)
    matrices = {}
    for layer in np.flatnonzero(scale[paths[0]]):
        if shares:
            ours_a, ours_b = a[paths[0]][layer], np.stack([b[path][layer] for path in paths])
        else:
            ours_a = np.concatenate([a[path][layer] for path in paths], axis=-1)
            ours_b, start = np.zeros((len(site.paths), rank, *b[paths[0]].shape[2:]), np.float32), 0
            for path in paths:
                end = start + a[path].shape[-1]
                ours_b[site.paths.index(path), start:end] = b[path][layer] * (float(max(scale[path])) / factor)
                start = end
        pair = []
        for pattern, array in ((site.layout_a, ours_a), (site.layout_b, ours_b if len(site.paths) > 1 else ours_b[0])):
            left, _, right = pattern.partition(" -> ")
            pair.append(einops.rearrange(array, f"{right} -> {left}", **site.pattern_sizes(right)))
        matrices[site.module(int(layer)).removeprefix(prefix)] = (pair[0], pair[1])
    return WrittenSite(site.name.removeprefix(prefix), rank, factor * rank, matrices, site.transposed)


def _saved_tensors(
    rows: Sequence[Row], config: ModelConfig, params: PyTree, prefix: str
) -> dict[str, Callable[[], np.ndarray]]:
    """Tensors of the parameters that are trained whole.

    Raises:
      ConfigError: they are no modules of the other library.
    """
    plain = adapters.without(params)
    paths = ["/".join(path) for path in traverse_util.flatten_dict(plain)]
    trained = adapters.also_trained(config, paths)
    chosen = [row for row in rows if trained & set(row.param_paths)]
    modules = {row.hf_name.rpartition(".")[0] for row in chosen}
    partly = [row.hf_name for row in rows if row.hf_name.rpartition(".")[0] in modules and row not in chosen]
    stacked = [row.hf_name for row in chosen if row.stacked_axes]
    tied = [path for path in trained if path.endswith("embed/table") and config.head.tied]
    if partly or stacked or tied:
        raise ConfigError(
            f"export: got {', '.join(sorted(trained))} trained beside adapters, expected whole modules outside the "
            "layers, not tied: the peft format has no others; export the merged model"
        )
    kept = {path: x for path, x in traverse_util.flatten_dict(plain, sep="/").items() if path in trained}
    tree = traverse_util.unflatten_dict(kept, sep="/")
    return {name.removeprefix(prefix): make for name, make in convert.export_tensors(chosen, tree).items()}


def _config_values(
    written: Sequence[WrittenSite], sites: Sequence[Site], config: AdapterConfig, prefix: str
) -> dict[str, Any]:
    """The adapter_config.json of the adapters: endings of names where they are unambiguous, else whole names."""
    others = {site.name.removeprefix(prefix) for site in sites} - {site.name for site in written}
    has_groups = any(site.first_layer for site in sites)  # an ending would name maps of other groups, too
    whole = bool(config.layers) or has_groups
    targets: list[str] = []
    rank, alpha = (
        Counter(getattr(site, field) for site in written).most_common(1)[0][0] for field in ("rank", "alpha")
    )
    patterns: dict[str, dict[str, float]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for site in written:
        ending = site.name.rpartition("{layer}.")[2]
        clash = [name for name in others | {s.name for s in written} - {site.name} if f".{name}".endswith(f".{ending}")]
        entries = list(site.matrices) if whole or clash or "{layer}" not in site.name else [ending]
        targets += entries
        if site.rank != rank:
            patterns["rank_pattern"] |= dict.fromkeys(map(re.escape, entries), site.rank)
        if site.alpha != alpha:
            patterns["alpha_pattern"] |= dict.fromkeys(map(re.escape, entries), site.alpha)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "fan_in_fan_out": any(site.transposed for site in written),
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
        **patterns,
    }
