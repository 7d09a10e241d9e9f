"""Prepares a stock tfds data set: downloads it and writes it as array_record, once, with TensorFlow installed."""

from __future__ import annotations

import importlib
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories

COLLECTIONS = ("question_answering", "summarization", "text", "translate")  # modules that tfds imports on demand


def prepare(name: str, directory: str | Path) -> Path:
    """Downloads and prepares `name` ("wmt14_translate/de-en", "lm1b") below `directory`, tfds' data_dir.

    Does nothing if it exists. Most stock data sets read their archives with TensorFlow, which the extra `prepare`
    installs; `jaxformer.data.sources.tfds` reads the result without it.

    Returns:
      The directory of the prepared data set.

    Raises:
      ConfigError: tfds has no such data set, TensorFlow is missing, or the download or the writing failed.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    for collection in COLLECTIONS:
        importlib.import_module(f"tensorflow_datasets.{collection}")
    folder = directories.expand_user(str(directory), "--dir")
    tfds.enable_progress_bar()  # off while local files are read; downloads take long
    try:
        builder = tfds.builder(name, data_dir=str(folder), file_format="array_record")
        builder.download_and_prepare()  # ty: ignore[missing-argument]  (tfds wraps the method without its types)
    except ImportError as error:
        if "tensorflow" not in str(error):
            raise
        what = f"{name}: preparing it needs TensorFlow, which cannot be imported here"
        raise ConfigError(f"{what}; pip install 'jaxformer[prepare]' and run this again") from error
    except tfds.core.DatasetNotFoundError as error:
        catalogue = "https://www.tensorflow.org/datasets/catalog/overview"
        raise ConfigError(f"{name}: got a name that tfds does not know, expected one of {catalogue}") from error
    except (OSError, ValueError, AssertionError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        # tfds raises AssertionError if a data set must be downloaded by hand, and says from where.
        raise ConfigError(f"{name}: got no prepared data in {folder}: {' '.join(str(error).split())}") from error
    return Path(builder.data_path)
