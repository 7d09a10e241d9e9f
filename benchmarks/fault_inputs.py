"""Bad input for `faults.py`: configs, edits, saved configs, recipes, texts, tables and tokenizers, mutated at random.

Among them are absurd sizes, recipes that raise or exit, tokenizers of other libraries with broken vocabularies, merges
and patterns, and devices, pipes and folders in the place of files. Each must be taken, or refused by a ConfigError of
one printable line. Anything else is a fault: another exception, a message of several lines, more than ten seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any, Callable

import fault_drills
import fault_processes as processes
import tiny_runs

ODD: list[Any] = [
    0, 1, -1, 2, 3, 7, 10**9, 2**31, 2**64, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None,
    "", " ", "None", "a", "../..", "/etc/passwd", "\0", "\ud800", "ä\n", "x" * 5000, [], [1], [[]], [0, 2**40], (),
    (1, 2), {}, {"a": 1}, {"train": ("x",)}, b"bytes", "first_fit", "concat", "rope", "batch", "lstm", "adam", "muon",
    1 << 20,
]  # fmt: skip
TEXTS = [
    "1000000000", "99999999999",
    "", "1", "-1", "1e9", "nan", "None", "true", "(1,", "1,2,3", "[", "'", '"', "\\", "x", "a.b", "=", "1_0", "0x1f",
    " ", "é", "__import__('os').system('false')", "9" * 400, "1;2", "train=x", "../../x", "\x1b[31m", "16", "0.5",
]  # fmt: skip
PIECES = [
    b"", b"\0", b"\xff", b"\n", b'"', b"{", b"[" * 2000, b"\r\n\r\n", b"9" * 50, b"NaN", b"\xef\xbb\xbf", b"\t",
]  # fmt: skip
KEYS = ["", "a", "__class__", "model", "vocab", "2", "ä", "a.b", "\n"]


def corpus(folder: Path, rng: random.Random, count: int) -> list[dict[str, Any]]:
    report = folder / "inputs.json"
    act = lambda: _corpus(folder, random.Random(rng.random()), count, report)  # noqa: E731
    code = processes.wait(processes.spawn(act, folder / "inputs.log"), 1200)
    if code:
        return [fault_drills.row("input", "bad input", "", [f"exit code {code}; see inputs.log"])]
    counts, wrong = json.loads(report.read_text())
    rows = []
    for kind, each in counts.items():
        taken, refused = each.get("taken", 0), each.get("refused", 0)
        words = f"{sum(each.values()):,} tried: {taken:,} taken, {refused:,} refused in one line"
        rows.append(fault_drills.row("input", f"bad {kind}", words, [w for w in wrong if w.startswith(kind)]))
    return rows


def _corpus(folder: Path, rng: random.Random, count: int, report: Path) -> int:
    counts: dict[str, collections.Counter] = {kind: collections.Counter() for kind in KINDS}
    wrong: list[str] = []
    place = folder / "inputs"
    place.mkdir(exist_ok=True)

    def late(number: int, frame: Any) -> None:
        raise TimeoutError("more than ten seconds")

    signal.signal(signal.SIGALRM, late)
    from jaxformer.config import ConfigError

    for kind, (share, act) in KINDS.items():
        for _ in range(int(count * share)):
            seed = rng.random()
            signal.alarm(10)
            try:
                act(random.Random(seed), folder, place)
                counts[kind]["taken"] += 1
            except ConfigError as error:
                fine = "\n" not in str(error) and str(error).isprintable()
                counts[kind]["refused" if fine else "several lines"] += 1
                if not fine:
                    wrong.append(f"{kind} {seed}: {str(error)[:200]!r}")
            except Exception as error:
                counts[kind]["fault"] += 1
                wrong.append(f"{kind} {seed}: {type(error).__name__}: {str(error)[:200]!r}")
            finally:
                signal.alarm(0)
    report.write_text(json.dumps([counts, wrong]))
    print("\n".join(wrong))
    return 0


def _mutated(value: Any, rng: random.Random) -> Any:
    """One to three places of nested dicts and lists changed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                places.append((node, key))  # noqa: B023
                walk(node[key])

        walk(value)
        node, key = rng.choice(places)
        act = rng.randrange(6)
        if act == 0 and isinstance(node, dict):
            del node[key]
        elif act == 1 and isinstance(node, dict):
            node[rng.choice(KEYS)] = node.pop(key)
        elif act == 2:
            other, there = rng.choice(places)
            node[key] = json.loads(json.dumps(other[there], default=str))
        elif act == 3 and type(node[key]) is int:
            node[key] += rng.choice((-10, -1, 1, 10, 1000))
        else:
            odd = rng.choice(ODD)
            node[key] = odd if not isinstance(odd, bytes) else odd.decode()
    return value


@functools.cache
def _config(name: str, folder: Path) -> Any:
    return tiny_runs.config(name, folder / "files")


def _any(rng: random.Random, folder: Path) -> Any:
    return _config(rng.choice(tuple(tiny_runs.RUNS)), folder)


def _configs(rng: random.Random, folder: Path, place: Path) -> None:
    from jaxformer.config import overrides

    overrides.freeze(_mutated(dataclasses.asdict(_any(rng, folder)), rng))


def _edits(rng: random.Random, folder: Path, place: Path) -> None:
    from jaxformer.config import overrides

    config = _any(rng, folder)
    paths, node = [], dataclasses.asdict(config)

    def walk(node: Any, path: str) -> None:
        for key, value in node.items():
            paths.append(f"{path}.{key}")
            if isinstance(value, dict):
                walk(value, paths[-1])

    walk(node, "--config")
    made = []
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice(paths)
        if rng.random() < 0.1:
            at = rng.randrange(len(path))
            path = path[:at] + rng.choice(("", ".", "x", "..", "é", "=")) + path[at + 1 :]
        made.append(f"{path}{rng.choice(('=', '=', '=', '=', '', ' '))}{rng.choice(TEXTS)}")
    overrides.edit(config, made)


def _bytes(raw: bytes, rng: random.Random) -> bytes:
    """Flipped, cut, repeated, or with odd bytes put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(raw) + 1)
        odd = rng.choice(PIECES)
        raw = raw[:at] + odd + raw[at + rng.choice((0, 1, 8, 10**9)) :]
    return raw


def _saved(rng: random.Random, folder: Path, place: Path) -> None:
    from jaxformer.config import overrides

    text = overrides.to_json(_any(rng, folder))
    (place / "config.json").write_bytes(_bytes(text.encode(), rng))
    overrides.read(place)


def _source(name: str, split: str, raw: bytes, folder: Path, place: Path) -> None:
    from jaxformer import tasks
    from jaxformer.data import sources
    from jaxformer.data.pipeline import Pipeline
    from jaxformer.data.tokenizers import Tokenizers

    here = place / "data"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(folder / "files", here, ignore=shutil.ignore_patterns("cache"))
    (here / split).write_bytes(raw)
    config = tiny_runs.config(name, here)
    try:
        dataset = sources.build(config.data)
        task = tasks.get(config.task.name)
        tokenizers = Tokenizers.build(config.data, dataset.splits["train"], task.roles)
        batches = Pipeline(config, dataset, tokenizers, task).evaluate("train")
        for _ in zip(range(3), batches, strict=False):
            pass
    finally:
        shutil.rmtree(here, ignore_errors=True)


def _texts(rng: random.Random, folder: Path, place: Path) -> None:
    raw = _bytes((folder / "files" / "train.txt").read_bytes(), rng)
    _source(rng.choice(("packed", "fitted")), "train.txt", raw, folder, place)


def _tables(rng: random.Random, folder: Path, place: Path) -> None:
    raw = (folder / "files" / "train.jsonl").read_bytes()
    if rng.random() < 0.5:
        rows = [json.loads(line) for line in raw.splitlines()]
        raw = "\n".join(json.dumps(row) for row in _mutated(rows, rng)).encode("utf-8", "surrogatepass")
    else:
        raw = _bytes(raw, rng)
    _source("classes", "train.jsonl", raw, folder, place)


def _tokenizer(rng: random.Random, folder: Path, place: Path) -> None:
    from jaxformer.data.tokenizers import Tokenizers

    config = tiny_runs.config("packed", folder / "files", data__tokenizer__kind="word", data__tokenizer__vocab=40)
    here = place / "tokenizer"
    if not here.exists():
        here.mkdir()
        lines = (folder / "files" / "train.txt").read_text().splitlines()
        Tokenizers.build(config.data, [{"text": line} for line in lines], ("text",)).save(here)
    other = place / "tokenizer-other"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(here, other)
    file = other / Tokenizers.FILE
    file.write_bytes(_bytes(file.read_bytes(), rng))
    Tokenizers.load(other)


RECIPE = [
    "import {word}", "raise {word}('x')", "def get_config():", "    return {word}", "    raise SystemExit({word})",
    "from jaxformer.config.overrides import defaults", "    config = defaults()", "    config.{word}.steps = 1", "\0",
    "(" * 300, "    return config", "get_config = {word}",
]  # fmt: skip
WORDS = ["train", "ValueError", "KeyError", "SystemExit", "get_config", "None", "0", "sys", "config.model", "json"]


def _recipes(rng: random.Random, folder: Path, place: Path) -> None:
    """Programs of a few lines, one in ten with those of a recipe in their order; one in ten is no file at all."""
    from jaxformer.config import overrides

    path = place / "recipe.py"
    path.unlink(missing_ok=True)
    if rng.random() < 0.1:
        _no_file(rng, path)
    else:
        right = [RECIPE[5], RECIPE[2], RECIPE[6], RECIPE[7], RECIPE[10]]
        lines = right if rng.random() < 0.1 else rng.choices(RECIPE, k=rng.randrange(1, 6))
        path.write_text("\n".join(line.replace("{word}", rng.choice(WORDS)) for line in lines))
    try:
        overrides.freeze(overrides.load(str(path)))
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def _no_file(rng: random.Random, path: Path) -> None:
    """A device without end, a pipe without a writer, or a folder."""
    rng.choice((lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path), path.mkdir))()


PATTERNS = ["(a+)+$", "(", "((a{1000}){1000}){1000}", "\\s+|\\S+", "(?<=a+)b", "[" * 3000, "", "(a|aa)+$", "\\p{L}+"]


def _foreign_tokenizer(rng: random.Random, folder: Path, place: Path) -> None:
    """A `tokenizer.json` of the `tokenizers` library, or a SentencePiece file, with something broken."""
    from jaxformer.data.tokenizers import Tokenizer

    path = place / rng.choice(("foreign.json", "foreign.model"))
    if rng.random() < 0.1:
        _no_file(rng, path)
    elif path.suffix == ".model":
        path.write_bytes(rng.randbytes(rng.randrange(200)))
    else:
        split = {"type": "Split", "pattern": {"Regex": rng.choice(PATTERNS)}, "behavior": "Isolated", "invert": False}
        table = {"type": "Precompiled", "precompiled_charsmap": rng.choice(("AAAA", "//////////8=", "", "?"))}
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
        content = {"version": "1.0", "added_tokens": [], "normalizer": rng.choice((None, None, table)),
                   "pre_tokenizer": rng.choice((None, split)), "post_processor": None, "decoder": None,
                   "truncation": None, "padding": None, "model": model}  # fmt: skip
        content = _mutated(content, rng) if rng.random() < 0.7 else content
        path.write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")
    try:
        Tokenizer.load(path).encode("aab " + "a" * 40 + "!")
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


KINDS: dict[str, tuple[float, Callable[[random.Random, Path, Path], None]]] = {
    "configs": (0.45, _configs),
    "override strings": (0.31, _edits),
    "saved configs (config.json)": (0.15, _saved),
    "text files": (0.01, _texts),
    "JSONL tables": (0.01, _tables),
    "tokenizer files": (0.02, _tokenizer),
    "recipes": (0.03, _recipes),
    "tokenizer files of other libraries": (0.02, _foreign_tokenizer),
}
"""What is tried, its share of the count, and the function that raises what the input deserves."""
