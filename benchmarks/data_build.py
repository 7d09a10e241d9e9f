"""Token shards: what building costs beside the `tokenizers` library alone, and what the first batch of a run costs.

    python benchmarks/data_build.py --folder=DIR [--megabytes=30] [--large 300 3000] [--output=FILE.jsonl]
    python benchmarks/data_build.py --folder=DIR --bucket=s3,gs [--megabytes=30]

The text is the source code and the documentation of the running Python and its packages, a file a document, as JSONL. A
larger corpus than there are files begins again with the first file, each line marked with the number of the round, so
that no document is a copy.

1. Building: a BPE vocabulary of 16,000 is learned, then the same text is tokenized by the library's own `encode_batch`
   (and `encode_batch_fast`, which keeps no offsets) on one thread, and built with one worker and with two. Rates are
   tokens per second of processor time (of all processes, start included), since other programs may use the machine, and
   by the clock. They are taken by turns.
2. First batch: in a new process, seconds from the import to the first batch of 16 rows of 1,024 tokens and the peak of
   its memory, of the source table (which parses and tokenizes the text first; the smaller corpus only) and of shards;
   then the peak after 2,000 batches more, and the tokens read per second.
3. Corpora of 10^9 and 10^10 tokens: the shards again and again under other names (hard links) until the index has as
   many. Then 10^10 examples: a shard of 250,000 lines of the text, again and again, read without packing.
4. Hosts: what host 0 of 1, 8 and 64 does for its 16 rows of each global batch, for running text and for packed
   documents, which every host plans from the lengths of a block's documents.
5. With `--bucket`, instead: shards of several sizes are built into a bucket on this machine (`storage_servers.py`);
   then the first batch, without copies of shards in the cache and with them, and the same with two loader processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
VOCABULARY = 16000
ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt", ".html", ".h")
ROWS, LENGTH = 16, 1024
LINES = 250_000
HOSTS = (1, 8, 64)
SHARD_MEGABYTES = (1, 30)
HOST_BATCHES = 20
"""Batches after the first one: few, since 64 hosts have 1,024 rows in each, and the smaller corpus has about 10,000."""

READ = """
import json, sys, time
start, cpu = time.perf_counter(), time.process_time()
from pathlib import Path
from jaxformer import tasks
from jaxformer.config import Config, DataConfig, ModelConfig, StackConfig, TaskConfig, TokenizerConfig
from jaxformer.data import sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.train import setup
fields, more, hosts, vocabulary = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tokenizer = TokenizerConfig(kind="file", path=vocabulary) if fields["source"] != "shards" else TokenizerConfig()
data = DataConfig(batch=ROWS * hosts, tokenizer=tokenizer, **{"packing": "concat", "length": LENGTH, **fields})
config = Config(model=ModelConfig(decoder=StackConfig()), data=data, task=TaskConfig("language_modelling"))
dataset = sources.build(data, ("text",))
tokenizers = setup.build_or_load_tokenizers(config, dataset, Path("no such folder"))
task = tasks.get("language_modelling")
batches = Pipeline(config, dataset, tokenizers, task, process_index=0, process_count=hosts).train()
next(batches)
PEAK
found = dict(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu, megabytes=peak())
children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
if children:
    found |= dict(loader_megabytes=max(map(peak, children)))
start, cpu = time.perf_counter(), time.process_time()
for _ in range(more):
    next(batches)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
if more:
    found |= dict(later=peak(), tokens_per_second=more * ROWS * data.length / seconds, batch_cpu_ms=cpu / more * 1000)
batches.close()
print(json.dumps(found))
"""

BUILD = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "benchmarks")
import data_build
from jaxformer.data import build
PEAK
text, vocabulary, target = map(Path, sys.argv[1:])
index, seconds, used = data_build.timed(lambda: build.build(data_build.data_config(text, vocabulary), target))
tokens = index["splits"]["train"]["tokens"]
rates = dict(tokens=tokens, tokens_per_processor_second=tokens / used, tokens_per_second=tokens / seconds)
print(json.dumps(rates | dict(megabytes=peak(), shards=len(index["splits"]["train"]["shards"]))))
"""

# Not ru_maxrss: a new process begins with that of the process which started it.
PEAK = 'peak = lambda pid="self": int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024'


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


def library(texts: list[str], vocabulary: Path, fast: bool) -> int:
    """Tokens by the library alone: texts that are in memory, and the numbers of the ids read."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(vocabulary))
    encode = model.encode_batch_fast if fast else model.encode_batch
    batches = (texts[begin : begin + 64] for begin in range(0, len(texts), 64))
    return sum(len(each.ids) for batch in batches for each in encode(batch, add_special_tokens=False))


def building(text: Path, vocabulary: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Rates of the library and of builds with one worker and two, the best of `rounds` by turns."""
    from jaxformer.data import build

    names = ("encode_batch", "encode_batch_fast", "build, 1 worker", "build, 2 workers")
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = read(text)
    for number in range(rounds):
        for name in names[:2]:
            count, seconds, used = timed(lambda name=name: library(texts, vocabulary, name.endswith("fast")))
            rates[name].append((count / used, count / seconds))
        for workers, name in enumerate(names[2:], 1):
            target = folder / f"built-{text.name}-{workers}-{number}"
            index, seconds, used = timed(
                lambda target=target, workers=workers: build.build(data_config(text, vocabulary), target, workers)
            )
            tokens = index["splits"]["train"]["tokens"]
            rates[name].append((tokens / used, tokens / seconds))
    best = {name: [max(each) for each in zip(*values, strict=True)] for name, values in rates.items()}
    return {
        name: {
            "tokens_per_processor_second": round(best[name][0]),
            "tokens_per_second": round(best[name][1]),
            "ratio": round(best[name][0] / best["encode_batch"][0], 2),
            "ratio_fast": round(best[name][0] / best["encode_batch_fast"][0], 2),
        }
        for name in best
    }


def in_new_process(script: str, *arguments: str) -> dict[str, float]:
    """What a script prints, run by a new process."""
    script = script.replace("PEAK", PEAK).replace("ROWS", str(ROWS)).replace("LENGTH", str(LENGTH))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    return {name: round(value, 2) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def first_batch(fields: dict[str, Any], vocabulary: Path, more: int, hosts: int = 1) -> dict[str, float]:
    """Measurements of a new process: until its first batch, and after `more` batches."""
    return in_new_process(READ, json.dumps(fields), str(more), str(hosts), str(vocabulary))


def multiplied(built: Path, target: Path, size: int, what: str = "tokens") -> Path:
    """Shards of at least `size` tokens or documents: those of `built` as hard links under as many names as it takes."""
    index = json.loads((built / "index.json").read_text())
    target.mkdir(exist_ok=True)
    (target / "jaxformer_tokenizer.json").write_bytes((built / "jaxformer_tokenizer.json").read_bytes())
    shards, found = [], 0
    for number, shard in enumerate(itertools.cycle(index["splits"]["train"]["shards"])):
        if found >= size:
            break
        name = f"train-{number:05d}.array_record"
        if not (target / name).exists():
            os.link(built / shard["file"], target / name)
        shards.append({**shard, "file": name})
        found += shard[what]
    index["splits"] = {"train": {"shards": shards}}
    (target / "index.json").write_text(json.dumps(index))
    return target


def lines_shard(text: Path, vocabulary: Path, target: Path) -> Path:
    """A shard whose documents are `LINES` lines of a corpus."""
    from jaxformer.config import Config, DataConfig
    from jaxformer.data import build

    lines = (line for document in itertools.cycle(read(text)) for line in document.splitlines() if line.strip())
    source = target.with_suffix(".text")
    source.mkdir(exist_ok=True)
    (source / "train.txt").write_text("".join(f"{line}\n" for line in itertools.islice(lines, LINES)))
    tokenizer = data_config(text, vocabulary).data.tokenizer
    splits = {"train": ("train.txt",)}
    data = DataConfig(source="text", dir=str(source), splits=splits, tokenizer=tokenizer)
    build.build(Config(data=data), target, options=build.Options(shard_mb=256))
    return target


def buckets(text: Path, vocabulary: Path, folder: Path, scheme: str) -> Iterator[dict[str, Any]]:
    """First batches of shards in a bucket, by size of the shards."""
    import storage_servers

    from jaxformer.data import build

    with storage_servers.serve(scheme, 0.0, 0, folder) as server:
        os.environ |= storage_servers.environment(scheme, server)
        for megabytes in SHARD_MEGABYTES:
            url = f"{scheme}://{storage_servers.BUCKET}/corpus-{megabytes}"
            os.environ["JAXFORMER_CACHE"] = str(folder / f"cache-{scheme}-{megabytes}")
            options = build.Options(shard_mb=megabytes)
            config = data_config(text, vocabulary)
            index, _, used = timed(lambda: build.build(config, url, options=options))  # noqa: B023
            shards = len(index["splits"]["train"]["shards"])
            what = f"{scheme}, {shards} shards of {megabytes} MB"
            tokens = index["splits"]["train"]["tokens"]
            yield {"table": "bucket", "what": f"{what}: build", "tokens_per_processor_second": round(tokens / used)}
            local = folder / f"bucket-{megabytes}"
            build.build(config, local, options=options)
            measured = first_batch({"source": "shards", "dir": str(local)}, vocabulary, 200)
            yield {"table": "bucket", "what": f"{what}, in a folder", **measured}
            fields = {"source": "shards", "dir": url}
            for workers, copies in ((0, "no copies"), (0, "copies"), (2, "no copies")):
                if copies == "no copies":
                    shutil.rmtree(Path(os.environ["JAXFORMER_CACHE"]) / "data", ignore_errors=True)
                measured = first_batch({**fields, "workers": workers}, vocabulary, 200)
                yield {"table": "bucket", "what": f"{what}, {workers} workers, {copies}", **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=30, help="of the smaller corpus")
    parser.add_argument("--large", type=int, nargs="*", default=[300], help="megabytes of larger ones")
    parser.add_argument("--tokens", type=int, default=10**10, help="of the simulated corpus")
    parser.add_argument("--examples", type=int, default=10**10, help="of the simulated index of examples")
    parser.add_argument("--batches", type=int, default=2000, help="read after the first one")
    parser.add_argument("--rounds", type=int, default=1, help="beside the library, of which the best counts")
    parser.add_argument("--bucket", default="", help="schemes, as s3,gs: only shards in a bucket are measured")
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

    if chosen.bucket:
        for scheme in chosen.bucket.split(","):
            for row in buckets(text, vocabulary, folder, scheme):
                show(row)
        return
    if chosen.rounds:
        for name, rates in building(text, vocabulary, folder, chosen.rounds).items():
            show({"table": "building", "what": name, **rates})
    plain = {"source": "table", "dir": str(text), "splits": {"train": ["train.jsonl"]}, "columns": {"text": "text"}}
    plain["cache"] = str(folder / "cache")
    show({"table": "first batch", "what": f"table, {chosen.megabytes} MB", **first_batch(plain, vocabulary, 0)})
    built = {}
    for megabytes in (chosen.megabytes, *chosen.large):
        built[megabytes] = folder / f"built-{megabytes}"
        measured = in_new_process(BUILD, str(corpus(folder, megabytes)), str(vocabulary), str(built[megabytes]))
        show({"table": "building", "what": f"1 worker, {megabytes} MB", **measured})
    for megabytes, target in built.items():
        measured = first_batch({"source": "shards", "dir": str(target)}, vocabulary, chosen.batches)
        show({"table": "first batch", "what": f"shards, {megabytes} MB", **measured})
    last = list(built.values())[-1]
    for tokens in (10**9, chosen.tokens):
        target = multiplied(last, folder / f"simulated-{tokens}", tokens)
        measured = first_batch({"source": "shards", "dir": str(target)}, vocabulary, chosen.batches)
        count = len(json.loads((target / "index.json").read_text())["splits"]["train"]["shards"])
        show({"table": "simulated", "what": f"{tokens:,} tokens in {count:,} shards", **measured})
    target = lines_shard(text, vocabulary, folder / "lines")
    target = multiplied(target, folder / f"examples-{chosen.examples}", chosen.examples, "documents")
    fields = {"source": "shards", "dir": str(target), "packing": "none", "length": 64}
    measured = first_batch(fields, vocabulary, chosen.batches)
    count = len(json.loads((target / "index.json").read_text())["splits"]["train"]["shards"])
    show({"table": "simulated", "what": f"{chosen.examples:,} examples in {count:,} shards", **measured})
    for packing in ("concat", "first_fit"):
        for hosts in HOSTS:
            fields = {"source": "shards", "dir": str(last), "packing": packing}
            measured = first_batch(fields, vocabulary, HOST_BATCHES, hosts)
            show({"table": "hosts", "what": f"{packing}, host 0 of {hosts}", **measured})
    if chosen.output:
        with open(chosen.output, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
