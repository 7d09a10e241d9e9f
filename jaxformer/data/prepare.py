"""Prepares a stock tfds data set: downloads it and writes it as array_record, once, with TensorFlow installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories

COLLECTIONS = ("question_answering", "summarization", "text", "translate")  # modules that tfds imports on demand
TENSORFLOW_USE = re.compile(r"import tensorflow as|extract\(|iter_archive\(")
MAX_TRIED_HOSTS = 3
ANSWER_SECONDS = 5.0
"""A server that does not answer within this time counts as out of reach."""

LOG = logging.getLogger("jaxformer")


def prepare(name: str, directory: str | Path) -> Path:
    """Downloads and prepares `name` ("wmt14_translate/de-en", "lm1b") below `directory`, tfds' data_dir.

    Does nothing if it exists. Most stock data sets read their archives with TensorFlow, which the extra `prepare`
    installs; `jaxformer.data.sources.tfds` reads the result without it. TensorFlow and the network are checked before
    anything is downloaded.

    Returns:
      The directory of the prepared data set.

    Raises:
      ConfigError: tfds has no such data set, TensorFlow is missing, no server can be reached, or the download or the
        writing failed.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    for collection in COLLECTIONS:
        importlib.import_module(f"tensorflow_datasets.{collection}")
    folder = directories.expand_user(str(directory), "--dir")
    tfds.enable_progress_bar()  # off while local files are read; downloads take long
    try:
        builder = tfds.builder(name, data_dir=str(folder), file_format="array_record")
        if not (Path(builder.data_path) / "dataset_info.json").exists():
            if _reads_with_tensorflow(type(builder)) and not _has_tensorflow():
                raise _no_tensorflow(name)
            _check_network(name, builder.url_infos or (), folder / "downloads")
        builder.download_and_prepare()  # ty: ignore[missing-argument]  (tfds wraps the method without its types)
    except ConfigError:
        raise
    except ImportError as error:
        if "tensorflow" not in str(error):
            raise
        raise _no_tensorflow(name) from error
    except tfds.core.DatasetNotFoundError as error:
        catalogue = "https://www.tensorflow.org/datasets/catalog/overview"
        raise ConfigError(f"{name}: got a name that tfds does not know, expected one of {catalogue}") from error
    except (OSError, ValueError, AssertionError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        # tfds raises AssertionError if a data set must be downloaded by hand, and says from where.
        raise ConfigError(f"{name}: got no prepared data in {folder}: {' '.join(str(error).split())}") from error
    return Path(builder.data_path)


def _no_tensorflow(name: str) -> ConfigError:
    what = f"{name}: preparing it needs TensorFlow, which cannot be imported here"
    return ConfigError(f"{what}; pip install 'jaxformer[prepare]' and run this again")


def _has_tensorflow() -> bool:
    if "tensorflow" in sys.modules:
        return sys.modules["tensorflow"] is not None
    return importlib.util.find_spec("tensorflow") is not None


def _reads_with_tensorflow(builder: type) -> bool:
    """True if the code of a builder, or of one that it derives from, opens archives or names TensorFlow.

    tfds opens archives with TensorFlow's file functions.
    """
    for base in builder.__mro__:
        if base is object or base.__module__.startswith(("tensorflow_datasets.core.", "abc", "typing")):
            continue
        if hasattr(sys.modules.get(base.__module__), "tf"):
            return True
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if TENSORFLOW_USE.search(source):
            return True
    return False


def _check_network(name: str, addresses: Iterable[str], downloads: Path) -> None:
    """Raises a ConfigError if none of the servers of a data set answers.

    tfds itself tries for minutes. If archives were downloaded before (or copied to this machine), they may suffice.

    Args:
      addresses: of its archives; without any there is nothing to check.
      downloads: folder of the archives that tfds has downloaded.
    """
    import requests

    servers: dict[str, str] = {}
    for address in addresses:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme in ("http", "https"):
            servers.setdefault(f"{parts.scheme}://{parts.netloc}", address)
    tried: list[str] = []
    for server, address in list(servers.items())[:MAX_TRIED_HOSTS]:
        try:
            requests.head(address, timeout=ANSWER_SECONDS)
            return  # whatever it says: tfds judges it
        except requests.RequestException as error:
            tried.append(f"{server} ({_reason(error)})")
    if not tried:
        return
    if downloads.is_dir() and any(downloads.glob("*.INFO")):
        LOG.warning("%s: no network (%s): only archives in %s can be used", name, tried[0], downloads)
        return
    what = f"{name}: got no answer from {', '.join(tried)}, expected a network for the download"
    raise ConfigError(
        f"{what}; connect, set HTTP_PROXY and HTTPS_PROXY, or prepare it on another machine and copy {downloads.parent}"
    )


def _reason(error: Any) -> str:
    """The cause of a failed connection in a few words."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()).rpartition(": ")[2][:80]
