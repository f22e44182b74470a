"""Small parts of the loop: how long it may sleep, what other threads asked for, and the watcher that sees its news.

Owns no thread and no lock: the loop guards the inbox with its condition.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from branchline.engine.cache.leases import LeaseBook
from branchline.engine.handover import Handovers
from branchline.engine.scheduler import Group, Scheduler
from branchline.engine.types import Delta, Request

logger = logging.getLogger(__name__)

Watch = Callable[[Request, Delta, float], None]
"""Sees every piece of news with its request and the time on the loop's clock. Called on the loop's thread."""


@dataclass(slots=True)
class Inbox:
    """What other threads ask for; guarded by the loop's condition."""

    groups: deque[Group] = field(default_factory=deque)
    aborts: dict[str, str] = field(default_factory=dict)  # request id → words
    calls: deque[Callable[[], None]] = field(default_factory=deque)
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.groups or self.aborts or self.calls or self.stop)

    def run_calls(self) -> None:
        """Run what was asked for, each whatever the others do."""
        for call in self.calls:
            try:
                call()
            except Exception:
                logger.exception("what another thread asked for failed")


def idle_limit(
    now: float, deadlines: Mapping[str, float], leases: LeaseBook, handovers: Handovers | None
) -> float | None:
    """Seconds until something happens though no request runs: a lease or a room runs out, or a deadline passes."""
    expiries = [leases.next_expiry_s, None if handovers is None else handovers.rooms.next_expiry_s]
    times = [*(time for time in expiries if time is not None), *deadlines.values()]
    return max(min(times) - now, 0.0) if times else None


def let_go(scheduler: Scheduler, handovers: Handovers | None, now: float) -> None:
    """Give back what requests that have ended hold beside their own pages: the pins of leases and of hand-overs."""
    for group in scheduler.outbox.take_ended():
        scheduler.leasing.leave(group)
        if handovers is not None:
            handovers.ended(group.request, now)


def call_off(post: Callable[[Callable[[], None]], None], handovers: Handovers | None, request_id: str | None) -> None:
    """Free rooms of prompts that are computed and that nobody will come for: a request's, or all if it is None."""
    if handovers is not None:
        rooms = handovers.rooms
        post(lambda: rooms.call_off(request_id))


class Watcher:
    """Calls a watch; its faults cost no request, but end the watching."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch

    def tell(self, group: Group | None, delta: Delta, now: float) -> None:
        """Let it see one piece of news of a live request."""
        if group is None or self.watch is None:
            return
        try:
            self.watch(group.request, delta, now)
        except Exception:
            logger.exception("metrics or tracing failed; they are off from here on")
            self.watch = None
