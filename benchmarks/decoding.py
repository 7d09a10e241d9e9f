"""Greedy search, sampling and beam search beside Hugging Face's `generate` and CTranslate2, by turns (see turns.py).

    python benchmarks/decoding.py --peer=PYTHON [--only=WORD] [--rounds=5]
    python benchmarks/decoding.py --peer=PYTHON --workdir=RUN --directory=EXPORT --input=test.en --reference=test.de
    python benchmarks/decoding.py --page

The first continues prompts of 8 tokens by 200 with random models of GPT-2's shape, whose texts never end. The second
translates a file with beam 5 by one trained model in its workdir and as `jaxformer export` wrote it, from token ids to
token ids. PYTHON is an interpreter with the extra [bench] (torch, transformers, ctranslate2), by default this one.
Rows go to benchmarks/results/decoding.jsonl and, with --page, into docs/measurements/decoding.md. Exits 1 where we are
slower, in relation to the best peer of the same precision, than in the last row of the case, by more than the noise.
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

from jaxformer import memory  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decoding.jsonl"
PAGE = ROOT / "docs" / "measurements" / "decoding.md"
NOISE = 0.15
Row = dict[str, Any]


def program(file: str, interpreter: str, task: Row) -> turns.Program:
    return turns.Program([interpreter, str(ROOT / "benchmarks" / file)], task)


def continuations(peer: str, size: Row, batches: list[int]) -> list[tuple[str, Row, dict[str, turns.Program]]]:
    """What is timed, as (words, what a run makes and how much, the programs by name)."""
    cases = []
    for method in ("greedy", "sample"):
        for dtype in ("float32", "bfloat16"):
            for batch in batches:
                task = size | {"kind": "continue", "method": method, "dtype": dtype, "batch": batch}
                programs = {"jaxformer": program("decoding_jax.py", sys.executable, task)}
                if method == "greedy":
                    whole = task | {"first": task["tokens"]}
                    programs["one cache"] = program("decoding_jax.py", sys.executable, whole)
                for compiled in (False, True):
                    asked = task | {"peer": "generate", "compiled": compiled}
                    name = "generate, compiled" if compiled else "generate"
                    programs[name] = program("decoding_peers.py", peer, asked)
                work = {"unit": "tokens/s", "amount": batch * task["tokens"]}
                cases.append((f"{method}, {batch} {'prompt' if batch == 1 else 'prompts'}, {dtype}", work, programs))
    return cases


def translation(flags: argparse.Namespace) -> tuple[str, Row, dict[str, turns.Program]]:
    """The same for a trained translator and the lines of a file."""
    import jaxformer
    from jaxformer import tasks

    model = jaxformer.load(flags.workdir)
    prompt = tasks.get(model.config.task.name).prompt
    lines = Path(flags.input).read_text(encoding="utf-8").splitlines()[: flags.lines]
    sources = [[int(token) for token in prompt(model.config, model.tokenizers, line)["source"]] for line in lines]
    task = {"sources": sources, "beams": 5, "tokens": 64, "batch": flags.batch, "directory": flags.directory}
    ours = task | {"kind": "translate", "workdir": flags.workdir}
    programs = {
        "jaxformer": program("decoding_jax.py", sys.executable, ours | {"stopping": "estimate"}),
        "jaxformer, first": program("decoding_jax.py", sys.executable, ours | {"stopping": "first"}),
        "jaxformer, int8": program(
            "decoding_jax.py", sys.executable, ours | {"stopping": "estimate", "weights": "int8"}
        ),
        "generate": program("decoding_peers.py", flags.peer, task | {"peer": "hugging_face"}),
    }
    for dtype in ("float32", "int8"):
        for inter in (1, os.cpu_count() or 1):
            name = f"CTranslate2 {dtype}, {inter} x {(os.cpu_count() or 1) // inter} threads"
            asked = task | {"peer": "ctranslate2", "dtype": dtype, "inter": inter}
            programs[name] = program("decoding_peers.py", flags.peer, asked)
    return f"beam 5, {len(lines):,} sentences", {"unit": "sentences/s", "amount": len(lines)}, programs


def judged(found: dict[str, Row], flags: argparse.Namespace) -> None:
    """Replaces translations by how many are ours, and their BLEU."""
    import jaxformer
    from jaxformer import metrics

    tokenizer = jaxformer.load(flags.workdir).tokenizers.target
    references = Path(flags.reference).read_text(encoding="utf-8").splitlines()[: flags.lines]
    ours = found["jaxformer"]["result"]
    for row in found.values():
        if "failed" not in row:
            texts = [tokenizer.decode(each) for each in row["result"]]
            same = sum(a == b for a, b in zip(ours, row["result"], strict=True))
            row |= {"same": same, "bleu": round(metrics.bleu(texts, references).value, 2)}


def versions(peer: str) -> Row:
    """Of what was measured, on both sides."""
    names = ["torch", "transformers", "ctranslate2"]
    script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    theirs = json.loads(subprocess.run([peer, "-c", script], capture_output=True, text=True, check=True).stdout)
    cores = f"{os.cpu_count()} {platform.machine()} cores"
    here = {"python": platform.python_version(), "jax": importlib.metadata.version("jax"), "hardware": cores}
    return here | theirs | {"date": time.strftime("%Y-%m-%d")}


def timed(words: str, work: Row, programs: dict[str, turns.Program], flags: argparse.Namespace) -> Row:
    """One row: rates by name, and how many times as fast we are as each."""
    settings = {memory.VARIABLE: memory.tunables({})}
    found = turns.take(programs, flags.rounds, {**os.environ, "JAX_PLATFORMS": "cpu", **settings})
    if flags.workdir:
        judged(found, flags)
    ours, rows = found["jaxformer"], {}
    if "failed" in ours:
        raise RuntimeError(f"{words}: {ours['failed']}")
    for name, row in found.items():
        if "failed" in row:
            rows[name] = {"failed": " ".join(row["failed"].split())[-200:]}
            continue
        kept = {key: row[key] for key in ("same", "bleu") if key in row}
        rate = {"rate": work["amount"] / row["seconds"], "spread": row["spread"], "times": turns.ratio(ours, row)}
        rate |= {"bytes": row["bytes"]}
        rows[name] = rate | kept
    return {"case": words, "unit": work["unit"], "rows": rows, "rounds": flags.rounds}


def best(row: Row) -> float:
    """Our speed in relation to the fastest peer's in the same precision."""
    theirs = [each["times"] for name, each in row["rows"].items() if is_peer(name) and "times" in each]
    return min(theirs, default=float("nan"))


def is_peer(name: str) -> bool:
    return name.startswith(("generate", "CTranslate2 float32"))


def slower(row: Row, before: list[Row]) -> bool:
    """Whether we fell behind the last row of the same case."""
    last = [each for each in before if each["case"] == row["case"]][-1:]
    spread = max(each.get("spread", 0.0) for each in row["rows"].values())
    return bool(last) and best(row) < best(last[0]) * (1 - max(NOISE, spread))


def table(rows: list[Row]) -> list[str]:
    """The last row of every case, a line a program."""
    newest = {row["case"]: row for row in rows}.values()
    lines = ["| what | by | rate | spread | we are | BLEU, same as ours | memory |", "|---|---|---|---|---|---|---|"]
    for row in newest:
        for name, each in row["rows"].items():
            if "failed" in each:
                lines.append(f"| {row['case']} | {name} | failed: {each['failed']} | | | | |")
                continue
            score = f"{each['bleu']:.2f}, {each['same']:,}" if "bleu" in each else ""
            times = "" if name == "jaxformer" else f"{each['times']:.2f} x"
            rate = f"{each['rate']:,.0f} {row['unit']}"
            held = f"{each['bytes'] / 1e9:.1f} GB" if "bytes" in each else ""
            lines.append(f"| {row['case']} | {name} | {rate} | {each['spread']:.0%} | {times} | {score} | {held} |")
    names = ("date", "hardware", "rounds", "python", "jax", "torch", "transformers", "ctranslate2")
    words = dict.fromkeys(", ".join(f"{name} {row[name]}" for name in names if name in row) for row in newest)
    return [*lines, "", f"Measured {'; '.join(words)}."]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--only", default="", help="cases whose words hold this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--lines", type=int, default=None, help="of the file, from its start; default: all")
    parser.add_argument("--batch", type=int, default=64, help="sentences translated at a time")
    for name in ("workdir", "directory", "input", "reference"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page")
    flags = parser.parse_args(argv)
    before = [json.loads(line) for line in flags.results.read_text().splitlines()] if flags.results.exists() else []
    if flags.page:
        pages.put(PAGE, "decoding", table(before))
        return 0
    size = {"layers": flags.layers, "width": flags.width, "vocab": 65, "prompt": 8, "tokens": flags.tokens}
    batches = [int(each) for each in flags.batches.split(",")]
    cases = [translation(flags)] if flags.workdir else continuations(flags.peer, size, batches)
    failed, told = 0, versions(flags.peer)
    for words, work, programs in cases:
        if flags.only not in words:
            continue
        row = timed(words, work, programs, flags)
        with flags.results.open("a") as file:
            file.write(json.dumps(row | told) + "\n")
        print(f"{words}: {best(row):.2f} x the fastest peer", flush=True)
        for name, each in row["rows"].items():
            print(f"    {name}: {json.dumps(each)}", flush=True)
        failed += slower(row, before)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
