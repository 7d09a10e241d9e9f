"""Speculative decoding: tokens a second and tokens a pass, beside the same model without proposals.

    python benchmarks/speculation.py --workdir=DIR [--draft=DIR] --input=FILE [--lines=8] [--tokens=128] [--rounds=3]
        [--processor]

The cases take turns, so that what slows the machine hits all of them: none, prompt look-up, a draft, and the first
module of a model with `multi_token`, with several numbers of proposals; greedy search and sampling; one prompt at a
time and all together. Seconds are those of the clock, or with `--processor` of the processors, which other work on the
machine changes less. Fails if any output differs from that without proposals.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import jaxformer
from jaxformer.config import DecodeConfig
from jaxformer.decode.generate import generate, prepare
from jaxformer.decode.runner import Runner
from jaxformer.decode.scheduler import decode_queue, open_dispatchers

METHODS = {"greedy": {"method": "greedy"}, "sample": {"method": "sample", "temperature": 0.8, "top_p": 0.95}}
PROPOSALS = {"none": (0,), "look-up": (2, 4, 8), "draft": (2, 4, 8), "multi_token": (1,)}


def tokens_a_pass(runner: Runner, prompts: list, options: DecodeConfig) -> float:
    """Tokens that a pass of the model over a row gives; 1 without proposals."""
    tokens = passes = 0
    for group in prepare(runner, prompts, options):
        with open_dispatchers(runner.variables) as dispatchers:
            for _ in decode_queue(group.run, group.queue, options.batch, dispatchers):
                pass
        tokens, passes = tokens + group.run.tally.tokens, passes + group.run.tally.passes
    return tokens / passes


def proposing(options: DecodeConfig, kind: str, count: int) -> DecodeConfig:
    """The options of a case."""
    return dataclasses.replace(
        options, speculate=count, proposals="multi_token" if kind == "multi_token" else "look_up"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("workdir", "input"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--processor", action="store_true")
    for name, default in (("lines", 8), ("tokens", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args(argv)
    model = jaxformer.load(flags.workdir)
    lines = [line for line in Path(flags.input).read_text(encoding="utf-8").splitlines() if line.strip()]
    runner = model.predictor.runner
    clock = time.process_time if flags.processor else time.perf_counter
    prompts = model.predictor.prompts(lines[: flags.lines])
    runners = {"none": runner, "look-up": runner}
    if flags.draft:
        runners["draft"] = model.with_draft(jaxformer.load(flags.draft)).predictor.runner
    if model.config.model.multi_token is not None:
        runners["multi_token"] = runner
    print("| method | prompts | proposals | tokens a pass | tokens/s | ratio |\n| --- | --- | --- | --- | --- | --- |")
    differ = 0
    for name, method in METHODS.items():
        for rows in sorted({1, len(prompts)}):
            options = DecodeConfig(max_length=flags.tokens, min_length=flags.tokens, batch=rows, **method)
            cases = [
                (f"{kind}, {count}" if count else kind, runners[kind], proposing(options, kind, count))
                for kind, counts in PROPOSALS.items()
                for count in counts
                if kind in runners
            ]
            seconds: dict[str, list[float]] = {case: [] for case, _, _ in cases}
            outputs = {}
            for turn in range(flags.rounds + 1):  # the first compiles
                for case, bundle, chosen in cases:
                    begun = clock()
                    outputs[case] = generate(bundle, prompts, chosen)
                    if turn:
                        seconds[case].append(clock() - begun)
            texts = {case: [h[0].tokens.tolist() for h in found] for case, found in outputs.items()}
            for case, bundle, chosen in cases:
                differ += texts[case] != texts["none"]
                median = statistics.median(seconds[case])
                ratio = statistics.median(a / b for a, b in zip(seconds["none"], seconds[case], strict=True))
                rate = flags.tokens * len(prompts) / median
                share = tokens_a_pass(bundle, prompts, chosen)
                mark = "" if texts[case] == texts["none"] else " (other tokens)"
                print(f"| {name} | {rows} | {case}{mark} | {share:.2f} | {rate:,.0f} | {ratio:.2f} |", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
