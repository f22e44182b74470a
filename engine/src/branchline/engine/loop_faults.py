"""The loop when things go wrong: a step that does not end, a step that fails, the report on either, the audit.

Parts of branchline.engine.loop that its good days do not need. Owns who was given up; decides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.cache.leases import LeaseBook
from branchline.engine.errors import InternalError, Unavailable
from branchline.engine.scheduler import Group, Scheduler
from branchline.engine.scheduler.batch import Step
from branchline.engine.scheduler.load import LoopStats
from branchline.engine.types import Delta, RowResult

logger = logging.getLogger(__name__)

LOST = 4  # rows in a row that fail alone before the executor is taken to be lost
RETRY_MS = 5000  # what clients are told to wait while a step does not end


class Stall:
    """Requests that were answered from outside because a step did not end. Guarded by the loop's condition."""

    def __init__(self) -> None:
        self.reason = ""  # why nobody is taken now; empty in good order
        self.given_up: set[str] = set()  # ids whose news of this turn are not sent: they have had their error

    def refuse(self) -> None:
        """Raise Unavailable while a step does not end."""
        if self.reason:
            raise Unavailable(
                "a step of the worker does not end; send the request to another one, or try later",
                retry_after_ms=RETRY_MS,
            )

    def begin(self, message: str, live: Iterable[Group]) -> list[Group]:
        """Mark everybody who is alive and not given up yet."""
        self.reason = message
        groups = [group for group in live if not group.given_up]
        for group in groups:
            group.given_up = True
        return groups

    def end(self, live: Iterable[Group]) -> list[Group]:
        """The loop turns again: who was given up."""
        self.reason = ""
        groups = [group for group in live if group.given_up]
        self.given_up = {group.request.request_id for group in groups}
        return groups

    def wanted(self, deltas: list[Delta]) -> list[Delta]:
        """Those that may be sent."""
        if not self.given_up:
            return deltas
        return [delta for delta in deltas if delta.request_id not in self.given_up]


def tell(groups: Iterable[Group], step: int, message: str) -> None:
    """Send each request its one error, from any thread."""
    error = Unavailable(message, retry_after_ms=RETRY_MS)
    for group in groups:
        try:
            group.sink(step, [Delta(group.request.request_id, error=error)])
        except Exception:
            logger.exception("a stream can't take the end of request %s", group.request.request_id)


def isolate(
    step: Step,
    error: Exception,
    scheduler: Scheduler,
    run: Callable[[Step], list[RowResult]],
    commit: Callable[[Step, list[RowResult]], None],
) -> None:
    """Run the rows of a failed step one by one, so that a poisoned request costs its neighbours nothing.

    A row writes the same KV to the same slots again. Once LOST rows in a row have failed, the executor is taken to
    be lost and the others fail with them.
    """
    failed = 0
    for row in step.rows:
        if row.sequence.finished:  # a sibling failed
            continue
        if failed < LOST and len(step.rows) > 1:
            alone = scheduler.alone(row)
            try:
                results = run(alone)
            except Exception as own:
                failed, error = failed + 1, own
            else:
                failed = 0
                commit(alone, results)
                continue
        message = f"the model could not run: {type(error).__name__}: {error}"
        scheduler.fail(row.sequence.group, InternalError(message))


def describe(step: Step | None, stats: LoopStats, live: Iterable[Group]) -> list[str]:
    """Lines about what the loop is doing. Reads what another thread may be changing: for a human in need."""
    lines = [repr(stats)]
    if step is not None:
        lines.append(f"step {stats.steps + 1}: {len(step.rows)} rows, {step.decodes} of them decode")
        for row in step.rows:
            one = row.sequence
            lines.append(
                f"  {one.group.request.request_id}[{one.index}]: {row.count} tokens from {row.start} on; prompt "
                f"{one.prompt_len}, output {one.generated}, pages {len(one.pages)}, retractions {one.retractions}"
            )
    for group in live:
        gone = ", given up" if group.given_up else ""
        lines.append(
            f"live {group.request.request_id}: {group.live} sequences of priority {group.request.priority}{gone}"
        )
    return lines


def unblock(scheduler: Scheduler) -> None:
    """Work exists and nothing can run: a fault of ours. End the first waiting request rather than spin."""
    stuck = next(iter(scheduler.waiting), None)
    if stuck is not None and not scheduler.running:
        logger.error("request %s can't be scheduled on an idle worker", stuck.group.request.request_id)
        scheduler.fail(stuck.group, InternalError("the request can't be scheduled on an idle worker"))


def audit(
    cache: RadixCacheBackend, num_pages: int, leases: LeaseBook, idle: bool, lent: Set[int] = frozenset()
) -> None:
    """Walk the whole page ledger. Raises RuntimeError if a page is in no state or in two, or held by nobody.

    `lent` are the pages that are locked for hand-overs to other workers.
    """
    cache.audit()
    leases.audit()
    free, evictable, protected, private = cache.counters()
    if free + evictable + protected + private != num_pages:
        raise RuntimeError(f"{free}+{evictable}+{protected}+{private} pages of {num_pages}")
    held = len(leases.held | lent)
    if idle and (protected != held or private):
        raise RuntimeError(
            f"{protected} protected pages ({leases.pages} leased, {len(lent)} lent) and {private} private pages "
            "while nothing runs"
        )
