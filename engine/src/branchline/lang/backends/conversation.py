"""What vendors' chat backends have in common: messages out of a prompt, pictures, clients by event loop, refusals.

Knows no vendor. A conversation with text outside its messages, or a call outside an assistant message, is refused here.
"""

from __future__ import annotations

import asyncio
import base64
import mimetypes
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from branchline.lang import hosts
from branchline.lang.backends.base import CHATML, Backend, Markup, Message, Prompt
from branchline.lang.errors import ArgumentError, UnsupportedError

T = TypeVar("T")
# What encoded pictures begin with (https://www.iana.org/assignments/media-types).
SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


def needed(package: str, extra: str) -> NoReturn:
    """Says which package a backend needs.

    Raises:
        ImportError: always.
    """
    raise ImportError(f"the package {package!r} is not installed: pip install 'branchline[{extra}]'")


def history(prompt: Prompt, name: str, *, prefill: bool, markup: Markup = CHATML) -> list[Message]:
    """The messages a chat API is sent: all but the assistant's open one, unless something stands in it already.

    Raises:
        UnsupportedError: text stands outside messages, the open message is not the assistant's, or it has begun and
            the API cannot go on with a begun message (`prefill` False).
    """
    if prompt.open_role != "assistant":
        where = f"inside a {prompt.open_role} message" if prompt.open_role else "outside of messages"
        raise UnsupportedError(
            f"{name} generates in assistant messages only, this is {where}: write s.assistant(gen(…))"
        )
    if len(prompt.text) != _written(prompt, markup):
        raise UnsupportedError(f"{name} takes messages only: move the text outside of roles into system() or user()")
    *before, begun = prompt.messages
    if not before:
        raise UnsupportedError(f"{name} needs a message before the assistant's: write s.user(…) first")
    if not begun.content and not begun.images:
        return before
    if not prefill:
        raise UnsupportedError(
            f"{name} cannot go on with a begun assistant message: let gen stand first and alone in it, "
            "or end the message and ask again"
        )
    return [*before, begun]


def _written(prompt: Prompt, markup: Markup) -> int:
    """Characters of the text that belong to messages and their markup."""
    size = len(markup.default_system) if prompt.messages and prompt.messages[0].role != "system" else 0
    for message in prompt.messages:
        size += len(markup.begin[message.role]) + len(message.content) + len(markup.end[message.role])
    return size - len(markup.end[prompt.messages[-1].role])


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture, or where it lies."""

    media_type: str
    data: bytes = b""
    url: str | None = None

    @property
    def base64(self) -> str:
        """The bytes as base64 text."""
        return base64.b64encode(self.data).decode()

    @property
    def any_url(self) -> str:
        """Its URL, else a data URL of its bytes."""
        return self.url or f"data:{self.media_type};base64,{self.base64}"


def picture(source: str | bytes) -> Picture:
    """A picture from bytes, a data URL, an http(s) URL or a path.

    Raises:
        ArgumentError: no such file, or not a PNG, JPEG, GIF or WebP.
    """
    if isinstance(source, bytes):
        return Picture(_kind(source, "the given bytes"), source)
    if source.startswith(("http://", "https://")):
        return Picture(mimetypes.guess_type(source)[0] or "image/jpeg", url=source)
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ArgumentError(f"image is {source[:40]!r}…: write data:image/png;base64,…")
        try:
            return picture(base64.b64decode(body, validate=True))
        except ValueError as error:
            raise ArgumentError(f"image {source[:40]!r}… is not base64: {error}") from None
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise ArgumentError(f"image {source!r} cannot be read: {error.strerror or error}") from None
    return Picture(_kind(data, source), data)


def _kind(data: bytes, what: str) -> str:
    for begin, kind in SIGNATURES:
        if data.startswith(begin):
            return kind
    raise ArgumentError(f"image: {what} is no PNG, JPEG, GIF or WebP")


class Clients(Generic[T]):
    """A vendor's async client for each event loop: their connections belong to the loop they were made on."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._end = end
        self._by_loop: dict[asyncio.AbstractEventLoop, T] = {}
        self._lock = threading.Lock()
        hosts.at_end(self)

    def here(self) -> T:
        """The running loop's client."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                for ended in [item for item in self._by_loop if item.is_closed()]:
                    del self._by_loop[ended]  # its sockets ended with the loop
                self._by_loop[loop] = self._make()
            return self._by_loop[loop]

    def _take(self) -> dict[asyncio.AbstractEventLoop, T]:
        with self._lock:
            taken, self._by_loop = self._by_loop, {}
        return taken

    async def aclose(self) -> None:
        """Ends the connections of all loops that still run."""
        here = asyncio.get_running_loop()
        for loop, client in self._take().items():
            if loop is here:
                await self._end(client)
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._finish(client), loop))

    def close(self) -> None:
        """`aclose` for plain code; from a running event loop it does not wait for that loop's own connections."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for loop, client in self._take().items():
            if loop is here:
                self._ending = loop.create_task(self._finish(client))
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(self._finish(client), loop).result()

    async def _finish(self, client: T) -> None:
        await self._end(client)


class Vendor(Backend, Generic[T]):
    """Base of backends that are a vendor's client."""

    completes_text = False

    def __init__(self, name: str, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self.name = name
        self._clients = Clients(make, end)

    def close(self) -> None:
        """Ends the connections; the backend can be used again."""
        self._clients.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await self._clients.aclose()


def most(name: str, option: str, values: Sequence[Any] | None, limit: int) -> list[Any] | None:
    """The values as a list.

    Raises:
        UnsupportedError: there are more than the vendor takes.
    """
    if values is not None and len(values) > limit:
        raise UnsupportedError(f"{name} takes at most {limit} values of {option}, not {len(values)}")
    return None if values is None else list(values)
