"""One run of a program: its backend, limits, branches, log, listeners and end. Knows nothing of the user's function."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from branchline.lang import hosts
from branchline.lang.backends.base import Backend, GenCall, Markup, Scores, SelectCall
from branchline.lang.branch import Branch
from branchline.lang.calls import Answer
from branchline.lang.errors import ArgumentError, CancelledError, LangError
from branchline.lang.ir import Gen, Hints, Sampling, Select
from branchline.lang.log import Log
from branchline.lang.trace import Block, Trace
from branchline.lang.values import Event, Listener

if TYPE_CHECKING:
    from branchline.lang.group import Group

_default: Backend | None = None
DEFAULT_MAX_TOKENS = 128


def set_default_backend(backend: Backend | None) -> None:
    """The backend of programs that are given none."""
    global _default
    check_backend(backend)
    _default = backend


def check_backend(backend: object) -> None:
    """A typed error for what is no backend, such as an address."""
    if backend is not None and not isinstance(backend, Backend):
        raise ArgumentError(f"backend is {backend!r:.80}: give Runtime(url), OpenAI(model) or another backend object")


def default_backend() -> Backend:
    """The backend set last.

    Raises:
        LangError: none was set.
    """
    if _default is None:
        raise LangError("no backend: call set_default_backend(Runtime(url)) once, or give backend= to run")
    return _default


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

    def unlisten(self, listener: Listener) -> None:
        """Takes a listener out."""
        self._listeners.remove(listener)

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
                await hosts.awaited(branch.idle())
                done.add(id(branch))
        await self._finish()

    async def abandon(self, reason: CancelledError) -> None:
        """Cancels every branch and lets go of everything. On the loop."""
        for branch in list(self.branches()):
            branch.cancel(reason)
        for branch in list(self.branches()):
            await hosts.awaited(branch.idle())
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
