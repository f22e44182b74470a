"""One branch of a program: a queue of blocks and the text, messages and variables they make.

Runs on the event loop, one block at a time; a branch without work has no task and no thread. Owns the order of blocks
and failure; calls go through `calls`, forks are `group`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchline.lang import calls
from branchline.lang.backends.base import Context, Lease, Message, Prompt
from branchline.lang.errors import ArgumentError, CancelledError, Place, ProgramError, UnknownVariable
from branchline.lang.ir import (
    Expr,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    Text,
    VarBegin,
    VarEnd,
)
from branchline.lang.values import Event, Variable, ready

if TYPE_CHECKING:
    from branchline.lang.group import Group
    from branchline.lang.run import Run

_HERE = str(Path(__file__).parent)


def place() -> Place | None:
    """The nearest line outside this package: the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HERE):
            return Place(file, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


@dataclass(frozen=True, slots=True)
class Item:
    """A queued block, with its variable if it makes one."""

    block: Expr | Callable[[], Any]
    place: Place | None
    variable: Variable | None = None
    reasoning: Variable | None = None
    model_type: str | None = None
    skipped: Callable[[ProgramError], None] | None = None  # told if the item does not run, or fails


@dataclass(slots=True)
class OpenRole:
    """The message being written: where its content begins in the text."""

    role: str
    start: int
    images: list[str | bytes] = field(default_factory=list)


class Branch:
    """Text, messages and variables of one branch."""

    def __init__(self, run: Run, parent: Branch | None = None, index: int = 0) -> None:
        self.run = run
        self.parent = parent
        self.path: tuple[int, ...] = (*parent.path, index) if parent else ()
        self.text = ""
        self.messages: list[Message] = []
        self.role: OpenRole | None = None
        self.images: list[str | bytes] = []
        self.vars: dict[str, Variable] = dict(parent.vars) if parent else {}
        self.own: set[str] = set()
        self.scopes: list[tuple[str, int, Variable]] = []
        self.written: list[Variable] = []  # all variables made here, for failures that nobody read
        self.error: ProgramError | None = None
        self.lease: Lease | None = None
        self.fork_width: int | None = parent.fork_width if parent else None
        self.group: Group | None = None
        self.stream = Variable(None, None)  # all text appended here
        self._queue: deque[Item] = deque()
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self._executing = False  # only then may the task be cancelled
        self._gate = parent is not None  # a child waits until its parent came to the fork
        self._idle: list[Future[None]] = []
        self._awaited: dict[str, list[Future[None]]] = {}  # readers of variables that are not assigned yet
        self._stopped: CancelledError | None = None

    # ---- from the program's side ---------------------------------------------------------------

    def append(self, blocks: Sequence[Expr], where: Place | None) -> None:
        """Queues blocks; variables are known from now on."""
        self.run.check_open()
        for block in blocks:
            self._append(block, where, None)

    def _append(self, block: Expr, where: Place | None, model_type: str | None) -> None:
        if isinstance(block, SeparateReasoning):
            for inner in block.body:
                self._append(inner, where, block.model_type)
            return
        variable = reasoning = None
        if isinstance(block, Gen | Select):
            self.run.backend.check(block, self.run.sampling_of(block))
            variable = self._declare(block.name, where)
            if model_type and isinstance(block, Gen):
                reasoning = self._declare(f"{block.name}_reasoning_content" if block.name else None, where)
        elif isinstance(block, VarEnd):
            variable = self._declare(block.name, where)
        self.put(Item(block, where, variable, reasoning, model_type))

    def _declare(self, name: str | None, where: Place | None) -> Variable:
        variable = Variable(name, where)
        self.written.append(variable)
        if name is not None:
            with self._lock:
                self.vars[name] = variable
                self.own.add(name)
                waiting = self._awaited.pop(name, [])
            for future in waiting:
                future.set_result(None)
        return variable

    def assigned(self, name: str) -> Future[None]:
        """Done once the variable is assigned, or the program's own code has ended."""
        future: Future[None] = Future()
        with self._lock:
            if name not in self.vars and not self.run.body.done():
                self._awaited.setdefault(name, []).append(future)
                return future
        future.set_result(None)
        return future

    def give_up(self) -> None:
        """The program's own code has ended: nothing will be assigned any more."""
        with self._lock:
            waiting, self._awaited = [item for items in self._awaited.values() for item in items], {}
        for future in waiting:
            future.set_result(None)

    def put(self, item: Item) -> None:
        """Queues one item and sees to it that somebody works on it."""
        with self._lock:
            self._queue.append(item)
            start = not self._busy and not self._gate
            self._busy = self._busy or start
        if start:
            self.run.loop.post(self._start)

    def open(self) -> None:
        """The parent came to the fork: work may begin. On the loop."""
        with self._lock:
            self._gate = False
            start = bool(self._queue) and not self._busy
            self._busy = self._busy or start
        if start:
            self._start()
        else:
            self._tell_idle()

    def variable(self, name: str) -> Variable:
        """The variable as last assigned.

        Raises:
            UnknownVariable: it never was; lists those there are.
        """
        try:
            return self.vars[name]
        except KeyError:
            known = ", ".join(sorted(self.vars)) or "none"
            raise UnknownVariable(f"no variable {name!r} in this branch (there are: {known})") from None

    def assign(self, name: str, value: Any) -> None:
        """Sets a variable from the program."""
        with self._lock:
            self.vars[name] = ready(name, value, place())
            self.own.add(name)
            waiting = self._awaited.pop(name, [])
        for future in waiting:
            future.set_result(None)

    def idle(self) -> Future[None]:
        """Done when everything queued so far has run or failed."""
        future: Future[None] = Future()
        with self._lock:
            if self._busy or self._queue or (self._gate and self._stopped is None):
                self._idle.append(future)
                return future
        future.set_result(None)
        return future

    def surface(self) -> ProgramError | None:
        """The branch's error, the first time it is asked for."""
        if self.error is None or self.error.surfaced:
            return None
        self.error.surfaced = True
        return self.error

    # ---- on the loop ---------------------------------------------------------------------------

    def _start(self) -> None:
        self._task = self.run.loop.loop.create_task(self._work())

    async def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy, self._task = False, None
                    break
                item = self._queue.popleft()
            if self.error is None and self._stopped is None:
                try:
                    self._executing = True
                    await self._execute(item)
                except asyncio.CancelledError:
                    self._stopped = self._stopped or CancelledError("the branch was cancelled")
                    self._fail(item, self._stopped)
                except Exception as error:  # of a backend or a user's function: it becomes the branch's error
                    self._fail(item, error)
                finally:
                    self._executing = False
            else:
                self._skip(item)
        self._tell_idle()

    def _tell_idle(self) -> None:
        with self._lock:
            waiting, self._idle = self._idle, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _fail(self, item: Item, cause: BaseException) -> None:
        error = cause
        if not isinstance(cause, ProgramError):
            name = item.variable.name if item.variable else None
            error = ProgramError(cause, place=item.place, branch=self.path, variable=name)
        assert isinstance(error, ProgramError)
        self.error = error
        self.run.emit(Event("error", self.path, item.variable.name if item.variable else None, error=error))
        self._skip(item)
        for variable in self.written:
            variable.fail(error)
        self.stream.fail(error)
        if self.group is not None:
            self.group.child_failed(self, error)

    def _skip(self, item: Item) -> None:
        error = self.error or ProgramError(
            self._stopped or CancelledError("the branch was cancelled"), place=item.place, branch=self.path
        )
        for variable in (item.variable, item.reasoning):
            if variable is not None:
                variable.fail(error)
        if item.skipped is not None:
            item.skipped(error)

    def never_begun(self, error: ProgramError) -> None:
        """The parent failed before the fork, or at it: all that is queued here fails the same way. On the loop."""
        self.error = self.error or error
        for variable in self.written:
            variable.fail(error)
        self.stream.fail(error)
        self.open()

    def cancel(self, reason: CancelledError) -> None:
        """Stops what runs here (its call is aborted on the server) and skips what waits. On the loop."""
        if self._stopped is not None:
            return
        self._stopped = reason
        if self._task is not None and self._executing:
            self._task.cancel()
        else:
            self.open()

    async def _execute(self, item: Item) -> None:
        block = item.block
        if isinstance(block, Text):
            self.write(block.value)
        elif isinstance(block, Gen):
            assert item.variable is not None
            await calls.generate(self, block, item.variable, item.reasoning, item.model_type)
        elif isinstance(block, Select):
            assert item.variable is not None
            await calls.choose(self, block, item.variable)
        elif isinstance(block, RoleBegin):
            await self._begin_role(block.role)
        elif isinstance(block, RoleEnd):
            await self._end_role(block.role)
        elif isinstance(block, VarBegin):
            self.scopes.append((block.name, len(self.text), Variable(block.name, item.place)))
        elif isinstance(block, VarEnd):
            self._end_scope(block.name, item)
        elif isinstance(block, Image):
            self._add_image(block.source)
        elif callable(block):
            result = block()
            if asyncio.iscoroutine(result):
                await result
        else:
            raise ArgumentError(f"cannot run {type(block).__name__}")

    def write(self, text: str) -> None:
        """Appends text."""
        self.text += text
        self.stream.add(text)

    # ---- roles and scopes ----------------------------------------------------------------------

    async def _begin_role(self, role: str) -> None:
        if self.role is not None:
            raise ArgumentError(f"{role} begins inside {self.role.role}: close the open role first")
        markup = await calls.bounded(self, self.run.markup)
        if not self.messages and role != "system":
            self.write(markup.default_system)
        if role not in markup.begin:
            raise ArgumentError(f"the model's chat template has no role {role!r}: there are {', '.join(markup.begin)}")
        after_system = role == "user" and bool(self.messages) and self.messages[-1].role == "system"
        opening = markup.user_after_system if after_system else None
        self.write(markup.begin[role] if opening is None else opening)
        self.role = OpenRole(role, len(self.text))

    async def _end_role(self, role: str) -> None:
        if self.role is None or self.role.role != role:
            raise ArgumentError(f"{role} ends, but {self.role.role if self.role else 'no role'} is open")
        content = self.text[self.role.start :]
        self.messages.append(Message(role, content, tuple(self.role.images)))
        self.role = None
        self.write((await calls.bounded(self, self.run.markup)).end[role])

    def _end_scope(self, name: str, item: Item) -> None:
        if not self.scopes or self.scopes[-1][0] != name:
            raise ArgumentError(f"the scope of variable {name!r} ends, but it is not the innermost open one")
        _, start, _ = self.scopes.pop()
        assert item.variable is not None
        item.variable.finish(self.text[start:])

    def _add_image(self, source: str | bytes) -> None:
        if not self.run.backend.images:
            raise ArgumentError(f"{self.run.backend.name} takes no images: use a backend of a vision model")
        (self.role.images if self.role else self.images).append(source)

    def prompt(self) -> Prompt:
        """What a call made now would see."""
        messages = list(self.messages)
        if self.role is not None:
            messages.append(Message(self.role.role, self.text[self.role.start :], tuple(self.role.images)))
        images = tuple(self.images) + tuple(itertools.chain.from_iterable(message.images for message in messages))
        return Prompt(self.text, tuple(messages), self.role.role if self.role else None, images)

    def context(self) -> Context:
        """Of which program, branch and lease a call made now would be."""
        hints = self.run.hints
        return Context(
            program=self.run.id,
            branch=self.path,
            lease=self.lease.id if self.lease else None,
            fork_width=self.fork_width or hints.fork_width,
            expected_tokens=hints.expected_tokens,
            deadline=self.run.deadline,
            stream=self.run.streams,
        )

    def take_over(self, parent: Branch) -> None:
        """Copies what the parent has come to. On the loop, when the fork is reached."""
        self.text = parent.text
        self.messages = list(parent.messages)
        self.images = list(parent.images)
        self.scopes = list(parent.scopes)
        self.lease = parent.lease
        if parent.role is not None:
            self.role = OpenRole(parent.role.role, parent.role.start, list(parent.role.images))
