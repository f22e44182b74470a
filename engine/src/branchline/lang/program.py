"""Programs and their runs: `@function`, `run`, `run_batch`, async forms. Owns a run from first line to last release."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, overload

from branchline.lang import hosts
from branchline.lang.backends.base import Backend, GenCall, Markup, Scores, SelectCall
from branchline.lang.branch import Branch, Group
from branchline.lang.calls import Answer
from branchline.lang.errors import ArgumentError, CancelledError, LangError
from branchline.lang.ir import Gen, Hints, Sampling, Select, texts
from branchline.lang.log import Log
from branchline.lang.state import State
from branchline.lang.trace import Block, Trace
from branchline.lang.values import MISSING, Event, Listener

_default: Backend | None = None
DEFAULT_MAX_TOKENS = 128
MOST_HOSTS = 8
MOST_AT_ONCE = 1000


def set_default_backend(backend: Backend | None) -> None:
    """The backend of programs that are given none."""
    global _default
    _default = backend


def default_backend() -> Backend:
    """The backend set last.

    Raises:
        LangError: none was set.
    """
    if _default is None:
        raise LangError("no backend: call set_default_backend(Runtime(url)) once, or give backend= to run")
    return _default


def flush_cache(backend: Backend | None = None) -> None:
    """Empties the prefix cache of the backend's server."""
    hosts.wait(hosts.background().submit((backend or default_backend()).flush_cache()))


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What the backend's server tells of itself."""
    return hosts.wait(hosts.background().submit((backend or default_backend()).server_info()))


@dataclass(slots=True)
class Settings:
    """Options of a run."""

    backend: Backend | None = None
    sampling: Sampling = field(default_factory=Sampling)
    timeout_s: float | None = None
    trace: bool = False
    log: Log | None = None
    listeners: tuple[Listener, ...] = ()
    stream: bool = False


class Run:
    """One run of a program: its backend, limits, branches and what it leaves to be undone."""

    def __init__(self, settings: Settings, hints: Hints, loop: hosts.Loop) -> None:
        self.backend = settings.backend or default_backend()
        self.sampling = settings.sampling
        self.hints = hints
        self.loop = loop
        self.id = uuid.uuid4().hex
        self.timeout_s = settings.timeout_s or 0.0
        self.deadline = None if settings.timeout_s is None else loop.loop.time() + settings.timeout_s
        self.streams = settings.stream or bool(settings.listeners)
        self.trace = Trace(self.id) if settings.trace else None
        self.groups: list[Group] = []
        self.root = Branch(self)
        self._log = settings.log
        self._listeners = list(settings.listeners)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._markup: Markup | None = None
        self._over = False
        self.body: Future[None] = Future()  # done when the program's own code has ended
        self.concluded: Future[None] = Future()  # done when all has ended and failures are known

    # ---- for branches --------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuses blocks of a program that has ended."""
        if self._over:
            raise LangError("the program has ended: append blocks while it runs")

    def sampling_of(self, block: Gen | Select) -> Sampling:
        """The block's options over the program's."""
        if isinstance(block, Select):
            return self.sampling
        merged = block.sampling.over(self.sampling)
        if merged.max_tokens is None:
            merged = replace(merged, max_tokens=self.hints.expected_tokens or DEFAULT_MAX_TOKENS)
        return merged

    async def markup(self) -> Markup:
        """How the backend's model writes roles."""
        if self._markup is None:
            self._markup = await self.backend.markup()
        return self._markup

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something to be done before the run is over. On the loop."""
        task = self.loop.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def emit(self, event: Event) -> None:
        """Tells the listeners; a listener that raises ends the block, as its own error."""
        for listener in self._listeners:
            listener(event)

    def listen(self, listener: Listener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)
        self.streams = True

    def record(
        self,
        branch: Branch,
        kind: str,
        name: str | None,
        prompt: str,
        texts_: Sequence[str],
        metas: Sequence[Mapping[str, Any]],
        seconds: float,
    ) -> None:
        """Keeps a block for the picture of the run, if one is asked for."""
        if self.trace is not None:
            block = Block(kind, branch.path, name, prompt, tuple(texts_), tuple(dict(m) for m in metas), seconds)
            self.trace.add(block, time.monotonic())

    def replayed(self, call: GenCall) -> Answer | None:
        """The logged answer, when the run replays one."""
        stored = self._log.answer(call) if self._log else None
        return Answer(*stored) if stored else None

    def log(self, call: GenCall, answer: Answer) -> None:
        """Writes an answer to the log."""
        if self._log:
            self._log.keep(call, answer.texts, answer.metas)

    def replayed_scores(self, call: SelectCall) -> Scores | None:
        """The logged scores, when the run replays them."""
        return self._log.scores(call) if self._log else None

    def log_scores(self, call: SelectCall, scores: Scores) -> None:
        """Writes scores to the log."""
        if self._log:
            self._log.keep_scores(call, scores)

    def body_ended(self) -> None:
        """The program's own code has returned or raised."""
        self.body.set_result(None)
        for branch in self.branches():
            branch.give_up()

    # ---- its end -------------------------------------------------------------------------------

    def branches(self) -> Iterator[Branch]:
        """All branches, the root first."""
        yield self.root
        for group in list(self.groups):
            yield from group.branches

    async def settle(self) -> None:
        """Waits for all that was queued, then lets go of everything. On the loop."""
        done: set[int] = set()
        while open_ := [branch for branch in self.branches() if id(branch) not in done]:
            for branch in open_:
                await asyncio.wrap_future(branch.idle())
                done.add(id(branch))
        await self._finish()

    async def abandon(self, reason: CancelledError) -> None:
        """Cancels every branch and lets go of everything. On the loop."""
        for branch in list(self.branches()):
            branch.cancel(reason)
        for branch in list(self.branches()):
            await asyncio.wrap_future(branch.idle())
        await self._finish()

    async def _finish(self) -> None:
        for group in self.groups:
            group.end()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._over = True
        for branch in self.branches():
            if branch.stream.done.done():
                continue
            branch.stream.finish(branch.text)

    def unread_error(self) -> BaseException | None:
        """The first failure that nobody has seen yet."""
        for branch in self.branches():
            group = branch.group
            if group is not None and group.collect:
                continue
            error = branch.surface()
            if error is not None and not isinstance(error.cause, CancelledError):
                return error
        return None


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
        self.is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

    def bind(self, **arguments: Any) -> Program:
        """The same program with some arguments fixed."""
        other = Program(self.function, self.hints)
        other.bound = {**self.bound, **arguments}
        return other

    def __call__(self, s: State, *args: Any, **kwargs: Any) -> Any:
        """Runs inside another program, on its state."""
        if not isinstance(s, State):
            raise ArgumentError(f"{self.__name__} was called with {type(s).__name__}: use .run(…) outside a program")
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
        settings, rest = _settings(kwargs, backend, timeout_s, trace, log)
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
        settings, rest = _settings(kwargs, backend, timeout_s, trace, log)
        settings.stream = True
        if self.is_async:
            return await self._run_async(settings, args, rest, on_error)
        run = Run(settings, self.hints, hosts.background())
        state = State(run.root)
        done = _in_thread(functools.partial(self._drive, run, state, args, rest, on_error))
        try:
            await asyncio.wrap_future(done)
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
        settings, rest = _settings(kwargs, backend, timeout_s, False, None)
        limit = MOST_AT_ONCE if num_threads == "auto" else num_threads
        if not isinstance(limit, int) or limit < 1:
            raise ArgumentError(f"num_threads is {num_threads!r}: give auto or a whole number of at least 1")
        results = run_batch(self, list(batch), settings, rest, limit, on_error, progress, progress_bar)
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


def _settings(
    kwargs: dict[str, Any], backend: Backend | None, timeout_s: float | None, trace: bool, log: Log | None
) -> tuple[Settings, dict[str, Any]]:
    """Splits run options from the program's arguments."""
    rest = dict(kwargs)
    sampling: dict[str, Any] = {}
    if "max_new_tokens" in rest:
        sampling["max_tokens"] = rest.pop("max_new_tokens")
    for name in list(rest):
        if name in Sampling.__dataclass_fields__:
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
