"""Programs: `@function`, `run`, `run_batch`, async forms. Runs the user's function; the rest of a run is `run`'s."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, overload

from branchline.lang import hosts
from branchline.lang.backends.base import Backend
from branchline.lang.errors import ArgumentError, CancelledError, DeadlineError
from branchline.lang.ir import Hints, Sampling, check_seconds, texts
from branchline.lang.log import Log
from branchline.lang.run import Run, Settings, check_backend, default_backend, set_default_backend
from branchline.lang.state import State
from branchline.lang.values import MISSING

MOST_HOSTS = 8
GRACE_S = 0.1
MOST_AT_ONCE = 1000


def flush_cache(backend: Backend | None = None) -> None:
    """Empties the prefix cache of the backend's server."""
    hosts.wait(hosts.background().submit((backend or default_backend()).flush_cache()))


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What the backend's server tells of itself."""
    return hosts.wait(hosts.background().submit((backend or default_backend()).server_info()))


class Program:
    """A decorated function. Call `run`, `run_async`, `run_batch` or `bind`; inside a program call it with `s`."""

    def __init__(self, function: Callable[..., Any], hints: Hints) -> None:
        names = list(inspect.signature(function).parameters)
        if not names or names[0] != "s":
            raise ArgumentError(
                f"the first parameter of {function.__name__} is {names[0] if names else 'missing'}: it must be named s"
            )
        self.function = function
        self.hints = hints
        self.bound: dict[str, Any] = {}
        self.base = self
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ArgumentError(
                f"{function.__name__} yields: a program returns; read it as a stream by run(stream=True)"
            )
        self.parameters = frozenset(names)
        self.is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

    def bind(self, **arguments: Any) -> Program:
        """The same program with some arguments fixed."""
        other = Program(self.function, self.hints)
        other.base = self.base
        other.bound = {**self.bound, **arguments}
        return other

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Like a function: by its name, with what is bound."""
        if self.bound:
            return _rebound, (self.base, self.bound)
        return self.function.__qualname__

    def __call__(self, s: State, *args: Any, **kwargs: Any) -> Any:
        """Runs inside another program, on its state."""
        if not isinstance(s, State):
            raise ArgumentError(
                f"{self.function.__name__} was called with {type(s).__name__}: use .run(…) outside a program"
            )
        return self.function(s, *args, **{**self.bound, **kwargs})

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
        trace: bool = False,
        log: Log | None = None,
        on_error: str = "raise",
        use_thread: bool = True,
        **kwargs: Any,
    ) -> State:
        """Runs the program and returns its state.

        Sampling options (`max_new_tokens`, `temperature`, `stop`, …) are defaults for its gens. With `stream` it
        returns at once: read `text_iter`. `on_error="state"` leaves failures in `state.error()`; by default they are
        raised: a failed block as ProgramError, an exception of the program itself as it is.
        """
        if not stream:
            hosts.refuse_running_loop(f"write `await {self.function.__name__}.run_async(…)`, in a notebook too")
        settings, rest = _settings(self, kwargs, backend, timeout_s, trace, log)
        settings.stream = stream
        if on_error not in ("raise", "state"):
            raise ArgumentError(f"on_error is {on_error!r}: give raise or state")
        if self.is_async:
            if stream:
                raise ArgumentError("stream=True is for plain programs: use run_async and the events of an async one")
            coroutine = self._run_async(settings, args, rest, on_error)
            return hosts.wait(hosts.background().submit(coroutine))
        run = Run(settings, self.hints, hosts.background())
        if stream:
            state = State(run.root, outside=True)
            _in_thread(functools.partial(self._drive, run, state, args, rest, on_error="state"))
            return state
        state = State(run.root)
        self._drive(run, state, args, rest, on_error)
        return state

    async def run_async(
        self,
        *args: Any,
        backend: Backend | None = None,
        timeout_s: float | None = None,
        trace: bool = False,
        log: Log | None = None,
        on_error: str = "raise",
        **kwargs: Any,
    ) -> State:
        """`run` on the caller's own event loop; an async program needs no thread, a plain one takes one."""
        settings, rest = _settings(self, kwargs, backend, timeout_s, trace, log)
        settings.stream = True
        if self.is_async:
            return await self._run_async(settings, args, rest, on_error)
        run = Run(settings, self.hints, hosts.background())
        state = State(run.root)
        done = _in_thread(functools.partial(self._drive, run, state, args, rest, on_error))
        try:
            await hosts.awaited(done)
        except asyncio.CancelledError:
            hosts.background().submit(run.abandon(CancelledError("the program was cancelled")))
            raise
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | None = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: str = "raise",
        timeout_s: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the program once for each set of arguments; results in the order of the input.

        At most `num_threads` (auto: 1,000) items run at once, on a few threads. A failing item never harms another:
        `on_error="raise"` raises the first failure, with `.index`, after all are done; `"collect"` leaves it in that
        item's `state.error()`. With `generator_style` states are yielded as soon as they and those before them are
        done. `progress(done, total)` is called after each item.
        """
        from branchline.lang.batch import run_batch

        if on_error not in ("raise", "collect"):
            raise ArgumentError(f"on_error is {on_error!r}: give raise or collect")
        hosts.refuse_running_loop("await run_async(…) of each item by asyncio.gather, or call it by to_thread")
        settings, rest = _settings(self, kwargs, backend, timeout_s, False, None)
        limit = MOST_AT_ONCE if num_threads == "auto" else num_threads
        if not isinstance(limit, int) or limit < 1:
            raise ArgumentError(f"num_threads is {num_threads!r}: give auto or a whole number of at least 1")
        batch = list(batch)
        for index, item in enumerate(batch):
            if not isinstance(item, Mapping):
                raise ArgumentError(f"item {index} of the batch is {item!r:.60}: give a dict of arguments")
        results = run_batch(self, batch, settings, rest, limit, on_error, progress, progress_bar)
        return results if generator_style else list(results)

    # ---- driving -------------------------------------------------------------------------------

    def _drive(self, run: Run, state: State, args: Sequence[Any], kwargs: Mapping[str, Any], on_error: str) -> None:
        """Runs the function here and settles the run; raises what failed."""
        try:
            self._settle(run, state, args, kwargs, on_error)
        finally:
            run.concluded.set_result(None)

    def _settle(self, run: Run, state: State, args: Sequence[Any], kwargs: Mapping[str, Any], on_error: str) -> None:
        inside = State(run.root) if state.outside else state
        try:
            state.ret_value = self.function(inside, *args, **{**self.bound, **kwargs})
        except BaseException as error:
            hosts.wait(run.loop.submit(run.abandon(CancelledError(f"the program raised {type(error).__name__}"))))
            state.failure = error
            if on_error == "raise":
                raise
            return
        finally:
            run.body_ended()
        hosts.wait(run.loop.submit(run.settle()))
        _conclude(run, state, on_error)

    async def _run_async(
        self, settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any], on_error: str
    ) -> State:
        run = Run(settings, self.hints, hosts.Loop(asyncio.get_running_loop()))
        state = State(run.root)
        try:
            async with _deadline(run):
                state.ret_value = await self.function(state, *args, **{**self.bound, **kwargs})
        except BaseException as error:
            await asyncio.shield(run.abandon(CancelledError(f"the program raised {type(error).__name__}")))
            state.failure = error
            if on_error == "raise" or isinstance(error, asyncio.CancelledError):
                raise
            return state
        finally:
            run.body_ended()
        await run.settle()
        _conclude(run, state, on_error)
        return state


@asynccontextmanager
async def _deadline(run: Run) -> AsyncIterator[None]:
    """Ends a program's own waiting. Its blocks end by themselves and say more, so they are given the time to."""
    scope = asyncio.timeout_at(None if run.deadline is None else run.deadline + GRACE_S)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise DeadlineError(f"the program's deadline of {run.timeout_s:g} s has passed") from None
        raise


def _conclude(run: Run, state: State, on_error: str) -> None:
    """Raises the first failure that the program did not see."""
    unread = run.unread_error()
    state.failure = unread or run.root.error
    if unread is not None and on_error == "raise":
        raise unread


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Runs something on a thread of its own."""
    import threading

    future: Future[None] = Future()

    def body() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=body, name="branchline-lang-program", daemon=True).start()
    return future


def _rebound(base: Program, bound: Mapping[str, Any]) -> Program:
    return base.bind(**bound)


def _settings(
    program: Program,
    kwargs: dict[str, Any],
    backend: Backend | None,
    timeout_s: float | None,
    trace: bool,
    log: Log | None,
) -> tuple[Settings, dict[str, Any]]:
    """Splits run options from the program's arguments; a name of both is the program's."""
    check_seconds("timeout_s", timeout_s)
    check_backend(backend)
    rest = dict(kwargs)
    sampling: dict[str, Any] = {}
    if "max_new_tokens" in rest and "max_new_tokens" not in program.parameters:
        sampling["max_tokens"] = rest.pop("max_new_tokens")
    for name in list(rest):
        if name in Sampling.__dataclass_fields__ and name not in program.parameters:
            value = rest.pop(name)
            if name in ("stop", "stop_regex"):
                value = texts(name, value)
            elif name == "stop_token_ids" and value is not None:
                value = tuple(value)
            sampling[name] = value
    return Settings(backend, Sampling(**sampling), timeout_s, trace, log), rest


@overload
def function(func: Callable[..., Any]) -> Program: ...


@overload
def function(
    *, hints: Hints | Mapping[str, Any] | None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...


def function(
    func: Callable[..., Any] | None = None,
    *,
    hints: Hints | Mapping[str, Any] | None = None,
    num_api_spec_tokens: int | None = None,
) -> Any:
    """Makes a program of a function whose first parameter is named s.

    `hints` say what is to come (fork width, expected tokens); `expected_tokens` is also the default of max_tokens.
    `num_api_spec_tokens` is taken for programs written for SGLang and refused: no backend here writes ahead.
    """
    if num_api_spec_tokens is not None:
        raise ArgumentError("num_api_spec_tokens is not offered: leave it out; the program gives the same text without")
    made = Hints(**hints) if isinstance(hints, Mapping) else hints or Hints()
    if func is not None:
        return Program(func, made)
    return lambda inner: Program(inner, made)


__all__ = ["MISSING", "Program", "Run", "Settings", "default_backend", "function", "set_default_backend"]
