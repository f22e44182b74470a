"""The `Router` class: options as text for the native router, context managers, and requests without a socket.

Owns no thread and no loop: blocking calls release the GIL, the async forms run them in a thread, and requests are
answered by the router's own threads.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, Unpack

from branchline_router import registry
from branchline_router._metrics import Sample, parse
from branchline_router._native import NativeRouter
from branchline_router._options import RouterOptions
from branchline_router._requests import Answer, events, failure, send
from branchline_router.cli import split


def _texts(value: object) -> list[str]:
    """The texts of one option, as a flag would have them."""
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, Enum):
        return [str(value.value)]
    if isinstance(value, (str, int, float)):
        return [str(value)]
    if isinstance(value, PathLike):
        return [str(fspath(value))]
    if isinstance(value, Sequence):
        return [text for item in value for text in _texts(item)]
    message = f"an option can't be a {type(value).__name__}; give text, a number, a bool or a list"
    raise TypeError(message)


def _prompt(prompt: str | Sequence[int]) -> dict[str, object]:
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}


class Router:
    """A router in this process.

    `config` is a TOML file; environment variables win over it and arguments win over both.
    Raises `ConfigError` with one line a fault. It is used in the process that made it: after a fork every call
    raises `ForkError`. Requests made here need no key and no port; they end with the task that awaits them.
    """

    def __init__(self, config: str | PathLike[str] | None = None, **options: Unpack[RouterOptions]) -> None:
        registry.plugins.load(*split([], os.environ)[:2])
        given = [(name, _texts(value)) for name, value in options.items() if value is not None]
        self._native = NativeRouter(given, None if config is None else fspath(config))

    @property
    def url(self) -> str | None:
        """Where it serves; `None` while it does not run."""
        return self._native.url

    def start(self) -> str:
        """Serves in the background and returns the URL. Raises `StartError` if it can't."""
        return self._native.start()

    def stop(self) -> None:
        """Lets running requests end within `drain_timeout`, then stops. Stopping twice is no error."""
        self._native.stop()

    async def start_async(self) -> str:
        """As `start`, without blocking the event loop."""
        return await asyncio.to_thread(self.start)

    async def stop_async(self) -> None:
        """As `stop`, without blocking the event loop."""
        await asyncio.to_thread(self.stop)

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A chat completion: the body of `POST /v1/chat/completions`, `fields` being its other fields.

        Raises a `RequestError`; `StateError` while the router does not run.
        """
        answer: dict[str, Any] = await self.request(
            "POST", "/v1/chat/completions", {"messages": list(messages), **fields, "stream": False}
        )
        return answer

    async def chat_stream(self, messages: Sequence[dict[str, Any]], **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed chat completion. Leaving the loop early ends the request at its worker."""
        body = {"messages": list(messages), **fields, "stream": True}
        async for event in self._events("/v1/chat/completions", body):
            yield event

    async def generate(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        """`POST /generate` for a text or token ids; `fields` such as `sampling_params`."""
        return await self.request("POST", "/generate", {**_prompt(prompt), **fields, "stream": False})

    async def generate_stream(self, prompt: str | Sequence[int], **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed `POST /generate`: the text so far in each."""
        async for event in self._events("/generate", {**_prompt(prompt), **fields, "stream": True}):
            yield event

    async def request(self, method: str, path: str, body: object = None) -> Any:
        """Any call of the HTTP API, answered with its parsed JSON. Raises a `RequestError` for other than success."""
        answer = await self._send(method, path, body)
        data = await answer.read()
        return json.loads(data) if data else None

    async def add_worker(self, url: str) -> dict[str, Any]:
        """Adds a worker; it gets requests as soon as it is ready. Returns what `workers` lists of it."""
        added: dict[str, Any] = await self.request("POST", "/workers", {"url": url})
        return added

    async def remove_worker(self, worker_id: str) -> None:
        """Takes a worker out: no new requests from now on; its running ones may end within `drain_timeout`."""
        await self.request("DELETE", f"/workers/{worker_id}")

    async def workers(self) -> list[dict[str, Any]]:
        """All workers with their state."""
        listed: list[dict[str, Any]] = (await self.request("GET", "/workers"))["workers"]
        return listed

    async def metrics(self) -> list[Sample]:
        """Every series as it is now; docs/reference/metrics.md says what they mean."""
        answer = await self._send("GET", "/metrics", None)
        return parse((await answer.read()).decode())

    async def _send(self, method: str, path: str, body: object) -> Answer:
        data = b"" if body is None else json.dumps(body).encode()
        answer = await send(self._native, method, path, data)
        if answer.status >= 300:
            raise failure(answer.status, answer.headers, await answer.read())
        return answer

    async def _events(self, path: str, body: object) -> AsyncIterator[Any]:
        answer = await self._send("POST", path, body)
        async for event in events(answer):
            yield event

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await self.start_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop_async()
