"""A bounded queue from the loop's thread to one stream's writer on the event loop.

Owns the bounds in items, if there is one, and in bytes: past one the box is broken, what it holds is dropped and
the owner is told once, so that a peer that does not read costs no memory. Everything but `post` runs on the event
loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from branchline.engine.errors import EngineError
from branchline.engine.service.limits import MAX_MESSAGE

M = TypeVar("M", bound=Message)


class Outbox(Generic[M]):
    """Messages waiting to be written; `close` and `fail` end the stream once what is before them is out."""

    def __init__(
        self, capacity: int | None, on_overflow: Callable[[], EngineError], max_bytes: int = MAX_MESSAGE
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._on_overflow = on_overflow
        self._items: deque[tuple[M, int]] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._error: EngineError | None = None

    @property
    def is_open(self) -> bool:
        """Whether a message put now would be written."""
        return not self._closed

    @property
    def pending(self) -> int:
        """Messages not yet taken."""
        return len(self._items)

    @property
    def tail(self) -> tuple[M, int] | None:
        """The message queued last and its bytes, while nobody has taken it."""
        return self._items[-1] if self._items else None

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread: run `function` on the event loop. Silent once that is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop is gone, and with it every stream
            self._closed = True

    def put(self, message: M) -> None:
        """Queue a message; past the bound the stream fails with what `on_overflow` gives."""
        if self._closed:
            return
        size = message.ByteSize()
        if self._capacity is not None and len(self._items) >= self._capacity:
            self._break()
        elif self._has_room(size):
            self._items.append((message, size))
            self._wake.set()

    def grow(self, size: int) -> None:
        """`tail` has grown by at most `size` bytes: they count against the bound as those of a new message do."""
        if self._has_room(size):
            message, before = self._items.pop()
            self._items.append((message, before + size))

    def _has_room(self, size: int) -> bool:
        if self._items and self._bytes + size > self._max_bytes:
            self._break()
            return False
        self._bytes += size
        return True

    def _break(self) -> None:
        self._items.clear()
        self._bytes = 0
        self.fail(self._on_overflow())

    def close(self) -> None:
        """No more messages; the stream ends well."""
        self._closed = True
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        """No more messages; the stream ends with `error`."""
        self._error = self._error or error
        self.close()

    async def get(self) -> M | None:
        """Next message; None at the end. Raises the error the stream failed with."""
        while not self._items:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._wake.clear()
            await self._wake.wait()
        message, size = self._items.popleft()
        self._bytes -= size
        return message
