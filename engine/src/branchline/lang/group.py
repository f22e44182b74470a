"""The branches of one fork: the lease on their prefix, a failure that ends the others, and the join."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from branchline.lang import calls, hosts
from branchline.lang.backends.base import Lease
from branchline.lang.branch import Branch
from branchline.lang.errors import CancelledError, JoinError, Place, ProgramError
from branchline.lang.values import MISSING, Variable

LEASE_TTL_MS = 60_000
RELEASE_S = 2.0  # a frozen server must not hold a program much past its deadline


class Group:
    """The branches of one fork: a prefix held for them, a failure that ends the others, a join."""

    def __init__(self, parent: Branch, size: int, *, collect: bool, hold: bool) -> None:
        self.parent = parent
        self.collect = collect
        self.hold = hold
        self.lease: Lease | None = None
        self.branches = [Branch(parent.run, parent, index) for index in range(size)]
        self.failed: tuple[int, ProgramError] | None = None
        self.over = False
        self._renewal: asyncio.Task[None] | None = None
        self._start = 0  # where the branches' own text begins
        for branch in self.branches:
            branch.group = self
            branch.fork_width = size
        parent.run.groups.append(self)

    async def begin(self) -> None:
        """Holds the prefix if there is one and somebody to share it, then lets the branches go."""
        parent, run = self.parent, self.parent.run
        if self.hold and len(self.branches) > 1 and parent.text and not self.over:
            self.lease = await calls.bounded(
                parent, lambda: run.backend.plant(parent.prompt(), LEASE_TTL_MS, parent.context())
            )
            if self.lease is not None and self.lease.ttl_ms:
                self._renewal = asyncio.get_running_loop().create_task(self._renew(self.lease))
        self._start = len(parent.text)
        for branch in self.branches:
            branch.take_over(parent)
            branch.lease = self.lease or parent.lease
            branch.open()

    def never_begun(self, error: ProgramError) -> None:
        """The branches will never run. On the loop."""
        for branch in self.branches:
            branch.never_begun(error)

    async def _renew(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(lease.ttl_ms / 3000)
            try:
                await self.parent.run.backend.renew(lease, lease.ttl_ms)
            except Exception:  # a lost lease costs time, not the program: branches are served all the same
                return

    def child_failed(self, branch: Branch, error: ProgramError) -> None:
        """The first failure cancels the siblings, unless they were asked to go on."""
        if self.collect or self.failed is not None:
            return
        self.failed = (branch.path[-1], error)
        for other in self.branches:
            if other is not branch:
                other.cancel(CancelledError(f"branch {branch.path[-1]} failed: {error.cause}"))

    def stop(self, reason: CancelledError) -> None:
        """Cancels every branch. On the loop."""
        for branch in self.branches:
            branch.cancel(reason)
        self.end()

    def end(self) -> None:
        """Lets go of the prefix. On the loop; idempotent."""
        if self.over:
            return
        self.over = True
        if self._renewal is not None:
            self._renewal.cancel()
        if self.lease is not None:
            self.parent.run.background(self._release(self.lease))

    async def _release(self, lease: Lease) -> None:
        """A server that does not take it back costs its lifetime there, not the program."""
        with suppress(Exception):
            async with asyncio.timeout(RELEASE_S):
                await self.parent.run.backend.release(lease)

    # ---- join ------------------------------------------------------------------------------------

    def declare(self, where: Place | None) -> dict[str, Variable]:
        """Variables of the parent that the join will fill: one list each, by index.

        Raises:
            JoinError: the parent has a variable of that name itself.
        """
        names = sorted({name for branch in self.branches for name in branch.own})
        clash = [name for name in names if name in self.parent.vars]
        if clash:
            raise JoinError(
                f"variable {clash[0]!r} exists in the parent and in a branch: name one of them otherwise before joining"
            )
        return {name: self.parent._declare(name, where) for name in names}

    async def finish(self, variables: dict[str, Variable], append: bool) -> None:
        """Waits for all branches, then fills the parent's variables, and appends the branches' text if asked."""
        try:
            for branch in self.branches:
                await hosts.awaited(branch.idle())
        finally:
            self.end()
        if self.failed is not None and not self.collect:
            error = self.failed[1]
            for variable in variables.values():
                variable.fail(error)
            raise error
        for name, variable in variables.items():
            variable.finish([_value(branch, name, self.collect) for branch in self.branches])
        if append:
            for branch in self.branches:
                self.parent.write(branch.text[self._start :])


def _value(branch: Branch, name: str, collect: bool) -> Any:
    if name not in branch.own:
        return MISSING
    done = branch.vars[name].done
    error = done.exception()
    if error is not None and collect:
        return error
    return done.result()
