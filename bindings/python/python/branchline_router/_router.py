"""The `Router` class: converts options to text for the native router and adds the context managers.

Owns no thread and no loop: blocking calls release the GIL, and the async forms run them in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from os import PathLike, fspath
from types import TracebackType
from typing import Self, Unpack

from branchline_router._native import NativeRouter
from branchline_router._options import RouterOptions


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


class Router:
    """A router in this process.

    `config` is a TOML file; environment variables win over it and arguments win over both.
    Raises `ConfigError` with one line a fault.
    """

    def __init__(self, config: str | PathLike[str] | None = None, **options: Unpack[RouterOptions]) -> None:
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
