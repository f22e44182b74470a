"""`branchline serve --backend`: other programs behind our gateway: a stand-in everywhere, the real one where it is.

The stand-in answers what llama.cpp's server answers: 503 from /health while it loads, models, completions.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from .stack import wait_until
from .test_faults import children
from .test_serve import command_of, served
from .tiny import real_gguf

STAND_IN = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
begun = time.monotonic()
if flags.get("-t") == "13":
    sys.exit("error: thirteen threads are too many")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            loading = time.monotonic() - begun < 0.3
            self.answer(503 if loading else 200, {{"status": "loading model" if loading else "ok"}})
        elif self.path == "/v1/models":
            self.answer(200, {{"object": "list", "data": [
                {{"id": flags["--alias"], "object": "model", "owned_by": "llamacpp"}}]}})
        else:
            self.answer(404, {{"error": {{"message": "File Not Found", "type": "not_found_error", "code": 404}}}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(200, {{"id": "c", "object": "text_completion", "model": asked["model"], "created": 1,
            "choices": [{{"index": 0, "text": " ".join(sys.argv[1:]), "finish_reason": "stop", "logprobs": None}}],
            "usage": {{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}}})

    def log_message(self, *_): ...


ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def odd_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GGUF file that our engine refuses, and a stand-in for llama-server."""
    program = tmp_path / "llama-server"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("BRANCHLINE_LLAMA_SERVER_BIN", str(program))
    model = tmp_path / "odd.gguf"
    model.write_bytes(b"GGUF")
    return str(model)


def test_auto_serves_by_another_program_says_why_and_brings_it_back(odd_model: str) -> None:
    with served(odd_model, "--context-length", "64", "--backend-arg=--flag", "--backend-arg=value") as (
        client,
        process,
    ):
        assert f"backend llama-server: a GGUF file, and {Path(odd_model).parent}" in process.output
        assert "not branchline: " in process.output
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["odd"]

        def ask() -> int:
            return client.post("/v1/completions", json={"model": "odd", "prompt": "x"}).status_code

        told = client.post("/v1/completions", json={"model": "odd", "prompt": "x"}).json()["choices"][0]["text"]
        assert told.endswith("-c 256 -np 4 --flag value") and "--alias odd" in told
        (worker,) = [pid for pid in children(process.child.pid) if b"--alias" in command_of(pid)]
        os.kill(worker, signal.SIGKILL)
        process.wait_for_line("llama-server died (signal SIGKILL)")
        wait_until(lambda: ask() == 200, 60, f"it serves again\n{process.output}")


def test_a_program_that_can_not_start_ends_the_launch_with_its_message(odd_model: str) -> None:
    with pytest.raises(AssertionError, match="thirteen threads are too many"), served(odd_model, "--threads", "13"):
        pytest.fail("it can't serve")


def test_llama_cpps_own_server_is_served_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = os.environ.get("BRANCHLINE_LLAMA_SERVER") or shutil.which("llama-server")
    if not binary:
        pytest.skip("llama-server is not on PATH and BRANCHLINE_LLAMA_SERVER does not name it")
    monkeypatch.setenv("BRANCHLINE_LLAMA_SERVER_BIN", binary)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(binary).parent))
    flags = ("--backend", "llama-server", "--served-model-name", "small", "--context-length", "512")
    with served(str(real_gguf()), *flags) as (client, process):
        assert "backend llama-server: asked for" in process.output
        chat = {"model": "small", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 5}
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        lines = client.post("/v1/chat/completions", json={**chat, "stream": True}).text.strip().splitlines()
        assert lines[-1] == "data: [DONE]"
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert any(one["choices"] and one["choices"][0]["delta"].get("content") for one in said)
