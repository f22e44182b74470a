"""Where a request with a hand-over enters the loop: its room is opened, or its pages are pulled before it is queued.

While pages come the request holds no row and no place in the queue; it can be aborted, and its deadline counts.
Between the scheduler and the hand-overs' book; owns neither. On the loop's thread; pulls answer from others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from branchline.engine.errors import EngineError, Unavailable, Unimplemented
from branchline.engine.handover import Handovers
from branchline.engine.handover.base import FIELD
from branchline.engine.scheduler import Group, Scheduler

Post = Callable[[Callable[[], None]], None]
Proceed = Callable[[Group], None]


class Doorway:
    """Every request that comes in goes on or is failed, once."""

    def __init__(self, handovers: Handovers | None, scheduler: Scheduler, post: Post) -> None:
        self._handovers = handovers
        self._scheduler = scheduler
        self._post = post

    def enter(self, group: Group, proceed: Proceed) -> None:
        """Take in a request; `proceed` is called at once or when its pages have landed."""
        ask = group.request.handover
        if ask is None:
            proceed(group)
            return
        try:
            if self._handovers is None or (self._handovers.puller is None and not ask.prefill):
                raise Unimplemented("this worker hands no pages over: leave disaggregation out", field=FIELD)
            if ask.prefill:
                request = group.request
                rooms = self._handovers.rooms
                rooms.begin(ask.room, request.request_id, request.namespace, request.token_ids, group.hashes)
                proceed(group)
            else:
                self._pull(self._handovers, group, proceed)
        except EngineError as error:
            self._scheduler.fail(group, error)

    def _pull(self, handovers: Handovers, group: Group, proceed: Proceed) -> None:
        request, puller = group.request, handovers.puller
        assert request.handover is not None and puller is not None, "checked by enter"
        landing = handovers.landings.begin(request.request_id, request.namespace, request.token_ids)
        if landing.missing <= 0:
            proceed(group)
            return
        coming = _Coming(handovers, self._scheduler, self._post, group, proceed)
        handovers.counters.pulls += 1
        ask = handovers.ask(request, landing, group.hashes)
        end = puller.pull(request.handover.host, request.handover.port, ask, coming)

        def withdraw() -> None:
            coming.stop()
            end()

        group.withdraw = withdraw


@dataclass(slots=True)
class _Coming:
    """Receiver of one request's pages. Its public methods may be called on any thread, the others on the loop's."""

    handovers: Handovers
    scheduler: Scheduler
    post: Post
    group: Group
    proceed: Proceed
    over: bool = False

    def pages(self, first: int, count: int, data: bytes, done: Callable[[], None]) -> None:
        """See Receiver."""
        self.post(lambda: self._land(first, data, done))

    def ended(self) -> None:
        """See Receiver."""
        self.post(lambda: self._settle(None))

    def failed(self, error: EngineError) -> None:
        """See Receiver."""
        self.post(lambda: self._settle(error))

    def stop(self) -> None:
        """Nothing that still comes counts."""
        if not self.over:
            self.over = True
            self.handovers.counters.pulls -= 1

    def _land(self, first: int, data: bytes, done: Callable[[], None]) -> None:
        if self.over:
            return
        try:
            landed = self.handovers.landings.land(
                self.group.request.request_id, first, data, reserve=self.scheduler.running + 1
            )
        except Exception as error:
            words = f"pages could not be put into the cache: {type(error).__name__}: {error}"
            self._settle(Unavailable(words, field=FIELD))
            return
        self.scheduler.pages.version += 1
        if landed:
            done()
        else:  # the pool is full: what came is used, the rest is computed here when there is room
            self._settle(None)

    def _settle(self, error: EngineError | None) -> None:
        """The pull is over: the request goes on, or fails."""
        if self.over:
            return
        withdraw, self.group.withdraw = self.group.withdraw, None
        if withdraw is None:
            self.stop()
        else:
            withdraw()
        if self.group.live == 0:
            return
        if error is not None:
            self.handovers.counters.failed_pulls += 1
            self.scheduler.fail(self.group, error)
        else:
            self.proceed(self.group)
