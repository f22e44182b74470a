"""A local server of the model hub's shape: one repository, `acme/tiny`, with listing, ranges and redirects."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server serves and what it was asked."""

    files: dict[str, bytes]
    commit: str = COMMIT
    break_after: dict[str, list[int]] = field(default_factory=dict)  # name → bytes before each broken-off answer
    wrong: set[str] = field(default_factory=set)  # files whose bytes differ from their checksum
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    redirect: bool = False  # whether files are served from another place
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One GET."""
        asked_range = handler.headers.get("Range")
        self.requests.append((handler.path, asked_range))
        self.tokens.append((handler.path, handler.headers.get("Authorization")))
        if handler.path.startswith("/api/models/acme/tiny/revision/"):
            self._send(handler, 200, json.dumps(self._listing()).encode())
            return
        prefix = f"/acme/tiny/resolve/{self.commit}/"
        name = handler.path.removeprefix("/cdn").removeprefix(prefix)
        if self.redirect and handler.path.startswith(prefix):
            handler.send_response(302)
            handler.send_header("Location", f"{self.url}/cdn{handler.path}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            handler.close_connection = True
            return
        if not handler.path.removeprefix("/cdn").startswith(prefix) or name not in self.files:
            self._send(handler, 404, b"{}")
            return
        content = self.files[name]
        if name in self.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int(asked_range.removeprefix("bytes=").removesuffix("-")) if asked_range else 0
        breaks = self.break_after.get(name) or [len(content)]
        sent = content[start : start + (breaks.pop(0) if self.break_after.get(name) else len(content))]
        self._send(handler, 206 if asked_range else 200, sent, len(content) - start)

    def _listing(self) -> dict[str, object]:
        return {
            "sha": self.commit,
            "siblings": [
                {"rfilename": name, "size": len(content), "lfs": {"sha256": hashlib.sha256(content).hexdigest()}}
                for name, content in self.files.items()
            ],
        }

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, length: int | None = None) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    def downloads(self) -> list[str]:
        """Names of files asked for, in order."""
        return [path.rpartition("/")[2] for path, _ in self.requests if "/resolve/" in path]


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub on a free loopback port, until the block ends."""
    served = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
