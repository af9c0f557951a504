"""A double of the Hugging Face hub: serves folders as models, and counts the bytes that it sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c" * 40
REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": "d" * 40, "d" * 40: "d" * 40}


class HubDouble:
    """`models` maps a hub id to its folder. Ids in `gated` list their files but do not send them."""

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models = models
        self.gated = gated
        self.sent: dict[str, int] = {}  # bytes sent of each file
        self.ranges: dict[str, list[str]] = {}  # requested ranges, "" for a whole file
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubDouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(hub: HubDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            model = listing[1] if listing else file[1] if file else ""
            if model not in hub.models:
                self._send(401, {"X-Error-Code": "RepoNotFound"}, b"", body)
                return
            named = (listing[3] if listing else file[2] if file else "") or "main"
            if named not in REVISIONS:
                self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
            elif listing:
                self._list(model, REVISIONS[named], tree=listing[2] == "tree", body=body)
            elif file:
                self._send_file(model, REVISIONS[named], file[3], body)

        def _list(self, model: str, commit: str, *, tree: bool, body: bool) -> None:
            folder = hub.models[model]
            files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
            if tree:
                said: object = [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}
                    for name, path in files.items()
                ]
            else:
                said = {"id": model, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(said).encode(), body)

        def _send_file(self, model: str, commit: str, name: str, body: bool) -> None:
            if model in hub.gated:
                self._send(403, {"X-Error-Code": "GatedRepo"}, b"", body)
                return
            file = hub.models[model] / name
            if not file.is_file():
                self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
                return
            content = file.read_bytes()
            headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked:
                first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                status, content = 206, content[first : last + 1]
            if body:
                hub.sent[name] = hub.sent.get(name, 0) + len(content)
                hub.ranges.setdefault(name, []).append(self.headers.get("Range", ""))
            self._send(status, headers, content, body)

        def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    return Handler


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
