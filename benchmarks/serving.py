"""A load test of `jaxformer serve`, beside the same model called for one request at a time.

    python benchmarks/serving.py --workdir=RUN --input=FILE [--clients=1,4,8,16] [--requests=64] [--tokens=128]
    python benchmarks/serving.py --page

RUN is a language model's, and the lines of FILE are the prompts. Each of so many clients sends its next request when
the answer to the last one is complete. Requests are greedy and streamed, and ask for a quarter, a half and all of
--tokens in turn. "alone" calls `Model.stream` for one request after the other, in this process, without HTTP.

Rows are appended to benchmarks/results/serving.jsonl; --page writes the last of each case into
docs/measurements/serving.md. Exits 1 if an answer is not the text that the model writes alone.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "serving.jsonl"
PAGE = ROOT / "docs" / "measurements" / "serving.md"
FRACTIONS = (4, 2, 1)
"""Requests ask for --tokens divided by these, in turn."""
MAX_CLIENTS = 64
COLUMNS = ("by", "clients", "tokens/s", "first token, p50", "p99", "whole answer, p50", "p99")
Row = dict[str, Any]


class Request(NamedTuple):
    """A prompt, and how many tokens to write."""

    prompt: str
    tokens: int


class Answer(NamedTuple):
    """The text of an answer, its number of tokens, and seconds until its first piece and its end."""

    text: str
    tokens: int
    first: float
    whole: float


def requests_of(prompts: Sequence[str], count: int, tokens: int) -> list[Request]:
    """So many requests; prompts are taken in turn."""
    sizes = itertools.cycle(max(tokens // fraction, 1) for fraction in FRACTIONS)
    return [Request(prompt, size) for prompt, size, _ in zip(itertools.cycle(prompts), sizes, range(count))]


def timed(pieces: Iterator[tuple[str, int]]) -> Answer:
    """An answer whose pieces come with the number of tokens so far."""
    begun, first, texts, tokens = time.perf_counter(), 0.0, [], 0
    for text, tokens in pieces:  # noqa: B007 (the last one counts)
        first = first or time.perf_counter() - begun
        texts.append(text)
    return Answer("".join(texts), tokens, first, time.perf_counter() - begun)


def from_model(model: Any, request: Request) -> Answer:
    """The answer of a model that is called."""
    tokenizer = model.tokenizers.target

    def pieces() -> Iterator[tuple[str, int]]:
        text = ""
        for piece in model.stream(request.prompt, method="greedy", max_length=request.tokens):
            text += piece
            yield piece, 0
        yield "", len(tokenizer.encode(text))

    return timed(pieces())


def from_server(port: int, request: Request) -> Answer:
    """The answer of a server."""
    body = {"prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}

    def pieces() -> Iterator[tuple[str, int]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"status {response.status}: {response.read().decode()}")
        for line in response:
            value = line.decode().removeprefix("data: ").strip()
            if value and value != "[DONE]":
                event = json.loads(value)
                if event["choices"]:
                    yield event["choices"][0]["text"], 0
                elif event["usage"]:
                    yield "", event["usage"]["completion_tokens"]
        connection.close()

    return timed(pieces())


def load(ask: Callable[[Request], Answer], requests: Sequence[Request], clients: int) -> tuple[list[Answer], float]:
    """The answers to all requests, which so many clients ask in turn, and the seconds that it took.

    Raises:
      RuntimeError: a request was refused.
    """
    answers: list[Answer | None] = [None] * len(requests)
    left, errors = iter(enumerate(requests)), []
    lock = threading.Lock()

    def client() -> None:
        while not errors:
            with lock:
                index, request = next(left, (-1, None))
            if request is None:
                return
            try:
                answers[index] = ask(request)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if errors:
        raise RuntimeError(f"a request failed: {errors[0]}") from errors[0]
    return [answer for answer in answers if answer is not None], seconds


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]


def row_of(by: str, clients: int, answers: Sequence[Answer], seconds: float) -> Row:
    """The arrays that are written of a case."""
    times = {"first": [answer.first for answer in answers], "whole": [answer.whole for answer in answers]}
    found = {f"{name}_p{p}": percentile(values, p) for name, values in times.items() for p in (50, 99)}
    tokens = sum(answer.tokens for answer in answers)
    return {"by": by, "clients": clients, "requests": len(answers), "tokens_per_second": tokens / seconds, **found}


def measure(
    cases: Sequence[tuple[str, Callable[[Request], Answer], int]], requests: Sequence[Request], rounds: int
) -> tuple[list[Row], int]:
    """The row of each case (name, function that asks, clients): the median over rounds in which the cases take turns.

    Also the number of answers that are not those of the first case.
    """
    found: list[list[Row]] = [[] for _ in cases]
    expected: list[str] = []
    different = 0
    for _ in range(rounds):
        for index, (by, ask, clients) in enumerate(cases):
            answers, seconds = load(ask, requests, clients)
            expected = expected or [answer.text for answer in answers]
            different += sum(answer.text != text for answer, text in zip(answers, expected, strict=True))
            found[index].append(row_of(by, clients, answers, seconds))
    rows = []
    for same in found:
        measured = [name for name, value in same[0].items() if isinstance(value, float)]
        rows.append({**same[0], **{name: statistics.median(row[name] for row in same) for name in measured}})
    return rows, different


def lines_of(rows: Sequence[Row]) -> list[str]:
    """A table of rows."""
    shown = []
    for row in rows:
        times = [f"{1000 * row[name]:,.0f} ms" for name in ("first_p50", "first_p99", "whole_p50", "whole_p99")]
        shown.append([row["by"], str(row["clients"]), f"{row['tokens_per_second']:,.0f}", *times])
    return pages.table(COLUMNS, shown)


def start(workdir: str, tokens: int, rows: int) -> tuple[subprocess.Popen[str], int]:
    """A server of its own process, and its port, once it answers."""
    command = [sys.executable, "-m", "jaxformer", "serve", f"--workdir={workdir}", "--port=0"]
    command += [f"--max-tokens={tokens}", f"--rows={rows}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    line = process.stdout.readline() if process.stdout else ""
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
    if not found:
        process.wait()
        raise RuntimeError(f"the server has not started: {line!a}")
    return process, int(found.group(1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", default="")
    parser.add_argument("--input", default="")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default=str(RESULTS))
    parser.add_argument("--page", action="store_true")
    flags = parser.parse_args(arguments)
    output = Path(flags.output)
    if flags.page:
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        latest = {(row["by"], row["clients"]): row for row in rows}
        pages.put(PAGE, "serving", lines_of(list(latest.values())))
        return 0
    clients = [int(count) for count in flags.clients.split(",")]
    if not flags.workdir or not flags.input or not all(1 <= count <= MAX_CLIENTS for count in clients):
        parser.error(f"expected --workdir, --input, and 1 to {MAX_CLIENTS} clients")

    from jaxformer.hf import workdirs

    prompts = [line for line in Path(flags.input).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        parser.error(f"--input: got no lines in {flags.input}, expected prompts")
    requests = requests_of(prompts, flags.requests, flags.tokens)
    model = workdirs.load(flags.workdir)
    process, port = start(flags.workdir, flags.tokens, flags.rows)
    try:
        cases = [("alone", lambda request: from_model(model, request), 1)]
        cases += [(f"server, {flags.rows} rows", lambda request: from_server(port, request), n) for n in clients]
        for _, ask, count in cases:  # the first calls compile
            load(ask, requests[: 2 * len(FRACTIONS)], count)
        rows, different = measure(cases, requests, flags.rounds)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    print("\n".join(lines_of(rows)))
    with output.open("a", encoding="utf-8") as file:
        for row in rows:
            host = {"machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d")}
            file.write(json.dumps({**row, "tokens": flags.tokens, **host}) + "\n")
    if different:
        print(f"{different} answers are not those of the model alone")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
