"""A scripted API server for what a real one does not do on demand: an expired version, an ERROR, a watch that ends.

Plays lists and watches in order over real HTTP. Must not know what is asserted of them.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]


@dataclass(slots=True)
class Watch:
    """One watch: a refusal, or events. Further events come by `Fake.send`; without `ends` it stays open."""

    refusal: int = 0
    events: list[Object] = field(default_factory=list)
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked, and when."""

    at: float
    watch: bool
    version: str


class Fake:
    """Answers lists from `lists` and watches from `watches`, the last of each again and again."""

    def __init__(self, lists: list[Object], watches: list[Watch]) -> None:
        self.lists, self.watches, self.calls = lists, watches, list[Call]()
        self._sent: list[Object] = []
        self._changed = threading.Condition()
        self._closed = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
                watch = query.get("watch") == "true"
                answer = fake.note(watch, query.get("resourceVersion", ""))
                if isinstance(answer, Watch):
                    self.play(answer)
                else:
                    self.whole(200, answer)

            def whole(self, status: int, body: Object) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def play(self, watch: Watch) -> None:
                if watch.refusal:
                    status = {"kind": "Status", "code": watch.refusal, "message": "scripted"}
                    return self.whole(watch.refusal, status)
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in watch.events:
                    self.line(event)
                if not watch.ends:
                    for event in fake.follow():
                        self.line(event)
                self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True

            def line(self, event: Object) -> None:
                text = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
                self.wfile.flush()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def note(self, watch: bool, version: str) -> Object | Watch:
        """Notes a call; its answer."""
        with self._changed:
            self.calls.append(Call(time.monotonic(), watch, version))
            if watch:
                return self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]
            return self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]

    def send(self, kind: str, item: Object) -> None:
        """One more event of the open watch."""
        with self._changed:
            self._sent.append({"type": kind, "object": item})
            self._changed.notify_all()

    def follow(self) -> Any:
        """Events that are sent, until the server is closed."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: self._closed or at < len(self._sent))  # type: ignore[misc]
                if self._closed:
                    return
                event = self._sent[at]
            yield event
            at += 1

    def kubeconfig(self, path: Path) -> Path:
        """Written to `path`."""
        return kubeconfig(path, self.url)


def kubeconfig(path: Path, server: str, token: str = "", authority: Path | None = None) -> Path:
    """A kubeconfig of one server, written to `path`."""
    cluster: Object = {"server": server}
    if authority is not None:
        cluster["certificate-authority"] = str(authority)
    user = {"token": token} if token else {}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    return path
