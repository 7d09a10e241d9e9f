"""Token shards: what building costs beside the `tokenizers` library alone, and what the first batch of a run costs.

    python benchmarks/data_build.py [--megabytes=30] [--large=300] [--folder=DIR] [--output=FILE.jsonl]

The text is the source code and the documentation of the running Python and its packages, a file a document, as JSONL. A
larger corpus than there are files begins again with the first file, each line marked with the number of the round, so
that no document is a copy.

1. Building: a BPE vocabulary of 16,000 is learned, then the same text is tokenized by the library's own `encode_batch`
   on one thread, and built with one worker and with two. Rates are tokens per second of processor time (of all
   processes, start included), since other programs may use the machine, and by the clock. They are taken by turns.
2. First batch: in a new process, seconds from the import to the first batch of rows of 1,024 tokens and the peak of its
   memory, of the source table (which parses and tokenizes the text first; the smaller corpus only) and of shards; then
   the peak after 2,000 batches more, and the rate at which batches are read.
3. A corpus of 10^10 tokens: the shards again and again under other names (hard links) until the index has as many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
VOCABULARY = 16000
ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt", ".html", ".h")
ROWS, LENGTH = 16, 1024

READ = """
import json, resource, sys, time
start, cpu = time.perf_counter(), time.process_time()
from jaxformer import tasks
from jaxformer.config import Config, DataConfig, ModelConfig, StackConfig, TaskConfig, TokenizerConfig
from jaxformer.data import sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.train import setup
fields, more, vocabulary = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tokenizer = TokenizerConfig(kind="file", path=vocabulary) if fields["source"] != "shards" else TokenizerConfig()
data = DataConfig(packing="concat", batch=ROWS, length=LENGTH, tokenizer=tokenizer, **fields)
config = Config(model=ModelConfig(decoder=StackConfig()), data=data, task=TaskConfig("language_modelling"))
dataset = sources.build(data, ("text",))
from pathlib import Path
tokenizers = setup.build_or_load_tokenizers(config, dataset, Path("no such folder"))
batches = Pipeline(config, dataset, tokenizers, tasks.get("language_modelling")).train()
next(batches)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu, megabytes=peak())
start = time.perf_counter()
for _ in range(more):
    next(batches)
found |= dict(later=peak(), rate=more * ROWS * LENGTH / max(time.perf_counter() - start, 1e-9))
print(json.dumps(found))
""".replace("ROWS", str(ROWS)).replace("LENGTH", str(LENGTH))


def documents(size: int) -> Iterator[str]:
    """Texts of files, `size` bytes in all."""
    folders = [Path(sysconfig.get_paths()["stdlib"]), *map(Path, site.getsitepackages()), Path("/usr/share/doc")]
    paths = sorted({path for folder in folders for path in folder.rglob("*") if path.suffix in ENDINGS})
    for number in itertools.count():
        found = size
        for path in paths:
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip() or len(text) > 2**20:
                continue
            if number:
                text = "".join(f"{number} {line}\n" for line in text.splitlines())
            size -= len(text.encode())
            yield text
            if size <= 0:
                return
        if found == size:
            sys.exit("no text was found")


def corpus(folder: Path, megabytes: int) -> Path:
    """A folder with a corpus of that many megabytes as train.jsonl."""
    path = folder / f"text-{megabytes}"
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "train.jsonl").exists():
        partial = path / "partial"
        with open(partial, "w") as file:
            for text in documents(megabytes * 10**6):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        partial.replace(path / "train.jsonl")
    return path


def processor_seconds() -> float:
    """Processor time of this process and of all processes that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(work: Any) -> tuple[Any, float, float]:
    """(result, seconds, processor seconds) of `work()`."""
    start, used = time.perf_counter(), processor_seconds()
    result = work()
    return result, time.perf_counter() - start, processor_seconds() - used


def data_config(text: Path, vocabulary: Path) -> Any:
    from jaxformer.config import Config, DataConfig, TokenizerConfig

    tokenizer = TokenizerConfig(kind="file", path=str(vocabulary))
    splits = {"train": ("train.jsonl",)}
    return Config(
        data=DataConfig(source="table", dir=str(text), splits=splits, columns={"text": "text"}, tokenizer=tokenizer)
    )


def learn(text: Path, folder: Path) -> Path:
    """The file of a vocabulary learned from every eighth document."""
    from jaxformer.config import TokenizerConfig
    from jaxformer.data import vocabularies
    from jaxformer.data.tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        texts = read(text)
        Tokenizer(vocabularies.learn(TokenizerConfig(vocab=VOCABULARY), texts[::8])).export(path)
    return path


def read(text: Path) -> list[str]:
    """The documents of a corpus."""
    with open(text / "train.jsonl") as file:
        return [json.loads(line)["text"] for line in file]


def library(text: Path, vocabulary: Path) -> int:
    """Tokens by the library alone: `encode_batch` of texts that are in memory, and the numbers of the ids read."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(vocabulary))
    texts = read(text)
    count, used = 0, processor_seconds()
    for begin in range(0, len(texts), 64):
        count += sum(len(each.ids) for each in model.encode_batch(texts[begin : begin + 64], add_special_tokens=False))
    library.seconds = processor_seconds() - used  # without reading the text  # ty: ignore[unresolved-attribute]
    return count


def building(text: Path, vocabulary: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Rates of the library and of builds with one worker and two, the best of `rounds` by turns."""
    from jaxformer.data import build

    rates: dict[str, list[tuple[float, float]]] = {"library": [], "1 worker": [], "2 workers": []}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in range(rounds):
        count, seconds, _ = timed(lambda: library(text, vocabulary))
        rates["library"].append((count / library.seconds, count / seconds))  # ty: ignore[unresolved-attribute]
        for workers in (1, 2):
            target = folder / f"built-{text.name}-{workers}-{number}"
            index, seconds, used = timed(
                lambda target=target, workers=workers: build.build(data_config(text, vocabulary), target, workers)
            )
            tokens = index["splits"]["train"]["tokens"]
            rates[f"{workers} worker{'s' * (workers > 1)}"].append((tokens / used, tokens / seconds))
    best = {name: [max(each) for each in zip(*values, strict=True)] for name, values in rates.items()}
    return {
        name: {
            "tokens_per_processor_second": round(best[name][0]),
            "tokens_per_second": round(best[name][1]),
            "ratio": round(best[name][0] / best["library"][0], 3),
        }
        for name in best
    }


def first_batch(fields: dict[str, Any], vocabulary: Path, more: int) -> dict[str, float]:
    """Measurements of a new process: until its first batch, and after `more` batches."""
    command = [sys.executable, "-c", READ, json.dumps(fields), str(more), str(vocabulary)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return {name: round(value, 2) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def multiplied(built: Path, target: Path, tokens: int) -> Path:
    """Shards of at least `tokens` tokens: those of `built` as hard links under as many names as it takes."""
    index = json.loads((built / "index.json").read_text())
    target.mkdir(exist_ok=True)
    (target / "jaxformer_tokenizer.json").write_bytes((built / "jaxformer_tokenizer.json").read_bytes())
    shards, found = [], 0
    for number, shard in enumerate(itertools.cycle(index["splits"]["train"]["shards"])):
        if found >= tokens:
            break
        name = f"train-{number:05d}.array_record"
        if not (target / name).exists():
            os.link(built / shard["file"], target / name)
        shards.append({**shard, "file": name})
        found += shard["tokens"]
    index["splits"] = {"train": {"shards": shards}}
    (target / "index.json").write_text(json.dumps(index))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=30, help="of the smaller corpus")
    parser.add_argument("--large", type=int, default=300, help="megabytes of the larger one; 0: none")
    parser.add_argument("--tokens", type=int, default=10**10, help="of the simulated corpus")
    parser.add_argument("--batches", type=int, default=2000, help="read after the first one")
    parser.add_argument("--rounds", type=int, default=1, help="of the builds, of which the best counts")
    parser.add_argument("--folder", type=Path, required=True, help="for the texts and the shards; kept")
    parser.add_argument("--output", help="a file that rows are appended to")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    text = corpus(folder, chosen.megabytes)
    vocabulary = learn(text, folder)
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            "  ".join(f"{name}={value:,}" if isinstance(value, (int, float)) else value for name, value in row.items()),
            flush=True,
        )

    for name, rates in building(text, vocabulary, folder, chosen.rounds).items():
        show({"table": "building", "what": name, **rates})
    plain = {"source": "table", "dir": str(text), "splits": {"train": ["train.jsonl"]}, "columns": {"text": "text"}}
    plain["cache"] = str(folder / "cache")
    show({"table": "first batch", "what": f"table, {chosen.megabytes} MB", **first_batch(plain, vocabulary, 0)})
    built = {chosen.megabytes: folder / f"built-{text.name}-1-0"}
    if chosen.large:
        from jaxformer.data import build

        large = corpus(folder, chosen.large)
        built[chosen.large] = folder / f"built-{chosen.large}"
        index, seconds, used = timed(lambda: build.build(data_config(large, vocabulary), built[chosen.large], 2))
        tokens = index["splits"]["train"]["tokens"]
        rates = {"tokens_per_processor_second": round(tokens / used), "tokens_per_second": round(tokens / seconds)}
        show({"table": "building", "what": f"2 workers, {chosen.large} MB", "tokens": tokens, **rates})
    for megabytes, target in built.items():
        measured = first_batch({"source": "shards", "dir": str(target)}, vocabulary, chosen.batches)
        show({"table": "first batch", "what": f"shards, {megabytes} MB", **measured})
    last = list(built.values())[-1]
    for tokens in (10**9, chosen.tokens):
        target = multiplied(last, folder / f"simulated-{tokens}", tokens)
        measured = first_batch({"source": "shards", "dir": str(target)}, vocabulary, chosen.batches)
        count = len(json.loads((target / "index.json").read_text())["splits"]["train"]["shards"])
        show({"table": "simulated", "what": f"{tokens:,} tokens in {count:,} shards", **measured})
    if chosen.output:
        with open(chosen.output, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
