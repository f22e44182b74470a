"""Many runs of one program at once, each by itself: results in input order, failures with their index."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from branchline.lang import hosts
from branchline.lang.errors import ProgramError
from branchline.lang.state import State

if TYPE_CHECKING:
    from branchline.lang.program import Program, Settings


class _Progress:
    """Counts finished items and tells about it."""

    def __init__(self, total: int, told: Callable[[int, int], None] | None, bar: bool) -> None:
        self.total, self.told, self.bar = total, told, bar
        self.done = 0
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.done += 1
            if self.told is not None:
                self.told(self.done, self.total)
            if self.bar:
                end = "\n" if self.done == self.total else ""
                print(f"\r{self.done}/{self.total} programs done", end=end, file=sys.stderr, flush=True)


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
    results: list[Future[State]] = [Future() for _ in batch]
    start = _start_async if program.is_async else _start_plain
    close = start(program, batch, settings, common, limit, results, meter)
    return _collect(results, close, on_error)


def _collect(results: Sequence[Future[State]], close: Callable[[], None], on_error: str) -> Iterator[State]:
    failure: BaseException | None = None
    try:
        for index, future in enumerate(results):
            state = hosts.wait(future)
            if state.failure is not None and failure is None:
                failure = state.failure
                if isinstance(failure, ProgramError):
                    failure.index = index
                failure.add_note(f"in item {index} of the batch")
            yield state
    finally:
        close()
    if failure is not None and on_error == "raise":
        raise failure


def _one(program: Program, settings: Settings, arguments: Mapping[str, Any], out: Future[State]) -> None:
    """One plain item, on whatever host it was put on. Never raises: the outcome is in the state."""
    from branchline.lang.program import Run

    state: State | None = None
    try:
        run = Run(settings, program.hints, hosts.background())
        state = State(run.root)
        program._drive(run, state, (), arguments, "state")
    except BaseException as error:
        if state is None:
            out.set_exception(error)
            return
        state.failure = error
    out.set_result(state)


def _start_plain(
    program: Program,
    batch: Sequence[Mapping[str, Any]],
    settings: Settings,
    common: Mapping[str, Any],
    limit: int,
    results: Sequence[Future[State]],
    meter: _Progress,
) -> Callable[[], None]:
    from branchline.lang.program import MOST_HOSTS

    pool = hosts.Pool(max(1, min(MOST_HOSTS, limit, len(batch))))
    waiting = iter(enumerate(batch))
    lock = threading.Lock()

    def next_one() -> None:
        with lock:
            item = next(waiting, None)
        if item is not None:
            index, arguments = item
            pool.start(functools.partial(body, index, {**common, **arguments}))

    def body(index: int, arguments: Mapping[str, Any]) -> None:
        future: Future[State] = Future()
        _one(program, settings, arguments, future)
        meter.step()
        next_one()
        _hand_over(future, results[index])

    for _ in range(min(limit, len(batch))):
        next_one()
    return pool.close


def _hand_over(source: Future[State], target: Future[State]) -> None:
    if (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def _start_async(
    program: Program,
    batch: Sequence[Mapping[str, Any]],
    settings: Settings,
    common: Mapping[str, Any],
    limit: int,
    results: Sequence[Future[State]],
    meter: _Progress,
) -> Callable[[], None]:
    async def everything() -> None:
        gate = asyncio.Semaphore(limit)

        async def one(index: int, arguments: Mapping[str, Any]) -> None:
            async with gate:
                try:
                    state = await program._run_async(settings, (), {**common, **arguments}, "state")
                except BaseException as error:
                    results[index].set_exception(error)
                else:
                    results[index].set_result(state)
                meter.step()

        await asyncio.gather(*(one(index, arguments) for index, arguments in enumerate(batch)))

    hosts.background().submit(everything())
    return lambda: None
