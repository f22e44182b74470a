"""HTTP connections of a backend: one aiohttp session an event loop, closed by hand, by `with`, or once collected.

Owns sessions and their end; knows nothing of paths and bodies.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import weakref
from collections.abc import Mapping

import aiohttp

from branchline.lang import hosts

RESERVED = 128  # descriptors left for the program itself


class Sessions:
    """Sessions by event loop. Sessions of a loop that has ended are dropped when the next one is made."""

    def __init__(self, timeout: aiohttp.ClientTimeout, headers: Mapping[str, str]) -> None:
        self._timeout = timeout
        self._headers = dict(headers)
        self._by_loop: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_quietly, self._by_loop)
        hosts.at_end(self)

    def here(self) -> aiohttp.ClientSession:
        """The running loop's session."""
        loop = asyncio.get_running_loop()
        with self._lock:
            session = self._by_loop.get(loop)
            if session is not None and not session.closed:
                return session
            for other in [item for item in self._by_loop if item.is_closed()]:
                _drive(self._by_loop.pop(other))
            connector = aiohttp.TCPConnector(limit=_most(), keepalive_timeout=30)
            session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
            self._by_loop[loop] = session
            return session

    def _take(self) -> dict[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
        with self._lock:
            taken = dict(self._by_loop)
            self._by_loop.clear()
        return taken

    async def aclose(self) -> None:
        """Ends the connections of all loops; waits for those of the running one and of other threads' loops."""
        here = asyncio.get_running_loop()
        for loop, session in self._take().items():
            if loop is here:
                await session.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))
            else:
                _drive(session)
        await asyncio.sleep(0)  # transports end in the loop's next round

    def close(self) -> None:
        """`aclose` for plain code. From a running event loop it does not wait for that loop's own connections."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for loop, session in self._take().items():
            if loop is here:
                _drive(session)
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(session.close(), loop).result()
            else:
                _drive(session)


def _most() -> int:
    """Connections at once: what the process may open, less what it needs for itself. Calls beyond wait for one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else max(soft - RESERVED, soft // 2, 1)


def _drive(session: aiohttp.ClientSession) -> None:
    """Closes without waiting for the peers: a session's close does its work before it first waits."""
    closing = session.close()
    try:
        closing.send(None)
    except StopIteration:
        pass
    finally:
        closing.close()


def _close_quietly(by_loop: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession]) -> None:
    """For a backend that was collected: on whatever thread that happens, so nothing here may wait."""
    for loop, session in by_loop.items():
        if loop.is_running():
            loop.call_soon_threadsafe(_drive, session)
        else:
            _drive(session)
    by_loop.clear()
