"""The engine's loop with hooks at its points: built in the place of EngineLoop only where hooks are registered.

Owns where in the loop a point is and what a failing hook costs there; what runs is the chain's. So a worker without
hooks runs a loop that has never heard of them.
"""

from __future__ import annotations

from typing import Any

from branchline.engine.errors import EngineError, InternalError
from branchline.engine.hooks.chain import Chain
from branchline.engine.loop import EngineLoop
from branchline.engine.scheduler import Sink
from branchline.engine.scheduler.batch import Step
from branchline.engine.types import Delta, Request, RowResult


class HookedLoop(EngineLoop):
    """An EngineLoop whose points have hooks."""

    def __init__(self, hooks: Chain, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._admission = hooks.bind("request.admission", _unchanged)
        self._hooked_run = hooks.bind("scheduler.step", super()._run)
        self._hooked_sample = hooks.bind("sampling", super()._sample)
        self._ending = hooks.bind("request.end", _told)
        self._watches_ends = bool(hooks.at("request.end"))

    def submit(self, request: Request, sink: Sink) -> None:
        """See EngineLoop; hooks may change or refuse the request first."""
        admitted = self._admission(request)
        if not isinstance(admitted, Request) or admitted.request_id != request.request_id:
            raise InternalError("a hook at request.admission gave back no request, or one of another id")
        super().submit(admitted, sink)

    def _run(self, step: Step) -> object:
        return self._hooked_run(step)

    def _sample(self, logits: object, step: Step) -> list[RowResult]:
        results = self._hooked_sample(logits, step)
        if len(results) != len(step.plans):
            raise InternalError(f"hooks at sampling gave {len(results)} results for {len(step.plans)} plans")
        return results

    def _emit(self) -> None:
        if self._watches_ends:
            self._end_news()
        super()._emit()

    def _end_news(self) -> None:
        """Let hooks see every end of this step; one whose hook fails becomes its request's one error."""
        outbox = self._scheduler.outbox
        news = outbox.take()
        lost: set[str] = set()
        for deltas in news.values():
            told = [self._end_told(delta, lost) for delta in deltas]
            deltas[:] = [delta for delta in told if delta is not None]
        outbox.take()  # the errors of those that failed just now: told above
        outbox.put(news)

    def _end_told(self, delta: Delta, lost: set[str]) -> Delta | None:
        if delta.request_id in lost:
            return None
        group = self._live.get(delta.request_id)
        if group is None or (delta.finish is None and delta.error is None):
            return delta
        try:
            told = self._ending(group.request, delta)
            if not _ends_the_same(told, delta):
                raise InternalError("a hook at request.end gave back no news that end the same sequence")
        except Exception as error:
            if delta.error is not None:  # it has failed for a reason of its own
                return delta
            lost.add(delta.request_id)
            failure = error if isinstance(error, EngineError) else InternalError(f"{type(error).__name__}: {error}")
            self._scheduler.fail(group, failure)
            return Delta(delta.request_id, error=failure)
        return told


def _unchanged(request: Request) -> Request:
    return request


def _told(request: Request, delta: Delta) -> Delta:
    return delta


def _ends_the_same(told: object, delta: Delta) -> bool:
    if not isinstance(told, Delta) or (told.request_id, told.index) != (delta.request_id, delta.index):
        return False
    return told.error is not None if delta.error is not None else told.finish is not None
