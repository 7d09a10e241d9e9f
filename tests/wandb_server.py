"""A stand-in for wandb's server on this machine: what the package asks it for one run after another, and no more."""

from __future__ import annotations

import gzip
import http.server
import json
import re
from typing import Any

ENTITY = {"id": "ZQ==", "name": "me"}
PROJECT = {"id": "cA==", "name": "jaxformer", "entity": ENTITY}
INFO = {"cliVersionInfo": {"max_cli_version": "99"}, "latestLocalVersionInfo": None, "features": []}


class Server(http.server.ThreadingHTTPServer):
    """`runs` are the histories by id; with `rewinds` False it refuses to rewind, as servers without the feature do."""

    def __init__(self, rewinds: bool) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[str] = []
        self.rewinds = rewinds
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer to a question of GraphQL by its name."""
        self.asked.append(name)
        run = given.get("name") or given.get("runName") or ""
        if name == "RunResumeStatus":
            return {"model": {**PROJECT, "bucket": self.bucket(run) if run in self.runs else None}}
        if name == "UpsertBucket":
            is_new = run not in self.runs
            self.runs.setdefault(run, [])
            return {"upsertBucket": {"bucket": self.bucket(run), "inserted": is_new}}
        if name == "RewindRun" and self.rewinds:
            self.runs[run] = [row for row in self.runs[run] if row["_step"] <= given["metricValue"]]
            return {"rewindRun": {"rewoundRun": self.bucket(run)}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": []}}
        return {"viewer": {"id": "dQ==", "entity": "me", "username": "me", "flags": "{}"}, "serverInfo": INFO}

    def bucket(self, run: str) -> dict[str, Any]:
        """A run as the server describes it."""
        rows = self.runs[run]
        counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]), "eventsTail": "[]"}
        names = {"id": "aWQ=", "name": run, "displayName": run, "description": None, "sweepName": None, "tags": []}
        config = {"config": "{}", "wandbConfig": '{"t": 1}', "summaryMetrics": "{}", "project": PROJECT}
        return names | counts | tails | config


class Handler(http.server.BaseHTTPRequestHandler):
    """GraphQL, and the stream of a run's files."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Prints nothing."""

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        value = json.loads(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
        if self.path == "/graphql":
            name = re.search(r"(?:query|mutation)\s+(\w+)", value["query"])
            answer = {"data": self.server.answer(name.group(1) if name else "", value.get("variables") or {})}
            if name and name.group(1) == "RewindRun" and not self.server.rewinds:
                answer = {"errors": [{"message": "rewind is not enabled"}], "data": None}
            return self.reply(answer)
        run = self.path.split("/")[-2]
        history = value.get("files", {}).get("wandb-history.jsonl")
        if history is not None:  # lines from an offset on, which replace what is there
            rows = [json.loads(line) for line in history["content"]]
            self.server.runs[run][history["offset"] :] = rows
        return self.reply({"limits": {}})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply({})

    def do_GET(self) -> None:
        self.reply({})

    def reply(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
