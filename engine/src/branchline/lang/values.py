"""Variables of a program: written once by a call, read from any thread, streamed piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from branchline.lang.errors import Place


class Missing:
    """Stands in a joined list for a branch that has no such variable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclass(slots=True)
class Variable:
    """One value to come. `done` carries it, or the error that took its place."""

    name: str | None
    place: Place | None
    done: Future[Any] = field(default_factory=Future)
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    surfaced: bool = False
    _waiting: list[Future[None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, piece: str) -> None:
        """A piece of text, as it comes."""
        if piece:
            with self._lock:
                self.pieces.append(piece)
            self._wake()

    def finish(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        """The value is complete."""
        if not self.done.done():
            self.meta.update(meta or {})
            self.done.set_result(value)
            self._wake()

    def fail(self, error: BaseException) -> None:
        """There will be no value."""
        if not self.done.done():
            self.done.set_exception(error)
            self._wake()

    def more(self, seen: int) -> Future[None]:
        """Done as soon as there are more than `seen` pieces, or nothing will come any more."""
        future: Future[None] = Future()
        with self._lock:
            if len(self.pieces) > seen or self.done.done():
                future.set_result(None)
            else:
                self._waiting.append(future)
        return future

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)


def ready(name: str | None, value: Any, place: Place | None = None) -> Variable:
    """A variable that has its value already."""
    variable = Variable(name, place)
    variable.finish(value)
    return variable


@dataclass(frozen=True, slots=True)
class Event:
    """What happened in a program: `kind` is start, delta, end or error; `branch` is the path of fork indices."""

    kind: str
    branch: tuple[int, ...]
    variable: str | None
    text: str = ""
    value: Any = None
    error: BaseException | None = None
    meta: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]
