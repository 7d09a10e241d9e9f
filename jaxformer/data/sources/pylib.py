"""The source text of the running Python's standard library: about nine million characters, without any download.

An example is a file. Tests, vendored packages, generated tables and files that are not UTF-8 are left out. The hash of
its path puts a file into the validation split (1/20), the test split (1/20) or the training split, so a patch release
keeps the splits. A second file with the same text is left out, so that no text is in two splits.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.errors import ConfigError

SKIPPED = {
    "__pycache__",
    "_bundled",
    "config",
    "dist-packages",
    "encodings",  # tables of code points
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",  # the manual, as string literals
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
SPLITS = {0: "test", 1: "validation"}  # twentieths of the files; the others train


def files(root: Path) -> Iterator[Path]:
    """The .py files of the library below `root`, directory by directory in sorted order."""
    for folder, folders, names in os.walk(root):
        # Pruned in place: site-packages may have more files than the library itself.
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("config-"))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # differs between builds
                yield Path(folder, name)


def build(config: DataConfig) -> Dataset:
    """The text of the library, in memory; `key` is a hash of all of it."""
    del config  # no settings
    root = Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    seen: set[bytes] = set()
    content = hashlib.sha256()
    for path in files(root):
        data = path.read_bytes()
        text_hash = hashlib.sha256(data).digest()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a few files declare another encoding
        if not text.strip() or text_hash in seen:
            continue
        seen.add(text_hash)
        name = path.relative_to(root).as_posix()
        content.update(name.encode() + text_hash)
        splits[SPLITS.get(_generated.hash64(f"pylib {name}") % 20, "train")].append({"text": text})
    if not all(splits.values()):
        expected = "expected the standard library's source; use another data.source"
        raise ConfigError(f"{root}: got {len(seen)} Python files, {expected}")
    return Dataset(splits=splits, key=f"pylib-1-{content.hexdigest()[:16]}")


SOURCE = build
