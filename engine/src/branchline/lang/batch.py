"""Many runs of one program at once, each by itself: results in input order, failures with their index."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from branchline.lang import hosts
from branchline.lang.errors import CancelledError, ProgramError
from branchline.lang.state import State

if TYPE_CHECKING:
    from branchline.lang.program import Program, Settings


class _Progress:
    """Counts finished items and tells about it. What the caller's own function raises is kept, and told once."""

    def __init__(self, total: int, told: Callable[[int, int], None] | None, bar: bool) -> None:
        self.total, self.told, self.bar = total, told, bar
        self.done = 0
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.done += 1
            if self.told is not None:
                try:
                    self.told(self.done, self.total)
                except Exception as error:  # it must not end the thread that runs other programs
                    self.error, self.told = error, None
            if self.bar:
                end = "\n" if self.done == self.total else ""
                print(f"\r{self.done}/{self.total} programs done", end=end, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one batch is made of; `results` has a future for each item, in order."""

    program: Program
    items: Sequence[Mapping[str, Any]]
    settings: Settings
    common: Mapping[str, Any]
    limit: int
    meter: _Progress
    results: Sequence[Future[State]]


def run_batch(
    program: Program,
    batch: Sequence[Mapping[str, Any]],
    settings: Settings,
    common: Mapping[str, Any],
    limit: int,
    on_error: str,
    progress: Callable[[int, int], None] | None,
    bar: bool,
) -> Iterator[State]:
    """Yields states in input order; see `Program.run_batch`."""
    meter = _Progress(len(batch), progress, bar)
    work = _Work(program, batch, settings, common, limit, meter, [Future() for _ in batch])
    close = _start_async(work) if program.is_async else _start_plain(work)
    return _collect(work, close, on_error)


def _collect(work: _Work, close: Callable[[], None], on_error: str) -> Iterator[State]:
    failure: BaseException | None = None
    try:
        for index, future in enumerate(work.results):
            state = hosts.wait(future)
            if state.failure is not None and failure is None:
                failure = state.failure
                if isinstance(failure, ProgramError):
                    failure.index = index
                failure.add_note(f"in item {index} of the batch")
            yield state
    finally:
        close()
    if work.meter.error is not None:
        raise work.meter.error
    if failure is not None and on_error == "raise":
        raise failure


def _start_plain(work: _Work) -> Callable[[], None]:
    """Runs items as greenlets. The function it returns ends what still runs, and the threads."""
    from branchline.lang.program import MOST_HOSTS
    from branchline.lang.run import Run

    pool = hosts.Pool(max(1, min(MOST_HOSTS, work.limit, len(work.items))))
    waiting = iter(enumerate(work.items))
    alive: dict[int, Run] = {}
    left = CancelledError("the batch was left before its end")
    stopped = threading.Event()
    lock = threading.Lock()

    def next_one() -> None:
        with lock:
            item = None if stopped.is_set() else next(waiting, None)
        if item is not None:
            pool.start(functools.partial(body, *item))

    def body(index: int, arguments: Mapping[str, Any]) -> None:
        try:
            run = alive[index] = Run(work.settings, work.program.hints, hosts.background())
            state = State(run.root)
            if stopped.is_set():
                raise left
            work.program._drive(run, state, (), {**work.common, **arguments}, "state")
        except BaseException as error:
            end: Callable[[], None] = functools.partial(work.results[index].set_exception, error)
        else:
            end = functools.partial(work.results[index].set_result, state)
        work.meter.step()
        next_one()
        alive.pop(index, None)
        end()

    def close() -> None:
        with lock:
            stopped.set()
        running = dict(alive)
        for run in running.values():
            hosts.background().submit(run.abandon(left)).result()
        wait(work.results[index] for index in running)
        pool.close()

    for _ in range(min(work.limit, len(work.items))):
        next_one()
    return close


def _start_async(work: _Work) -> Callable[[], None]:
    """Runs items as tasks of the loop. The function it returns ends what still runs."""

    async def everything() -> None:
        gate = asyncio.Semaphore(work.limit)

        async def one(index: int, arguments: Mapping[str, Any]) -> None:
            async with gate:
                try:
                    state = await work.program._run_async(work.settings, (), {**work.common, **arguments}, "state")
                except BaseException as error:
                    work.results[index].set_exception(error)
                else:
                    work.results[index].set_result(state)
                work.meter.step()

        await asyncio.gather(*(one(index, arguments) for index, arguments in enumerate(work.items)))

    running = hosts.background().submit(everything())

    def close() -> None:
        running.cancel()  # what still runs is abandoned, its calls aborted; nothing if all have ended

    return close
