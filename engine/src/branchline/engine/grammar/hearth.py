"""The engine's end of the compiling process: starts it, hands it jobs, reads its reports, starts it anew if it dies.

One reader thread; callers may be on any thread, callbacks run on the reader's. Owns the process and its socket.
"""

from __future__ import annotations

import contextlib
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

    def check(self, schema: str, value: str, done: Done) -> int:
        """Look whether a text is a value of a JSON schema; `done` gets `valid`, or why that is not known."""

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
        self,
        context: GrammarContext,
        backends: tuple[str, ...],
        bounds: Bounds,
        plugins: tuple[str, ...] = (),
        disabled: tuple[str, ...] = (),
    ) -> None:
        self._setup = {
            "tokenizer": context.tokenizer_json.decode(),
            "vocab_size": context.vocab_size,
            "eos_ids": list(context.eos_ids),
            "backends": list(backends),
            "plugins": list(plugins),
            "disabled": list(disabled),
            "wall_s": bounds.wall_s,
            "memory_bytes": bounds.memory_bytes,
            "children": bounds.children,
        }
        self._lock = threading.Lock()  # over what is below; never held while anything is written
        self._sending = threading.Lock()  # one frame at a time; never held by a reader that has anything left to read
        self._jobs: dict[int, tuple[socket.socket, Done]] = {}
        self._greeted: socket.socket | None = None  # has its setup
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
        """Start the process ahead of the first job. Raises OSError if it can't be started or ends at once."""
        with self._sending:
            with self._lock:
                link = self._connect()
            self._send(link)

    def submit(self, backend: str, kind: GrammarKind, text: str, done: Done) -> int:
        """Begin a compilation; `done` gets its one report."""
        return self._ask({"backend": backend, "kind": kind.value, "text": text}, done)

    def check(self, schema: str, value: str, done: Done) -> int:
        """Look whether a text is a value of a JSON schema, within the limits of a compilation."""
        return self._ask({"text": schema, "value": value}, done)

    def _ask(self, job: Report, done: Done) -> int:
        number = 0
        try:
            with self._sending:
                with self._lock:
                    link = self._connect()
                    self._number = number = self._number + 1
                    self._jobs[number] = (link, done)
                self._send(link, {"job": number, **job})
        except OSError as error:
            with self._lock:
                untold = number == 0 or self._jobs.pop(number, None) is not None
            if untold:  # else the reader saw the end first
                done({"fault": f"the compiling process can't be reached: {error}"})
        return number

    def cancel(self, number: int) -> None:
        """Kill the child of a job; its report, if any, is dropped."""
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is not None:
            # If it can't be sent, the reader sees the end and tells whoever waits.
            with self._sending, contextlib.suppress(OSError):
                self._send(job[0], {"job": number, "cancel": True})

    def close(self) -> None:
        """Stop the process and its children."""
        with self._lock:
            self._closed = True
            link, process = self._link, self._process
            self._link = None
        if link is not None:
            _hang_up(link)
        if process is not None:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _connect(self) -> socket.socket:
        """The socket of a living process, whose reader runs. Called with both locks held."""
        if self._closed:
            raise OSError("the worker is shutting down")
        if self._link is None:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "branchline.engine.grammar.foundry", str(theirs.fileno())],
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
                    )
                except OSError:
                    ours.close()
                    raise
            self._link = ours
            reader = threading.Thread(target=self._read, args=(ours, self._process), name="grammar-reader", daemon=True)
            reader.start()
        return self._link

    def _send(self, link: socket.socket, message: Report | None = None) -> None:
        """Write a frame, after the setup if it is the first. Called with `_sending` held, so that the reader goes on
        reading: both ends writing at each other with neither reading would be a deadlock."""
        try:
            if self._greeted is not link:
                foundry.send(link, self._setup)
                self._greeted = link
            if message is not None:
                foundry.send(link, message)
        except OSError:
            with self._lock:
                if self._link is link:  # the next job starts another process
                    self._link = None
            raise

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
                job = self._jobs.pop(message.get("job", 0), None)
            if job is not None:
                self._tell(job[1], message)
        self._lost(link, process, reason)

    def _lost(self, link: socket.socket, process: subprocess.Popen[bytes], reason: str) -> None:
        """The process is gone: whoever waits is told, and the next job starts another one."""
        with self._lock:
            if self._link is link:
                self._link = None
            lost = [number for number, (its, _) in self._jobs.items() if its is link]
            jobs = [self._jobs.pop(number)[1] for number in lost]
            closed = self._closed
        _hang_up(link)
        with self._sending:  # nobody may be writing to a number that the system gives away again
            link.close()
        process.wait()
        if not closed:
            logger.error("%s (exit status %s); %d compilations are lost", reason, process.returncode, len(jobs))
        for done in jobs:
            self._tell(done, {"fault": reason})

    def _tell(self, done: Done, report: Report) -> None:
        try:
            done(report)
        except Exception:
            logger.exception("a report of the compiling process can't be taken")


def _hang_up(link: socket.socket) -> None:
    """End a connection under whoever writes to it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
