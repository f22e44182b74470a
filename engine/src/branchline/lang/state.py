"""`s`: what a program writes to and reads from. A thin face of one branch; every read waits only for what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from branchline.lang import hosts
from branchline.lang.blocks import (
    assistant_begin,
    assistant_end,
    system_begin,
    system_end,
    user_begin,
    user_end,
)
from branchline.lang.branch import Branch, Item, place
from branchline.lang.errors import ArgumentError, CancelledError, ProgramError, UnknownVariable
from branchline.lang.group import Group
from branchline.lang.ir import Appendable, VarBegin, VarEnd, flatten
from branchline.lang.values import Event, Variable

if TYPE_CHECKING:
    from branchline.lang.trace import Trace


class State:
    """The state of one branch.

    `s += block` never waits; `s["name"]` waits for that value, and raises if it failed. In async programs write
    `await s.get("name")`.
    """

    def __init__(self, branch: Branch, *, outside: bool = False) -> None:
        self.branch = branch
        self.outside = outside  # held by the caller of a streaming run, while the program still appends
        self.ret_value: Any = None
        self.failure: BaseException | None = None

    # ---- writing -------------------------------------------------------------------------------

    def __iadd__(self, other: Appendable) -> State:
        self.branch.append(flatten(other), place())
        return self

    def __add__(self, other: Appendable) -> State:
        """A branch of its own that goes on from here; this one is left as it is."""
        child = self.fork(1)[0]
        child += other
        return child

    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable."""
        self.branch.assign(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    @contextmanager
    def _role(self, begin: Any, end: Any) -> Iterator[None]:
        self.__iadd__(begin())
        try:
            yield
        finally:
            self.__iadd__(end())

    def system(self) -> AbstractContextManager[None]:
        """A system message, written in a `with` block."""
        return self._role(system_begin, system_end)

    def user(self) -> AbstractContextManager[None]:
        """A user message, written in a `with` block."""
        return self._role(user_begin, user_end)

    def assistant(self) -> AbstractContextManager[None]:
        """An assistant message, written in a `with` block."""
        return self._role(assistant_begin, assistant_end)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """What is appended inside also becomes the variable `name`."""
        self.branch.append((VarBegin(name),), place())
        try:
            yield
        finally:
            self.branch.append((VarEnd(name),), place())

    # ---- reading -------------------------------------------------------------------------------

    def _surface(self, error: BaseException) -> BaseException:
        if isinstance(error, ProgramError):
            error.surfaced = True
        return error

    def __getitem__(self, name: str) -> Any:
        """The value, as soon as it is there. Of a streaming run also a variable that is still to be assigned."""
        if self.outside:
            hosts.wait(self.branch.assigned(name))
        variable = self._variable(name)
        try:
            return hosts.wait(variable.done)
        except ProgramError as error:
            raise self._surface(error) from error.__cause__

    def _variable(self, name: str) -> Variable:
        try:
            return self.branch.variable(name)
        except UnknownVariable:
            if self.outside and self.failure is not None:
                raise self._surface(self.failure) from None
            raise

    def __contains__(self, name: str) -> bool:
        return name in self.branch.vars

    def get_var(self, name: str) -> Any:
        """The same as `s[name]`."""
        return self[name]

    async def get(self, name: str) -> Any:
        """The value, without blocking the event loop."""
        if self.outside:
            await hosts.awaited(self.branch.assigned(name))
        variable = self._variable(name)
        try:
            return await hosts.awaited(variable.done)
        except ProgramError as error:
            raise self._surface(error) from error.__cause__

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What came with the value: finish reason, tokens, cached tokens, logprobs, scores."""
        self[name]
        return dict(self.branch.variable(name).meta)

    def sync(self) -> None:
        """Waits for everything appended so far, of a streaming run for its end; raises if something failed."""
        for future in self._pending():
            hosts.wait(future)
        self._raise_failed()

    async def async_sync(self) -> None:
        """`sync` without blocking the event loop."""
        for future in self._pending():
            await hosts.awaited(future)
        self._raise_failed()

    def _pending(self) -> Iterator[Future[None]]:
        if self.outside:
            yield self.branch.run.concluded
        yield self.branch.idle()

    def _raise_failed(self) -> None:
        if (error := self.branch.error) is not None:
            raise self._surface(error) from error.__cause__
        if self.outside and self.failure is not None:
            raise self._surface(self.failure)

    def text(self) -> str:
        """The whole text so far, waiting for what was appended."""
        self.sync()
        return self.branch.text

    async def async_text(self) -> str:
        """`text` without blocking the event loop."""
        await self.async_sync()
        return self.branch.text

    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, the open message included."""
        self.sync()
        return [{"role": item.role, "content": item.content} for item in self.branch.prompt().messages]

    def error(self) -> BaseException | None:
        """What failed in this branch, or None; waits for what was appended."""
        for future in self._pending():
            hosts.wait(future)
        if self.branch.error is not None:
            self.branch.error.surfaced = True
        return self.branch.error or self.failure

    def trace(self) -> Trace:
        """The picture of the run; asked for by `run(trace=True)`."""
        if self.branch.run.trace is None:
            raise ArgumentError("the run was not traced: give trace=True to run")
        return self.branch.run.trace

    # ---- streams -------------------------------------------------------------------------------

    def _stream(self, name: str | None) -> tuple[Variable, Future[None] | None]:
        """The stream, and what else ends it: inside a program its own text ends with what was appended so far."""
        if name is not None:
            return self.branch.variable(name), None
        return self.branch.stream, None if self.outside else self.branch.idle()

    @staticmethod
    def _more(stream: Variable, seen: int, end: Future[None] | None) -> Future[None]:
        more = stream.more(seen)
        return more if end is None else hosts.either(more, end)

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Pieces of a variable, or of the whole text; raises where the stream broke.

        The whole text ends with the program, or inside the program with what was appended so far.
        """
        if name is not None:
            hosts.wait(self.branch.assigned(name))
        stream, end = self._stream(name)
        seen = 0
        while True:
            hosts.wait(self._more(stream, seen, end))
            over = stream.done.done() or (end is not None and end.done())
            fresh = stream.pieces[seen:]
            seen += len(fresh)
            yield from fresh
            if over and not fresh:
                self._raise_broken(stream)
                return

    async def text_async_iter(self, name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for async programs; with `return_meta_data` pairs of piece and meta."""
        if name is not None:
            await hosts.awaited(self.branch.assigned(name))
        stream, end = self._stream(name)
        seen = 0
        while True:
            await hosts.awaited(self._more(stream, seen, end))
            over = stream.done.done() or (end is not None and end.done())
            fresh = stream.pieces[seen:]
            seen += len(fresh)
            for piece in fresh:
                yield (piece, dict(stream.meta)) if return_meta_data else piece
            if over and not fresh:
                self._raise_broken(stream)
                return

    def _raise_broken(self, stream: Variable) -> None:
        error = stream.done.exception() if stream.done.done() else None
        if error is not None:
            raise self._surface(error)

    async def events(self) -> AsyncIterator[Event]:
        """Events of the whole run from now on: start, delta, end, error; each names its branch and variable."""
        pending: asyncio.Queue[Event | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(event: Event | None) -> None:
            with suppress(RuntimeError):  # the listener's loop has ended: nobody listens
                loop.call_soon_threadsafe(pending.put_nowait, event)

        self.branch.run.listen(hear)
        self.branch.run.root.stream.done.add_done_callback(lambda _: hear(None))
        try:
            while (event := await pending.get()) is not None:
                yield event
        finally:
            self.branch.run.unlisten(hear)

    # ---- branching -----------------------------------------------------------------------------

    def fork(
        self,
        size: int = 1,
        position_ids_offset: object = None,
        *,
        on_error: str = "cancel",
        hold: bool = True,
    ) -> Forks:
        """Branches that go on from here at the same time.

        The prefix is computed once and held by a lease until `join` (or the end of the `with` block), so that every
        branch hits it; `hold=False` leaves that to the cache. `on_error="cancel"`: the first failing branch cancels its
        siblings; `"collect"`: all go on, and failures stand in the joined lists.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"fork size is {size!r}: give a whole number of at least 1")
        if on_error not in ("cancel", "collect"):
            raise ArgumentError(f"on_error is {on_error!r}: give cancel or collect")
        self.branch.run.check_open()
        group = Group(self.branch, size, collect=on_error == "collect", hold=hold)
        self.branch.put(Item(group.begin, place(), skipped=group.never_begun))
        return Forks(self, group)

    @contextmanager
    def copy(self) -> Iterator[State]:
        """A branch to try something on; nothing of it comes back."""
        forks = self.fork(1)
        try:
            yield forks[0]
        finally:
            forks.close()


class Forks:
    """The branches of a fork. A sequence of states; `join` brings their variables back as lists, by index."""

    def __init__(self, parent: State, group: Group) -> None:
        self.parent = parent
        self.group = group
        self.states = [State(branch) for branch in group.branches]
        self._joined = False

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __getitem__(self, index: int) -> State:
        return self.states[index]

    def __setitem__(self, index: int, value: State) -> None:
        """Lets `forks[i] += …` work; nothing else may be stored."""
        if value is not self.states[index]:
            raise ArgumentError("a branch cannot be replaced: append to it with +=")

    def __iadd__(self, other: Appendable) -> Forks:
        """Appends the same to every branch."""
        for state in self.states:
            state += other
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Ends the fork. Does not wait: reading a joined variable does.

        `gather_variable` makes each variable of the branches a list in the parent; `concate_and_append` also appends
        the branches' texts, in order. The held prefix is let go.

        Raises:
            JoinError: a branch's variable has the name of one of the parent.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ArgumentError(f"join mode is {mode!r}: give gather_variable or concate_and_append")
        if self._joined:
            raise ArgumentError("the fork was joined already")
        where = place()
        variables = self.group.declare(where)
        self._joined = True
        append = mode == "concate_and_append"

        def skipped(error: ProgramError) -> None:
            for variable in variables.values():
                variable.fail(error)

        self.parent.branch.put(Item(lambda: self.group.finish(variables, append), where, skipped=skipped))

    def close(self) -> None:
        """Cancels what still runs and lets go of the prefix; nothing if joined."""
        if not self._joined:
            self._joined = True
            self.group.parent.run.loop.post(self.group.stop, CancelledError("the fork was left without a join"))

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is not None:
            self.close()
        elif not self._joined:
            self.join()
