"""A stand-in for the Hugging Face hub on loopback: the few routes that its client uses to download and to upload."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SERVERS = {}
"""Address -> its server, whose `hub` may be replaced."""


class Hub:
    """Repositories in memory.

    Attributes:
      repositories: name -> revision -> (commit, files by name).
      requests: "METHOD path" of all requests so far.
      tokens: a set of tokens of which private repositories want one.
      private, gated: names of repositories.
      missing: files that are listed, and that the server fails to send.
      broken: status that every request gets; None: all is well.
    """

    def __init__(self):
        self.repositories, self.requests, self.tokens = {}, [], {"hf_letmein"}
        self.private, self.gated, self.missing, self.broken = set(), set(), set(), None
        self.uploaded, self.messages = {}, []

    def add(self, name, files, revision="main"):
        content = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
        commit = hashlib.sha1(repr((name, sorted(content.items()))).encode()).hexdigest()
        self.repositories.setdefault(name, {})[revision] = (commit, content)
        return commit

    def find(self, name, revision):
        revisions = self.repositories.get(name, {})
        return revisions.get(revision) or next((x for x in revisions.values() if x[0] == revision), None)

    def downloads(self):
        """The files that were sent, in order."""
        return [
            line.split("/resolve/")[1].split("/", 1)[1]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, status, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status, code, message):
        self.send(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def answer(self):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if hub.broken is not None:
            return self.send(hub.broken, {"error": "broken"})
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            return self.send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            if token not in hub.tokens:
                return self.send(401, {"error": "no token"}, X_Error_Message="Invalid credentials")
            wish = json.loads(body)
            name = f"{wish.get('organization') or 'somebody'}/{wish['name']}"
            hub.repositories.setdefault(name, {}).setdefault("main", ("0" * 40, {}))
            if wish.get("private") or wish.get("visibility") == "private":
                hub.private.add(name)
            return self.send(200, {"url": f"{self.server.address}/{name}", "name": name, "id": name})
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        if is_api and len(parts) > 3 and parts[2] == "branch":
            hub.repositories["/".join(parts[:2])]["/".join(parts[3:])] = ("0" * 40, {})
            return self.send(201, {})
        count = 2 if "/".join(parts[:2]) in hub.repositories else 1
        name, rest = "/".join(parts[:count]), parts[count:]
        if name not in hub.repositories or (name in hub.private and token not in hub.tokens):
            return self.send(
                401, {"error": "not found"}, X_Error_Code="RepoNotFound", X_Error_Message="Repository Not Found"
            )
        if name in hub.gated and token not in hub.tokens:
            return self.fail(403, "GatedRepo", "Access is restricted")
        if is_api and rest[:1] in (["preupload"], ["commit"]) and token in hub.tokens:
            return self.upload(name, rest, body)
        revision = rest[1] if len(rest) > 1 else "main"
        found = hub.find(name, revision)
        if found is None:
            return self.send(
                404, {"error": "no revision"}, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id"
            )
        commit, files = found
        if is_api and rest[:1] in ([], ["revision"]):
            return self.send(200, {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]})
        if not is_api and rest[:1] == ["resolve"]:
            file = "/".join(rest[2:])
            if file in hub.missing:
                return self.send(500, {"error": "lost"})
            if file not in files:
                return self.send(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            return self.send(200, files[file], ETag=etag, X_Repo_Commit=commit)
        return self.send(404, {"error": f"the stand-in has no {self.command} {path}"})

    def upload(self, name, rest, body):
        hub = self.server.hub
        if rest[0] == "preupload":
            wanted = json.loads(body)["files"]
            return self.send(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]}
            )
        lines = [json.loads(line) for line in body.decode().splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        hub.messages += [line["value"]["summary"] for line in lines if line["key"] == "header"]
        hub.uploaded[name] = files
        commit = hub.add(name, files, "/".join(rest[1:]))
        return self.send(
            200, {"commitUrl": f"{self.server.address}/{name}/commit/{commit}", "commitOid": commit, "success": True}
        )

    do_GET = do_HEAD = do_POST = do_PUT = answer


@contextlib.contextmanager
def serving(hub):
    """The address of a server of `hub`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub, server.address = hub, f"http://127.0.0.1:{server.server_address[1]}"
    SERVERS[server.address] = server
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.address
    finally:
        server.shutdown()
        server.server_close()
