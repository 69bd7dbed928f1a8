"""A small model hub on loopback: enough of the Hugging Face protocol for `HF_ENDPOINT`.

It serves folders as repositories, wants a token for gated ones, moves `main` when told to, and
breaks a transfer off in its middle. The cluster tests run it as a program:
`python tests/hub_server.py PORT ORG/NAME=FOLDER ...`.
"""

import hashlib
import http.server
import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Repository:
    """Files by commit, and which commit each branch names."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    token: str | None = None
    """Gated: only with this token."""


@dataclass
class Hub:
    """What the server knows, to be changed by tests while it runs."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    break_off: set[str] = field(default_factory=set)
    """Names of files whose next transfer ends in the middle, once each."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of every request."""

    def add(self, name: str, files: dict[str, bytes], *, token: str | None = None) -> str:
        """A repository, or a new commit on its `main`; the commit."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        held = self.repositories.setdefault(name, Repository({}, {}, token))
        held.commits[digest] = files
        held.branches["main"] = digest
        return digest


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        asked = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path} {asked or ''}".strip())
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository.token is not None and given != repository.token:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        headers = {"X-Repo-Commit": commit}
        if api:
            answer: Any = {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
            if rest and rest[0] == "tree":
                answer = [
                    {"type": "file", "path": n, "size": len(d), "oid": _etag(d)}
                    for n, d in files.items()
                ]
            return self._send(200, headers, json.dumps(answer).encode() if body else b"")
        file = "/".join(rest[2:])
        if file not in files:
            return self._send(404, headers | {"X-Error-Code": "EntryNotFound"})
        data, status = files[file], 200
        headers |= {"ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if asked:
            first = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status = data[first:], 206
        if not body:
            return self._send(status, headers | {"Content-Length": str(len(data))})
        if file in self.hub.break_off:
            self.hub.break_off.discard(file)
            self._send(status, headers, data, upto=len(data) // 2)
            self.close_connection = True
            return None
        return self._send(status, headers, data)

    def _send(
        self, status: int, headers: dict[str, str], data: bytes = b"", upto: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[:upto])

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: Hub, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The address of `hub`, for HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer((host, port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Serve the folders of the command line until the process is ended."""
    hub = Hub()
    for argument in sys.argv[2:]:
        name, _, folder = argument.partition("=")
        hub.add(name, {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()})
    with serving(hub, "0.0.0.0", int(sys.argv[1])):
        threading.Event().wait()


if __name__ == "__main__":
    main()
