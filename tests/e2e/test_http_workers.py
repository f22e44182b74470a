"""Workers reached over HTTP: our own gateway as one, and llama.cpp's server where it is installed.

Between gateway and worker stands a tap, so that what the client got is compared with what the worker sent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from .conftest import Starter
from .stack import Gateway, Process, Stack, free_port, wait_until
from .tiny import TinyModels, real_gguf

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 6, "temperature": 0, "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "temperature": 0, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "naïve 東京"}], "max_tokens": 6, "temperature": 0},
    ),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/generate", {"text": "Once upon", "sampling_params": GREEDY, "return_logprob": True}),
    ("/generate", {"text": ["a", "b"], "sampling_params": GREEDY}),
    ("/generate", {"input_ids": [-1], "sampling_params": GREEDY}),
]


class Tap:
    """A proxy before a worker that keeps the bytes of every answer's body, as they were sent."""

    def __init__(self, target: str) -> None:
        self.bodies: list[tuple[str, int, str, bytes]] = []  # path, status, content type, body
        tap, address = self, target.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                upstream = HTTPConnection(address, timeout=60)
                upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
                answer = upstream.getresponse()
                kind = answer.headers["Content-Type"]
                self.send_response(answer.status)
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                sent = b""
                while piece := answer.read1():
                    sent += piece
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                tap.bodies.append((self.path, answer.status, kind, sent))
                self.wfile.write(b"0\r\n\r\n")
                upstream.close()

            do_GET = do_POST = forward

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextmanager
def tapped(url: str) -> Iterator[tuple[Tap, Gateway]]:
    """A gateway that reaches the worker at `url` through a tap."""
    tap = Tap(url)
    gateway = Gateway(workers=[tap.url])
    try:
        gateway.wait_ready()
        yield tap, gateway
    finally:
        assert gateway.stop() == 0
        tap.close()


@pytest.fixture
def chain(stacks: Starter, tiny: TinyModels) -> Iterator[tuple[Stack, Gateway]]:
    """An engine behind a gateway, and a second gateway that knows the first by its HTTP address only."""
    worker = stacks(model=str(tiny.llama("plain")))
    outer = Gateway(workers=[worker.url])
    try:
        outer.wait_ready()
        yield worker, outer
    finally:
        assert outer.stop() == 0


def last_sent(tap: Tap, path: str) -> tuple[Any, ...]:
    """What the worker sent last for a path. The client has the end mark before the tap has noted the answer's end."""
    wait_until(lambda: any(entry[0] == path for entry in tap.bodies), 5, f"an answer to {path} is noted")
    return [entry[1:] for entry in tap.bodies if entry[0] == path][-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_answers_are_relayed_byte_for_byte(stacks: Starter, tiny: TinyModels, streamed: bool) -> None:
    worker = stacks(model=str(tiny.llama("plain")))
    with tapped(worker.url) as (tap, outer):
        for path, body in REQUESTS:
            answer = outer.client.post(path, json={**body, "stream": streamed})
            sent = last_sent(tap, path)
            assert (answer.status_code, answer.headers["content-type"], answer.content) == sent
            assert answer.content
            if answer.status_code == 200 and streamed:
                assert sent[1].startswith("text/event-stream")
                assert answer.content.endswith(b"data: [DONE]\n\n")


def test_leaving_through_the_relay_ends_the_work(chain: tuple[Stack, Gateway]) -> None:
    worker, outer = chain
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}, "stream": True}
    with outer.client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
    worker.assert_idle(10)
    assert outer.client.get("/workers").json()["workers"][0]["in_flight"] == 0
    assert outer.client.get("/health").status_code == 200


def test_models_and_aborts_go_through(chain: tuple[Stack, Gateway]) -> None:
    worker, outer = chain
    model = worker.client.get("/v1/models").json()["data"][0]["id"]
    assert model in [entry["id"] for entry in outer.client.get("/v1/models").json()["data"]]
    named = {"model": model, "prompt": "x", "max_tokens": 1}
    assert outer.client.post("/v1/completions", json=named).status_code == 200
    unknown = outer.client.post("/v1/completions", json={**named, "model": "no-such-model"})
    assert unknown.status_code == 404 and "no-such-model" in unknown.json()["error"]["message"]
    assert outer.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert outer.client.post("/flush_cache").json()["success"] is True
    assert worker.cache()["pages_evictable"] == 0


def test_dead_worker_behind_http_is_said_and_used_again(stacks: Starter, tiny: TinyModels) -> None:
    engine = stacks(model=str(tiny.llama("plain"))).engines[0].address
    inner = Gateway(workers=[f"grpc://{engine}"])
    inner.wait_ready()
    outer = Gateway(workers=[inner.url])
    body = {"prompt": "x", "max_tokens": 1}
    try:
        outer.wait_ready()
        assert outer.client.post("/v1/completions", json=body).status_code == 200
        os.killpg(inner.process.child.pid, signal.SIGKILL)
        inner.stop()
        answer = outer.client.post("/v1/completions", json=body)
        assert answer.status_code in (502, 503), answer.text
        assert answer.json()["error"]["message"]
        inner = Gateway(workers=[f"grpc://{engine}"], port=inner.port)
        inner.wait_ready()
        wait_until(
            lambda: outer.client.post("/v1/completions", json=body).status_code == 200, 30, "the worker is used again"
        )
    finally:
        outer.stop()
        inner.stop()


@pytest.mark.model
@pytest.mark.parametrize("streamed", [False, True])
def test_llama_cpp_server_behind_the_gateway(streamed: bool) -> None:
    binary = os.environ.get("BRANCHLINE_LLAMA_SERVER", "")
    if not Path(binary).is_file():
        pytest.skip("BRANCHLINE_LLAMA_SERVER does not name llama.cpp's server")
    port = free_port()
    command = [binary, "-m", str(real_gguf()), "--host", "127.0.0.1", "--port", str(port), "-c", "2048", "-t", "2"]
    server = Process(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url, server), 120, f"llama-server is ready\n{server.output}")
        with tapped(url) as (tap, gateway):
            chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/completions", {"prompt": "One, two,", "max_tokens": 4}),
            ):
                answer = gateway.client.post(path, json={**body, "temperature": 0, "stream": streamed})
                assert answer.status_code == 200, answer.text
                assert answer.content == last_sent(tap, path)[2]
    finally:
        server.stop()


def answers(url: str, server: Process) -> bool:
    """Whether the server says that it is healthy."""
    assert server.child.poll() is None, server.output
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
