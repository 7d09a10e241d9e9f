"""Stock tfds data sets by name, read from a directory in which they are prepared as array_record.

    config.name = "wmt14_translate/de-en"       as tfds spells it: data set, configuration, optionally ":version"
    config.dir = "/data/tfds"                   tfds' data_dir
    config.splits = {"train": ("train[:90%]",), "validation": ("train[90%:]",)}     default: the data set's own splits
    config.splits = {"train": ("train[:90%]", "validation")}          several parts, concatenated (tfds' "+")
    config.columns = {"source": "en", "target": "de"}                                 default: see below

Without `columns`, the name of a translation's configuration gives the direction ("de-en": German is the source). Of
another data set, the only text feature has the role text, and a class feature named label is the label. A score outside
of `config.score_range` is an error when it is read. "a/b" is feature b of feature a. Preparing most stock data sets
needs TensorFlow (see `jaxformer.data.prepare`); reading does not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError
from jaxformer.runtime import bucket_folders


def build(config: DataConfig) -> Dataset:
    """The data set `config.name` below `config.dir`.

    Raises:
      ConfigError: the data set is not prepared there, or has no such split or column.
    """
    builder = _opened(config)
    columns = dict(config.columns) or _default_columns(builder, config)
    for role, column in columns.items():
        _check(builder, role, column, config.name)
    names = tuple(builder.info.splits)
    expressions = {split: "+".join(parts) for split, parts in config.splits.items()} or {
        split: split for split in names
    }
    splits = {}
    for split, expression in expressions.items():
        try:
            length = len(builder.as_data_source(expression))
        except ValueError as error:
            name = expression.split("[")[0]
            expected = f"expected one of {', '.join(names)} or a part, as train[:90%]{registry.nearest(name, names)}"
            raise ConfigError(f"data.splits.{split}: got {expression!r}, {expected}") from error
        splits[split] = cache.PreparedSplit(str(builder.data_path), expression, columns, length, config.score_range)
    classes = cache.class_names({role: _feature(builder, column) for role, column in columns.items()})
    counts = {name: (split.num_examples, split.num_bytes) for name, split in builder.info.splits.items()}
    content = repr((builder.info.full_name, counts, expressions, sorted(columns.items())))
    return Dataset(splits=splits, key=f"tfds-{hashlib.sha256(content.encode()).hexdigest()[:16]}", classes=classes)


def _opened(config: DataConfig) -> tfds.core.DatasetBuilder:
    """The builder, from the prepared files only: tfds' own `data_source` would start a download."""
    if not config.name:
        raise ConfigError("data.name: got '', expected a tfds data set; set --config.data.name=lm1b, for example")
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder of prepared tfds data; set --config.data.dir=DIR")
    try:
        folder = bucket_folders.local_folder(config.dir, "data.dir")
        builder = tfds.core.read_only_builder.builder_from_files(config.name, data_dir=str(folder))
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        what = f"{config.name}: got no prepared data set in {config.dir}"
        how = f"run `jaxformer data prepare {config.name} --dir={config.dir}` where jaxformer[prepare] is installed"
        raise ConfigError(f"{what}; {how}") from error
    stored = builder.info.file_format
    if stored != tfds.core.FileFormat.ARRAY_RECORD:
        what = f"{config.name}: got files in the format {stored.value} in {builder.data_path}, expected array_record"
        raise ConfigError(f"{what}; prepare it into another folder with `jaxformer data prepare {config.name}`")
    return builder


def _default_columns(builder: tfds.core.DatasetBuilder, config: DataConfig) -> dict[str, str]:
    """Columns that follow from the features: a translation's two languages, or the only text, and the label."""
    features = builder.info.features
    languages = config.name.split(":")[0].partition("/")[2].split("-")
    if isinstance(features, tfds.features.FeaturesDict) and len(languages) == 2 and set(languages) <= set(features):
        return {"source": languages[0], "target": languages[1]}
    texts = [name for name, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if len(texts) != 1:
        expected = f"expected roles with columns among {config.name}'s {', '.join(sorted(features))}"
        raise ConfigError(f"data.columns: got nothing, {expected}; set data.columns")
    columns = {"text": texts[0]}
    if "label" in features and isinstance(features["label"], tfds.features.ClassLabel):
        columns["label"] = "label"
    return columns


def _feature(builder: tfds.core.DatasetBuilder, column: str) -> Any:
    """The feature at the path "a/b". Raises KeyError with the names that exist if there is none."""
    feature: Any = builder.info.features
    for name in column.split("/"):
        known = tuple(sorted(feature)) if isinstance(feature, tfds.features.FeaturesDict) else ()
        if name not in known:
            raise KeyError(known)
        feature = feature[name]
    return feature


def _check(builder: tfds.core.DatasetBuilder, role: str, column: str, name: str) -> None:
    try:
        feature = _feature(builder, column)
    except KeyError as error:
        known = error.args[0]
        expected = f"expected one of {', '.join(known)}{registry.nearest(column.split('/')[-1], known)}"
        raise ConfigError(f"data.columns.{role}: got {column!r}, which {name} does not have, {expected}") from error
    if role == "score":
        number = isinstance(feature, tfds.features.Tensor) and feature.shape == ()
        if not number or np.dtype(feature.np_dtype).kind not in "iuf":
            expected = "expected a number"
            raise ConfigError(f"data.columns.score: got {column!r}, a {type(feature).__name__} in {name}, {expected}")
        return
    expected_class = tfds.features.ClassLabel if role in ("label", "tags") else tfds.features.Text
    single = isinstance(feature, expected_class) and role != "tags"
    several = isinstance(feature, tfds.features.Sequence) and isinstance(feature.feature, expected_class)
    if not single and not (several and role in ("text", "tags")):
        expected = f"expected a {'Sequence of ' if role == 'tags' else ''}{expected_class.__name__} feature"
        raise ConfigError(f"data.columns.{role}: got {column!r}, a {type(feature).__name__} in {name}, {expected}")


SOURCE = build
