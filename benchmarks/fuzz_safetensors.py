"""Damages small Hugging Face checkpoints for a while and opens them: each is refused in one line, or read as it is.

    python benchmarks/fuzz_safetensors.py [--seconds=120] [--seed=0]

What was opened is compared with a reader of ten lines that trusts the file. Prints counts and the peak memory; exits 1
on any exception that is not a ConfigError, on a message of several lines, and on a tensor that is not the file's bytes.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.config import ConfigError
from jaxformer.hf import reading, writing

INTERESTING: list[Any] = [
    0, 1, -1, 2, 7, 8, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**400, 1.0, 1e308, True, None, "", "F32", "BF16",
    "F4", "__metadata__", "model.safetensors", "model-00001-of-00004.safetensors", "../model.safetensors", "/a",
    "\0", "\ud800", "\n", [], {}, [[]], [0, 0], [0, 2**64], [-4, 4],
    {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
]  # fmt: skip
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\u0000",
    b"NaN",
    b"-",
    b"9" * 30,
    b"1e9",
    b"\xff",
    b"[" * 5000,
    b" ",
]


def checkpoints(place: Path) -> list[Path]:
    """A small checkpoint of one file and one of several, with every element type that has its own width."""
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.normal(size=(2, 3)).astype(np.float32),
        "a.bias": rng.normal(size=3).astype(ml_dtypes.bfloat16),
        "b": np.arange(5, dtype=np.int64),
        "c": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.float64(1.5),
    }
    made = [place / "single", place / "sharded"]
    for directory, size in zip(made, (10**9, 24)):
        writing.write_checkpoint(directory, {"model_type": "toy", "layers": [1, 2]}, tensors, shard_bytes=size)
    return made


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to three damages: to bytes, to the length in front, or to the JSON while all around it stays in order."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice((_flip, _cut, _repeat, _token, _length, _json, _json, _json))(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8)) if content else 0):
        changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), 0, 255, 48 + rng.randrange(10)))
    return bytes(changed)


def _cut(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(content) + 1)
    return content[:begin] + content[rng.choice((len(content), rng.randrange(begin, len(content) + 1))) :]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    begin, at = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    return content[:at] + content[begin : begin + rng.randrange(1, 64)] + content[at:]


def _token(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(TOKENS) + content[at + rng.choice((0, 1)) :]


def _length(content: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    other = rng.choice((0, 1, length + 1, length - 1, length + 8, len(content) - 8, 10**8, 10**8 + 1, 2**63, 2**64 - 1))
    return (other % 2**64).to_bytes(8, "little") + content[8:]


def _json(content: bytes, rng: random.Random) -> bytes:
    """Another value, key or order somewhere in the JSON of a safetensors header, an index or a config."""
    begin = 0 if content[:1] == b"{" else 8
    end = len(content) if not begin else 8 + int.from_bytes(content[:8], "little")
    try:
        document = json.loads(content[begin:end])
    except (ValueError, RecursionError):
        return _flip(content, rng)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(document)
    if not places:
        return content
    inside, key = rng.choice(places)
    act = rng.randrange(5)
    if act == 0:
        del inside[key]
    elif act == 1 and isinstance(inside, dict):
        name = rng.choice(INTERESTING)
        inside[name if isinstance(name, str) else str(name)] = inside.pop(key)
    elif act == 2:
        other, there = rng.choice(places)
        inside[key] = json.loads(json.dumps(other[there])) if other is not inside else inside[key]
    elif act == 3 and type(inside[key]) is int:
        inside[key] += rng.choice((-8, -4, -1, 1, 4, 8))
    else:
        inside[key] = rng.choice(INTERESTING)
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + content[end:] if begin else text


def trusting(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a safetensors file as its header gives them, with no check."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = entry["dtype"], entry["shape"], content[begin + start : begin + end]
    return found


def problem(directory: Path) -> str | None:
    """What is wrong with how a checkpoint opens; None: nothing. Raises ConfigError when it is refused."""
    config = reading.read_config(directory)
    if config != json.loads((directory / reading.CONFIG_FILE).read_bytes()):
        return "the config is another one"
    tensors = reading.open_tensors(directory)
    of_files: dict[str, dict[str, Any]] = {
        tensor.file: trusting(directory / tensor.file) for tensor in tensors.values()
    }
    if sum(map(len, of_files.values())) != len(tensors):
        return "not all tensors of the files are there"
    for name, tensor in tensors.items():
        dtype, shape, content = of_files[tensor.file][name]
        array = tensor.array()
        if (reading.DTYPES[dtype], tuple(shape)) != (array.dtype, array.shape) or array.dtype != tensor.dtype:
            return f"{name} has another shape or dtype"
        if array.nbytes != math.prod(shape) * array.dtype.itemsize or array.tobytes() != content:
            return f"{name} has other bytes"
        if array.flags.writeable:
            return f"{name} is writeable"
    return None


def attempt(directory: Path, name: str, content: bytes) -> tuple[str, str]:
    """Opens a checkpoint with one file replaced: ("opened" | "refused" | "UNEXPECTED", words). The file is put back."""
    path = directory / name
    original = path.read_bytes()
    path.unlink()  # a mapping may still look at it
    path.write_bytes(content)
    try:
        wrong = problem(directory)
    except ConfigError as error:
        words = str(error)
        return ("refused" if words.isprintable() and len(words) < 1500 else "UNEXPECTED"), words
    except Exception:
        return "UNEXPECTED", traceback.format_exc()
    finally:
        path.unlink()
        path.write_bytes(original)
    return ("UNEXPECTED", wrong) if wrong else ("opened", "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    by_file: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        targets = [(place, path.name) for place in checkpoints(Path(folder)) for path in sorted(place.iterdir())]
        end = time.monotonic() + options.seconds
        while (start := time.monotonic()) < end:
            directory, name = rng.choice(targets)
            content = mutate((directory / name).read_bytes(), rng)
            outcome, words = attempt(directory, name, content)
            slowest = max(slowest, time.monotonic() - start)
            counts[outcome] += 1
            by_file[f"{directory.name}/{name} {outcome}"] += 1
            if outcome == "UNEXPECTED":
                print(f"{directory.name}/{name} as {content!r}: {words}", file=sys.stderr)
    for line, count in sorted(by_file.items()):
        print(f"{line}: {count}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{sum(counts.values())} checkpoints: {counts['refused']} refused, {counts['opened']} opened, "
        f"{counts['UNEXPECTED']} unexpected; slowest {slowest:.3f} s, peak memory {peak} MB"
    )
    return 1 if counts["UNEXPECTED"] else 0


if __name__ == "__main__":
    sys.exit(main())
