"""Where programs and their calls run.

One event loop (a background thread, or the caller's own for async programs) makes all calls. Plain programs of a batch
run as greenlets on a few threads: a program that waits for a value gives its thread to the next one, so a thousand
programs need no thousand threads. Owns waiting; knows nothing of blocks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

import greenlet

from branchline.lang.errors import WouldBlock

T = TypeVar("T")
LONGEST_END_S = 2.0


class Loop:
    """An event loop that calls are made on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Runs a function on the loop, from any thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            function(*args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class Closable(Protocol):
    """What has something to end."""

    def close(self) -> None:
        """Ends it."""


_lock = threading.Lock()
_background: Loop | None = None
_thread: threading.Thread | None = None
_pid = 0
_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def at_end(item: Closable) -> None:
    """Closes it before the background loop ends with the process, if it still is alive then."""
    _open.add(item)


async def _cancel_rest() -> None:
    """Cancels all other tasks of the loop and lets them, and transports that are closing, end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


@atexit.register
def _end() -> None:
    """Closes what is open, then the background loop: a process ends without warnings of forgotten connections."""
    loop = _background.loop if _background is not None and _pid == os.getpid() else None
    if loop is None or _thread is None:
        return
    for item in list(_open):
        item.close()
    asyncio.run_coroutine_threadsafe(_cancel_rest(), loop).add_done_callback(lambda _: loop.stop())
    _thread.join(LONGEST_END_S)
    if not _thread.is_alive():
        loop.close()


def background() -> Loop:
    """The process's own loop, in a daemon thread; a new one after a fork of the process."""
    global _background, _thread, _pid
    with _lock:
        if _background is None or _pid != os.getpid():
            loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=loop.run_forever, name="branchline-lang", daemon=True)
            _thread.start()
            _background, _pid = Loop(loop), os.getpid()
        return _background


class Host:
    """One thread that runs many plain programs as greenlets."""

    def __init__(self, name: str) -> None:
        self._ready: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def start(self, program: Callable[[], object]) -> None:
        """Begins a program; it must not raise."""
        self._ready.put(lambda: greenlet.greenlet(program).switch())

    def resume(self, waiting: greenlet.greenlet) -> None:
        """Goes on with a program that waited."""
        self._ready.put(lambda: waiting.switch())

    def stop(self) -> None:
        """Ends the thread once nothing is ready; call when all programs have ended."""
        self._ready.put(None)

    def _run(self) -> None:
        _here.host, _here.main = self, greenlet.getcurrent()
        while (step := self._ready.get()) is not None:
            step()


class _Here(threading.local):
    host: Host | None = None
    main: greenlet.greenlet | None = None


_here = _Here()


def wait(future: Future[T]) -> T:
    """The future's value. Parks a hosted program; refuses to block a running event loop."""
    if future.done():
        return future.result()
    host, main = _here.host, _here.main
    if host is not None and main is not None:
        current = greenlet.getcurrent()
        if current is not main:
            future.add_done_callback(lambda _: host.resume(current))
            main.switch()
            return future.result()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return future.result()
    raise WouldBlock(
        "this read would block the event loop: in an async program write `await s.get(name)` (or s.text_async)"
    )


async def awaited(future: Future[T]) -> T:
    """The future's value, on any event loop. Giving up the wait leaves the future as it is."""
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def tell(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the wait with it
                loop.call_soon_threadsafe(wake)

        future.add_done_callback(tell)
        await waiter
    return future.result()


def either(one: Future[Any], other: Future[Any]) -> Future[None]:
    """Done as soon as one of them is."""
    future: Future[None] = Future()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_result(None)

    one.add_done_callback(tell)
    other.add_done_callback(tell)
    return future


def refuse_running_loop(remedy: str) -> None:
    """For what waits by blocking its thread.

    Raises:
        WouldBlock: an event loop runs on this thread, as in an async function or a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WouldBlock(f"this would block the event loop that runs here: {remedy}")


class Pool:
    """Hosts for the plain programs of a batch."""

    def __init__(self, threads: int) -> None:
        self.hosts = [Host(f"branchline-lang-host-{index}") for index in range(threads)]
        self._next = 0
        self._finalizer = weakref.finalize(self, _stop, self.hosts)

    def start(self, program: Callable[[], object]) -> None:
        """Begins a program on the next host in turn."""
        self._next += 1
        self.hosts[self._next % len(self.hosts)].start(program)

    def close(self) -> None:
        """Ends the threads; all programs must have ended."""
        self._finalizer()
        for host in self.hosts:
            host.thread.join()


def _stop(hosts: list[Host]) -> None:
    for host in hosts:
        host.stop()
