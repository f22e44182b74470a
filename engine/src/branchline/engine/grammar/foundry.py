"""The compiling process: builds the backends once, then forks a child for each compilation and can kill it.

Run as `python -m branchline.engine.grammar.foundry FD`. One thread, so that forking is safe; frames over a Unix
socket. A child has limits of wall time, CPU time and memory of its own, and whatever it does ends with it. Must not
hold results: the engine caches. Ends when the engine's end of the socket closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from branchline.engine.grammar.base import BaseGrammarBackend, GrammarContext
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarKind

HEAD = struct.Struct("<I")
NICENESS = 10


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Write one frame."""
    data = json.dumps(message).encode()
    link.sendall(HEAD.pack(len(data)) + data)


def receive(link: socket.socket) -> dict[str, Any] | None:
    """Read one frame; None at the end of the stream."""
    head = _exactly(link, HEAD.size)
    body = None if head is None else _exactly(link, HEAD.unpack(head)[0])
    return None if body is None else dict(json.loads(body))


def _exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = link.recv(min(size - len(data), 1 << 20))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


@dataclass(slots=True, eq=False)
class Job:
    """One compilation. `output` collects the child's report."""

    number: int
    message: dict[str, Any]
    pid: int = 0
    until_s: float = 0.0
    output: bytearray = field(default_factory=bytearray)
    late: bool = False


class Foundry:
    """The loop of the process. `wall_s` and `memory_bytes` bound a child, `children` how many run at once."""

    def __init__(self, link: socket.socket, setup: dict[str, Any]) -> None:
        self._link = link
        self._wall_s = float(setup["wall_s"])
        self._memory_bytes = int(setup["memory_bytes"])
        self._most = int(setup["children"])
        self._backends = build_backends(setup)
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by file number of the pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the engine leaves; its children leave with it."""
        try:
            while self._turn():
                pass
        finally:
            for job in self._running.values():
                _kill(job.pid)

    def _turn(self) -> bool:
        now = time.monotonic()
        wait = min((job.until_s - now for job in self._running.values()), default=None)
        for key, _ in self._selector.select(None if wait is None else max(wait, 0.0)):
            if key.fileobj is self._link:
                message = receive(self._link)
                if message is None:
                    return False
                self._take(message)
            else:
                self._read(key.fd)
        now = time.monotonic()
        for job in self._running.values():
            if now >= job.until_s and not job.late:
                job.late = True
                _kill(job.pid)
        while self._waiting and len(self._running) < self._most:
            self._fork(self._waiting.popleft())
        return True

    def _take(self, message: dict[str, Any]) -> None:
        number = int(message["job"])
        if not message.get("cancel"):
            self._waiting.append(Job(number, message))
            return
        self._waiting = deque(job for job in self._waiting if job.number != number)
        for job in self._running.values():
            if job.number == number:
                _kill(job.pid)

    def _fork(self, job: Job) -> None:
        source, sink = os.pipe()
        job.pid = os.fork()
        if job.pid == 0:
            os.close(source)
            self._selector.close()
            self._link.close()
            self._child(job, sink)  # never returns
        os.close(sink)
        job.until_s = time.monotonic() + self._wall_s
        self._running[source] = job
        self._selector.register(source, selectors.EVENT_READ)

    def _child(self, job: Job, sink: int) -> None:
        """Compile within limits, report, leave without any clean-up."""
        code = 1
        try:
            limit(self._wall_s, self._memory_bytes)
            report = json.dumps(answer(self._backends, job.message)).encode()
            view = memoryview(report)
            while view:
                view = view[os.write(sink, view) :]
            code = 0
        except MemoryError:
            code = 2
        finally:
            os._exit(code)

    def _read(self, source: int) -> None:
        job = self._running[source]
        piece = os.read(source, 1 << 20)
        if piece:
            job.output += piece
            return
        self._selector.unregister(source)
        os.close(source)
        del self._running[source]
        _, status = os.waitpid(job.pid, 0)
        report: dict[str, Any]
        if status == 0 and job.output:
            report = json.loads(bytes(job.output))
        else:
            report = {"limit": _cause(job, status)}
        send(self._link, {"job": job.number, **report})


def answer(backends: dict[str, BaseGrammarBackend], message: dict[str, Any]) -> dict[str, Any]:
    """Compile one message; refusals are values."""
    started = time.monotonic()
    if "value" in message:
        return checked(message["text"], message["value"])
    try:
        backend = backends[message["backend"]]
        compiled = backend.compile(GrammarKind(message["kind"]), message["text"])
    except GrammarUnsupported as error:
        return {"unsupported": error.message, "keyword": error.keyword, "pointer": error.pointer}
    except GrammarInvalid as error:
        return {"invalid": error.message, "pointer": error.pointer}
    except RecursionError:
        return {"unsupported": "the constraint is nested too deep: flatten it", "keyword": "depth", "pointer": None}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # a backend's fault is this constraint's refusal, not the worker's end
        return {"fault": f"{type(error).__name__}: {error}"[:300]}
    return {"compiled": compiled, "ms": (time.monotonic() - started) * 1e3}


def checked(schema: str, value: str) -> dict[str, Any]:
    """Whether a text is a value of a JSON schema, by a validator that shares nothing with the backends."""
    try:
        import jsonschema
    except ImportError:
        return {"fault": "jsonschema is not installed"}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return {"valid": False}
    try:
        kind = jsonschema.validators.validator_for(json.loads(schema), default=jsonschema.Draft202012Validator)
        return {"valid": bool(kind(json.loads(schema)).is_valid(parsed))}
    except Exception as error:  # a schema that it can't read, too
        return {"fault": f"{type(error).__name__}: {error}"[:300]}


def limit(wall_s: float, memory_bytes: int) -> None:
    """Bound this process. The kernel ends it even if its parent is gone."""
    os.nice(NICENESS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_s + 1.0)
    # Half of the limit: the engine, which builds the same matcher again from what the child approved, has the rest.
    signal.setitimer(signal.ITIMER_PROF, wall_s / 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    room = held + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    silent = os.open(os.devnull, os.O_WRONLY)  # an allocator that gives up says so; the report tells it better
    os.dup2(silent, 2)


def build_backends(setup: dict[str, Any]) -> dict[str, BaseGrammarBackend]:
    """The backends by name, as the engine has them."""
    from branchline import registry

    registry.plugins.load(setup["plugins"], setup["disabled"])
    context = context_of(setup)
    made = {}
    for name in setup["backends"]:
        backend = registry.grammar_backends.get(name)(context)
        assert isinstance(backend, BaseGrammarBackend), "checked by the engine before it starts this process"
        made[name] = backend
    return made


def context_of(setup: dict[str, Any]) -> GrammarContext:
    """The tokenizer as sent."""
    return GrammarContext(setup["tokenizer"].encode(), setup["vocab_size"], tuple(setup["eos_ids"]))


def _cause(job: Job, status: int) -> str:
    """Why a child gave no report."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if job.late or number in (signal.SIGALRM, signal.SIGPROF):
        return "time"
    if number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) or os.WEXITSTATUS(status) == 2:
        return "memory"
    return "cancelled" if number == signal.SIGKILL else "fault"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Read the setup, say when ready, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to handle
    link = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(link)
    if setup is None:
        return
    try:
        foundry = Foundry(link, setup)
    except Exception as error:
        send(link, {"failed": f"{type(error).__name__}: {error}"})
        return
    send(link, {"ready": True})
    foundry.run()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine has ended: so does this
        main()
