"""Compares the speed of greedy search, sampling and beam search with Hugging Face's `generate` and CTranslate2.

    python benchmarks/decoding.py --peer=PYTHON [--only=WORD] [--rounds=5]
    python benchmarks/decoding.py --peer=PYTHON --workdir=RUN --directory=EXPORT --input=test.en --reference=test.de
    python benchmarks/decoding.py --page

The first command continues prompts of 8 tokens by 200 tokens, with random models of GPT-2's shape that never choose an
end token. The second translates a file with beam 5, from token ids to token ids, by one trained model: from its
workdir, and as `jaxformer export` wrote it. PYTHON is an interpreter with the extra [bench] (torch, transformers,
ctranslate2), by default this one. The programs take turns (see turns.py).

Rows are appended to benchmarks/results/decoding.jsonl; --page writes them into docs/measurements/decoding.md. Exits 1
if the speed relative to the fastest peer of the same precision falls behind the last row of a case by more than noise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402
import turns  # noqa: E402

from jaxformer.runtime import memory  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decoding.jsonl"
PAGE = ROOT / "docs" / "measurements" / "decoding.md"
NOISE = 0.15
"""Smallest relative slowdown that counts."""
Row = dict[str, Any]


def program(file: str, interpreter: str, task: Row) -> turns.Program:
    """A script of this folder that serves `task`."""
    return turns.Program([interpreter, str(ROOT / "benchmarks" / file)], task)


def continuations(peer: str, size: Row, batches: list[int]) -> list[tuple[str, Row, dict[str, turns.Program]]]:
    """Cases of text continuation, as (title, unit and amount of work of a run, programs by name)."""
    cases = []
    for method in ("greedy", "sample"):
        for dtype in ("float32", "bfloat16"):
            for batch in batches:
                task = size | {"kind": "continue", "method": method, "dtype": dtype, "batch": batch}
                programs = {"jaxformer": program("decoding_jax.py", sys.executable, task)}
                if method == "greedy":
                    full_cache = task | {"initial_tokens": task["tokens"]}
                    programs["one cache"] = program("decoding_jax.py", sys.executable, full_cache)
                for compiled in (False, True):
                    peer_task = task | {"peer": "generate", "compiled": compiled}
                    name = "generate, compiled" if compiled else "generate"
                    programs[name] = program("decoding_peers.py", peer, peer_task)
                work = {"unit": "tokens/s", "amount": batch * task["tokens"]}
                cases.append((f"{method}, {batch} {'prompt' if batch == 1 else 'prompts'}, {dtype}", work, programs))
    return cases


def translation(flags: argparse.Namespace) -> tuple[str, Row, dict[str, turns.Program]]:
    """The case of translating the lines of a file, as (title, unit and amount of work, programs by name)."""
    import jaxformer
    from jaxformer import tasks

    model = jaxformer.load(flags.workdir)
    prompt = tasks.get(model.config.task.name).prompt
    lines = Path(flags.input).read_text(encoding="utf-8").splitlines()[: flags.lines]
    sources = [[int(token) for token in prompt(model.config, model.tokenizers, line)["source"]] for line in lines]
    task = {"sources": sources, "beams": 5, "tokens": 64, "batch": flags.batch, "directory": flags.directory}
    own_task = task | {"kind": "translate", "workdir": flags.workdir}
    programs = {
        "jaxformer": program("decoding_jax.py", sys.executable, own_task | {"stopping": "estimate"}),
        "jaxformer, first": program("decoding_jax.py", sys.executable, own_task | {"stopping": "first"}),
        "jaxformer, int8": program(
            "decoding_jax.py", sys.executable, own_task | {"stopping": "estimate", "weights": "int8"}
        ),
        "generate": program("decoding_peers.py", flags.peer, task | {"peer": "hugging_face"}),
    }
    for dtype in ("float32", "int8"):
        for inter in (1, os.cpu_count() or 1):
            name = f"CTranslate2 {dtype}, {inter} x {(os.cpu_count() or 1) // inter} threads"
            peer_task = task | {"peer": "ctranslate2", "dtype": dtype, "inter": inter}
            programs[name] = program("decoding_peers.py", flags.peer, peer_task)
    return f"beam 5, {len(lines):,} sentences", {"unit": "sentences/s", "amount": len(lines)}, programs


def score_translations(results: dict[str, Row], flags: argparse.Namespace) -> None:
    """Adds to each program's row the BLEU of its translations, and how many equal those of jaxformer."""
    import jaxformer
    from jaxformer import metrics

    tokenizer = jaxformer.load(flags.workdir).tokenizers.target
    references = Path(flags.reference).read_text(encoding="utf-8").splitlines()[: flags.lines]
    own_result = results["jaxformer"]["result"]
    for row in results.values():
        if "failed" not in row:
            texts = [tokenizer.decode(tokens) for tokens in row["result"]]
            same = sum(a == b for a, b in zip(own_result, row["result"], strict=True))
            row |= {"same": same, "bleu": round(metrics.bleu(texts, references).value, 2)}


def versions(peer: str) -> Row:
    """Versions of the measured packages, the hardware and the date."""
    names = ["torch", "transformers", "ctranslate2"]
    script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    peer_versions = json.loads(subprocess.run([peer, "-c", script], capture_output=True, text=True, check=True).stdout)
    cores = f"{os.cpu_count()} {platform.machine()} cores"
    own_versions = {"python": platform.python_version(), "jax": importlib.metadata.version("jax"), "hardware": cores}
    return own_versions | peer_versions | {"date": time.strftime("%Y-%m-%d")}


def measure(title: str, work: Row, programs: dict[str, turns.Program], flags: argparse.Namespace) -> Row:
    """One row of results: each program's rate, and how many times as fast jaxformer is."""
    settings = {memory.VARIABLE: memory.tunables({})}
    results = turns.take(programs, flags.rounds, {**os.environ, "JAX_PLATFORMS": "cpu", **settings})
    if flags.workdir:
        score_translations(results, flags)
    own, rows = results["jaxformer"], {}
    if "failed" in own:
        raise RuntimeError(f"{title}: {own['failed']}")
    for name, row in results.items():
        if "failed" in row:
            rows[name] = {"failed": " ".join(row["failed"].split())[-200:]}
            continue
        scores = {key: row[key] for key in ("same", "bleu") if key in row}
        rate = {"rate": work["amount"] / row["seconds"], "spread": row["spread"], "times": turns.ratio(own, row)}
        rate |= {"bytes": row["bytes"]}
        rows[name] = rate | scores
    return {"case": title, "unit": work["unit"], "rows": rows, "rounds": flags.rounds}


def speedup(row: Row) -> float:
    """Speed of jaxformer divided by that of the fastest peer of the same precision."""
    speedups = [result["times"] for name, result in row["rows"].items() if is_peer(name) and "times" in result]
    return min(speedups, default=float("nan"))


def is_peer(name: str) -> bool:
    """True for the programs of other libraries that compute in the same precision."""
    return name.startswith(("generate", "CTranslate2 float32"))


def is_slower(row: Row, earlier: list[Row]) -> bool:
    """True if the speedup fell behind the last earlier row of the same case by more than noise."""
    last = [other for other in earlier if other["case"] == row["case"]][-1:]
    spread = max(result.get("spread", 0.0) for result in row["rows"].values())
    return bool(last) and speedup(row) < speedup(last[0]) * (1 - max(NOISE, spread))


def table(rows: list[Row]) -> list[str]:
    """Markdown table of the last row of every case, with a line per program."""
    newest = {row["case"]: row for row in rows}.values()
    lines = ["| what | by | rate | spread | we are | BLEU, same as ours | memory |", "|---|---|---|---|---|---|---|"]
    for row in newest:
        for name, result in row["rows"].items():
            if "failed" in result:
                lines.append(f"| {row['case']} | {name} | failed: {result['failed']} | | | | |")
                continue
            score = f"{result['bleu']:.2f}, {result['same']:,}" if "bleu" in result else ""
            times = "" if name == "jaxformer" else f"{result['times']:.2f} x"
            rate = f"{result['rate']:,.0f} {row['unit']}"
            memory_use = f"{result['bytes'] / 1e9:.1f} GB" if "bytes" in result else ""
            lines.append(
                f"| {row['case']} | {name} | {rate} | {result['spread']:.0%} | {times} | {score} | {memory_use} |"
            )
    names = ("date", "hardware", "rounds", "python", "jax", "torch", "transformers", "ctranslate2")
    settings = dict.fromkeys(", ".join(f"{name} {row[name]}" for name in names if name in row) for row in newest)
    return [*lines, "", f"Measured {'; '.join(settings)}."]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--lines", type=int, default=None, help="number of lines of the file; default: all")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    for name in ("workdir", "directory", "input", "reference"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page and measure nothing")
    flags = parser.parse_args(argv)
    earlier = [json.loads(line) for line in flags.results.read_text().splitlines()] if flags.results.exists() else []
    if flags.page:
        pages.put(PAGE, "decoding", table(earlier))
        return 0
    size = {"layers": flags.layers, "width": flags.width, "vocab": 65, "prompt": 8, "tokens": flags.tokens}
    batches = [int(size) for size in flags.batches.split(",")]
    cases = [translation(flags)] if flags.workdir else continuations(flags.peer, size, batches)
    failed, settings = 0, versions(flags.peer)
    for title, work, programs in cases:
        if flags.only not in title:
            continue
        row = measure(title, work, programs, flags)
        with flags.results.open("a") as file:
            file.write(json.dumps(row | settings) + "\n")
        print(f"{title}: {speedup(row):.2f} x the fastest peer", flush=True)
        for name, result in row["rows"].items():
            print(f"    {name}: {json.dumps(result)}", flush=True)
        failed += is_slower(row, earlier)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
