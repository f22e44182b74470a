"""A server of one's own: `branchline serve MODEL` on a free loopback port, for as long as the backend lives."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from branchline.lang import hosts
from branchline.lang.backends.runtime import Runtime
from branchline.lang.errors import ArgumentError, BackendError

POLL_S = 0.1
STOP_S = 60.0
SHOWN_LINES = 20


class Engine(Runtime):
    """Starts gateway and engine for `model_path` (all that `branchline serve` takes) and waits until they serve.

    `options` are those of `branchline serve --help`, with underscores: `workers=2`, `max_total_tokens=4096`; True and
    False are `--flag` and `--no-flag`. Ends with `close()`, `with`, or the program.

    Raises:
        BackendError: it did not begin to serve within `startup_timeout_s`; holds its last lines.
    """

    def __init__(self, model_path: str, *, startup_timeout_s: float = 900.0, **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if "port" in options or "host" in options:
            raise ArgumentError("Engine chooses its own address: leave host and port out, or start `branchline serve`")
        super().__init__(f"http://127.0.0.1:{port}")
        self.name = f"Engine({model_path})"
        self._log = tempfile.NamedTemporaryFile(prefix="branchline-engine-", suffix=".log")
        tied = [sys.executable, "-m", "branchline.cli.parent", str(os.getpid())]
        command = [
            *tied,
            sys.executable,
            "-m",
            "branchline.cli",
            "serve",
            model_path,
            "--port",
            str(port),
            *_flags(options),
        ]
        # Children die with the thread that started them: it must be one that lives as long as the process.
        self._process = hosts.wait(hosts.background().submit(_spawn(command, self._log)))
        hosts.at_end(self)
        try:
            self._wait(time.monotonic() + startup_timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        while True:
            if self._process.poll() is not None:
                raise BackendError(f"{self.name} ended with code {self._process.returncode}:\n{self.last_lines()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            if time.monotonic() > deadline:
                raise BackendError(f"{self.name} did not serve in time:\n{self.last_lines()}", status=504)
            time.sleep(POLL_S)

    def last_lines(self) -> str:
        """The end of what the server has printed."""
        with open(self._log.name, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-SHOWN_LINES:]).strip()

    def close(self) -> None:
        """Ends connections and server; the backend cannot be used again."""
        super().close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        import asyncio

        await super().aclose()
        await asyncio.to_thread(self.close)


def _flags(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


async def _spawn(command: list[str], log: Any) -> subprocess.Popen[bytes]:
    """Starts it in a session of its own: Ctrl-C goes to the program, which ends it."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
    )
