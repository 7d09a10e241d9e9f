"""Rows of token shards in a bucket: read as records by byte ranges, from copies, and with a copy made for each row.

    python benchmarks/shard_reads.py [--schemes=gs,s3] [--latency-ms=5] [--megabytes 4 64] [--rounds=3]

The servers are those of `storage_servers.py` on this machine, behind a proxy that waits before each answer. Batches of
16 rows of 1,024 tokens are drawn at random from a corpus of eight shards, as training with `data.packing` concat reads
it. Medians of rounds by turns, in milliseconds a row:

1. records: no copies; a record is 16 KiB, and 8 are fetched at a time.
2. copies: all shards are there.
3. a copy a row: what a cache of copies costs that is so small that each row misses it.

Then seconds to the first batch of a process without copies: with copies made in the background, as it is for shards of
more than 16 MiB, and with copies that the batch waits for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import storage_servers  # noqa: E402

from jaxformer.data import shard_copies, token_shards  # noqa: E402
from jaxformer.data.shard_copies import Room  # noqa: E402
from jaxformer.data.token_shards import Shard, ShardFiles, TokenStream  # noqa: E402
from jaxformer.runtime.object_store import Store  # noqa: E402

ROWS, LENGTH, SHARDS = 16, 1024, 8
BATCHES = {"records": 8, "copies": 50, "a copy a row": 1}


def make_shards(url: str, megabytes: int, folder: Path) -> list[Shard]:
    """Uploads shards of random tokens, without a table of documents."""
    records = megabytes * 10**6 // (2 * token_shards.RECORD_TOKENS)
    rng, found = np.random.default_rng(megabytes), []
    for number in range(SHARDS):
        path = folder / "shard"
        writer = token_shards.array_record().ArrayRecordWriter(str(path), token_shards.WRITER_OPTIONS)
        for _ in range(records):
            writer.write(rng.bytes(2 * token_shards.RECORD_TOKENS))
        writer.close()
        content = path.read_bytes()
        Store(url).write(f"{number}.array_record", content)
        tokens, sha256 = records * token_shards.RECORD_TOKENS, hashlib.sha256(content).hexdigest()
        found.append(Shard(f"{number}.array_record", len(content), sha256, 0, tokens, 0, 0, 0))
    return found


def seconds_per_row(url: str, shards: list[Shard], how: str, seed: int) -> float:
    files = ShardFiles(url, shards, np.dtype("<u2"), Room(0 if how == "records" else None))
    stream = TokenStream(files, 0, sum(shard.tokens for shard in shards) + 1)
    rng = np.random.default_rng(seed)
    if how == "copies":
        for number in range(SHARDS):
            files._fetch(number)
    start = time.perf_counter()
    for _ in range(BATCHES[how]):
        rows = [(row * LENGTH, (row + 1) * LENGTH + 1) for row in rng.integers(0, len(stream) // LENGTH - 1, ROWS)]
        if how == "a copy a row":
            for begin, end in rows:
                number = begin // shards[0].tokens
                files._fetch(number)
                stream[begin:end]
                files._drop(number)
                shard_copies.delete_unused(files._path(shards[number]))
        else:
            stream.fetch(rows)
            for begin, end in rows:
                stream[begin:end]
    return (time.perf_counter() - start) / (BATCHES[how] * ROWS)


def seconds_to_first_batch(url: str, shards: list[Shard], waits: bool) -> float:
    token_shards.MAX_AWAITED_BYTES = 2**60 if waits else 0
    start = time.perf_counter()
    stream = TokenStream(ShardFiles(url, shards, np.dtype("<u2")), 0, sum(shard.tokens for shard in shards) + 1)
    begins = np.random.default_rng(0).integers(0, len(stream) // LENGTH - 1, ROWS) * LENGTH
    stream.fetch((begin, begin + LENGTH + 1) for begin in begins)
    for begin in begins:
        stream[begin : begin + LENGTH + 1]
    found = time.perf_counter() - start
    while stream.files._copier is not None:
        time.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="gs,s3")
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    heads = ["shards", *BATCHES, "first batch, s", "first batch that waits, s"]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for scheme in chosen.schemes.split(","):
        with tempfile.TemporaryDirectory() as name, storage_servers.serve(scheme, 0.0, 0, Path(name)) as server:
            os.environ |= storage_servers.environment(scheme, server) | {"JAXFORMER_CACHE": f"{name}/cache"}
            for megabytes in chosen.megabytes:
                url = f"{scheme}://{storage_servers.BUCKET}/{megabytes}"
                shards = make_shards(url, megabytes, Path(name))
                storage_servers.control(server, latency=chosen.latency_ms / 1000)
                times: dict[str, list[float]] = {how: [] for how in BATCHES}
                for number in range(chosen.rounds):
                    for how, found in times.items():
                        found.append(seconds_per_row(url, shards, how, number))
                        for path in shard_copies.folder().glob("*.array_record"):
                            path.unlink()
                first = {}
                for waits in (False, True):
                    first[waits] = seconds_to_first_batch(url, shards, waits)
                    for path in shard_copies.folder().glob("*.array_record"):
                        path.unlink()
                storage_servers.control(server, latency=0.0)
                cells = [f"{1000 * statistics.median(found):.2f}" for found in times.values()]
                cells += [f"{first[False]:.2f}", f"{first[True]:.2f}"]
                print(f"| `{scheme}://`, {megabytes} MB | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
