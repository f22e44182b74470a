"""Requests to a router of this process, without a socket: awaited, cancelled with their task, pulled as they are read.

The native side calls back from its own threads; every result enters the event loop through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from branchline_router._native import NativeCall, NativeRouter, RouterError


class RequestError(RouterError):
    """The router refused or failed a request; `status` is that of the HTTP API."""

    def __init__(
        self, status: int, message: str, code: str | None, param: str | None, retry_after: float | None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """Stable name of the cause, for example `invalid_argument`."""
        self.param = param
        """The field that is wrong, by its path."""
        self.retry_after = retry_after
        """Seconds to wait before another try, if the router knows."""


class BadRequestError(RequestError):
    """The request is wrong: the same one will fail again."""


class NotFoundError(RequestError):
    """A model or a thing that was named does not exist."""


class OverloadedError(RequestError):
    """Nobody can serve it now; try again after `retry_after` seconds."""


class WorkerError(RequestError):
    """A worker failed or spoke nonsense."""


class DeadlineError(RequestError):
    """A deadline of the options has passed."""


_BY_STATUS: dict[int, type[RequestError]] = {
    404: NotFoundError,
    429: OverloadedError,
    502: WorkerError,
    503: OverloadedError,
    504: DeadlineError,
}


def failure(status: int, headers: dict[str, str], body: bytes) -> RequestError:
    """The exception for an answer that is no success."""
    try:
        error = json.loads(body)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, code, param = body.decode("utf-8", "replace"), None, None
    kind = _BY_STATUS.get(status, BadRequestError if 400 <= status < 500 else RequestError)
    wait = headers.get("retry-after", "")
    return kind(status, message, code, param, float(wait) if wait.isdigit() else None)


class Answer:
    """One answer: its head, and a body that is read when asked for."""

    def __init__(self, call: NativeCall, status: int, headers: dict[str, str]) -> None:
        self._call = call
        self.status = status
        self.headers = headers

    async def chunk(self) -> bytes | None:
        """The next bytes, `None` at the end."""
        data: bytes | None = await _wait(self._call.read)
        return data

    async def read(self) -> bytes:
        """The whole body."""
        parts = []
        while (part := await self.chunk()) is not None:
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Ends the request; its worker stops within a step."""
        self._call.cancel()


async def send(native: NativeRouter, method: str, path: str, body: bytes) -> Answer:
    """Sends a request and waits for the head of its answer. Cancelling the task cancels the request."""
    held: list[NativeCall] = []

    def start(callback: Callable[[str | None, Any], None]) -> None:
        held.append(native.send(method, path, body, callback))

    try:
        status, headers = await _wait(start)
    except BaseException:
        for call in held:
            call.cancel()
        raise
    return Answer(held[0], status, dict(headers))


async def events(answer: Answer) -> AsyncIterator[Any]:
    """JSON of each event up to the end mark. An error event raises; leaving early ends the request."""
    held = b""
    try:
        while (part := await answer.chunk()) is not None:
            held += part
            while b"\n\n" in held:
                event, held = held.split(b"\n\n", 1)
                data = b"\n".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
                if data == b"[DONE]":
                    return
                if data:
                    value = json.loads(data)
                    if isinstance(value, dict) and value.get("error"):
                        raise failure(_status_of(value["error"]), {}, data)
                    yield value
    finally:
        answer.close()


def _status_of(error: dict[str, Any]) -> int:
    known = {"upstream_failed": 502, "unavailable": 503, "deadline_exceeded": 504, "resource_exhausted": 429}
    return known.get(str(error.get("code")), 500)


async def _wait(start: Callable[[Callable[[str | None, Any], None]], None]) -> Any:
    """Runs `start` with a callback and waits until it is called."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(error: str | None, value: Any) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(RouterError(error))
        else:
            future.set_result(value)

    def callback(error: str | None, value: Any) -> None:
        try:
            loop.call_soon_threadsafe(settle, error, value)
        except RuntimeError:
            # The loop has closed: nobody waits any more.
            return

    start(callback)
    return await future
