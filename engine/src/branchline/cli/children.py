"""A child process of the launcher: in its process group, tied to its life, its output relayed.

The group is shared so that a terminal's stop and continue reach all; its Ctrl-C is kept from children, which the
launcher ends in order (see parent.py). Owns the pipes. Must not decide what to start nor when to restart it. Event
loop only.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO


class Child:
    """One run of one command. `ready` resolves to its ready line, or fails if it ends before that."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], out: TextIO | None = None) -> None:
        self.name = name
        self.command = tuple(command)
        self._env = dict(env)
        self._out = out or sys.stderr
        self._process: asyncio.subprocess.Process | None = None
        self._readers: asyncio.Future[tuple[None, None]] | None = None
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start it. The kernel kills it should the launcher die."""
        tied = [sys.executable, "-m", "branchline.cli.parent", str(os.getpid()), *self.command]
        self._process = await asyncio.create_subprocess_exec(
            *tied,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        relays = (self._relay(self._process.stdout), self._relay(self._process.stderr))
        self._readers = asyncio.gather(*relays)

    async def _relay(self, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await pipe.readline()
            except ValueError:  # a line beyond the reader's limit; the rest of it follows
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\n")
            if not self._is_ready_line(text):
                print(f"{self.name} | {text}", file=self._out, flush=True)

    def _is_ready_line(self, text: str) -> bool:
        if not text.startswith('{"event"'):
            return False
        try:
            event = json.loads(text)
        except ValueError:
            return False
        if event.get("event") != "ready":
            return False
        if not self.ready.done():
            self.ready.set_result(event)
        return True

    @property
    def pid(self) -> int | None:
        """Of the process, once started."""
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code, once its output has been relayed; negative for a signal."""
        assert self._process is not None and self._readers is not None, "started before"
        code = await self._process.wait()
        await self._readers
        if not self.ready.done():
            self.ready.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it; nothing if it has ended."""
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return


def describe(code: int) -> str:
    """Words for an exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
