"""What a module adds to a request: one gateway, one worker, requests with and without a module in turn.

Run: `.venv/bin/python benchmarks/wasm/overhead.py [module.wasm …]`; without arguments the text-format example that does
nothing. Prints medians and 99th percentiles of both, in microseconds, and writes them to benchmarks/results/wasm.json.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROUTER = os.environ.get("BRANCHLINE_ROUTER", str(ROOT / "target/release/branchline-router"))
ROUNDS = int(os.environ.get("ROUNDS", "2000"))
BODY = json.dumps({"model": "m", "prompt": "x" * 4096}).encode()


def serve(listener: socket.socket) -> None:
    """A worker that answers every request at once, on kept connections."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

    def talk(connection: socket.socket) -> None:
        held = b""
        while chunk := connection.recv(65536):
            held += chunk
            while (end := held.find(b"\r\n\r\n")) >= 0:
                length = re.search(rb"content-length: (\d+)", held[:end], re.IGNORECASE)
                whole = end + 4 + (int(length.group(1)) if length else 0)
                if len(held) < whole:
                    break
                held = held[whole:]
                connection.sendall(answer)

    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=talk, args=(connection,), daemon=True).start()


class Client:
    """One kept connection to the gateway."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        held = b""
        while True:
            held += self.socket.recv(65536)
            end = held.find(b"\r\n\r\n")
            if end < 0:
                continue
            length = re.search(rb"content-length: (\d+)", held[:end], re.IGNORECASE)
            if length and len(held) >= end + 4 + int(length.group(1)):
                assert re.match(rb"HTTP/1.1 20", held), held[:300]
                return held[end + 4 :]


def measure(client: Client, path: str) -> float:
    """Microseconds of one request."""
    started = time.perf_counter_ns()
    client.call("POST", path, BODY)
    return (time.perf_counter_ns() - started) / 1000


def figures(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {
        "p50_us": round(statistics.median(samples), 1),
        "p99_us": round(statistics.quantiles(samples, n=100)[98], 1),
    }


def run(client: Client, module: Path) -> dict[str, object]:
    """Requests to a path with the module and to one without, in turn."""
    settings = {"name": module.stem, "module": base64.b64encode(module.read_bytes()).decode()}
    settings |= {"routes": {"paths": ["/v1/completions"]}, "limits": {"memory_mib": 256}}  # type: ignore[dict-item]
    loaded = json.loads(client.call("POST", "/wasm", json.dumps(settings).encode()))
    with_module, without = [], []
    for _ in range(200):
        measure(client, "/v1/completions")
        measure(client, "/v1/chat/completions")
    for _ in range(ROUNDS):
        with_module.append(measure(client, "/v1/completions"))
        without.append(measure(client, "/v1/chat/completions"))
    client.call("DELETE", f"/wasm/{loaded['uuid']}", b"")
    added = statistics.median(with_module) - statistics.median(without)
    tail = figures(with_module)["p99_us"] - figures(without)["p99_us"]
    row: dict[str, object] = {"module": module.name, "bytes": module.stat().st_size, "rounds": ROUNDS}
    row |= {"with": figures(with_module), "without": figures(without)}
    return row | {"added_p50_us": round(added, 1), "added_p99_us": round(tail, 1)}


def main() -> int:
    """Measures each module of the command line."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    worker = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+") as log:
        noop = Path(scratch) / "noop.wasm"
        source = ROOT / "examples/middleware/noop/noop.wat"
        subprocess.run([ROUTER, "wasm", "build", str(source), "-o", str(noop)], check=True, stdout=subprocess.DEVNULL)
        modules = [Path(name) for name in sys.argv[1:]] or [noop]
        router = subprocess.Popen([ROUTER, "--port", "0", "--worker-urls", worker], stderr=log)
        try:
            port = None
            while port is None:
                found = re.search(r"http://127\.0\.0\.1:(\d+)", (Path(scratch) / "log").read_text())
                port = int(found.group(1)) if found else None
                time.sleep(0.05)
            client = Client(port)
            rows = [run(client, module) for module in modules]
        finally:
            router.terminate()
            router.wait()
    for row in rows:
        print(json.dumps(row))
    (ROOT / "benchmarks/results").mkdir(exist_ok=True)
    (ROOT / "benchmarks/results/wasm.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
