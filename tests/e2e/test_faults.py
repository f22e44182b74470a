"""Workers that die, come back or are not there; ports in use; models that can't be loaded; the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from .stack import BIN, Engine, Gateway, Process, Stack, events, free_port, wait_until
from .tiny import TinyModels, real_gguf

LONG = {"prompt": "Count", "max_tokens": 1800, "ignore_eos": True, "stream": True}


def read_to_end(url: str, path: str, body: dict[str, object], after: int, action: object) -> list[str]:
    """Streams; calls `action` after so many events; all data up to the end of the stream."""
    seen: list[str] = []
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}{path}", json=body) as answer:
        assert answer.status_code == 200
        for item in events(answer.iter_text()):
            seen.append(item)
            if len(seen) == after:
                action()  # type: ignore[operator]
    return seen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_killed_engine_ends_its_stream_in_an_error_and_is_used_again(tiny: TinyModels, path: str) -> None:
    model = str(tiny.llama("plain"))
    stack = Stack(model=model)
    try:
        engine = stack.engines[0]
        port = int(engine.address.rsplit(":", 1)[1])
        body: dict[str, object] = dict(LONG)
        if path == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if path == "/generate":
            body = {"text": "Count", "stream": True, "sampling_params": {"max_new_tokens": 1800, "ignore_eos": True}}
        seen = read_to_end(stack.url, path, body, 5, lambda: os.killpg(engine.process.child.pid, signal.SIGKILL))
        assert "[DONE]" not in seen
        errors = [json.loads(item) for item in seen if "error" in json.loads(item)]
        assert len(errors) == 1 and json.loads(seen[-1]) == errors[0]
        assert errors[0]["error"]["message"] and errors[0]["error"]["type"]
        assert all(not choice.get("finish_reason") for item in seen for choice in json.loads(item).get("choices", []))

        refused = stack.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert stack.client.get("/health").status_code == 503
        assert stack.client.get("/liveness").status_code == 200

        engine.process.stop()
        stack.engines[0] = Engine(model=model, port=port)
        assert stack.gateway is not None
        stack.gateway.wait_ready()
        assert stack.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    finally:
        stack.close()


def test_waiting_request_goes_to_the_other_worker(tiny: TinyModels) -> None:
    """A worker that dies before the first byte costs a request nothing while another one lives."""
    stack = Stack(model=str(tiny.llama("plain")), engines=2)
    try:
        victim = stack.engines[0]
        os.killpg(victim.process.child.pid, signal.SIGKILL)
        for index in range(20):
            answer = stack.post("/v1/completions", {"prompt": f"x{index}", "max_tokens": 2})
            assert answer.status_code == 200, answer.text
    finally:
        stack.close()


def test_no_worker_is_said_with_retry_after() -> None:
    gateway = Gateway(workers=[f"grpc://127.0.0.1:{free_port()}"])
    try:
        wait_until(lambda: gateway_alive(gateway), 20, "gateway listens")
        answer = gateway.client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["message"]
        assert gateway.client.get("/readiness").status_code == 503
        assert gateway.client.get("/v1/models").status_code == 503
    finally:
        assert gateway.stop() == 0


def gateway_alive(gateway: Gateway) -> bool:
    try:
        return gateway.client.get("/liveness", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(env or {})}
    )


def test_port_in_use_is_said_before_anything_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        gateway = run(str(BIN / "branchline-router"), "--port", port, "--worker-urls", "grpc://127.0.0.1:1")
        engine = run(sys.executable, "-m", "branchline.cli", "engine", str(real_gguf()), "--port", port)
        serve = run(sys.executable, "-m", "branchline.cli", "serve", str(real_gguf()), "--port", port)
    for done in (gateway, engine, serve):
        assert done.returncode not in (0, None), done.args
        told = done.stdout + done.stderr
        assert port in told and "in use" in told, told
        assert "Traceback" not in told


def test_other_addresses_need_keys() -> None:
    done = run(
        str(BIN / "branchline-router"),
        "--host",
        "0.0.0.0",
        "--port",
        str(free_port()),
        "--worker-urls",
        "grpc://127.0.0.1:1",
    )
    assert done.returncode == 2
    assert "--insecure" in done.stderr and "--api-key" in done.stderr


def test_engine_off_loopback_needs_a_token(tiny: TinyModels) -> None:
    done = run(
        sys.executable, "-m", "branchline.cli", "engine", str(tiny.llama("plain")), "--host", "0.0.0.0", "--port", "0"
    )
    assert done.returncode == 2
    assert "--token" in done.stderr


def test_keys_are_asked_for(tiny: TinyModels) -> None:
    stack = Stack(model=str(tiny.llama("plain")), gateway_flags=())
    gateway = Gateway("--api-key", "sk-test-key", workers=[f"grpc://{stack.engines[0].address}"])
    try:
        gateway.client.headers["authorization"] = "Bearer sk-test-key"
        gateway.wait_ready()
        body = {"prompt": "x", "max_tokens": 1}
        assert gateway.client.post("/v1/completions", json=body).status_code == 200
        for wrong in ("Bearer sk-wrong", "sk-test-key", ""):
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers={"authorization": wrong})
            assert answer.status_code == 401, answer.text
            assert answer.json()["error"]["type"] == "authentication_error"
        assert "sk-test-key" not in gateway.process.output
    finally:
        gateway.stop()
        stack.close()


def test_token_of_the_engine_is_asked_for(tiny: TinyModels) -> None:
    engine = Engine(model=str(tiny.llama("plain")), env={"BRANCHLINE_TOKEN": "engine-secret"})
    good = Gateway("--worker-token", "engine-secret", workers=[f"grpc://{engine.address}"])
    bad = Gateway("--worker-token", "wrong", workers=[f"grpc://{engine.address}"])
    try:
        good.wait_ready()
        assert good.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        wait_until(lambda: gateway_alive(bad), 20, "second gateway listens")
        assert bad.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 503
    finally:
        good.stop()
        bad.stop()
        engine.stop()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", ("does not exist", "does-not-exist.gguf")),
        ("truncated", ("truncated",)),
        ("not a model", ("GGUF",)),
        ("empty folder", ("config.json",)),
        ("unsupported architecture", ("NoneSuchForCausalLM", "LlamaForCausalLM")),
        ("another architecture's weights", ("MambaForCausalLM", "missing", "config.json")),
        ("pickle only", ("safetensors",)),
        ("no package", ("llm-nothing", "pip install")),
    ],
)
def test_models_that_cannot_be_loaded(tmp_path: Path, tiny: TinyModels, kind: str, words: tuple[str, ...]) -> None:
    model = str(tmp_path / "does-not-exist.gguf")
    if kind == "truncated":
        model = str(tmp_path / "cut.gguf")
        Path(model).write_bytes(real_gguf().read_bytes()[: 40 << 20])
    elif kind == "not a model":
        model = str(tmp_path / "text.gguf")
        Path(model).write_text("hello")
    elif kind == "empty folder":
        model = str(tmp_path)
    elif kind == "unsupported architecture":
        model = str(tiny.llama("none", config={"architectures": ["NoneSuchForCausalLM"], "model_type": "nonesuch"}))
    elif kind == "another architecture's weights":
        model = str(tiny.llama("mamba", config={"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    elif kind == "pickle only":
        model = str(tiny.llama("pickle", save=lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x") and None))
    elif kind == "no package":
        model = "pypi:llm-nothing"
    done = run(sys.executable, "-m", "branchline.cli", "engine", model, "--port", "0")
    told = done.stdout + done.stderr
    assert done.returncode == 2, told
    assert "Traceback" not in told
    for word in words:
        assert word.lower() in told.lower(), told


def children(pid: int) -> list[int]:
    """Live descendants of a process."""
    out = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(a): int(b) for a, b in (line.split() for line in out.splitlines())}
    found: list[int] = []
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def alive(pids: list[int]) -> list[int]:
    """Those that still run (zombies do not)."""
    out = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                out.append(pid)
        except FileNotFoundError:
            pass
    return out


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_serve_leaves_no_orphan(tiny: TinyModels, sign: signal.Signals) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "branchline.cli",
        "serve",
        str(tiny.llama("plain")),
        "--port",
        str(port),
        "--workers",
        "2",
    ]
    serve = Process(command)
    try:
        serve.wait_for_line("curl")
        url = f"http://127.0.0.1:{port}"
        assert re.search(r"openai", serve.output, re.I)
        assert url in serve.output
        family = children(serve.child.pid)
        assert len(family) >= 3
        assert len(httpx.get(f"{url}/server_info").json()["workers"]) == 2
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        if sign == signal.SIGINT:
            os.killpg(serve.child.pid, sign)  # as a terminal does
        else:
            serve.child.send_signal(sign)
        code = serve.child.wait(20)
        assert code in (0, 130, -signal.SIGKILL), serve.output
        wait_until(lambda: not alive(family), 10, "all children end")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/liveness", timeout=1)
        assert "Traceback" not in serve.output
    finally:
        serve.stop(signal.SIGKILL)


def test_serve_restarts_a_dead_engine(tiny: TinyModels) -> None:
    port = free_port()
    serve = Process([sys.executable, "-m", "branchline.cli", "serve", str(tiny.llama("plain")), "--port", str(port)])
    try:
        serve.wait_for_line("curl")
        url = f"http://127.0.0.1:{port}"
        engine = next(
            pid
            for pid in children(serve.child.pid)
            if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        os.kill(engine, signal.SIGKILL)

        def served() -> bool:
            return (
                httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=10).status_code
                == 200
            )

        start = time.monotonic()
        wait_until(lambda: not served(), 5, "the death is noticed") if served() else None
        wait_until(served, 60, f"the engine is back (since {start})\n{serve.output}")
    finally:
        serve.stop(signal.SIGTERM)


def test_doctor_tells_what_the_machine_has() -> None:
    done = run(sys.executable, "-m", "branchline.cli", "doctor")
    assert done.returncode == 0, done.stderr
    for word in ("cpu", "memory", "torch", "gpu", "port", "executor"):
        assert word in done.stdout.lower(), done.stdout
    facts = json.loads(run(sys.executable, "-m", "branchline.cli", "doctor", "--json").stdout)
    assert facts
