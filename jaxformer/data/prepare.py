"""Preparing a stock tfds data set: download it and write it as array_record, once, where TensorFlow is installed."""

from __future__ import annotations

import importlib
from pathlib import Path

from jaxformer import places
from jaxformer.config import ConfigError

COLLECTIONS = ("question_answering", "summarization", "text", "translate")  # modules that tfds does not import itself


def prepare(name: str, directory: str | Path) -> Path:
    """Downloads and prepares `name` ("wmt14_translate/de-en", "lm1b") below `directory`, tfds' data_dir.

    Does nothing when it lies there already. Most stock data sets unpack and read their archives with TensorFlow, which
    the extra `prepare` installs; `jaxformer.data.sources.tfds` reads the result without it.

    Returns:
      The folder of the prepared data set.

    Raises:
      ConfigError: tfds has no such data set, TensorFlow is missing, or the download or the writing failed.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    for collection in COLLECTIONS:
        importlib.import_module(f"tensorflow_datasets.{collection}")
    folder = places.expanded(str(directory), "--dir")
    tfds.enable_progress_bar()  # downloads take long; reading local files switched it off
    try:
        builder = tfds.builder(name, data_dir=str(folder), file_format="array_record")
        builder.download_and_prepare()
    except ImportError as error:
        if "tensorflow" not in str(error):
            raise
        what = f"{name}: preparing it needs TensorFlow, which cannot be imported here"
        raise ConfigError(f"{what}; pip install 'jaxformer[prepare]' and run this again") from error
    except tfds.core.DatasetNotFoundError as error:
        catalogue = "https://www.tensorflow.org/datasets/catalog/overview"
        raise ConfigError(f"{name}: got a name that tfds does not know, expected one of {catalogue}") from error
    except (OSError, ValueError, AssertionError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        # Assertions are how tfds says that a data set must be fetched by hand, and from where.
        raise ConfigError(f"{name}: got no prepared data in {folder}: {' '.join(str(error).split())}") from error
    return Path(builder.data_path)
