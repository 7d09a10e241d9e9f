"""The source text of the running Python's standard library: about nine million characters that are always there.

One file is one example. Tests, vendored packages, generated tables and what is not UTF-8 are left out. A twentieth of
the files is the validation set and a twentieth the test set, chosen by the hash of the file's path, so that the split
survives a new patch release; a file whose text occurred before is left out, so that no text is on both sides.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data.sources import Dataset, Example, _generated

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
    """The .py files below `root` that count as library source, folder by folder in sorted order."""
    for folder, folders, names in os.walk(root):
        # Pruned in place: site-packages alone may hold more files than the library itself.
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("config-"))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # that one differs from build to build
                yield Path(folder, name)


def build(config: DataConfig) -> Dataset:
    """The library's text, read into memory; `key` is a hash of all of it."""
    del config  # nothing to choose
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
        splits[SPLITS.get(_generated.digest(f"pylib {name}") % 20, "train")].append({"text": text})
    if not all(splits.values()):
        expected = "expected the standard library's source; use another data.source"
        raise ConfigError(f"{root}: got {len(seen)} Python files, {expected}")
    return Dataset(splits=splits, key=f"pylib-1-{content.hexdigest()[:16]}")


SOURCE = build
