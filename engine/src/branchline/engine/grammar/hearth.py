"""The engine's end of the compiling process: starts it, hands it jobs, reads its reports, starts it anew if it dies.

One reader thread; callers may be on any thread, callbacks run on the reader's. Owns the process and its socket.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from branchline.engine.grammar import foundry
from branchline.engine.grammar.base import GrammarContext
from branchline.engine.types import GrammarKind

logger = logging.getLogger(__name__)

Report = dict[str, Any]
Done = Callable[[Report], None]


class Compiler(Protocol):
    """What compiles: one report a job, but for cancelled ones, which may report `cancelled` or nothing."""

    def submit(self, backend: str, kind: GrammarKind, text: str, done: Done) -> int:
        """Begin a compilation; its number."""

    def cancel(self, number: int) -> None:
        """Stop it if it has not ended."""

    def close(self) -> None:
        """Stop everything; idempotent."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one compilation, and how many run at once."""

    wall_s: float = 2.0
    memory_bytes: int = 512 << 20
    children: int = 2


class Hearth:
    """A Compiler over the process `foundry`."""

    def __init__(
        self, context: GrammarContext, backends: tuple[str, ...], bounds: Bounds, plugins: tuple[str, ...] = ()
    ) -> None:
        self._setup = {
            "tokenizer": context.tokenizer_json.decode(),
            "vocab_size": context.vocab_size,
            "eos_ids": list(context.eos_ids),
            "backends": list(backends),
            "plugins": list(plugins),
            "wall_s": bounds.wall_s,
            "memory_bytes": bounds.memory_bytes,
            "children": bounds.children,
        }
        self._lock = threading.Lock()
        self._jobs: dict[int, Done] = {}
        self._number = 0
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Start the process ahead of the first job."""
        with self._lock:
            self._connect()

    def submit(self, backend: str, kind: GrammarKind, text: str, done: Done) -> int:
        """Begin a compilation; `done` gets its one report."""
        with self._lock:
            self._number += 1
            number = self._number
            self._jobs[number] = done
            try:
                link = self._connect()
                foundry.send(link, {"job": number, "backend": backend, "kind": kind.value, "text": text})
            except OSError as error:
                del self._jobs[number]
                failure: Report = {"fault": f"the compiling process can't be reached: {error}"}
            else:
                return number
        done(failure)
        return number

    def cancel(self, number: int) -> None:
        """Kill the child of a job; its report, if any, is dropped."""
        with self._lock:
            if self._jobs.pop(number, None) is None or self._link is None:
                return
            try:
                foundry.send(self._link, {"job": number, "cancel": True})
            except OSError:
                return  # the reader sees the end and tells whoever waits

    def close(self) -> None:
        """Stop the process and its children."""
        with self._lock:
            self._closed = True
            link, process = self._link, self._process
            self._link = None
        if link is not None:
            link.shutdown(socket.SHUT_RDWR)
        if process is not None:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _connect(self) -> socket.socket:
        """The socket of a living process. Called with the lock held."""
        if self._closed:
            raise OSError("the worker is shutting down")
        if self._link is None:
            ours, theirs = socket.socketpair()
            # Frames are written with the lock held: a process that does not read must not hold the writer for ever.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "branchline.engine.grammar.foundry", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
                )
            self._link = ours
            foundry.send(ours, self._setup)
            reader = threading.Thread(target=self._read, args=(ours, self._process), name="grammar-reader", daemon=True)
            reader.start()
        return self._link

    def _read(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        reason = "the compiling process ended"
        while True:
            try:
                message = foundry.receive(link)
            except (OSError, ValueError) as error:
                message, reason = None, f"the compiling process sent nonsense: {error}"
            if message is None:
                break
            if "failed" in message:
                reason = f"the compiling process can't start: {message['failed']}"
            with self._lock:
                done = self._jobs.pop(message.get("job", 0), None)
            if done is not None:
                self._tell(done, message)
        self._lost(link, process, reason)

    def _lost(self, link: socket.socket, process: subprocess.Popen[bytes], reason: str) -> None:
        """The process is gone: whoever waits is told, and the next job starts another one."""
        with self._lock:
            if self._link is link:
                self._link = None
            jobs, self._jobs = self._jobs, {}
            closed = self._closed
        link.close()
        process.wait()
        if not closed:
            logger.error("%s (exit status %s); %d compilations are lost", reason, process.returncode, len(jobs))
        for done in jobs.values():
            self._tell(done, {"fault": reason})

    def _tell(self, done: Done, report: Report) -> None:
        try:
            done(report)
        except Exception:
            logger.exception("a report of the compiling process can't be taken")
