"""Runs one question after another in a child with limits of time and memory; a child that dies is one lost answer.

Peers hang, grow or crash on some schemas, so every backend is asked in here. The child answers rows in order; at a
row that is too late it is killed and the next row starts a fresh one.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MEMORY = 4 << 30


def each(
    make: Callable[[], Callable[[Any], Any]], rows: Iterable[Any], wall_s: float, memory: int = MEMORY
) -> Iterator[Any]:
    """`make()(row)` of each row, made in the child; "timeout" or "died" where there is none. Answers are JSON."""
    left = list(rows)
    place = 0
    while place < len(left):
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(source)
            _child(make, left[place:], sink, memory)
        os.close(sink)
        verdict = "died"
        with os.fdopen(source, "rb", buffering=0) as pipe:
            buffer = b""
            while place < len(left):
                line, _, rest = buffer.partition(b"\n")
                if _:
                    buffer = rest
                    yield json.loads(line)
                    place += 1
                    continue
                if not select.select([pipe], [], [], wall_s)[0]:
                    verdict = "timeout"
                    break
                piece = os.read(pipe.fileno(), 1 << 16)
                if not piece:
                    break
                buffer += piece
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if place < len(left):
            yield verdict
            place += 1


def _child(make: Callable[[], Callable[[Any], Any]], rows: list[Any], sink: int, memory: int) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))
        ask = make()
        for row in rows:
            data = json.dumps(ask(row)).encode() + b"\n"
            while data:
                data = data[os.write(sink, data) :]
    finally:
        os._exit(0)
