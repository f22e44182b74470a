"""A worker whose step does not end, and readers that do not read: what everybody else is told through the gateway."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .conftest import Starter
from .stack import Engine, Gateway, events, wait_until
from .test_cases_logprobs_cache import ids_of
from .test_overload import body_of
from .tiny import TinyModels

HOLD = 777
PLUGIN = f"""
import os
import time
from pathlib import Path

from branchline import registry
from branchline.engine.executor.native import build_executor

GO = Path(os.environ["HELD_UNTIL"])


@registry.executors.register("held")
def build(model, **options):
    # The native executor; a step with the token {HOLD} does not end until the file exists.
    executor = build_executor(model, **options)
    inner = executor.run

    def run(batch):
        while {HOLD} in batch.token_ids and not GO.exists():
            time.sleep(0.01)
        return inner(batch)

    executor.run = run
    return executor
"""


class Held:
    """An engine of the plugin above behind a gateway."""

    def __init__(self, model: str, folder: Path) -> None:
        (folder / "held_plugin.py").write_text(PLUGIN)
        self.go, self.reports = folder / "go", folder / "reports"
        self.reports.mkdir()
        flags = ("--plugin", "held_plugin", "--executor", "held", "--step-timeout", "0.5")
        self.engine = Engine(
            *flags, "--stall-dump-dir", str(self.reports), model=model,
            env={"PYTHONPATH": str(folder), "HELD_UNTIL": str(self.go)},
        )  # fmt: skip
        self.gateway = Gateway(workers=[f"grpc://{self.engine.address}"])
        self.gateway.wait_ready()

    def close(self) -> None:
        """Let go, and stop."""
        self.go.touch()
        self.gateway.stop()
        self.engine.stop()

    def ask(self, ids: list[int], new: int = 4) -> httpx.Response:
        """One whole answer."""
        body = body_of("/generate", ids, new)
        body["sampling_params"]["temperature"] = 0
        return self.gateway.client.post("/generate", json=body)

    def follow(self, ids: list[int]) -> list[str]:
        """A long stream to its end."""
        body = body_of("/v1/completions", ids, 1900, stream=True)
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{self.gateway.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            return list(events(answer.iter_text()))

    def serving(self) -> bool:
        """What the engine's own health service says."""
        with grpc.insecure_channel(self.engine.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def running(self) -> int:
        """Sequences that run."""
        info = self.gateway.client.get("/server_info").json()
        return int(info["workers"][0]["load"]["running"])


@pytest.fixture
def held(tiny: TinyModels, tmp_path: Path) -> Held:
    return Held(str(tiny.llama("plain")), tmp_path)


def test_a_step_that_never_ends_is_told_to_all_reported_and_survived(held: Held) -> None:
    probe = ids_of(7, 12)
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        stack.callback(held.close)
        before = held.ask(probe).json()["output_ids"]
        streams = [pool.submit(held.follow, ids_of(number, 8)) for number in range(3)]
        wait_until(lambda: held.running() == 3, 20, "the neighbours run")
        stuck = pool.submit(held.ask, [5, HOLD, 9]).result(60)
        assert stuck.status_code == 503, stuck.text
        assert int(stuck.headers["retry-after"]) >= 1
        for future in streams:
            last = [item for item in future.result(60) if item != "[DONE]"][-1]
            assert "error" in json.loads(last), last
        refused = held.ask(ids_of(1, 8))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, refused.text
        wait_until(lambda: not held.serving(), 30, "its health fails")
        (report,) = held.reports.iterdir()
        text = report.read_text()
        assert "4 rows, 3 of them decode" in text and "engine-loop" in text and "held_plugin.py" in text
        held.go.touch()
        wait_until(lambda: held.ask(probe).status_code == 200, 60, "it serves again")
        assert held.ask(probe).json()["output_ids"] == before
        wait_until(held.serving, 30, "its health is well again")


def test_readers_that_do_not_read_hold_nobody_up(stacks: Starter, tiny: TinyModels) -> None:
    stack = stacks("--max-running-requests", "8", model=str(tiny.llama("plain")))
    stack.flush()
    port = int(stack.url.rsplit(":", 1)[1])
    body = json.dumps(body_of("/generate", ids_of(3, 8), 1500, stream=True)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as opened:
        for _ in range(4):
            reader = opened.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", port))
            reader.sendall(head + body)
        wait_until(lambda: stack.load()["running"] == 4, 20, "they run")
        for number in range(4):
            assert len(stack.generate(ids_of(20 + number, 9), sampling_params={"max_new_tokens": 40})["text"]) >= 0
        stack.assert_idle(60)  # what they asked for has ended, though they have not read it
    assert stack.post("/generate", body_of("/generate", ids_of(9, 8), 2)).status_code == 200
