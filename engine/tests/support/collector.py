"""An OTLP collector over HTTP that keeps the spans it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """Listens on a free port of loopback."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: dict[bytes, str] = {}  # span id → service.name
        keep = self.keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)

    def keep(self, message: ExportTraceServiceRequest) -> None:
        """Take in one batch."""
        for one in message.resource_spans:
            names = [item.value.string_value for item in one.resource.attributes if item.key == "service.name"]
            for scope in one.scope_spans:
                self.spans.extend(scope.spans)
                self.services.update({span.span_id: names[0] for span in scope.spans})

    @property
    def url(self) -> str:
        """What `--otlp-endpoint` takes."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that serves until the end."""
    made = Collector()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
